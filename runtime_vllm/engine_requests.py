"""Requests as the engine's core admits them: an adapter is loaded before its first request is scheduled.

Where vLLM loads an adapter in the middle of a step, a fault ends the engine. Here it ends the one request. The content
of an artifact is part of the prefix cache's key, and content that changed under a loaded name is refused until it is
loaded again: cached keys and values of the older one are never mixed with it.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from scute_compile.formats.artifact import MANIFEST, is_artifact, open_artifact

logger = logging.getLogger("vllm.scute")
LOADED = "scute_loaded"
"""An attribute of the engine's core: digest by number of the adapters that were loaded."""
LEAVING = "scute_leaving"
"""An attribute of the engine's core: numbers of adapters that were removed while requests used them."""
DIGEST = "scute_digest"
"""An attribute of a request."""
_digests: dict[str, tuple[tuple[int, int], str]] = {}


def digest_of(path: str) -> str:
    """Return what tells an adapter's content on disk from another's; "" where nothing lies.

    Of an artifact it is the manifest's digest, which is read again when its file changes. Of a plain PEFT folder it is
    made of its files' sizes and times, since nothing says what they hold.
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


def hash_keys(original: Callable[[Any], list[Any]]) -> Callable[[Any], list[Any]]:
    """Return vLLM's `_gen_lora_extra_hash_keys(request)` with the artifact's digest in the key."""

    @wraps(original)
    def keys(request: Any) -> list[Any]:
        found = original(request)
        if not found:
            return found
        digest = getattr(request, DIGEST, None)
        if digest is None:  # once per request: later blocks of it belong to the same content
            digest = _digest_or_none(request.lora_request.lora_path)
            setattr(request, DIGEST, digest)
        return [*found, ("scute", digest, "")] if digest else found

    return keys


def _digest_or_none(path: str) -> str:
    try:
        return digest_of(path)
    except Exception:  # noqa: BLE001 - loading it names the fault; this key is then never used
        return ""


def adding_lora(original: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    """Return `EngineCore.add_lora(lora_request)`, which hears every rank's answer and remembers what was loaded.

    An adapter in use is not replaced: the tokens of its requests so far came from the older content. And what was
    loaded stays what it is until it is removed, or replaced by name: ranks that have it read no file again.
    """

    @wraps(original)
    def add_lora(core: Any, request: Any) -> bool:
        loaded: dict[int, str] = core.__dict__.setdefault(LOADED, {})
        digest = digest_of(request.lora_path)
        _forget_left(core, request.lora_int_id)
        before = loaded.get(request.lora_int_id)
        if before not in (None, digest):
            _check_replaceable(core, request, digest)
        if _many(core, request.lora_int_id):
            _hold(core, request.lora_int_id)
        answers = core.model_executor.collective_rpc("add_lora", args=(request,))
        faults = [answer for answer in answers if isinstance(answer, str)]
        if faults:
            if len(faults) < len(answers) and before is None:
                core.model_executor.collective_rpc("remove_lora", args=(request.lora_int_id,))
            raise ValueError(faults[0])
        loaded[request.lora_int_id] = digest
        _leaving(core).discard(request.lora_int_id)
        return all(answers)

    return add_lora


def _check_replaceable(core: Any, request: Any, now: str) -> None:
    running = _requests(core, request.lora_int_id)
    if running and (request.load_inplace or request.lora_int_id in _leaving(core)):
        raise ValueError(
            f"adapter {request.lora_name!r}: {len(running)} requests still use the content that is to be replaced; "
            "wait for them, or load the new content under another name"
        )
    if not request.load_inplace:
        _refuse_changed(request, now)


def _refuse_changed(lora: Any, now: str) -> None:
    lies = f"another adapter lies at {lora.lora_path} than" if now else f"{lora.lora_path} no longer holds"
    raise ValueError(
        f"adapter {lora.lora_name!r}: {lies} the one that was loaded; load it again (load_inplace), or under another "
        "name"
    )


def _leaving(core: Any) -> set[int]:
    leaving: set[int] = core.__dict__.setdefault(LEAVING, set())
    return leaving


def _forget_left(core: Any, lora_id: int) -> None:
    """Remove an adapter that was removed before, now that the last request that used it has ended."""
    if lora_id in _leaving(core) and not _requests(core, lora_id):
        _leaving(core).discard(lora_id)
        core.remove_lora(lora_id)


def _many(core: Any, *coming: int) -> bool:
    """Whether ranks may have forgotten one of the adapters that were loaded, or may do so for one that comes."""
    loaded: dict[int, str] = core.__dict__.setdefault(LOADED, {})
    lora_config = core.vllm_config.lora_config
    return lora_config is not None and len(loaded.keys() | set(coming)) > int(lora_config.max_cpu_loras)


def _hold(core: Any, *coming: int) -> None:
    """Tell the ranks which adapters they must keep: those that requests were admitted with, and no others.

    A rank that has to read files in the middle of a step can't refuse the one request: a fault of theirs would end the
    engine.
    """
    requests = (one.lora_request for one in core.scheduler.requests.values())
    numbers = {one.lora_int_id for one in requests if one is not None} | set(coming)
    core.model_executor.collective_rpc(hold_adapters, args=(sorted(numbers),))


def hold_adapters(worker: Any, numbers: list[int]) -> None:
    """Let a rank keep these adapters; the engine's core calls it on every worker."""
    lora_manager = getattr(worker.model_runner, "lora_manager", None)
    if lora_manager is not None:  # else the engine serves the base alone
        lora_manager._adapter_manager.hold(numbers)


def answering_faults(original: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool | str]:
    """Return a worker's `add_lora(lora_request)`, which answers what refused an adapter instead of raising it.

    The engine takes answers from its ranks in turn and stops at one that raises: the other ranks' answers would be
    taken for those of its next call.
    """

    @wraps(original)
    def add_lora(runner: Any, request: Any) -> bool | str:
        try:
            return original(runner, request)
        except Exception as error:  # noqa: BLE001 - `adding_lora` raises it in the engine
            return str(error) or type(error).__name__

    return add_lora


def adding_to_engine(original: Callable[..., str]) -> Callable[..., str]:
    """Return `LLMEngine.add_request(...)`, which forgets a request that the core in the same process refuses."""

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


def removing_lora(original: Callable[[Any, int], bool]) -> Callable[[Any, int], bool]:
    """Return `EngineCore.remove_lora(lora_id)`, which forgets what was loaded; requests that use it end with it."""

    @wraps(original)
    def remove_lora(core: Any, lora_id: int) -> bool:
        loaded: dict[int, str] = core.__dict__.setdefault(LOADED, {})
        if lora_id in loaded and _requests(core, lora_id):
            _leaving(core).add(lora_id)
        else:
            loaded.pop(lora_id, None)
            _leaving(core).discard(lora_id)
        _hold(core)
        return original(core, lora_id)

    return remove_lora


def adding_request(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `EngineCore.add_request(request, request_wave)`, which refuses a request whose adapter can't be served."""

    @wraps(original)
    def add_request(core: Any, request: Any, *args: Any, **named: Any) -> Any:
        if request.lora_request is not None:
            try:
                _ensure(core, request)
            except Exception as error:
                if not hasattr(core, "_send_abort_outputs_to_client"):  # the caller is in this process
                    raise
                logger.error("request %s was refused: %s", request.request_id, error)  # noqa: TRY400 - no traceback
                older = core._send_abort_outputs_to_client
                getattr(core, "_send_error_outputs_to_client", older)([request.request_id], request.client_index)
                return None
        return original(core, request, *args, **named)

    return add_request


def _ensure(core: Any, request: Any) -> None:
    """Load a request's adapter where the workers may not have it, and let its steps take it as it is from then on."""
    lora = request.lora_request
    loaded: dict[int, str] = core.__dict__.setdefault(LOADED, {})
    known, now = loaded.get(lora.lora_int_id), _digest_of(request)
    changes = lora.load_inplace and known != now
    if known is None or changes or _many(core) or lora.lora_int_id in _leaving(core):
        core.add_lora(lora)
    if loaded[lora.lora_int_id] != now:
        _refuse_changed(lora, now)
    if lora.load_inplace:  # done: steps would read it again, whatever lies there by then
        request.lora_request = replace(lora, load_inplace=False)


def _digest_of(request: Any) -> str:
    digest: str | None = getattr(request, DIGEST, None)
    return digest_of(request.lora_request.lora_path) if digest is None else digest


def answering(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the server's `load_lora_adapter`, which says that an adapter was refused for its own sake: status 400."""

    @wraps(original)
    async def load_lora_adapter(models: Any, *args: Any, **named: Any) -> Any:
        answer = await original(models, *args, **named)
        error = getattr(answer, "error", None)
        if error is not None and "error[SC" in str(error.message):
            error.code, error.type = 400, "BadRequestError"
        return answer

    return load_lora_adapter


def _requests(core: Any, lora_id: int) -> list[Any]:
    held = core.scheduler.requests.values()
    return [one for one in held if one.lora_request is not None and one.lora_request.lora_int_id == lora_id]
