"""Bookkeeping of the device: where adapters, shared factors and pairs lie, and how much must be evicted for an adapter.

The bookkeeping is on the host; `scute_compile.runtime_min.pool.device_memory` writes to the device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from scute_compile.runtime_min.pool.device_memory import DeviceMemory
from scute_compile.runtime_min.pool.directory import PAGE_BYTES, PAGE_GRANULES, Field
from scute_compile.runtime_min.pool.leases import Placement, Resident, ResidentFacts
from scute_compile.runtime_min.pool.packed_adapter import FactorWindow, PackedAdapter, PackedFactor
from scute_compile.runtime_min.pool.pages import PagePool, Runs

_PAGE_FIELDS = [Field.A_PAGES, Field.B_PAGES, Field.OWN_PAGES]
"""Fields of a directory row that count from the adapter's first entry in the page map."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Factor:
    packed: PackedFactor
    start: int
    """First page in the memory of shared factors."""
    references: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class _Pair:
    rank: int
    index: int
    references: int = 0


class _SharedDemand:
    """What an adapter's shared factors and pairs need beyond the free room, while evictions are simulated."""

    def __init__(
        self,
        adapter: PackedAdapter,
        factors: Mapping[str, _Factor],
        pairs: Mapping[tuple[str, str], _Pair],
        *,
        free_pages: int,
        free_pairs: int,
    ) -> None:
        self._free_pages, self._free_pairs = free_pages, free_pairs
        self._new_pages = sum(factor.pages for factor in adapter.factors if factor.key not in factors)
        self._new_pairs = sum(pair not in pairs for pair in _pairs_of(adapter))
        self._factors = Counter({key: factor.references for key, factor in factors.items()})
        self._factors.update(factor.key for factor in adapter.factors)
        self._pairs = Counter({key: pair.references for key, pair in pairs.items()})
        self._pairs.update(_pairs_of(adapter))

    @property
    def exceeds_room(self) -> bool:
        """Whether the free pages or pairs are too few."""
        return self._new_pairs > self._free_pairs or self._new_pages > self._free_pages

    def evict(self, other: PackedAdapter) -> None:
        """Simulate evicting one adapter, which frees the factors and pairs that no other adapter uses."""
        for factor in other.factors:
            self._factors[factor.key] -= 1
            self._free_pages += 0 if self._factors[factor.key] else factor.pages
        for pair in _pairs_of(other):
            self._pairs[pair] -= 1
            self._free_pairs += not self._pairs[pair]


class Residents:
    """The adapters on the device. The caller chooses which of them are evicted."""

    def __init__(self, memory: DeviceMemory, pool: PagePool, *, pairs: int) -> None:
        self._memory, self._pool = memory, pool
        self._map = Runs(len(memory.page_map))
        self._shared = Runs(len(memory.shared))
        self._free_indices = list(range(len(memory.directory) - 1, -1, -1))
        self.pair_capacity = pairs
        self._free_pair_indices = list(range(pairs - 1, -1, -1))
        self._factors: dict[str, _Factor] = {}
        self._pairs: dict[tuple[str, str], _Pair] = {}
        self._placed: dict[Resident, None] = {}
        """In the order of placement; a dict, so that any of them can be removed."""
        self.facts: dict[int, ResidentFacts] = {}
        """Facts from which steps are planned, by adapter index."""
        self.map_moved = 0
        """Entries of the page map that were rewritten to close gaps; pages of adapters never move."""
        self.shared_moved = 0
        """Pages of shared factors that were copied again to close gaps."""

    def __iter__(self) -> Iterator[Resident]:
        return iter(self._placed)

    @property
    def free_indices(self) -> int:
        """Number of adapter indices without an adapter."""
        return len(self._free_indices)

    @property
    def map_free(self) -> int:
        """Number of free entries of the page map."""
        return self._map.free

    @property
    def bytes_by_adapter(self) -> Mapping[str, int]:
        """Bytes of the pages of each adapter by name, without shared factors."""
        sizes: Counter[str] = Counter()
        for resident in self._placed:
            sizes[resident.packed.name] += resident.packed.pages * PAGE_BYTES
        return dict(sizes)

    @property
    def factors(self) -> Iterable[PackedFactor]:
        """Shared factors on the device."""
        return (factor.packed for factor in self._factors.values())

    @property
    def pairs(self) -> tuple[tuple[int, ...], ...]:
        """The table of shared pairs: at a pair's index its rank and seven zeros, elsewhere eight zeros."""
        rows: list[tuple[int, ...]] = [(0,) * 8] * self.pair_capacity
        for pair in self._pairs.values():
            rows[pair.index] = (pair.rank, *(0,) * 7)
        return tuple(rows)

    def victims(self, packed: PackedAdapter, candidates: Iterable[Resident]) -> tuple[Resident, ...] | None:
        """Return the first candidates that must be evicted for an adapter; None when evicting all is not enough.

        Evicting the last user of a shared factor frees it, unless the new adapter uses it too.
        """
        shared = None
        if packed.pairs:
            shared = _SharedDemand(
                packed,
                self._factors,
                self._pairs,
                free_pages=self._shared.free,
                free_pairs=len(self._free_pair_indices),
            )
        free, map_free, indices = self._pool.free, self._map.free, len(self._free_indices)
        chosen: list[Resident] = []
        remaining = iter(candidates)
        while (
            packed.pages > free
            or packed.pages > map_free
            or indices < 1
            or (shared is not None and shared.exceeds_room)
        ):
            if (victim := next(remaining, None)) is None:
                return None
            chosen.append(victim)
            indices += 1
            free, map_free = free + victim.packed.pages, map_free + victim.packed.pages
            if shared is not None:
                shared.evict(victim.packed)
        return tuple(chosen)

    def can_place(self, packed: PackedAdapter) -> bool:
        """Return whether the page map and the shared memory have gaps long enough for an adapter.

        `compact` joins the gaps into one, where they are large enough together.
        """
        new = [factor.pages for factor in packed.factors if factor.key not in self._factors]
        return self._map.can_allocate([packed.pages]) and self._shared.can_allocate(new)

    def place(self, packed: PackedAdapter, staged: torch.Tensor) -> Resident:
        """Write a staged adapter, and those of its shared factors that are not on the device; `can_place` must hold."""
        new = [factor for factor in packed.factors if factor.key not in self._factors]
        with ExitStack() as undo:
            for factor in new:
                start = self._allocate(self._shared, factor.pages)
                undo.callback(self._shared.release, start, factor.pages)
                self._memory.write_shared(factor.buffer, start)
                self._factors[factor.key] = _Factor(packed=factor, start=start)
                undo.callback(self._factors.pop, factor.key)
            placement = self._place_pages(packed, staged)
            undo.pop_all()
        for factor in packed.factors:
            self._factors[factor.key].references += 1
        for pair in _pairs_of(packed):
            self._retain_pair(pair, packed.pairs[0].rank)
        pairs = tuple(self._pairs[window.shared].index for window in packed.pairs)
        facts = ResidentFacts(
            rank=packed.own_rank,
            pair=pairs[0] if pairs else -1,
            pair_rank=packed.pairs[0].rank if pairs else 0,
            beside_pair=packed.beside_pair,
            rotated=packed.rotated,
        )
        resident = Resident(
            packed=packed, index=self._free_indices.pop(), placement=placement, pairs=pairs, facts=facts
        )
        self._placed[resident] = None
        self.facts[resident.index] = facts
        self._write_rows(resident)
        return resident

    def remove(self, resident: Resident) -> None:
        """Free an adapter's pages and index, and the shared factors that no other adapter uses; clear its rows."""
        self._memory.write_after(resident.last_use)
        del self._placed[resident], self.facts[resident.index]
        self._memory.clear_rows(resident.index)
        self._free_indices.append(resident.index)
        self._free_pages(resident.placement)
        for pair in _pairs_of(resident.packed):
            entry = self._pairs[pair]
            entry.references -= 1
            if not entry.references:
                self._free_pair_indices.append(self._pairs.pop(pair).index)
        for factor in resident.packed.factors:
            self._release_factor(factor.key)

    @contextmanager
    def retaining_factors(self, packed: PackedAdapter) -> Iterator[None]:
        """Keep the shared factors that an adapter uses on the device while others are evicted for it."""
        retained = [factor.key for factor in packed.factors if factor.key in self._factors]
        for key in retained:
            self._factors[key].references += 1
        try:
            yield
        finally:
            for key in retained:
                self._release_factor(key)

    def compact(self) -> None:
        """Rewrite the page map and the shared memory without gaps.

        Every running step must have been launched on the current stream.
        """
        self._memory.flush()  # first, because it can raise
        self._memory.settle()
        self._map.clear()
        for resident in self._placed:
            resident.placement.start = self._allocate(self._map, resident.packed.pages)
        self._memory.write_map([resident.placement.allocation.pages for resident in self._placed])
        self.map_moved += sum(resident.packed.pages for resident in self._placed)
        self._shared.clear()
        for factor in sorted(self._factors.values(), key=lambda item: item.start):
            start = self._allocate(self._shared, factor.packed.pages)
            if start != factor.start:
                factor.start = start
                self._memory.write_shared(factor.packed.buffer, start)
                self.shared_moved += factor.packed.pages
        for resident in self._placed:
            self._write_rows(resident, deferred=False)  # a lease may hold the adapter

    @staticmethod
    def _allocate(runs: Runs, count: int) -> int:
        start = runs.allocate(count)
        if start is None:
            raise RuntimeError("no gap is long enough: `can_place` was not checked")
        return start

    def _granule(self, window: FactorWindow) -> int:
        return self._factors[window.factor.key].start * PAGE_GRANULES + window.offset

    def _place_pages(self, packed: PackedAdapter, staged: torch.Tensor) -> Placement:
        start = self._allocate(self._map, packed.pages)
        placement = Placement(allocation=self._pool.allocate(packed.pages, payload=packed.payload), start=start)
        with ExitStack() as undo:
            undo.callback(self._free_pages, placement)
            self._memory.write_adapter(packed.buffer, placement.allocation.pages, start, staged=staged)
            undo.pop_all()
        return placement

    def _free_pages(self, placement: Placement) -> None:
        self._map.release(placement.start, len(placement.allocation.pages))
        self._pool.release(placement.allocation)

    def _release_factor(self, key: str) -> None:
        factor = self._factors[key]
        factor.references -= 1
        if not factor.references:
            del self._factors[key]
            self._shared.release(factor.start, factor.packed.pages)

    def _retain_pair(self, pair: tuple[str, str], rank: int) -> None:
        entry = self._pairs.get(pair)
        if entry is None:
            entry = self._pairs[pair] = _Pair(rank=rank, index=self._free_pair_indices.pop())
        entry.references += 1

    def _write_rows(self, resident: Resident, *, deferred: bool = True) -> None:
        packed_rows = resident.packed.rows.numpy()
        rows, windows = packed_rows.copy(), packed_rows[:, Field.PAIR]
        starts = rows[:, _PAGE_FIELDS]
        rows[:, _PAGE_FIELDS] = np.where(starts >= 0, starts + resident.placement.start, starts)
        for number, window in enumerate(resident.packed.pairs):
            sites = windows == number
            rows[sites, Field.A_OFFSET] = self._granule(window.a)
            rows[sites, Field.B_OFFSET] = self._granule(window.b)
            rows[sites, Field.PAIR] = resident.pairs[number]
        self._memory.write_rows(resident.index, torch.from_numpy(rows), deferred=deferred)


def _pairs_of(packed: PackedAdapter) -> set[tuple[str, str]]:
    return {window.shared for window in packed.pairs}
