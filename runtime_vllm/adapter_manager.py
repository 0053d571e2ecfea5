"""vLLM's bookkeeping of adapters, with the runtime's pool behind it: what vLLM activates is what lies in the pool."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import torch
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.lora.model_manager import LRUCacheLoRAModelManager

from scute_compile.runtime_min.pool.directory import GRANULE_BYTES, PAGE_BYTES, DirectoryEntry, granules, pages_of
from scute_compile.runtime_min.pool.packed_adapter import PackedAdapter
from scute_compile.runtime_min.pool.resident_pool import ResidentPool
from scute_compile.runtime_min.step.arguments import Gemm
from scute_compile.runtime_min.step.writer import StepLimits
from scute_compile.runtime_vllm import graph_kinds
from scute_compile.runtime_vllm.engine_base import EngineBase
from scute_compile.runtime_vllm.engine_steps import EngineSteps
from scute_compile.runtime_vllm.layers import AdaptedLinear, Attachment
from scute_compile.runtime_vllm.load_checks import check_fits
from scute_compile.runtime_vllm.logits import AdaptedLogits
from scute_compile.runtime_vllm.options import Options
from scute_compile.runtime_vllm.stock_lora import Module, pack_stock_lora

logger = logging.getLogger("vllm.scute")
DECODE_ROWS = 64
"""Most rows of the decode form; beyond it tiles of many tokens are faster."""


class AdapterManager(LRUCacheLoRAModelManager):
    """vLLM's manager of LoRA models, for adapters of every method.

    An adapter that vLLM registers lies in the pool's host memory; one that it activates lies on the device. Embeddings,
    heads and experts stay with vLLM's own layers.
    """

    options: ClassVar[Options] = Options()

    def __init__(self, *args: Any, vllm_config: Any, **named: Any) -> None:
        super().__init__(*args, vllm_config=vllm_config, **named)
        self._epoch = 0
        """Counts changes of what is on the device, which vLLM's own check of the slots can miss."""
        self._written = -1
        self._modules = tuple(
            Module(name=name, layer=layer, sites=self._sites(name, layer))
            for name, layer in self.modules.items()
            if isinstance(layer, AdaptedLinear)
        )
        self._heads = tuple(layer for layer in self.modules.values() if isinstance(layer, AdaptedLogits))
        self.sites = tuple(site for module in self._modules for site in module.sites)
        self.tp, self.rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
        model = vllm_config.model_config
        self.base = EngineBase(source=model.model, revision=model.revision, quantized=bool(model.quantization))
        self._stages = int(vllm_config.parallel_config.pipeline_parallel_size)
        self.splits_steps = bool(getattr(vllm_config.parallel_config, "use_ubatching", False))
        self.digests: dict[int, str] = {}
        """Content of each artifact by vLLM's number, until that adapter is removed."""
        self._models: dict[int, Any] = {}
        """vLLM's LoRA models by number, as long as they are registered."""
        self._held: frozenset[int] = frozenset()
        self._kept: dict[int, Any] = {}
        """Models of held adapters that vLLM has forgotten, so that a step never reads their files again."""
        max_num_seqs, padded_beyond = _decode_rows(vllm_config)
        limits = StepLimits(
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            padded_beyond=padded_beyond,
            max_lora_rank=self.lora_config.max_lora_rank,
            pair_rank=self.options.pair_rank,
            rotations=self.options.rotations,
        )
        self.pool = ResidentPool(
            self.sites,
            num_pages=self._pages(model.dtype),
            max_adapters=self.lora_slots,
            dtype=model.dtype,
            device=torch.device(self.device),
            shared_pages=pages_of(self.options.shared_bytes),
            pairs=self.options.pairs,
        )
        self.steps = EngineSteps(self.pool, limits)
        self._attach()
        graph_kinds.install()
        logger.info("%s", pool_report(self))

    @property
    def renames_layers(self) -> bool:
        """Whether vLLM may look for a layer's adapter under another name than the checkpoint's, or elsewhere."""
        return bool(
            self.is_pooling_model
            or self.supports_mm
            or self._is_moe
            or self._stages > 1
            or getattr(self.lora_config, "target_modules", None) is not None
        )

    @property
    def modules_by_site(self) -> Mapping[str, Module]:
        """The wrapped layer of each site."""
        return {site.name: module for module in self._modules for site in module.sites}

    def packed_adapters(self, *, without: int = 0) -> Mapping[str, PackedAdapter]:
        """Return the adapters in host memory by the pool's name, with those that vLLM will register again."""
        kept = {self.pool_name(number): model.scute_packed for number, model in self._kept.items()}
        return {
            name: packed
            for name, packed in {**kept, **self.pool.packed_adapters}.items()
            if name != self.pool_name(without)
        }

    def hold(self, numbers: Collection[int]) -> None:
        """Keep these adapters in host memory until the next call, also where vLLM forgets them, and no others."""
        self._held = frozenset(numbers)
        self._kept = {number: model for number, model in self._kept.items() if number in self._held}

    def kept(self, lora_id: int) -> Any:
        """Return the model of a held adapter that vLLM has forgotten; None where there is none."""
        return self._kept.get(lora_id)

    def pool_name(self, lora_id: int) -> str:
        """Return what the pool calls an adapter; vLLM's numbers tell apart what shares a name."""
        return str(lora_id)

    def activate_adapter(self, lora_id: int) -> bool:
        """Bring an adapter onto the device."""
        activated = bool(super().activate_adapter(lora_id))
        if activated:
            self._epoch += 1
        self.pool.ensure([self.pool_name(lora_id)])
        return activated

    def deactivate_adapter(self, adapter_id: int) -> bool:
        """Take an adapter off the device and out of the pool: vLLM calls this where it forgets one."""
        deactivated = bool(super().deactivate_adapter(adapter_id))
        name, model = self.pool_name(adapter_id), self._models.pop(adapter_id, None)
        if model is not None and adapter_id in self._held:
            self._kept[adapter_id] = model
        if name in self.pool.names:
            self._take_off(name)
            self.pool.remove(name)
        return deactivated

    def remove_adapter(self, adapter_id: int) -> bool:
        """Forget one adapter because it was asked for: its name may come back with other content."""
        self.digests.pop(adapter_id, None)
        return bool(super().remove_adapter(adapter_id))

    def remove_all_adapters(self) -> None:
        """Forget every adapter."""
        super().remove_all_adapters()
        self._models.clear()
        self._kept.clear()
        self.steps.release()
        self.steps.rehearsing = False
        self._epoch += 1
        for name in self.pool.names:
            self._take_off(name)
            self.pool.remove(name)

    def set_adapter_mapping(self, mapping: Any) -> None:
        """Set the adapters of the next step's tokens."""
        if self._written != self._epoch:
            self._last_mapping = None
            self._written = self._epoch
        super().set_adapter_mapping(mapping)
        self.steps.current = True
        for head in self._heads:
            head.vacate(self.lora_index_to_id)

    def _set_adapter_mapping(self, mapping: Any) -> None:
        super()._set_adapter_mapping(mapping)
        names = {number: self.pool_name(number) if number > 0 else None for number in set(mapping.index_mapping)}
        self.steps.rehearsing = any(number not in self.digests for number in self._registered_adapters)
        rows = [names[number] for number in mapping.index_mapping]
        self.steps.hold(rows)
        self.steps.write(rows)

    def _deactivate_adapter(self, lora_id: int) -> None:
        super()._deactivate_adapter(lora_id)
        self._take_off(self.pool_name(lora_id))

    def _take_off(self, name: str) -> None:
        if name in self.pool.resident:
            self.steps.release()
            self.pool.evict(name)
            self._epoch += 1

    def _create_merged_loras_inplace(self, lora_model: Any) -> None:
        """Put a loaded adapter into the pool's host memory; what is left of a stock one is vLLM's.

        Adapters without a digest are the stand-ins of vLLM's warm-up. They are empty here: their weights are zeros, and
        already have this rank's shapes.
        """
        packed: PackedAdapter | None = getattr(lora_model, "scute_packed", None)
        if getattr(lora_model, "scute_ready", False):  # it was here before, and every check was made then
            self._register(lora_model, lora_model.scute_packed)
            return
        digest: str | None = getattr(lora_model, "scute_digest", None)
        name, pin = str(lora_model.id), self.pool.memory.pin
        if packed is None and (self.options.stock_kernels or digest is None):
            packed = pack_stock_lora(name, {}, (), self.sites, self.pool.dtype, pin=pin)
        elif packed is None:
            packed = pack_stock_lora(name, lora_model.loras, self._modules, self.sites, self.pool.dtype, pin=pin)
        if not self.options.stock_kernels:
            for site in self.sites:
                lora_model.loras.pop(site.name, None)
                lora_model.loras.pop(site.gemm, None)  # vLLM's warm-up packs slices itself
        check_fits(
            packed,
            self.pool,
            self.options,
            max_adapters=self.lora_slots,
            packed_adapters=self.packed_adapters(without=lora_model.id),
        )
        if lora_model.loras:
            super()._create_merged_loras_inplace(lora_model)
        self._register(lora_model, packed)

    def _register(self, lora_model: Any, packed: PackedAdapter) -> None:
        self.pool.add(self.pool_name(lora_model.id), packed)
        lora_model.scute_packed, lora_model.scute_ready = packed, True
        self._models[lora_model.id] = lora_model
        self._kept.pop(lora_model.id, None)
        digest: str | None = getattr(lora_model, "scute_digest", None)
        if digest is not None:
            self.digests[lora_model.id] = digest

    def _sites(self, name: str, layer: Any) -> tuple[DirectoryEntry, ...]:
        parts = self.packed_modules.get(name, [name])
        return tuple(
            DirectoryEntry(name=part, in_features=int(layer.input_size), out_features=width, gemm=name)
            for part, width in zip(parts, layer.widths, strict=True)
        )

    def _attach(self) -> None:
        first = 0
        for module in self._modules:
            widths = tuple(site.out_features for site in module.sites)
            module.layer.attachment = Attachment(steps=self.steps, gemm=Gemm(first_site=first, widths=widths))
            first += len(widths)

    def _pages(self, dtype: torch.dtype) -> int:
        """Return the pool's size: as asked, or what vLLM's buffers would take with s and b beside them."""
        if self.options.pool_bytes is not None:
            return pages_of(self.options.pool_bytes)
        rank = self.lora_config.max_lora_rank
        each = sum(
            rank * (granules(site.in_features, dtype) + granules(site.out_features, dtype))
            + granules(site.out_features, dtype)
            + granules(site.out_features, torch.float32)
            for site in self.sites
        )
        return int(self.lora_slots) * (pages_of(each * GRANULE_BYTES) + 1)


def _decode_rows(vllm_config: Any) -> tuple[int, bool]:
    """Return the decode form's most rows, and whether a step of fewer may be padded to more.

    It is the largest captured size within the form, so that padding a step to a captured size never changes its form.
    Data parallel ranks are padded to the largest of them all, sequence parallelism pads to its own multiples, and
    speculative decoding changes the captured sizes later.
    """
    sizes: list[int] = getattr(vllm_config.compilation_config, "cudagraph_capture_sizes", None) or []
    fitting = [size for size in sizes if size <= DECODE_ROWS]
    passes = getattr(vllm_config.compilation_config, "pass_config", None)
    beyond = (
        bool(sizes and not fitting)
        or vllm_config.parallel_config.data_parallel_size > 1
        or vllm_config.speculative_config is not None
        or bool(getattr(passes, "enable_sp", False))
    )
    return max(fitting or [DECODE_ROWS]), beyond


def pool_report(slots: AdapterManager) -> str:
    """Return one line on what the pool has room for, for the engine's log."""
    stats = slots.pool.stats()
    return (
        f"scute: {stats.pages.total * PAGE_BYTES >> 20} MiB for up to {slots.lora_slots} adapters at once over "
        f"{len(slots.sites)} sites of {len({site.gemm for site in slots.sites})} layers"
    )
