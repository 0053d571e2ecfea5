"""vLLM's manager of LoRA adapters with the runtime's pool behind it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.lora.model_manager import LRUCacheLoRAModelManager

from scute_compile.runtime_min.pool.directory import GRANULE_BYTES, PAGE_BYTES, DirectoryEntry, granules, pages_of
from scute_compile.runtime_min.pool.packed_adapter import PackedAdapter
from scute_compile.runtime_min.pool.resident_pool import ResidentPool
from scute_compile.runtime_min.step.arguments import Gemm
from scute_compile.runtime_min.step.writer import StepLimits
from scute_compile.runtime_vllm.engine_base import EngineBase
from scute_compile.runtime_vllm.engine_steps import EngineSteps
from scute_compile.runtime_vllm.hooks import GRAPH_HOOKS, install
from scute_compile.runtime_vllm.layers import ADAPTED, AdaptedLinear, Attachment
from scute_compile.runtime_vllm.logits import AdaptedLogits
from scute_compile.runtime_vllm.options import Options
from scute_compile.runtime_vllm.stock_lora import WrappedLayer, pack_stock_lora
from scute_compile.runtime_vllm.vllm_types import LoRAMapping, LoRAModel

logger = logging.getLogger("vllm.scute")
MAX_DECODE_ROWS = 64
"""Largest number of rows of the decode form; for more rows, tiles of many tokens are faster."""


@dataclass(kw_only=True)
class Loaded:
    """The plugin's data about a loaded adapter, attached to vLLM's LoRA model as `scute`."""

    packed: PackedAdapter
    digest: str | None
    """Digest of the content on disk; None for a stand-in of vLLM's warm-up."""
    merged: bool = False
    """Whether vLLM has merged the slices of the layers that it keeps."""


class AdapterManager(LRUCacheLoRAModelManager):
    """vLLM's manager of LoRA models, for adapters of every method.

    Registered adapters lie in the pool's host memory, activated ones on the device. Embeddings, heads and experts stay
    with vLLM's own layers.
    """

    options: ClassVar[Options] = Options()

    def __init__(self, *args: Any, vllm_config: Any, **named: Any) -> None:
        super().__init__(*args, vllm_config=vllm_config, **named)
        self._epoch = 0
        """Counts changes of the adapters on the device, some of which vLLM's comparison of its indices misses."""
        self._written = -1
        """The epoch of the last step that was written."""
        self._modules = tuple(
            WrappedLayer(name=name, layer=layer, sites=self._sites(name, layer))
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
        """Digest of each adapter's content by vLLM's id, until that adapter is removed."""
        self._models: dict[int, LoRAModel] = {}
        """vLLM's LoRA models by id, while they are registered."""
        self._held: frozenset[int] = frozenset()
        self._held_models: dict[int, LoRAModel] = {}
        """Models of held adapters that vLLM has evicted, so that no step reads their files again."""
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
        _install_graph_hooks()
        logger.info("%s", pool_report(self))

    @property
    def renames_layers(self) -> bool:
        """Whether vLLM may look for a layer's adapter under another name than the checkpoint's, or on another rank."""
        return bool(
            self.is_pooling_model
            or self.supports_mm
            or self._is_moe
            or self._stages > 1
            or getattr(self.lora_config, "target_modules", None) is not None
        )

    @property
    def modules_by_site(self) -> Mapping[str, WrappedLayer]:
        """The wrapped layer of each site."""
        return {site.name: module for module in self._modules for site in module.sites}

    def packed_adapters(self, *, without: int = 0) -> Mapping[str, PackedAdapter]:
        """Return the adapters in host memory by the pool's name, held ones that vLLM has evicted included.

        Args:
            without: The id of an adapter to leave out.
        """
        held = {pool_name(lora_id): _loaded(model).packed for lora_id, model in self._held_models.items()}
        adapters = {**held, **self.pool.packed_adapters}
        adapters.pop(pool_name(without), None)
        return adapters

    def hold(self, lora_ids: Collection[int]) -> None:
        """Keep these adapters, and no others, in host memory until the next call, even where vLLM evicts them."""
        self._held = frozenset(lora_ids)
        self._held_models = {lora_id: model for lora_id, model in self._held_models.items() if lora_id in self._held}

    def held_model(self, lora_id: int) -> LoRAModel | None:
        """Return the model of a held adapter that vLLM has evicted; None for any other id."""
        return self._held_models.get(lora_id)

    def take_over(self, lora_model: LoRAModel, name: str) -> PackedAdapter:
        """Pack a stock LoRA's weights of the adapted layers for the pool, and remove them from vLLM's model.

        With vLLM's own kernels they stay there, and the packed adapter is empty.

        Args:
            lora_model: As vLLM loaded it.
            name: The adapter's name, for messages.

        Raises:
            ScuteError: As `pack_stock_lora`.
        """
        weights = {} if self.options.stock_kernels else lora_model.loras
        pin = self.pool.memory.pin
        packed = pack_stock_lora(name, weights, self._modules, self.sites, self.pool.dtype, pin=pin)
        self._strip(lora_model)
        return packed

    def activate_adapter(self, lora_id: int) -> bool:
        """Copy an adapter to the device."""
        activated = bool(super().activate_adapter(lora_id))
        if activated:
            self._epoch += 1
        self.pool.ensure([pool_name(lora_id)])
        return activated

    def deactivate_adapter(self, adapter_id: int) -> bool:
        """Remove an adapter from the device and from the pool; vLLM calls this when it evicts or removes one."""
        deactivated = bool(super().deactivate_adapter(adapter_id))
        name, model = pool_name(adapter_id), self._models.pop(adapter_id, None)
        if model is not None and adapter_id in self._held:
            self._held_models[adapter_id] = model
        if name in self.pool.names:
            self._evict(name)
            self.pool.remove(name)
        return deactivated

    def remove_adapter(self, adapter_id: int) -> bool:
        """Remove an adapter on request; its id may come back with other content."""
        self.digests.pop(adapter_id, None)
        return bool(super().remove_adapter(adapter_id))

    def remove_all_adapters(self) -> None:
        """Remove every adapter."""
        super().remove_all_adapters()
        self._models.clear()
        self._held_models.clear()
        self.steps.release()
        self.steps.rehearsing = False
        self._epoch += 1
        for name in self.pool.names:
            self._evict(name)
            self.pool.remove(name)

    def set_adapter_mapping(self, mapping: LoRAMapping) -> None:
        """Set the adapters of the next step's tokens."""
        if self._written != self._epoch:
            self._last_mapping = None
            self._written = self._epoch
        super().set_adapter_mapping(mapping)
        self.steps.current = True
        for head in self._heads:
            head.vacate(self.lora_index_to_id)

    def _set_adapter_mapping(self, mapping: LoRAMapping) -> None:
        super()._set_adapter_mapping(mapping)
        names = {lora_id: pool_name(lora_id) if lora_id > 0 else None for lora_id in set(mapping.index_mapping)}
        self.steps.rehearsing = any(lora_id not in self.digests for lora_id in self._registered_adapters)
        rows = [names[lora_id] for lora_id in mapping.index_mapping]
        self.steps.hold(rows)
        self.steps.write(rows)

    def _deactivate_adapter(self, lora_id: int) -> None:
        super()._deactivate_adapter(lora_id)
        self._evict(pool_name(lora_id))

    def _evict(self, name: str) -> None:
        if name in self.pool.resident:
            self.steps.release()
            self.pool.evict(name)
            self._epoch += 1

    def _create_merged_loras_inplace(self, lora_model: LoRAModel) -> None:
        """Add a loaded adapter to the pool's host memory; vLLM merges the slices of the layers that it keeps.

        A model that the plugin has not loaded is a stand-in of vLLM's warm-up. Its weights are zeros, so it is empty
        in the pool.
        """
        if not hasattr(lora_model, "scute"):
            pin = self.pool.memory.pin
            empty = pack_stock_lora(pool_name(lora_model.id), {}, (), self.sites, self.pool.dtype, pin=pin)
            self._strip(lora_model)
            lora_model.scute = Loaded(packed=empty, digest=None)
        loaded = _loaded(lora_model)
        if lora_model.loras and not loaded.merged:
            super()._create_merged_loras_inplace(lora_model)
        loaded.merged = True
        self.pool.add(pool_name(lora_model.id), loaded.packed)
        self._models[lora_model.id] = lora_model
        self._held_models.pop(lora_model.id, None)
        if loaded.digest is not None:
            self.digests[lora_model.id] = loaded.digest

    def _strip(self, lora_model: LoRAModel) -> None:
        """Remove the adapted layers from vLLM's model, unless vLLM's own kernels serve them."""
        if not self.options.stock_kernels:
            for site in self.sites:
                lora_model.loras.pop(site.name, None)
                lora_model.loras.pop(site.gemm, None)  # stand-ins come with merged slices

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
        """Return the pool's pages: those of the option, or what vLLM's buffers with `s` and `b` would take."""
        if self.options.pool_bytes is not None:
            return pages_of(self.options.pool_bytes)
        rank = self.lora_config.max_lora_rank
        per_adapter = sum(
            rank * (granules(site.in_features, dtype) + granules(site.out_features, dtype))
            + granules(site.out_features, dtype)
            + granules(site.out_features, torch.float32)
            for site in self.sites
        )
        return int(self.lora_slots) * (pages_of(per_adapter * GRANULE_BYTES) + 1)


@cache
def _install_graph_hooks() -> None:
    """Install the hooks of vLLM's choice of graphs, once per process, now that the class that runs steps is loaded."""
    install(GRAPH_HOOKS)


def manager_class(original: type[Any]) -> type[AdapterManager]:
    """Return the class of the adapter manager, in the place of vLLM's."""
    del original
    return AdapterManager


def with_adapted_layers(original: tuple[type[Any], ...]) -> tuple[type[Any], ...]:
    """Return vLLM's classes of layers with LoRA, after the plugin's: vLLM takes the first that fits a layer."""
    return (*ADAPTED, *original)


def pool_name(lora_id: int) -> str:
    """Return the pool's name of an adapter: vLLM's id, since several adapters may share a name."""
    return str(lora_id)


def _loaded(lora_model: Any) -> Loaded:
    loaded: Loaded = lora_model.scute
    return loaded


def _decode_rows(vllm_config: Any) -> tuple[int, bool]:
    """Return the most rows of the decode form, and whether vLLM may pad a step of fewer rows beyond it.

    The former is the largest captured size of at most `MAX_DECODE_ROWS`, so padding a step to a captured size keeps its
    form. vLLM pads further where data parallel ranks are padded to the largest of all, where sequence parallelism pads
    to its multiples, and where speculative decoding changes the captured sizes later.
    """
    sizes: list[int] = getattr(vllm_config.compilation_config, "cudagraph_capture_sizes", None) or []
    fitting = [size for size in sizes if size <= MAX_DECODE_ROWS]
    passes = getattr(vllm_config.compilation_config, "pass_config", None)
    beyond = (
        bool(sizes and not fitting)
        or vllm_config.parallel_config.data_parallel_size > 1
        or vllm_config.speculative_config is not None
        or bool(getattr(passes, "enable_sp", False))
    )
    return max(fitting or [MAX_DECODE_ROWS]), beyond


def pool_report(manager: AdapterManager) -> str:
    """Return one line on the pool's size, for the engine's log."""
    stats = manager.pool.stats()
    return (
        f"scute: {stats.pages.total * PAGE_BYTES >> 20} MiB for up to {manager.lora_slots} adapters at once over "
        f"{len(manager.sites)} sites of {len({site.gemm for site in manager.sites})} layers"
    )
