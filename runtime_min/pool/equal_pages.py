"""Ranks of one model decide alike what has room: each holds as many pages of an adapter as the one that needs most.

Ranks' parts differ in size: one alone adds the shift of a row-parallel layer, and shares of a rank may be uneven. Where
one rank evicted or refused an adapter that another keeps, the next step would wait for ever, or meet another step.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import replace

import torch

from scute_compile.runtime_min.pool.directory import PAGE_BYTES
from scute_compile.runtime_min.pool.packed_adapter import FactorWindow, PackedAdapter, PackedFactor
from scute_compile.runtime_min.ranks.group import RankGroup

MOST_FACTORS = 62
"""How many shared factors of an adapter are with_equal_pages; it has one or two for each shape of its layers."""


def with_equal_pages(
    packed: PackedAdapter, ranks: RankGroup, device: torch.device, factors: MutableMapping[str, PackedFactor]
) -> PackedAdapter:
    """Return an adapter's packed with as many pages as on the rank that has most; all ranks call it for one adapter.

    Shared factors are padded as well where all ranks have as many: ranks hold other columns of the same ones. They
    don't where a cut falls inside a granule on some ranks alone, which no model's head size does; what room there is
    for shared factors is then each rank's own.

    Args:
        packed: The rank's part.
        ranks: All of them.
        device: One that the group's backend sends from.
        factors: Images by key, in which with_equal_pages ones take the others' places.
    """
    held = packed.factors[:MOST_FACTORS]
    sizes = torch.zeros(MOST_FACTORS + 2, dtype=torch.int32)
    sizes[: len(held) + 2] = torch.tensor([packed.pages, len(packed.factors), *(factor.pages for factor in held)])
    every = ranks.all_gather(sizes.to(device)).cpu()
    own, count, *shared = every.amax(0).tolist()
    packed = replace(packed, buffer=_padded(packed.buffer, own))
    if every[:, 1].min() < count:
        return packed
    larger = {
        factor.key: replace(factor, buffer=_padded(factor.buffer, pages))
        for factor, pages in zip(held, shared[: len(held)], strict=True)
        if factor.pages < pages
    }
    factors.update(larger)

    def window(one: FactorWindow) -> FactorWindow:
        return replace(one, factor=larger.get(one.factor.key, one.factor))

    pairs = tuple(replace(pair, a=window(pair.a), b=window(pair.b)) for pair in packed.pairs)
    return replace(packed, pairs=pairs)


def _padded(buffer: torch.Tensor, pages: int) -> torch.Tensor:
    """Return an packed's bytes with zeros up to a number of pages."""
    if len(buffer) >= pages * PAGE_BYTES:
        return buffer
    padded = torch.zeros(pages * PAGE_BYTES, dtype=torch.uint8, pin_memory=buffer.is_pinned())
    padded[: len(buffer)] = buffer
    return padded
