"""Loads a request's adapter when the engine's core admits the request, before any of its steps is scheduled.

vLLM loads adapters in the middle of a step, where an error ends the engine; here an error ends only the request. The
digest of an adapter's content is part of the prefix cache's key. Content that changed on disk under a loaded adapter
is refused until it is loaded again, so cached keys and values of older content are never used with it.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from scute_compile.formats.artifact import MANIFEST, is_artifact, open_artifact
from scute_compile.runtime_vllm.vllm_types import EngineCore, LoRARequest, Request

logger = logging.getLogger("vllm.scute")
DIGEST = "scute_digest"
"""An attribute of a request: the digest of its adapter's content when the request arrived."""
_digests: dict[str, tuple[tuple[int, int], str]] = {}
"""Inode and change time of an artifact's manifest, and its digest, by path."""


@dataclass(slots=True)
class CoreState:
    """The adapters that the engine's core has loaded on its ranks; ids are vLLM's."""

    digests: dict[int, str] = field(default_factory=dict)
    """Digest of the loaded content, by id."""
    leaving: set[int] = field(default_factory=set)
    """Adapters that were removed while requests used them."""


def digest_of(path: str) -> str:
    """Return a digest of an adapter's content on disk; "" where there is none.

    For an artifact it is the manifest's digest, which is read again when the file changes. For a plain PEFT folder it
    is a hash of its files' sizes and times.
    """
    folder = Path(path).expanduser()
    if not is_artifact(folder):
        return _folder_digest(folder)
    stat = (folder / MANIFEST).stat()
    identity = stat.st_ino, stat.st_ctime_ns
    known = _digests.get(path)
    if known is None or known[0] != identity:
        known = identity, open_artifact(folder, verify_hashes=False).manifest.digest
        _digests[path] = known
    return known[1]


def _folder_digest(folder: Path) -> str:
    files = sorted(file for file in folder.glob("adapter_*") if file.is_file()) if folder.is_dir() else []
    stats = [(file.name, stat.st_size, stat.st_ino, stat.st_mtime_ns) for file in files for stat in [file.stat()]]
    return hashlib.sha256(repr(stats).encode()).hexdigest() if stats else ""


def hash_keys(original: Callable[[Request], list[Any]]) -> Callable[[Request], list[Any]]:
    """Return vLLM's `_gen_lora_extra_hash_keys(request)`, which adds the content's digest to the key."""

    @wraps(original)
    def keys(request: Request) -> list[Any]:
        found = original(request)
        if not found or request.lora_request is None:
            return found
        digest = getattr(request, DIGEST, None)
        if digest is None:  # once per request: its later blocks belong to the same content
            digest = _digest_or_empty(request.lora_request.lora_path)
            setattr(request, DIGEST, digest)
        return [*found, ("scute", digest, "")] if digest else found

    return keys


def _digest_or_empty(path: str) -> str:
    try:
        return digest_of(path)
    except Exception:  # noqa: BLE001 - loading it reports the error, and then this key is not used
        return ""


def core_add_lora(original: Callable[[Any, Any], bool]) -> Callable[[EngineCore, LoRARequest], bool]:
    """Return `EngineCore.add_lora(lora_request)`, which collects every rank's answer and records the content.

    It refuses to replace an adapter that requests use, since their tokens so far came from the older content. Content
    that changed on disk is refused unless the request replaces it: ranks that have the adapter read no file again.
    """

    @wraps(original)
    def add_lora(core: EngineCore, request: LoRARequest) -> bool:
        state = _state(core)
        digest = digest_of(request.lora_path)
        _remove_unused(core, request.lora_int_id)
        loaded = state.digests.get(request.lora_int_id)
        if loaded not in (None, digest):
            _check_replaceable(core, request, digest)
        if _may_evict(core, request.lora_int_id):
            _hold_admitted(core, request.lora_int_id)
        answers = core.model_executor.collective_rpc("add_lora", args=(request,))
        refusals = [answer for answer in answers if isinstance(answer, str)]
        if refusals:
            if len(refusals) < len(answers) and loaded is None:
                core.model_executor.collective_rpc("remove_lora", args=(request.lora_int_id,))
            raise ValueError(refusals[0])
        state.digests[request.lora_int_id] = digest
        state.leaving.discard(request.lora_int_id)
        return all(answers)

    return add_lora


def core_remove_lora(original: Callable[[Any, int], bool]) -> Callable[[EngineCore, int], bool]:
    """Return `EngineCore.remove_lora(lora_id)`, which keeps the digest of an adapter while requests use it."""

    @wraps(original)
    def remove_lora(core: EngineCore, lora_id: int) -> bool:
        state = _state(core)
        if lora_id in state.digests and _requests(core, lora_id):
            state.leaving.add(lora_id)
        else:
            state.digests.pop(lora_id, None)
            state.leaving.discard(lora_id)
        _hold_admitted(core)
        return original(core, lora_id)

    return remove_lora


def core_add_request(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `EngineCore.add_request(request, request_wave)`, which refuses a request whose adapter can't be served."""

    @wraps(original)
    def add_request(core: Any, request: Request, *args: Any, **named: Any) -> Any:
        if request.lora_request is not None:
            try:
                _ensure_loaded(core, request, request.lora_request)
            except Exception as error:
                if not hasattr(core, "_send_abort_outputs_to_client"):  # the caller is in this process
                    raise
                logger.error("request %s was refused: %s", request.request_id, error)  # noqa: TRY400 - no traceback
                send_abort = core._send_abort_outputs_to_client
                getattr(core, "_send_error_outputs_to_client", send_abort)([request.request_id], request.client_index)
                return None
        return original(core, request, *args, **named)

    return add_request


def worker_add_lora(original: Callable[[Any, Any], bool]) -> Callable[[Any, LoRARequest], bool | str]:
    """Return a worker's `add_lora(lora_request)`, which returns the text of a refusal instead of raising it.

    The core reads its ranks' answers in turn and stops at an exception. It would then read the answers of the
    remaining ranks as those of its next call.
    """

    @wraps(original)
    def add_lora(runner: Any, request: LoRARequest) -> bool | str:
        try:
            return original(runner, request)
        except Exception as error:  # noqa: BLE001 - `core_add_lora` raises it in the core
            return str(error) or type(error).__name__

    return add_lora


def engine_add_request(original: Callable[..., str]) -> Callable[..., str]:
    """Return `LLMEngine.add_request(...)`, which drops a request that a core in the same process refuses."""

    @wraps(original)
    def add_request(engine: Any, *args: Any, **named: Any) -> str:
        states = engine.output_processor.request_states
        before = set(states)
        try:
            return original(engine, *args, **named)
        except Exception:
            engine.abort_request([name for name in states if name not in before], internal=True)
            raise

    return add_request


def server_load_lora_adapter(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the server's `load_lora_adapter`, which answers status 400 where the adapter itself was refused."""

    @wraps(original)
    async def load_lora_adapter(models: Any, *args: Any, **named: Any) -> Any:
        answer = await original(models, *args, **named)
        error = getattr(answer, "error", None)
        if error is not None and "error[SC" in str(error.message):
            error.code, error.type = 400, "BadRequestError"
        return answer

    return load_lora_adapter


def hold_adapters(worker: Any, lora_ids: list[int]) -> None:
    """Hold these adapters on a rank, and no others; the core calls it on every worker."""
    lora_manager = getattr(worker.model_runner, "lora_manager", None)
    if lora_manager is not None:  # else the engine serves the base alone
        lora_manager._adapter_manager.hold(lora_ids)


def _ensure_loaded(core: EngineCore, request: Request, lora: LoRARequest) -> None:
    """Load a request's adapter where ranks may lack it; its steps then use the adapter as it is loaded now."""
    state = _state(core)
    loaded, on_disk = state.digests.get(lora.lora_int_id), _digest_of(request, lora)
    replaces = lora.load_inplace and loaded != on_disk
    if loaded is None or replaces or _may_evict(core) or lora.lora_int_id in state.leaving:
        core.add_lora(lora)
    if state.digests[lora.lora_int_id] != on_disk:
        _refuse_changed(lora, on_disk)
    if lora.load_inplace:  # done; steps would otherwise read the files again
        request.lora_request = replace(lora, load_inplace=False)


def _digest_of(request: Request, lora: LoRARequest) -> str:
    digest: str | None = getattr(request, DIGEST, None)
    return digest_of(lora.lora_path) if digest is None else digest


def _check_replaceable(core: EngineCore, request: LoRARequest, digest: str) -> None:
    running = _requests(core, request.lora_int_id)
    if running and (request.load_inplace or request.lora_int_id in _state(core).leaving):
        raise ValueError(
            f"adapter {request.lora_name!r}: {len(running)} requests still use the content that is to be replaced; "
            "wait for them, or load the new content under another name"
        )
    if not request.load_inplace:
        _refuse_changed(request, digest)


def _refuse_changed(lora: LoRARequest, digest: str) -> None:
    change = f"{lora.lora_path} holds another adapter than" if digest else f"{lora.lora_path} no longer holds"
    raise ValueError(
        f"adapter {lora.lora_name!r}: {change} the one that was loaded; load it again (load_inplace), or under another "
        "name"
    )


def _remove_unused(core: EngineCore, lora_id: int) -> None:
    """Remove an adapter whose removal was asked for before, if the last request that used it has ended."""
    leaving = _state(core).leaving
    if lora_id in leaving and not _requests(core, lora_id):
        leaving.discard(lora_id)
        core.remove_lora(lora_id)


def _may_evict(core: EngineCore, *loading: int) -> bool:
    """Return whether ranks may have evicted a loaded adapter, or may evict one for the adapters that are loaded now."""
    lora_config = core.vllm_config.lora_config
    count = len(_state(core).digests.keys() | set(loading))
    return lora_config is not None and count > int(lora_config.max_cpu_loras)


def _hold_admitted(core: EngineCore, *loading: int) -> None:
    """Hold the adapters of admitted requests on the ranks, and no others.

    A rank that reads files in the middle of a step can't refuse a single request: an error would end the engine.
    """
    requests = (request.lora_request for request in core.scheduler.requests.values())
    lora_ids = {lora.lora_int_id for lora in requests if lora is not None} | set(loading)
    core.model_executor.collective_rpc(hold_adapters, args=(sorted(lora_ids),))


def _requests(core: EngineCore, lora_id: int) -> list[Request]:
    admitted = core.scheduler.requests.values()
    return [
        request
        for request in admitted
        if request.lora_request is not None and request.lora_request.lora_int_id == lora_id
    ]


def _state(core: EngineCore) -> CoreState:
    state: CoreState = core.__dict__.setdefault("scute", CoreState())
    return state
