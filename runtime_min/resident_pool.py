"""The resident pool: adapters in pages of device memory, the rest in host memory, brought in as batches need them.

A step holds a lease on its adapters, so that none of them is evicted or overwritten while its kernels run. Calls come
from one thread. On a CUDA device no call waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakValueDictionary

import torch

from scute_compile.codes import Code
from scute_compile.diagnostics import Findings, fail
from scute_compile.formats.artifact import Artifact, open_artifact
from scute_compile.runtime_min.device_memory import DeviceMemory
from scute_compile.runtime_min.gather import read_rows, read_run
from scute_compile.runtime_min.image import AdapterImage, FactorImage
from scute_compile.runtime_min.image_reading import read_adapter
from scute_compile.runtime_min.page_pool import PagePool
from scute_compile.runtime_min.pool_stats import PoolStats
from scute_compile.runtime_min.record import PAGE_BYTES, Field, SiteSlot
from scute_compile.runtime_min.residents import Resident, Residents

Source = Artifact | Path | AdapterImage
"""An opened artifact, the folder of one, or an image that was made already."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lease:
    """The adapters of one step; they stay where they are until the lease is released."""

    slots: Mapping[str, int]
    """Slot in the directory by name."""
    residents: tuple[Resident, ...] = field(repr=False)


class ResidentPool:
    """Adapters on one device, and those in host memory that may come in."""

    def __init__(
        self,
        sites: Sequence[SiteSlot],
        *,
        num_pages: int,
        slots: int,
        dtype: torch.dtype,
        device: torch.device,
        map_entries: int | None = None,
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
            slots: Most adapters that are resident at once.
            dtype: Of all values but `b`.
            device: Where kernels read adapters.
            map_entries: Length of the page map; None: four for each page, so that gaps hardly ever need closing.
            pairs: Most pairs of shared factors (with the columns that a site uses) at once.
            tp: Number of ranks.
            rank: Which of them this is.
            convert: Whether artifacts of another dtype are rounded to the pool's instead of refused.
            lendable: Most pages that a KV cache may hold at once.
        """
        self.sites = tuple(sites)
        self.dtype, self.device = dtype, device
        self._tp, self._rank, self._convert, self._lendable = tp, rank, convert, lendable
        self._pool = PagePool(num_pages, dtype, device)
        entries = 4 * num_pages if map_entries is None else max(map_entries, num_pages)
        self.memory = DeviceMemory(
            self._pool.pages, slots=slots, sites=len(self.sites), map_entries=entries, pairs=pairs
        )  # fmt: skip
        self._residents = Residents(self.memory, self._pool)
        self._host: dict[str, AdapterImage] = {}
        self._factors: WeakValueDictionary[str, FactorImage] = WeakValueDictionary()
        self._current: dict[str, Resident] = {}
        """By name, least recently used first."""
        self._retired: list[Resident] = []
        """Replaced, and still read by a running step."""

    # What is known

    @property
    def names(self) -> tuple[str, ...]:
        """Adapters in host memory, resident or not, in the order in which they were added."""
        return tuple(self._host)

    @property
    def resident(self) -> Mapping[str, int]:
        """Slot by name of the adapters on the device, least recently used first."""
        return {name: resident.slot for name, resident in self._current.items()}

    def image(self, name: str) -> AdapterImage:
        """Return an adapter's image in host memory. Raises SC802."""
        self._check_known([name])
        return self._host[name]

    def pairs_of(self, name: str) -> tuple[int, ...]:
        """Return the rows of `memory.pairs` that a resident adapter uses. Raises SC802."""
        return self._resident(name).pairs

    def add(self, name: str, source: Source) -> AdapterImage:
        """Read an adapter into host memory; it comes in when a batch needs it.

        Raises:
            ScuteError: SC806 (the name is taken), SC805 (it could never fit), and what `open_artifact` and
                `read_adapter` raise. The pool is then as it was.
        """
        if name in self._host:
            fail(
                Code.SC806,
                where=name,
                found=f"an adapter of that name, {self._host[name].payload} bytes",
                expected="a new name",
                next="replace it, or remove it first",
            )
        image = self._read(name, source)
        self._host[name] = image
        return image

    def remove(self, name: str) -> None:
        """Forget an adapter, on the device and in host memory. Raises SC802; SC806 while it is used or pinned."""
        self._check_known([name])
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
            ScuteError: SC802, SC804, and what `add` raises. The old adapter then serves as before.
        """
        self._check_known([name])
        image = self._read(name, source)
        old = self._current.get(name)
        if old is not None:
            # others go before the old one does, and it goes only if nothing reads it
            last = () if old.uses else (old,)
            others = [resident for resident in self._idle() if resident is not old]
            new = self._bring_in(image, [*others, *last])
            new.pinned = old.pinned
            self._current[name] = self._current.pop(name, new) if name not in self._current else new
            if old in list(self._residents):
                self._retire(old)
        self._host[name] = image

    # What is on the device

    def ensure(self, names: Iterable[str]) -> Mapping[str, int]:
        """Bring in the adapters of a batch and return their slots; others go, least recently used first.

        The current stream sees them after `memory.wait()`.

        Raises:
            ScuteError: SC802 (unknown names, all of them together), SC804 (more adapters than fit at once), SC805 (one
                adapter that is larger than the pool). What was resident and held stays so.
        """
        wanted = tuple(dict.fromkeys(names))
        self._check_known(wanted)
        self._check_batch(wanted)
        for name in wanted:
            if name in self._current:
                self._current[name] = self._current.pop(name)
            else:
                self._current[name] = self._bring_in(self._host[name], self._idle(keep=wanted))
        return {name: self._current[name].slot for name in wanted}

    def prefetch(self, names: Iterable[str]) -> tuple[str, ...]:
        """Bring in what the next batch needs while this one runs, as far as room allows without touching this one.

        Returns:
            Those of `names` that are resident now or on their way. Raises SC802.
        """
        wanted = tuple(dict.fromkeys(names))
        self._check_known(wanted)
        for name in wanted:
            image = self._host[name]
            if name in self._current:
                self._current[name] = self._current.pop(name)
                continue
            victims = self._residents.victims(image, self._idle(keep=wanted))
            if victims is None:
                continue
            for victim in victims:
                self._drop(victim)
            if self._residents.gap_for(image):
                self._current[name] = self._residents.place(image)
        return tuple(name for name in wanted if name in self._current)

    def acquire(self, names: Iterable[str]) -> Lease:
        """Bring in a step's adapters, hold them, and let the current stream wait for their copies. Raises as `ensure`."""
        slots = self.ensure(names)
        residents = tuple(self._current[name] for name in slots)
        for resident in residents:
            resident.uses += 1
        self.memory.wait()
        return Lease(slots=slots, residents=residents)

    def release(self, lease: Lease) -> None:
        """Give a step's adapters back, once its kernels were given to the current stream; they need not have run."""
        end = self.memory.mark_use()
        for resident in lease.residents:
            resident.uses -= 1
            resident.last_use = end
            if resident in self._retired and not resident.uses:
                self._retired.remove(resident)
                self._residents.take_off(resident)

    @contextmanager
    def in_use(self, names: Iterable[str]) -> Iterator[Mapping[str, int]]:
        """Hold a step's adapters for a `with` block, which gets their slots by name."""
        lease = self.acquire(names)
        try:
            yield lease.slots
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
            fail(
                Code.SC806,
                where=name,
                found=f"{resident.uses} running steps read it" if resident.uses else "it is pinned",
                expected="an adapter that no step reads and nothing pins",
                next="release the step's lease first" if resident.uses else "unpin it first",
            )
        self._drop(resident)

    def lend(self, count: int) -> torch.Tensor:
        """Lend pages to a KV cache, evicting idle adapters for them, and return their numbers (int32, on the CPU).

        Raises:
            ScuteError: SC805 when that is more than may be lent, or than can be freed.
        """
        lent = self._pool.counts.lent
        victims = self._residents.victims(count, self._idle())
        if lent + count > self._lendable or victims is None:
            held = sum(resident.image.pages for resident in self._residents if resident.held)
            fail(
                Code.SC805,
                where="a loan to the cache",
                found=f"{count} pages asked, {lent} lent already, {self._pool.free} free, {held} held by adapters in use",
                expected=f"at most {self._lendable} lent pages, and room beside the adapters in use",
                next="raise the part of the pool that may be lent, or end requests first",
            )
        for victim in victims:
            self._drop(victim)
        # a borrower writes on its own stream: the evicted adapters' readers come before it there
        return self._pool.lend(count)

    def reclaim(self, pages: torch.Tensor) -> None:
        """Take back lent pages, all of a loan or a part, that the current stream was the last to use."""
        self.memory.settle()
        self._pool.reclaim(pages)

    def stats(self) -> PoolStats:
        """Return what the pool holds at this moment."""
        adapters: dict[str, int] = {}
        for resident in self._residents:
            name = resident.image.name
            adapters[name] = adapters.get(name, 0) + resident.image.pages * PAGE_BYTES
        images = list(self._host.values())
        factors = {factor.key: factor for image in images for factor in image.factors}
        return PoolStats(
            pages=self._pool.counts,
            slots=len(self.memory.directory),
            slots_in_use=len(self.memory.directory) - self._residents.free_slots,
            adapters=adapters,
            factors={factor.key: factor.pages * PAGE_BYTES for factor in self._residents.factors},
            host=sum(len(item.buffer) for item in [*images, *factors.values()]),
            host_adapters=len(images),
            map_entries=len(self.memory.page_map),
            map_in_use=len(self.memory.page_map) - self._residents.map_free,
            map_moved=self._residents.map_moved,
        )
