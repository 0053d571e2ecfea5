"""What an engine refuses to load, and how it says so: everything is checked before an adapter enters the pool."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from scute_compile.diagnostics import Code, fail
from scute_compile.runtime_min.pool.directory import PAGE_BYTES, Field, values_per_granule
from scute_compile.runtime_min.pool.packed_adapter import PackedAdapter
from scute_compile.runtime_min.pool.resident_pool import ResidentPool
from scute_compile.runtime_vllm.options import MIB, Options
from scute_compile.runtime_vllm.stock_lora import Module


def check_limits(packed: PackedAdapter, options: Options, *, max_lora_rank: int, device: torch.device) -> None:
    """Refuse ranks over the engine's limits, and rotations that it has no room for (SC811)."""
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
            "an engine with room for them",
            "start the engine without SCUTE_VLLM_ROTATIONS=0",
        )
    turned = packed.rows[:, Field.R_OFFSET] >= 0
    blocks = sorted(set(packed.rows[turned, Field.R_BLOCK].tolist()) - {1})
    step = values_per_granule(packed.dtype)
    odd = [block for block in blocks if block % step]
    if odd and device.type == "cuda":
        _refuse_limit(
            packed.name,
            f"rotation blocks of {odd[0]}",
            f"multiples of {step}, which captured steps can read",
            "train the adapter with larger blocks",
        )


def check_slots(packed: PackedAdapter, modules: Mapping[str, Module], sites: tuple[str, ...]) -> None:
    """Refuse slots at layers whose class can't take them (SC811)."""
    for number, site in enumerate(sites):
        record = packed.rows[number]
        layer = modules[site].layer
        turned = bool(record[Field.R_OFFSET] >= 0)
        scaled = bool((record[Field.DS_OFFSET] >= 0) | (record[Field.SHIFT_OFFSET] >= 0))
        kind = type(layer.base_layer).__name__
        if turned and (layer.quantized or layer.own_forward):
            what = "quantized weights" if layer.quantized else "a product of its own"
            _refuse_limit(
                f"{packed.name}: {site}",
                f"a rotation at a {kind} with {what}",
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
        pool: Where it would go.
        options: The engine's settings.
        max_adapters: Most adapters of one batch.
        packed_adapters: Those that are loaded and stay.
    """
    others = sorted((one.pages for one in packed_adapters.values()), reverse=True)[: max_adapters - 1]
    need, have = packed.pages + sum(others), pool.stats().pages.total
    if need > have:
        fail(
            Code.SC805,
            where=packed.name,
            found=f"{packed.pages * PAGE_BYTES} bytes beside {sum(others) * PAGE_BYTES} of {len(others)} others",
            expected=f"at most {have * PAGE_BYTES} bytes for any {max_adapters} adapters of one batch",
            next=f"start the engine with SCUTE_VLLM_POOL_MIB={-(-need * PAGE_BYTES // MIB)}, or fewer max_loras",
        )
    pairs = {window.shared for one in (packed, *packed_adapters.values()) for window in one.pairs}
    if len(pairs) > options.pairs:
        _refuse_limit(
            packed.name,
            f"{len(pairs)} pairs of shared factors with those of loaded adapters",
            f"at most {options.pairs}",
            f"start the engine with SCUTE_VLLM_SHARED_PAIRS={len(pairs)}",
        )
    factors = {factor.key: factor.pages for one in (packed, *packed_adapters.values()) for factor in one.factors}
    shared = pool.stats().shared_pages
    if sum(factors.values()) > shared:
        fail(
            Code.SC805,
            where=packed.name,
            found=f"{sum(factors.values()) * PAGE_BYTES} bytes of shared factors with those of loaded adapters",
            expected=f"at most {shared * PAGE_BYTES} bytes",
            next=f"start the engine with SCUTE_VLLM_SHARED_MIB={-(-sum(factors.values()) * PAGE_BYTES // MIB)} or more",
        )


def refuse_engine(name: str, why: Any, next_step: str) -> None:
    """Refuse compiled adapters on an engine that runs in a way that the plugin doesn't (SC811)."""
    _refuse_limit(name, str(why), "an engine on which compiled adapters can be served", next_step)


def _refuse_limit(where: str, found: str, expected: str, next_step: str) -> None:
    fail(Code.SC811, where=where, found=found, expected=expected, next=next_step)
