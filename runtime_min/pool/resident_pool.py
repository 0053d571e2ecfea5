"""The resident pool: adapters in pages of device memory, the others in host memory until a batch needs them.

A step holds a lease on its adapters, so that none of them is evicted or overwritten while its kernels run. Calls come
from one thread. On a CUDA device no call blocks on the device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import TypeAlias

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
    refuse_room,
)
from scute_compile.runtime_min.pool.device_memory import DeviceMemory
from scute_compile.runtime_min.pool.directory import DirectoryEntry
from scute_compile.runtime_min.pool.leases import Lease, Leases, Resident, ResidentFacts
from scute_compile.runtime_min.pool.packed_adapter import PackedAdapter
from scute_compile.runtime_min.pool.pages import PagePool
from scute_compile.runtime_min.pool.residents import Residents
from scute_compile.runtime_min.pool.stats import PoolStats, stats_of

_SwapIn: TypeAlias = Callable[[PackedAdapter, Iterable[Resident]], Resident | None]


class ResidentPool:
    """Adapters on one device, and adapters in host memory that can be moved to it.

    The constructor allocates all device memory of the pool, except for staging memory.

    Args:
        sites: The model's layers as this rank holds them; their order is that of the directory.
        num_pages: Number of pages of 2 KiB.
        max_adapters: Largest number of adapters on the device at once.
        dtype: Dtype of all values but `b`.
        device: The device that kernels run on.
        map_entries: Length of the page map; None for four entries per page, so that gaps rarely need closing.
        shared_pages: Pages for shared factors; the default holds two pairs of rank 256 and 14336 features in bfloat16.
        pairs: Largest number of pairs of shared factors on the device at once.

    Raises:
        ScuteError: SC703 for sizes below one.
    """

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
    ) -> None:
        check_pool(num_pages=num_pages, max_adapters=max_adapters, shared_pages=shared_pages)
        self.sites, self.dtype, self.device = tuple(sites), dtype, device
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
        self._current: dict[str, Resident] = {}
        """Adapters on the device by name, least recently used first."""

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
        """Adapter index by name of the adapters on the device, least recently used first."""
        return {name: resident.index for name, resident in self._current.items()}

    @property
    def facts(self) -> Mapping[int, ResidentFacts]:
        """Facts about the adapters on the device by adapter index, from which steps are planned; a live view."""
        return MappingProxyType(self._residents.facts)

    @property
    def pairs(self) -> tuple[tuple[int, ...], ...]:
        """The table of shared pairs, from which steps are planned; see `Residents.pairs`."""
        return self._residents.pairs

    def add(self, name: str, packed: PackedAdapter) -> None:
        """Add an adapter to host memory; it moves to the device when a batch needs it.

        Raises:
            ScuteError: SC806 (the name is taken), SC801 (packed for another pool), SC803 (several shared pairs), SC805
                (larger than the pool). The pool stays as it was.
        """
        check_new(name, self._host)
        self._host[name] = self._checked(name, packed)

    def remove(self, name: str) -> None:
        """Remove an adapter from the device and from host memory. Raises SC802; SC806 while a step reads it."""
        check_known([name], self._host)
        if name in self._current:
            self.evict(name)
        del self._host[name]

    def replace(self, name: str, packed: PackedAdapter) -> None:
        """Replace an adapter by another; running steps keep reading the old one.

        Raises:
            ScuteError: SC802, SC804, and what `add` raises. The old adapter then stays.
        """
        check_known([name], self._host)
        packed = self._checked(name, packed)
        old = self._current.get(name)
        if old is not None:
            # other adapters are evicted first, then the old one, if no step reads it
            last = () if old.held else (old,)
            new = self._swap_in(packed, [*self._idle(keep=(name,)), *last])
            if self._current.pop(name, None) is not None:
                self._retire(old)
            self._current[name] = new
        self._host[name] = packed

    def ensure(self, names: Iterable[str]) -> Mapping[str, int]:
        """Make the adapters of a batch resident and return their indices; evict the least recently used for them.

        The current stream sees them after `memory.wait()`.

        Raises:
            ScuteError: SC802 (unknown names, all of them together), SC804 (more adapters than fit at once), SC805 (one
                adapter that is larger than the pool). Held adapters stay resident.
        """
        wanted = tuple(dict.fromkeys(names))
        check_known(wanted, self._host)
        if any(name not in self._current for name in wanted):  # engines call this at every step
            self._check_batch(wanted)
        self._swap_in_all(wanted, self._swap_in)
        return {name: self._current[name].index for name in wanted}

    def fits(self, names: Iterable[str]) -> bool:
        """Return whether `ensure` would find room for these adapters together. Raises SC802."""
        wanted = tuple(dict.fromkeys(names))
        check_known(wanted, self._host)
        with suppress(ScuteError):
            self._check_batch(wanted)
            return True
        return False

    def prefetch(self, names: Iterable[str]) -> tuple[str, ...]:
        """Start to move the next batch's adapters to the device, as far as room allows; held adapters stay.

        Returns:
            Those of `names` that are resident, or whose copy has started. Raises SC802.
        """
        wanted = tuple(dict.fromkeys(names))
        check_known(wanted, self._host)
        with suppress(ScuteError):  # a batch that lacks staging memory is refused later, by `ensure`
            self._swap_in_all(wanted, lambda packed, candidates: self._try_swap_in(packed, candidates, compact=False))
        return tuple(name for name in wanted if name in self._current)

    def acquire(self, names: Iterable[str]) -> Lease:
        """Make a step's adapters resident, hold them, and make the current stream wait for them. Raises as `ensure`."""
        indices = self.ensure(names)
        self.memory.wait()
        return self._leases.acquire(indices, tuple(self._current[name] for name in indices))

    def release(self, lease: Lease) -> None:
        """Release a step's adapters once its kernels are launched on the current stream. Raises SC703 if not held."""
        self._leases.release(lease, self.memory.mark_use())
        for resident in lease.residents:
            if resident.retired:
                self._retire(resident)

    def evict(self, name: str) -> None:
        """Remove an adapter from the device; it stays in host memory. Raises SC802; SC806 while a step reads it."""
        check_known([name], self._host)
        check_resident(name, self._current)
        resident = self._current[name]
        if resident.held:
            refuse_eviction(name, resident.uses)
        self._drop(resident)

    def stats(self) -> PoolStats:
        """Return the pool's present statistics."""
        return stats_of(self._pool.counts, self.memory, self._residents, self._host)

    def _checked(self, name: str, packed: PackedAdapter) -> PackedAdapter:
        packed = dataclasses.replace(packed, name=name)
        check_layout(packed, sites=len(self.sites), dtype=self.dtype)
        check_size(packed, pages=self._pool.counts.total, shared=len(self.memory.shared))
        return packed

    def _check_batch(self, names: Sequence[str]) -> None:
        """Refuse a batch whose adapters don't fit together beside the held ones, before any is evicted."""
        batch = {self._current.get(name) for name in names}
        held = [resident.packed for resident in self._residents if resident.held and resident not in batch]
        capacity = Room(
            adapters=len(self.memory.directory),
            pages=self._pool.counts.total,
            shared_pages=len(self.memory.shared),
            pairs=self._residents.pair_capacity,
        )
        check_batch({name: self._host[name] for name in names}, held, capacity)

    def _idle(self, keep: Container[str] = ()) -> Iterator[Resident]:
        """Yield the adapters that may be evicted, least recently used first. Callers consume only a few of them."""
        return (item for name, item in self._current.items() if not item.held and name not in keep)

    def _swap_in_all(self, wanted: Sequence[str], swap_in: _SwapIn) -> None:
        """Move the missing adapters to the device by `swap_in`, and mark all as the most recently used."""
        missing, keep = [self._host[name] for name in wanted if name not in self._current], frozenset(wanted)
        self._touch(wanted)  # so that the search starts with the adapters that may be evicted
        if not missing:
            return
        try:
            with self.memory.batch([packed.buffer for packed in missing]):
                for packed in missing:
                    if resident := swap_in(packed, self._idle(keep)):
                        self._current[packed.name] = resident
        except BaseException:
            unwritten = self.memory.unwritten
            for resident in [item for item in self._current.values() if item.index in unwritten]:
                self._drop(resident)  # its directory rows were not written
            self.memory.clear_unwritten()
            raise
        self._touch(wanted)

    def _touch(self, names: Iterable[str]) -> None:
        for name in filter(self._current.__contains__, names):
            self._current[name] = self._current.pop(name)

    def _swap_in(self, packed: PackedAdapter, candidates: Iterable[Resident]) -> Resident:
        if (resident := self._try_swap_in(packed, candidates)) is None:
            refuse_room(packed, needed=packed.pages, free=self._pool.free)
        return resident

    def _try_swap_in(
        self, packed: PackedAdapter, candidates: Iterable[Resident], *, compact: bool = True
    ) -> Resident | None:
        """Move an adapter to the device, and evict as many candidates as needed; None where that is not enough.

        Without `compact`, the rows of adapters that a running step reads are not rewritten.
        """
        victims = self._residents.victims(packed, candidates)
        if victims is None:
            return None
        staged = self.memory.stage(packed.buffer)
        with self._residents.retaining_factors(packed):
            for victim in victims:
                self._drop(victim)
            if not self._residents.can_place(packed):
                if not compact or any(resident.held for resident in self._residents):
                    return None
                self._residents.compact()
            return self._residents.place(packed, staged)

    def _drop(self, resident: Resident) -> None:
        del self._current[resident.packed.name]
        self._residents.remove(resident)

    def _retire(self, resident: Resident) -> None:
        """Remove a replaced adapter from the device, now or when the last step that reads it is released."""
        resident.retired = resident.held
        if not resident.retired:
            self._residents.remove(resident)
