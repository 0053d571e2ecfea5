"""What lies on the device: adapters, shared factors by reference, pairs; and what to evict to make room.

Everything here is bookkeeping on the host; `scute_compile.runtime_min.pool.device_memory` writes to the device.
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
from scute_compile.runtime_min.pool.leases import Placed, Resident, ResidentFacts
from scute_compile.runtime_min.pool.packed_adapter import FactorWindow, PackedAdapter, PackedFactor
from scute_compile.runtime_min.pool.pages import PagePool, Runs

_PLACES = [Field.A_PAGES, Field.B_PAGES, Field.OWN_PAGES]
"""Fields of a record that count from the start of the adapter's own run of the page map."""


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


class _SharedRoom:
    """Whether an adapter's shared factors and pairs have room, as others that may share them are thought away."""

    def __init__(
        self,
        adapter: PackedAdapter,
        factors: Mapping[str, _Factor],
        pairs: Mapping[tuple[str, str], _Pair],
        *,
        free: int,
        rows: int,
    ) -> None:
        self._free, self._rows = free, rows
        """Pages of shared factors' memory, and rows of the pairs' table."""
        self._new_pages = sum(factor.pages for factor in adapter.factors if factor.key not in factors)
        self._new_pairs = sum(pair not in pairs for pair in _pairs_of(adapter))
        self._factors = Counter({key: factor.references for key, factor in factors.items()})
        self._factors.update(factor.key for factor in adapter.factors)
        self._pairs = Counter({key: pair.references for key, pair in pairs.items()})
        self._pairs.update(_pairs_of(adapter))

    @property
    def short(self) -> bool:
        """Whether there is too little."""
        return self._new_pairs > self._rows or self._new_pages > self._free

    def without(self, other: PackedAdapter) -> None:
        """Think an adapter away: a factor goes with its last tenant."""
        for factor in other.factors:
            self._factors[factor.key] -= 1
            self._free += 0 if self._factors[factor.key] else factor.pages
        for pair in _pairs_of(other):
            self._pairs[pair] -= 1
            self._rows += not self._pairs[pair]


class Residents:
    """Places packed_adapters on the device and takes them off again; decides nothing about who must go."""

    def __init__(self, memory: DeviceMemory, pool: PagePool, *, pairs: int) -> None:
        self._memory, self._pool = memory, pool
        self._ranges = Runs(len(memory.page_map))
        self._shared = Runs(len(memory.shared))
        self._slots = list(range(len(memory.directory) - 1, -1, -1))
        self.pair_capacity = pairs
        self._pair_rows = list(range(pairs - 1, -1, -1))
        self._factors: dict[str, _Factor] = {}
        self._pairs: dict[tuple[str, str], _Pair] = {}
        self._placed: dict[Resident, None] = {}
        """In the order in which they came; a dict, since any of them may go."""
        self.facts: dict[int, ResidentFacts] = {}
        """By slot, what the plan of a step needs to know."""
        self.map_moved = 0
        """Entries of the page map that were rewritten to close gaps; pages of adapters themselves never move."""
        self.shared_moved = 0
        """Pages of shared factors that were copied in again to close gaps."""

    def __iter__(self) -> Iterator[Resident]:
        return iter(self._placed)

    @property
    def free_slots(self) -> int:
        """Slots without an adapter."""
        return len(self._slots)

    @property
    def map_free(self) -> int:
        """Entries of the page map that no packed uses."""
        return self._ranges.free

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
        """By index, what a step must know of each shared pair: its rank, and zeros; all zeros where none is."""
        rows: list[tuple[int, ...]] = [(0,) * 8] * self.pair_capacity
        for pair in self._pairs.values():
            rows[pair.index] = (pair.rank, *(0,) * 7)
        return tuple(rows)

    def victims(self, packed: PackedAdapter | int, candidates: Iterable[Resident]) -> tuple[Resident, ...] | None:
        """Return the first candidates that must go before an packed fits, or None when all of them are too few.

        A shared factor goes with the last adapter that uses it, unless the new one needs it too. For a number of pages
        (a loan), pages alone count.
        """
        adapter = packed if isinstance(packed, PackedAdapter) else None
        needed = packed if isinstance(packed, int) else packed.pages
        shared = None
        if adapter is not None and adapter.pairs:
            shared = _SharedRoom(adapter, self._factors, self._pairs, free=self._shared.free, rows=len(self._pair_rows))
        free, map_free, slots = self._pool.free, self._ranges.free, len(self._slots)
        chosen: list[Resident] = []
        waiting = iter(candidates)
        while (
            needed > free
            or (adapter is not None and (slots < 1 or needed > map_free))
            or (shared is not None and shared.short)
        ):
            if (victim := next(waiting, None)) is None:
                return None
            chosen.append(victim)
            slots += 1
            free, map_free = free + victim.packed.pages, map_free + victim.packed.pages
            if shared is not None:
                shared.without(victim.packed)
        return tuple(chosen)

    def has_gaps(self, packed: PackedAdapter) -> bool:
        """Return whether the page map and the shared factors' memory have gaps that are long enough.

        `close_gaps` makes them where room is left.
        """
        own = self._ranges.has_gaps([packed.pages])
        return own and self._shared.has_gaps([f.pages for f in packed.factors if f.key not in self._factors])

    def place(self, packed: PackedAdapter, staged: torch.Tensor) -> Resident:
        """Bring a staged adapter in for which there is room, with the shared factors that aren't there yet."""
        new = [factor for factor in packed.factors if factor.key not in self._factors]
        with ExitStack() as undo:
            for factor in new:
                start = self._run(self._shared, factor.pages)
                undo.callback(self._shared.release, start, factor.pages)
                self._memory.write_shared(factor.buffer, start)
                self._factors[factor.key] = _Factor(packed=factor, start=start)
                undo.callback(self._factors.pop, factor.key)
            own = self._place(packed, staged)
            undo.pop_all()
        for factor in packed.factors:
            self._factors[factor.key].references += 1
        for pair in _pairs_of(packed):
            self._hold_pair(pair, packed.pairs[0].rank)
        pairs = tuple(self._pairs[window.shared].index for window in packed.pairs)
        facts = ResidentFacts(
            rank=packed.own_rank,
            pair=pairs[0] if pairs else -1,
            pair_rank=packed.pairs[0].rank if pairs else 0,
            beside_pair=packed.beside_pair,
            rotated=packed.rotated,
        )
        resident = Resident(packed=packed, slot=self._slots.pop(), own=own, pairs=pairs, facts=facts)
        self._placed[resident] = None
        self.facts[resident.slot] = facts
        self._write_records(resident)
        return resident

    def take_off(self, resident: Resident) -> None:
        """Free what an adapter holds, and the shared factors that no other uses; kernels find an empty record."""
        self._memory.write_after(resident.last_use)
        del self._placed[resident], self.facts[resident.slot]
        self._memory.clear_records(resident.slot)
        self._slots.append(resident.slot)
        self._free(resident.own)
        for pair in _pairs_of(resident.packed):
            entry = self._pairs[pair]
            entry.references -= 1
            if not entry.references:
                self._pair_rows.append(self._pairs.pop(pair).index)
        for factor in resident.packed.factors:
            self._let_go(factor.key)

    @contextmanager
    def keeping(self, packed: PackedAdapter) -> Iterator[None]:
        """Keep the shared factors that an adapter needs while others make room for it."""
        kept = [factor.key for factor in packed.factors if factor.key in self._factors]
        for key in kept:
            self._factors[key].references += 1
        try:
            yield
        finally:
            for key in kept:
                self._let_go(key)

    def close_gaps(self) -> None:
        """Rewrite the page map without gaps; no step may be running that was not given to the current stream."""
        self._memory.flush()  # first, since it may be refused
        self._memory.settle()
        self._ranges.clear()
        for resident in self._placed:
            resident.own.start = self._run(self._ranges, resident.packed.pages)
        self._memory.write_map([resident.own.holding.pages for resident in self._placed])
        self.map_moved += sum(resident.packed.pages for resident in self._placed)
        self._shared.clear()
        for factor in sorted(self._factors.values(), key=lambda item: item.start):
            start = self._run(self._shared, factor.packed.pages)
            if start != factor.start:
                factor.start = start
                self._memory.write_shared(factor.packed.buffer, start)
                self.shared_moved += factor.packed.pages
        for resident in self._placed:
            self._write_records(resident, at_once=True)  # of adapters that a step may hold

    @staticmethod
    def _run(runs: Runs, count: int) -> int:
        start = runs.allocate(count)
        if start is None:
            raise RuntimeError("no gap is long enough: has_gaps was not asked")
        return start

    def _granule(self, window: FactorWindow) -> int:
        return self._factors[window.factor.key].start * PAGE_GRANULES + window.offset

    def _place(self, packed: PackedAdapter, staged: torch.Tensor) -> Placed:
        start = self._run(self._ranges, packed.pages)
        placed = Placed(holding=self._pool.allocate(packed.pages, payload=packed.payload), start=start)
        with ExitStack() as undo:
            undo.callback(self._free, placed)
            self._memory.write_image(packed.buffer, placed.holding.pages, start, staged=staged)
            undo.pop_all()
        return placed

    def _free(self, placed: Placed) -> None:
        self._ranges.release(placed.start, len(placed.holding.pages))
        self._pool.release(placed.holding)

    def _let_go(self, key: str) -> None:
        held = self._factors[key]
        held.references -= 1
        if not held.references:
            del self._factors[key]
            self._shared.release(held.start, held.packed.pages)

    def _hold_pair(self, pair: tuple[str, str], rank: int) -> None:
        entry = self._pairs.get(pair)
        if entry is None:
            entry = self._pairs[pair] = _Pair(rank=rank, index=self._pair_rows.pop())
        entry.references += 1

    def _write_records(self, resident: Resident, *, at_once: bool = False) -> None:
        records = resident.packed.records.numpy().copy()
        pair = resident.packed.records.numpy()[:, Field.PAIR]
        places = records[:, _PLACES]
        records[:, _PLACES] = np.where(places >= 0, places + resident.own.start, places)
        for number, window in enumerate(resident.packed.pairs):
            at = pair == number
            records[at, Field.A_OFFSET] = self._granule(window.a)
            records[at, Field.B_OFFSET] = self._granule(window.b)
            records[at, Field.PAIR] = resident.pairs[number]
        self._memory.write_records(resident.slot, torch.from_numpy(records), at_once=at_once)


def _pairs_of(packed: PackedAdapter) -> set[tuple[str, str]]:
    return {window.shared for window in packed.pairs}
