"""Loads what a request's path holds: an artifact, a stock LoRA folder, or a PEFT folder that is compiled first."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from vllm.lora.lora_model import LoRAModel as EngineLoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.utils import get_adapter_absolute_path

from scute_compile.diagnostics import Code, ScuteError, fail
from scute_compile.formats.artifact import Artifact, is_artifact, open_artifact
from scute_compile.ir.dtypes import torch_dtype
from scute_compile.runtime_min.pool.directory import DirectoryEntry
from scute_compile.runtime_min.pool.packed_adapter import PackedAdapter, PackedFactor
from scute_compile.runtime_min.pool.reading import named_as_in, read_adapter
from scute_compile.runtime_vllm.adapter_manager import AdapterManager, Loaded
from scute_compile.runtime_vllm.engine_requests import digest_of
from scute_compile.runtime_vllm.load_checks import check_fits, check_limits, check_slots, refuse_engine
from scute_compile.runtime_vllm.vllm_types import LoRAModel, LoRARequest, WorkerManager

logger = logging.getLogger("vllm.scute")
IGNORED_BEFORE_0_31 = (
    "rank_pattern",
    "alpha_pattern",
    "lora_bias",
    "alora_invocation_tokens",
    "layer_replication",
    "use_bdlora",
    "use_qalora",
)
"""Fields of a LoRA configuration that change what it computes, and that vLLM before 0.31 ignores."""
CHANGING_THE_BASE = ("pissa", "olora", "corda", "loftq")
"""Initializations of LoRA that change the base's weights."""
Load = Callable[[WorkerManager, LoRARequest], LoRAModel]


def load_adapter(original: Load) -> Load:
    """Return vLLM's `_load_adapter`, which also takes artifacts and packs stock LoRA for the pool.

    An adapter that the engine's core holds for admitted requests is returned as it was loaded before: an error while
    reading its files in the middle of a step would end the engine.

    Args:
        original: `WorkerLoRAManager._load_adapter(self, lora_request)`.
    """

    @wraps(original)
    def load(worker: WorkerManager, request: LoRARequest) -> LoRAModel:
        manager = worker._adapter_manager
        if not isinstance(manager, AdapterManager):
            return original(worker, request)
        if not request.load_inplace and (held := manager.held_model(request.lora_int_id)) is not None:
            return held
        try:
            return _load(original, worker, manager, request)
        except ScuteError as error:
            raise ValueError(f"adapter {request.lora_name!r}: {error}") from None
        except SafetensorError as error:
            raise ValueError(f"adapter {request.lora_name!r}, from {request.lora_path}: {error}") from None

    return load


def apply_in_order(original: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Return vLLM's `_apply_adapters(lora_requests)`, which applies the adapters of a step in the order of their ids.

    vLLM passes a set, whose order differs between processes, so that ranks would evict different adapters.
    """

    @wraps(original)
    def apply(worker: WorkerManager, requests: Iterable[LoRARequest]) -> None:
        original(worker, sorted((request for request in requests if request), key=lambda request: request.lora_int_id))

    return apply


def _load(original: Load, worker: WorkerManager, manager: AdapterManager, request: LoRARequest) -> LoRAModel:
    if not manager.options.stock_kernels:  # else stock LoRA does not run in the plugin's layers
        _check_whole_steps(manager, request)
    path = Path(get_adapter_absolute_path(request.lora_path))
    if is_artifact(path):
        return _from_artifact(manager, request, open_artifact(path, verify_hashes=False))
    digest = digest_of(str(path))
    _check_unchanged(manager, request, str(path), digest)
    try:
        check_fields(path)
        model = _read_stock(original, worker, manager, request)
        check_matched(manager, model, request.lora_name)
    except (ValueError, NotImplementedError) as error:
        if not (path / "adapter_config.json").is_file():
            raise
        if not manager.options.compile_folders:
            raise ValueError(
                f"{error} Scute can compile such adapters: run `scute compile {path} --base "
                f"{manager.base.source} --tp {manager.tp}` and pass the artifact, or start the engine with "
                "SCUTE_VLLM_COMPILE=1."
            ) from error
        logger.info("scute: vLLM refuses %s (%s); compiling it", path, error)
        store = manager.options.store
        compiled = manager.base.compile_folder(path, tp=manager.tp, dtype=manager.pool.dtype, store=store)
        return _from_artifact(manager, request, compiled)
    return _checked(manager, request, model, Loaded(packed=manager.take_over(model, request.lora_name), digest=digest))


def _read_stock(original: Load, worker: WorkerManager, manager: AdapterManager, request: LoRARequest) -> LoRAModel:
    """Read a stock LoRA with vLLM, in float32: B is rounded once, after its scale is folded."""
    if manager.options.stock_kernels:
        return original(worker, request)
    config = worker.lora_config
    wide = copy.copy(config)
    wide.lora_dtype = torch.float32
    worker.lora_config = wide
    try:
        return original(worker, request)
    finally:
        worker.lora_config = config


def check_fields(folder: Path) -> None:
    """Refuse a plain folder whose configuration has fields that this vLLM ignores.

    vLLM 0.31 and newer reads or refuses them.

    Raises:
        ValueError: With the fields' names.
    """
    known = {field.name for field in fields(PEFTHelper)}
    file = folder / "adapter_config.json"
    if "rank_pattern" in known or not file.is_file():
        return
    config: Any = json.loads(file.read_text())
    found = [name for name in IGNORED_BEFORE_0_31 if name not in known and config.get(name)]
    if str(config.get("init_lora_weights")).lower().startswith(CHANGING_THE_BASE):
        found.append("init_lora_weights")
    if found:
        raise ValueError(f"This vLLM ignores {', '.join(f'`{name}`' for name in found)} of adapter_config.json.")


def check_matched(manager: AdapterManager, model: LoRAModel, name: str) -> None:
    """Refuse a plain folder with weights for layers that the model doesn't have, which vLLM would drop silently.

    Models whose layers vLLM renames, repeats or distributes over pipeline stages are not checked.

    Raises:
        ScuteError: SC402.
    """
    if manager.renames_layers:
        return
    known = {*manager.modules, *(part for parts in manager.packed_modules.values() for part in parts)}
    strays = [layer for layer in model.loras if layer not in known]
    if strays:
        some = ", ".join(f"`{layer}`" for layer in strays[:3])
        fail(
            Code.SC402,
            where=name,
            found=f"weights for {len(strays)} layers that the model doesn't have, such as {some}",
            expected="layers of the model, such as " + ", ".join(f"`{site.name}`" for site in manager.sites[:2]),
            next="serve the base that the adapter was trained on, or correct the prefix of its keys",
        )


def _from_artifact(manager: AdapterManager, request: LoRARequest, artifact: Artifact) -> LoRAModel:
    _check_engine(manager, request)
    digest = artifact.manifest.digest
    _check_unchanged(manager, request, str(artifact.path), digest)
    manager.base.check(artifact)
    packed = read_packed(manager, artifact, request.lora_name)
    check_limits(packed, manager.options, max_lora_rank=manager.lora_config.max_lora_rank, device=manager.pool.device)
    check_slots(packed, manager.modules_by_site, tuple(site.name for site in manager.sites))
    model = EngineLoRAModel(request.lora_int_id, max(1, packed.own_rank), {})
    return _checked(manager, request, model, Loaded(packed=packed, digest=digest))


def _checked(manager: AdapterManager, request: LoRARequest, model: Any, loaded: Loaded) -> LoRAModel:
    """Attach a packed adapter to vLLM's model if the pool has room for it."""
    check_fits(
        loaded.packed,
        manager.pool,
        manager.options,
        max_adapters=manager.lora_slots,
        packed_adapters=manager.packed_adapters(without=request.lora_int_id),
    )
    model.scute = loaded
    attached: LoRAModel = model
    return attached


def read_packed(manager: AdapterManager, artifact: Artifact, name: str) -> PackedAdapter:
    """Return this rank's part of an artifact, packed for the engine's layers. Raises what `read_adapter` raises."""
    factors: dict[str, PackedFactor] = {
        factor.key: factor for packed in manager.packed_adapters().values() for factor in packed.factors
    }
    stored, dtype = torch_dtype(artifact.manifest.dtype.value), manager.pool.dtype
    exact = torch.promote_types(stored, dtype) is dtype  # a wider dtype holds every value
    return read_adapter(
        artifact,
        _named_as_in(artifact, manager),
        dtype,
        name=name,
        tp=manager.tp,
        rank=manager.rank,
        factors=factors,
        convert=exact,
        pin=manager.pool.memory.pin,
    )


def _named_as_in(artifact: Artifact, manager: AdapterManager) -> list[DirectoryEntry]:
    """Return the engine's sites under the artifact's names, by vLLM's renaming of checkpoints where it has one."""
    mapper: Any = getattr(manager.model, "hf_to_vllm_mapper", None)
    if mapper is not None:
        mapper = mapper.get_rename_mapper() if hasattr(mapper, "get_rename_mapper") else mapper
        rename = mapper.map_name if hasattr(mapper, "map_name") else mapper._map_name
        renamed = {str(rename(f"{name}.weight")).removesuffix(".weight"): name for name in artifact.sites}
        if renamed.keys() <= {site.name for site in manager.sites}:
            return [replace(site, name=renamed.get(site.name, site.name)) for site in manager.sites]
    return named_as_in(artifact, manager.sites)


def _check_whole_steps(manager: AdapterManager, request: LoRARequest) -> None:
    """Refuse engines that split their steps, where a layer sees half of a step's tokens."""
    if manager.splits_steps:
        refuse_engine(
            request.lora_name,
            "an engine that splits its steps in microbatches",
            "start the engine without --enable-dbo and --ubatch-size",
        )


def _check_engine(manager: AdapterManager, request: LoRARequest) -> None:
    _check_whole_steps(manager, request)
    if manager.lora_config.fully_sharded_loras:
        refuse_engine(
            request.lora_name, "an engine with fully_sharded_loras", "start the engine without --fully-sharded-loras"
        )
    if getattr(manager.lora_config, "enable_tower_connector_lora", False):
        refuse_engine(
            request.lora_name,
            "an engine with LoRA in the vision tower",
            "start the engine without enable_tower_connector_lora",
        )


def _check_unchanged(manager: AdapterManager, request: LoRARequest, path: str, digest: str) -> None:
    """Refuse content that changed on disk since this adapter was first loaded, unless the request replaces it."""
    loaded = manager.digests.get(request.lora_int_id)
    if loaded not in (None, digest) and not request.load_inplace:
        fail(
            Code.SC603,
            where=path,
            found=f"an adapter of digest {digest[:12]}",
            expected=f"{loaded[:12] if loaded else ''}, which was loaded under this name first",
            next="load it again with load_inplace, or under a new name; the older content is no longer on disk",
        )
