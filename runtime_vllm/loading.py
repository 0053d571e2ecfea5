"""From a path in a request to an adapter that vLLM can register: artifacts, stock folders, folders to compile."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable
from dataclasses import fields, replace
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.utils import get_adapter_absolute_path

from scute_compile.diagnostics import Code, ScuteError, fail
from scute_compile.formats.artifact import Artifact, is_artifact, open_artifact
from scute_compile.ir.dtypes import torch_dtype
from scute_compile.runtime_min.pool.directory import DirectoryEntry
from scute_compile.runtime_min.pool.packed_adapter import PackedAdapter, PackedFactor
from scute_compile.runtime_min.pool.reading import named_as_in, read_adapter
from scute_compile.runtime_vllm.adapter_manager import AdapterManager
from scute_compile.runtime_vllm.compile_on_load import compile_folder
from scute_compile.runtime_vllm.engine_requests import digest_of
from scute_compile.runtime_vllm.load_checks import check_fits, check_limits, check_slots, refuse_engine

logger = logging.getLogger("vllm.scute")
READ_PAST = (
    "rank_pattern",
    "alpha_pattern",
    "lora_bias",
    "alora_invocation_tokens",
    "layer_replication",
    "use_bdlora",
    "use_qalora",
)
"""Fields of a LoRA's configuration that change what it computes."""
CHANGING_THE_BASE = ("pissa", "olora", "corda", "loftq")
"""Ways to initialize a LoRA that train it beside other base weights than the base's."""
Load = Callable[[Any, Any], Any]


def loading(original: Load) -> Load:
    """Return vLLM's `_load_adapter` with artifacts, and with stock LoRA kept in float32 until its scale is folded.

    What was kept for requests that were admitted is taken from there; a fault of its files would end the engine.

    Args:
        original: `WorkerLoRAManager._load_adapter(self, lora_request) -> LoRAModel`.
    """

    @wraps(original)
    def load(worker: Any, request: Any) -> Any:
        slots = worker._adapter_manager
        if not isinstance(slots, AdapterManager):
            return original(worker, request)
        if not request.load_inplace and (kept := slots.kept(request.lora_int_id)) is not None:
            return kept
        try:
            return _load(original, worker, slots, request)
        except ScuteError as error:
            raise ValueError(f"adapter {request.lora_name!r}: {error}") from None
        except SafetensorError as error:
            raise ValueError(f"adapter {request.lora_name!r}, from {request.lora_path}: {error}") from None

    return load


def in_one_order(original: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Return vLLM's `_apply_adapters(lora_requests)`, which takes a step's adapters in the order of their numbers.

    It is given a set, whose order differs between processes: ranks would keep and evict different adapters.
    """

    @wraps(original)
    def apply(worker: Any, requests: Any) -> None:
        original(worker, sorted((one for one in requests if one), key=lambda one: int(one.lora_int_id)))

    return apply


def _load(original: Load, worker: Any, slots: AdapterManager, request: Any) -> Any:
    if not slots.options.stock_kernels:  # plain folders go through the plugin's layers too
        _check_whole_steps(slots, request)
    path = Path(get_adapter_absolute_path(request.lora_path))
    if is_artifact(path):
        return _from_artifact(slots, request, open_artifact(path, verify_hashes=False))
    digest = digest_of(str(path))
    _check_same(slots, request, str(path), digest)
    try:
        check_understood(path)
        model = _stock(original, worker, slots, request)
        check_matched(slots, model, request.lora_name)
    except (ValueError, NotImplementedError) as error:
        if not (path / "adapter_config.json").is_file():
            raise
        if not slots.options.compile_folders:
            raise ValueError(
                f"{error} Scute can compile such adapters: run `scute compile {path} --base "
                f"{slots.base.source} --tp {slots.tp}` and pass the artifact, or start the engine with "
                "SCUTE_VLLM_COMPILE=1."
            ) from error
        logger.info("scute: vLLM refuses %s (%s); compiling it", path, error)
        compiled = compile_folder(path, slots.base, tp=slots.tp, dtype=slots.pool.dtype, store=slots.options.store)
        return _from_artifact(slots, request, compiled)
    model.scute_digest = digest
    return model


def _stock(original: Load, worker: Any, slots: AdapterManager, request: Any) -> Any:
    if slots.options.stock_kernels:
        return original(worker, request)
    config = worker.lora_config
    wide = copy.copy(config)
    wide.lora_dtype = torch.float32  # B keeps its digits until its scale is folded
    worker.lora_config = wide
    try:
        return original(worker, request)
    finally:
        worker.lora_config = config


def check_understood(folder: Path) -> None:
    """Refuse fields of a plain folder that this vLLM would read past, and so serve something else than was trained.

    From 0.31 on vLLM reads or refuses them itself.

    Raises:
        ValueError: With the fields' names.
    """
    known = {field.name for field in fields(PEFTHelper)}
    file = folder / "adapter_config.json"
    if "rank_pattern" in known or not file.is_file():
        return
    config: Any = json.loads(file.read_text())
    found = [name for name in READ_PAST if name not in known and config.get(name)]
    if str(config.get("init_lora_weights")).lower().startswith(CHANGING_THE_BASE):
        found.append("init_lora_weights")
    if found:
        raise ValueError(f"This vLLM reads past {', '.join(f'`{name}`' for name in found)} of adapter_config.json.")


def check_matched(slots: AdapterManager, model: Any, name: str) -> None:
    """Refuse a plain folder with weights for layers that the model doesn't have; vLLM would drop them without a word.

    Models whose layers vLLM renames, repeats or spreads over stages keep vLLM's own rule.

    Raises:
        ScuteError: SC402.
    """
    if slots.renames_layers:
        return
    known = {*slots.modules, *(part for parts in slots.packed_modules.values() for part in parts)}
    strays = [layer for layer in model.loras if layer not in known]
    if strays:
        some = ", ".join(f"`{layer}`" for layer in strays[:3])
        fail(
            Code.SC402,
            where=name,
            found=f"weights for {len(strays)} layers that the model doesn't have, such as {some}",
            expected="layers of the model, such as " + ", ".join(f"`{site.name}`" for site in slots.sites[:2]),
            next="serve the base that the adapter was trained on, or correct the prefix of its keys",
        )


def _from_artifact(slots: AdapterManager, request: Any, artifact: Artifact) -> LoRAModel:
    _check_engine(slots, request)
    _check_same(slots, request, str(artifact.path), artifact.manifest.digest)
    slots.base.check(artifact)
    packed = read_image(slots, artifact, request.lora_name)
    check_limits(packed, slots.options, max_lora_rank=slots.lora_config.max_lora_rank, device=slots.pool.device)
    check_slots(packed, slots.modules_by_site, tuple(site.name for site in slots.sites))
    check_fits(
        packed,
        slots.pool,
        slots.options,
        max_adapters=slots.lora_slots,
        packed_adapters=slots.packed_adapters(without=request.lora_int_id),
    )
    model = LoRAModel(request.lora_int_id, max(1, packed.own_rank), {})
    model.scute_packed, model.scute_digest = packed, artifact.manifest.digest
    return model


def read_image(slots: AdapterManager, artifact: Artifact, name: str) -> PackedAdapter:
    """Return this rank's part of an artifact, for the engine's layers. Raises what `read_adapter` raises."""
    factors: dict[str, PackedFactor] = {
        factor.key: factor for packed in slots.packed_adapters().values() for factor in packed.factors
    }
    stored, dtype = torch_dtype(artifact.manifest.dtype.value), slots.pool.dtype
    exact = torch.promote_types(stored, dtype) is dtype  # a wider dtype holds every value
    return read_adapter(
        artifact,
        _named_as_in(artifact, slots),
        dtype,
        name=name,
        tp=slots.tp,
        rank=slots.rank,
        factors=factors,
        convert=exact,
        pin=slots.pool.memory.pin,
    )


def _named_as_in(artifact: Artifact, slots: AdapterManager) -> list[DirectoryEntry]:
    """Return the engine's sites under the artifact's names, by vLLM's own renaming of checkpoints where it has one."""
    mapper: Any = getattr(slots.model, "hf_to_vllm_mapper", None)
    if mapper is not None:
        mapper = mapper.get_rename_mapper() if hasattr(mapper, "get_rename_mapper") else mapper
        rename = mapper.map_name if hasattr(mapper, "map_name") else mapper._map_name
        renamed = {str(rename(f"{name}.weight")).removesuffix(".weight"): name for name in artifact.sites}
        if renamed.keys() <= {site.name for site in slots.sites}:
            return [replace(site, name=renamed.get(site.name, site.name)) for site in slots.sites]
    return named_as_in(artifact, slots.sites)


def _check_whole_steps(slots: AdapterManager, request: Any) -> None:
    """Refuse engines that split their steps: a layer would see half of a step's tokens."""
    if slots.splits_steps:
        refuse_engine(
            request.lora_name,
            "an engine that splits its steps in microbatches",
            "start the engine without --enable-dbo and --ubatch-size",
        )


def _check_engine(slots: AdapterManager, request: Any) -> None:
    _check_whole_steps(slots, request)
    if slots.lora_config.fully_sharded_loras:
        refuse_engine(
            request.lora_name, "an engine with fully_sharded_loras", "start the engine without --fully-sharded-loras"
        )
    if getattr(slots.lora_config, "enable_tower_connector_lora", False):
        refuse_engine(
            request.lora_name,
            "an engine with LoRA in the vision tower",
            "start the engine without enable_tower_connector_lora",
        )


def _check_same(slots: AdapterManager, request: Any, path: str, now: str) -> None:
    """Refuse content that changed on disk since this adapter was first loaded, unless it is to be replaced."""
    before = slots.digests.get(request.lora_int_id)
    if before not in (None, now) and not request.load_inplace:
        fail(
            Code.SC603,
            where=path,
            found=f"an adapter of digest {now[:12]}",
            expected=f"{before[:12] if before else ''}, which was loaded under this name first",
            next="load it again with load_inplace, or under a new name; the older one is no longer on disk",
        )
