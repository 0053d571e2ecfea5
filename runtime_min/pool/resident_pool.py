"""The resident pool: adapters in pages of device memory, the rest in host memory, brought in as batches need them.

A step holds a lease on its adapters, so that none of them is evicted or overwritten while its kernels run. Calls come
from one thread. On a CUDA device no call waits for the device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias
from weakref import WeakValueDictionary

import torch

from scute_compile.diagnostics import ScuteError
from scute_compile.runtime_min.pool.admission import (
    Room,
    check_batch,
    check_known,
    check_layout,
    check_new,
    check_pool,
    check_resident,
    check_size,
    refuse_eviction,
    refuse_loan,
    refuse_room,
)
from scute_compile.runtime_min.pool.device_memory import DeviceMemory
from scute_compile.runtime_min.pool.directory import DirectoryEntry, Field
from scute_compile.runtime_min.pool.leases import Lease, Leases, Resident, ResidentFacts
from scute_compile.runtime_min.pool.packed_adapter import PackedAdapter, PackedFactor
from scute_compile.runtime_min.pool.pages import PagePool
from scute_compile.runtime_min.pool.read_back import read_field
from scute_compile.runtime_min.pool.residents import Residents
from scute_compile.runtime_min.pool.stats import PoolStats, stats_of

if TYPE_CHECKING:
    from scute_compile.formats.artifact import Artifact

Bring: TypeAlias = Callable[[PackedAdapter, Iterable[Resident]], Resident | None]
Source: TypeAlias = "Artifact | Path | PackedAdapter"
"""An opened artifact, the folder of one, or an packed that was made already."""


class ResidentPool:
    """Adapters on one device, and those in host memory that may come in."""

    def __init__(
        self,
        sites: Sequence[DirectoryEntry],
        *,
        num_pages: int,
        max_adapters: int,
        dtype: torch.dtype,
        device: torch.device,
        map_entries: int | None = None,
        shared_pages: int = 16384,
        pairs: int = 64,
        tp: int = 1,
        rank: int = 0,
        convert: bool = False,
        lendable: int = 0,
    ) -> None:
        """Allocate everything that the pool will ever take on the device, but for staging memory.

        Args:
            sites: The model's layers as this rank holds them; the order is that of the directory.
            num_pages: Pages of 2 KiB.
            max_adapters: Most adapters that are resident at once.
            dtype: Of all values but `b`.
            device: Where kernels read adapters.
            map_entries: Length of the page map; None: four for each page, so that gaps hardly ever need closing.
            shared_pages: Pages for shared factors; the default holds two pairs of rank 256 and 14336 features.
            pairs: Most pairs of shared factors (with the columns that a site uses) at once.
            tp: Number of ranks.
            rank: Which of them this is.
            convert: Whether artifacts of another dtype are rounded to the pool's instead of refused.
            lendable: Most pages that a KV cache may hold at once.

        Raises:
            ScuteError: SC703 for sizes below one, and for a rank that there isn't.
        """
        check_pool(num_pages=num_pages, max_adapters=max_adapters, shared_pages=shared_pages, tp=tp, rank=rank)
        self.sites, self.dtype, self.device = tuple(sites), dtype, device
        self._tp, self._rank, self._convert, self._lendable = tp, rank, convert, lendable
        self._pool = PagePool(num_pages, dtype, device)
        entries = 4 * num_pages if map_entries is None else max(map_entries, num_pages)
        self.memory = DeviceMemory(
            self._pool.pages,
            max_adapters=max_adapters,
            sites=len(self.sites),
            map_entries=entries,
            shared_pages=shared_pages,
        )
        self._residents, self._leases = Residents(self.memory, self._pool, pairs=pairs), Leases()
        self._host: dict[str, PackedAdapter] = {}
        self._factors: WeakValueDictionary[str, PackedFactor] = WeakValueDictionary()
        self._current: dict[str, Resident] = {}
        """By name, least recently used first."""

    @property
    def names(self) -> tuple[str, ...]:
        """Adapters in host memory, resident or not, in the order in which they were added."""
        return tuple(self._host)

    @property
    def packed_adapters(self) -> Mapping[str, PackedAdapter]:
        """The adapters in host memory by name."""
        return MappingProxyType(self._host)

    @property
    def resident(self) -> Mapping[str, int]:
        """Slot by name of the adapters on the device, least recently used first."""
        return {name: resident.slot for name, resident in self._current.items()}

    @property
    def facts(self) -> Mapping[int, ResidentFacts]:
        """By slot, what the plan of a step needs to know of each adapter on the device; a view that changes with it."""
        return MappingProxyType(self._residents.facts)

    @property
    def pairs(self) -> tuple[tuple[int, ...], ...]:
        """What the plan of a step needs to know of each shared pair; see `Residents.pairs`."""
        return self._residents.pairs

    def add(self, name: str, source: Source) -> PackedAdapter:
        """Read an adapter into host memory; it comes in when a batch needs it.

        Raises:
            ScuteError: SC806 (the name is taken), SC805 (it could never fit), and what `open_artifact` and
                `read_adapter` raise. The pool is then as it was.
        """
        check_new(name, self._host)
        packed = self._host[name] = self._read(name, source)
        return packed

    def remove(self, name: str) -> None:
        """Forget an adapter, on the device and in host memory. Raises SC802; SC806 while it is used or pinned."""
        check_known([name], self._host)
        if name in self._current:
            self.evict(name)
        del self._host[name]

    def load(self, name: str, source: Source) -> int:
        """Add an adapter, bring it in, and return its slot. Raises what `add` and `ensure` raise."""
        self.add(name, source)
        try:
            return self.ensure([name])[name]
        except BaseException:
            del self._host[name]
            raise

    def replace(self, name: str, source: Source) -> None:
        """Put another artifact in an adapter's place; steps that run now keep reading the old one.

        Raises:
            ScuteError: SC802, SC804, and what `add` raises. The old adapter then serves on.
        """
        check_known([name], self._host)
        packed = self._read(name, source)
        old = self._current.get(name)
        if old is not None:
            # others go before the old one does, and it goes only if nothing reads it
            last = () if old.uses else (old,)
            new = self._bring_in(packed, [*self._idle(keep=(name,)), *last])
            new.pinned, old.pinned = old.pinned, False
            if self._current.pop(name, None) is not None:
                self._retire(old)
            self._current[name] = new
        self._host[name] = packed

    def ensure(self, names: Iterable[str]) -> Mapping[str, int]:
        """Bring in the adapters of a batch and return their slots; others go, least recently used first.

        The current stream sees them after `memory.wait()`.

        Raises:
            ScuteError: SC802 (unknown names, all of them together), SC804 (more adapters than fit at once), SC805 (one
                adapter that is larger than the pool). What was resident and held stays so.
        """
        wanted = tuple(dict.fromkeys(names))
        check_known(wanted, self._host)
        if any(name not in self._current for name in wanted):  # an engine asks at every step, mostly for the same
            self._check_batch(wanted)
        self._bring_all(wanted, self._bring_in)
        return {name: self._current[name].slot for name in wanted}

    def fits(self, names: Iterable[str]) -> bool:
        """Whether `ensure` would find room for these adapters together; nothing is moved. Raises SC802."""
        wanted = tuple(dict.fromkeys(names))
        check_known(wanted, self._host)
        with suppress(ScuteError):
            self._check_batch(wanted)
            return True
        return False

    def prefetch(self, names: Iterable[str]) -> tuple[str, ...]:
        """Bring in what the next batch needs while this one runs, as far as room allows without touching this one.

        Returns:
            Those of `names` that are resident now or on their way. Raises SC802.
        """
        wanted = tuple(dict.fromkeys(names))
        check_known(wanted, self._host)
        with suppress(ScuteError):  # without room to stage in, it is for the next batch to be refused
            self._bring_all(wanted, lambda packed, others: self._try_in(packed, others, ahead=True))
        return tuple(name for name in wanted if name in self._current)

    def acquire(self, names: Iterable[str]) -> Lease:
        """Bring in a step's adapters, hold them, and let the current stream wait for them. Raises as `ensure`."""
        slots = self.ensure(names)
        self.memory.wait()
        return self._leases.take(slots, tuple(self._current[name] for name in slots))

    def release(self, lease: Lease) -> None:
        """Give a step's adapters back, once its kernels were given to the current stream. Raises SC703 if it was."""
        self._leases.give_back(lease, self.memory.mark_use())
        for resident in lease.residents:
            if resident.retired:
                self._retire(resident)

    @contextmanager
    def in_use(self, names: Iterable[str]) -> Iterator[Mapping[str, int]]:
        """Hold a step's adapters for a `with` block, which gets their slots by name."""
        lease = self.acquire(names)
        try:
            yield lease.indices
        finally:
            self.release(lease)

    def pin(self, name: str) -> None:
        """Bring an adapter in and keep it until `unpin`. Raises as `ensure`."""
        self.ensure([name])
        self._current[name].pinned = True

    def unpin(self, name: str) -> None:
        """Let a pinned adapter be evicted again. Raises SC802."""
        self._resident(name).pinned = False

    def evict(self, name: str) -> None:
        """Take an adapter off the device; it stays in host memory. Raises SC802; SC806 while it is used or pinned."""
        resident = self._resident(name)
        if resident.held:
            refuse_eviction(name, resident)
        self._drop(resident)

    def lend(self, count: int) -> torch.Tensor:
        """Lend pages to a KV cache, evicting idle adapters for them, and return their numbers (int32, on the CPU).

        Raises:
            ScuteError: SC805 when that is more than may be lent, or than can be freed; SC703 for less than none.
        """
        lent = self._pool.counts.lent
        victims = self._residents.victims(max(0, count), self._idle())
        if lent + count > self._lendable or victims is None:
            held = sum(resident.packed.pages for resident in self._residents if resident.held)
            refuse_loan(count, self._pool.counts, lendable=self._lendable, held=held)
        for victim in victims:
            self._drop(victim)
        # the borrower writes on the current stream, after the copies that may still be under way to these pages
        self.memory.wait()
        return self._pool.lend(count)

    def reclaim(self, pages: torch.Tensor) -> None:
        """Take back lent pages, all of a loan or a part, that the current stream was the last to use. Raises SC703."""
        self.memory.settle()
        self._pool.reclaim(pages)

    def read_back(self, slot: int, site: str, field: Field, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a tensor as the device's tables lead to it; see `read_field`."""
        self.memory.wait()
        index = next(number for number, known in enumerate(self.sites) if known.key == site)
        return read_field(self.memory, slot, index, field, shape)

    def stats(self) -> PoolStats:
        """Return what the pool holds at this moment."""
        return stats_of(self._pool.counts, self.memory, self._residents, self._host)

    def _read(self, name: str, source: Source) -> PackedAdapter:
        if isinstance(source, PackedAdapter):
            packed = dataclasses.replace(source, name=name)
        else:
            from scute_compile.runtime_min.pool.reading import read_adapter  # packed_adapters need no reader of files

            packed = read_adapter(
                source,
                self.sites,
                self.dtype,
                name=name,
                tp=self._tp,
                rank=self._rank,
                factors=self._factors,
                convert=self._convert,
                pin=self.memory.pin,
            )
        check_layout(packed, sites=len(self.sites), dtype=self.dtype)
        check_size(packed, pages=self._pool.counts.total, shared=len(self.memory.shared))
        return packed

    def _resident(self, name: str) -> Resident:
        check_known([name], self._host)
        check_resident(name, self._current)
        return self._current[name]

    def _check_batch(self, names: Sequence[str]) -> None:
        """Refuse a batch whose adapters don't fit at once beside those that are held, before anything is evicted."""
        batch = {self._current.get(name) for name in names}
        held = [resident.packed for resident in self._residents if resident.held and resident not in batch]
        counts = self._pool.counts
        room = Room(
            slots=len(self.memory.directory),
            pages=counts.total - counts.lent,
            shared=len(self.memory.shared),
            pairs=self._residents.pair_capacity,
        )
        check_batch({name: self._host[name] for name in names}, held, room)

    def _idle(self, keep: Container[str] = ()) -> Iterator[Resident]:
        """Yield who may go, least recently used first: of thousands, mostly one or two are asked for."""
        return (item for name, item in self._current.items() if not item.held and name not in keep)

    def _bring_all(self, wanted: Sequence[str], bring: Bring) -> None:
        """Bring in those that aren't there, by `bring`, and make all of them the last used."""
        coming, keep = [self._host[name] for name in wanted if name not in self._current], frozenset(wanted)
        self._touch(wanted)  # behind those who may go, so that each that comes in finds these at once
        if not coming:
            return
        try:
            with self.memory.together([packed.buffer for packed in coming]):
                for packed in coming:
                    if resident := bring(packed, self._idle(keep)):
                        self._current[packed.name] = resident
        except BaseException:
            for resident in [one for one in self._current.values() if one.slot in self.memory.unwritten]:
                self._drop(resident)  # it would be answered by the base, or by what lay there before
            self.memory.clear_unwritten()
            raise
        self._touch(wanted)

    def _touch(self, names: Iterable[str]) -> None:
        for name in filter(self._current.__contains__, names):
            self._current[name] = self._current.pop(name)

    def _bring_in(self, packed: PackedAdapter, candidates: Iterable[Resident]) -> Resident:
        if (resident := self._try_in(packed, candidates)) is None:
            refuse_room(packed, needed=packed.pages, free=self._pool.free)
        return resident

    def _try_in(self, packed: PackedAdapter, others: Iterable[Resident], *, ahead: bool = False) -> Resident | None:
        """Bring an adapter in if the others' room is enough; `ahead` leaves what a running step reads untouched."""
        victims = self._residents.victims(packed, others)
        if victims is None:
            return None
        staged = self.memory.stage(packed.buffer)
        with self._residents.keeping(packed):
            for victim in victims:
                self._drop(victim)
            if not self._residents.has_gaps(packed):
                if ahead or any(resident.uses for resident in self._residents):
                    return None
                self._residents.close_gaps()
            return self._residents.place(packed, staged)

    def _drop(self, resident: Resident) -> None:
        del self._current[resident.packed.name]
        self._residents.take_off(resident)

    def _retire(self, resident: Resident) -> None:
        """Take a replaced adapter off, now or when the last step that reads it is released."""
        resident.retired = resident.uses > 0
        if not resident.retired:
            self._residents.take_off(resident)
