"""Checks that an adapter fits the engine's settings, its layers and its pool; all run before it enters the pool."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from scute_compile.diagnostics import Code, fail
from scute_compile.runtime_min.pool.directory import PAGE_BYTES, Field, values_per_granule
from scute_compile.runtime_min.pool.packed_adapter import PackedAdapter
from scute_compile.runtime_min.pool.resident_pool import ResidentPool
from scute_compile.runtime_vllm.options import MIB, Options
from scute_compile.runtime_vllm.stock_lora import WrappedLayer


def check_limits(packed: PackedAdapter, options: Options, *, max_lora_rank: int, device: torch.device) -> None:
    """Refuse ranks over the engine's limits, and rotations that it has no buffers or no kernels for (SC811)."""
    if packed.own_rank > max_lora_rank:
        _refuse_limit(
            packed.name,
            f"rank {packed.own_rank}",
            f"at most max_lora_rank, {max_lora_rank}",
            "start the engine with a larger --max-lora-rank",
        )
    pair_rank = max((pair.rank for pair in packed.pairs), default=0)
    if pair_rank > options.pair_rank:
        _refuse_limit(
            packed.name,
            f"shared factors of rank {pair_rank}",
            f"at most {options.pair_rank}",
            f"start the engine with SCUTE_VLLM_SHARED_RANK={pair_rank}",
        )
    if packed.rotated and not options.rotations:
        _refuse_limit(
            packed.name,
            "rotations of the input",
            "an engine with buffers for them",
            "start the engine without SCUTE_VLLM_ROTATIONS=0",
        )
    rotated = packed.rows[:, Field.R_OFFSET] >= 0
    blocks = sorted(set(packed.rows[rotated, Field.R_BLOCK].tolist()) - {1})
    step = values_per_granule(packed.dtype)
    unaligned = [block for block in blocks if block % step]
    if unaligned and device.type == "cuda":
        _refuse_limit(
            packed.name,
            f"rotation blocks of {unaligned[0]}",
            f"multiples of {step}, which captured steps can read",
            "train the adapter with larger blocks",
        )


def check_slots(packed: PackedAdapter, modules: Mapping[str, WrappedLayer], sites: tuple[str, ...]) -> None:
    """Refuse slots at layers whose class can't apply them (SC811)."""
    for number, site in enumerate(sites):
        row = packed.rows[number]
        layer = modules[site].layer
        rotated = bool(row[Field.R_OFFSET] >= 0)
        scaled = bool((row[Field.DS_OFFSET] >= 0) | (row[Field.SHIFT_OFFSET] >= 0))
        kind = type(layer.base_layer).__name__
        if rotated and (layer.quantized or layer.own_forward):
            property_of_layer = "quantized weights" if layer.quantized else "its own forward method"
            _refuse_limit(
                f"{packed.name}: {site}",
                f"a rotation at a {kind} with {property_of_layer}",
                "a layer with plain weights",
                "serve the adapter on the unquantized base, or leave the layer out when training",
            )
        if scaled and layer.bias_apart:
            _refuse_limit(
                f"{packed.name}: {site}",
                f"an output scale or shift at a {kind} that adds its bias later",
                "a layer that adds its own bias",
                "leave the layer out when training",
            )


def check_fits(
    packed: PackedAdapter,
    pool: ResidentPool,
    options: Options,
    *,
    max_adapters: int,
    packed_adapters: Mapping[str, PackedAdapter],
) -> None:
    """Refuse an adapter with which some batch of `max_adapters` adapters would not fit (SC805, SC811).

    Args:
        packed: The new adapter.
        pool: The pool that it would enter.
        options: The engine's settings.
        max_adapters: Largest number of adapters of one batch.
        packed_adapters: The other adapters in host memory.
    """
    others = sorted((other.pages for other in packed_adapters.values()), reverse=True)[: max_adapters - 1]
    need, have = packed.pages + sum(others), pool.stats().pages.total
    if need > have:
        fail(
            Code.SC805,
            where=packed.name,
            found=f"{packed.pages * PAGE_BYTES} bytes beside {sum(others) * PAGE_BYTES} of {len(others)} others",
            expected=f"at most {have * PAGE_BYTES} bytes for any {max_adapters} adapters of one batch",
            next=f"start the engine with SCUTE_VLLM_POOL_MIB={-(-need * PAGE_BYTES // MIB)}, or fewer max_loras",
        )
    adapters = (packed, *packed_adapters.values())
    pairs = {window.shared for adapter in adapters for window in adapter.pairs}
    if len(pairs) > options.pairs:
        _refuse_limit(
            packed.name,
            f"{len(pairs)} pairs of shared factors with those of loaded adapters",
            f"at most {options.pairs}",
            f"start the engine with SCUTE_VLLM_SHARED_PAIRS={len(pairs)}",
        )
    factors = {factor.key: factor.pages for adapter in adapters for factor in adapter.factors}
    shared = pool.stats().shared_pages
    if sum(factors.values()) > shared:
        fail(
            Code.SC805,
            where=packed.name,
            found=f"{sum(factors.values()) * PAGE_BYTES} bytes of shared factors with those of loaded adapters",
            expected=f"at most {shared * PAGE_BYTES} bytes",
            next=f"start the engine with SCUTE_VLLM_SHARED_MIB={-(-sum(factors.values()) * PAGE_BYTES // MIB)} or more",
        )


def refuse_engine(name: str, found: str, next_step: str) -> None:
    """Refuse an adapter because of an option of the engine that the plugin doesn't support (SC811)."""
    _refuse_limit(name, found, "an engine on which compiled adapters can be served", next_step)


def _refuse_limit(where: str, found: str, expected: str, next_step: str) -> None:
    fail(Code.SC811, where=where, found=found, expected=expected, next=next_step)
