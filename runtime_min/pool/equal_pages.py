"""Padding of adapters to equal page counts on all ranks, so that all ranks make the same eviction decisions.

The ranks' parts differ in size: only one rank adds the shift of a row-parallel layer, and shares of a term's rank may
be uneven. If one rank evicted or refused an adapter that another keeps, the ranks' collectives would not match.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import replace

import torch

from scute_compile.runtime_min.pool.directory import PAGE_BYTES
from scute_compile.runtime_min.pool.packed_adapter import FactorWindow, PackedAdapter, PackedFactor
from scute_compile.runtime_min.ranks.group import RankGroup

MAX_FACTORS = 62
"""Largest number of an adapter's shared factors that are padded; it has one or two for each shape of its layers."""


def with_equal_pages(
    packed: PackedAdapter, ranks: RankGroup, device: torch.device, factors: MutableMapping[str, PackedFactor]
) -> PackedAdapter:
    """Pad an adapter to the largest rank's page count; all ranks must call this for the same adapter.

    Shared factors are padded too if all ranks hold equally many, which are then different columns of the same factors.
    The numbers differ only if the cuts of some ranks fall inside a granule. The head size of no known model causes
    this; shared factors are then not padded.

    Args:
        packed: The rank's part.
        ranks: The ranks.
        device: A device that the group's backend sends from.
        factors: Shared factors by key; padded ones replace the others.
    """
    held = packed.factors[:MAX_FACTORS]
    sizes = torch.zeros(MAX_FACTORS + 2, dtype=torch.int32)
    sizes[: len(held) + 2] = torch.tensor([packed.pages, len(packed.factors), *(factor.pages for factor in held)])
    every = ranks.all_gather(sizes.to(device)).cpu()
    pages, count, *factor_pages = every.amax(0).tolist()
    packed = replace(packed, buffer=_padded(packed.buffer, pages))
    if every[:, 1].min() < count:
        return packed
    padded = {
        factor.key: replace(factor, buffer=_padded(factor.buffer, largest))
        for factor, largest in zip(held, factor_pages[: len(held)], strict=True)
        if factor.pages < largest
    }
    factors.update(padded)

    def with_padded(window: FactorWindow) -> FactorWindow:
        return replace(window, factor=padded.get(window.factor.key, window.factor))

    pairs = tuple(replace(pair, a=with_padded(pair.a), b=with_padded(pair.b)) for pair in packed.pairs)
    return replace(packed, pairs=pairs)


def _padded(buffer: torch.Tensor, pages: int) -> torch.Tensor:
    """Return a buffer with zeros up to a number of pages."""
    if len(buffer) >= pages * PAGE_BYTES:
        return buffer
    padded = torch.zeros(pages * PAGE_BYTES, dtype=torch.uint8, pin_memory=buffer.is_pinned())
    padded[: len(buffer)] = buffer
    return padded
