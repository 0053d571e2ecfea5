"""The tensors that kernels read adapters from, and the writes to them, which run beside the step on a side stream.

On a CUDA device every write goes to one side stream, in order, from pinned memory; `wait` makes the current stream
wait for the writes so far and for nothing else. On a CPU the same code runs in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NoReturn

import torch

from scute_compile.diagnostics import Code, fail
from scute_compile.runtime_min.pool.directory import PAGE_BYTES, absent_records
from scute_compile.runtime_min.pool.staging import SMALL_PAGES, Gathered

STAGING_PAGES = 131072
"""An packed larger than this (256 MiB) comes in by several copies, so that staging never doubles the pool."""


class DeviceMemory:
    """Pages, page map, directory and shared factors of one device."""

    pages: torch.Tensor
    """`(num_pages, values per page)`."""
    page_map: torch.Tensor
    """int32: the physical page of each logical page of every resident packed."""
    directory: torch.Tensor
    """int32 `(slots, sites, 16)`; `scute_compile.runtime_min.pool.directory.Field` names the fields."""

    shared: torch.Tensor
    """`(shared_pages, values per page)`: shared factors, each in one piece: rows load without a look-up."""

    def __init__(
        self, pages: torch.Tensor, *, max_adapters: int, sites: int, map_entries: int, shared_pages: int
    ) -> None:
        device = pages.device
        self.shared = torch.zeros(shared_pages, pages.shape[1], dtype=pages.dtype, device=device)
        self.pages = pages
        self.page_map = torch.zeros(map_entries, dtype=torch.int32, device=device)
        self._absent = absent_records(sites)
        self.directory = self._absent.to(device).repeat(max_adapters, 1, 1)
        self._stream = _stream(device) if device.type == "cuda" else None
        self._written: torch.cuda.Event | None = None
        self._gathered: Gathered | None = None
        self._unwritten: set[int] = set()
        self.settle()

    @property
    def pin(self) -> bool:
        """Whether host memory should be pinned for this device."""
        return self._stream is not None

    @property
    def unwritten(self) -> frozenset[int]:
        """Slots whose adapters were held back and never written, since writing them failed."""
        return frozenset(self._unwritten)

    @contextmanager
    def together(self, buffers: Sequence[torch.Tensor]) -> Iterator[None]:
        """Let small packed_adapters that come in within a `with` block share one scatter, and one write to each table.

        Where there is no memory for that beside the pool, they come in one by one.

        Args:
            buffers: The packed_adapters that may come in, of any size.
        """
        small = [len(buffer) for buffer in buffers if len(buffer) <= SMALL_PAGES * PAGE_BYTES]
        if len(small) > 1:
            with self._writing(), suppress(torch.OutOfMemoryError):
                device, sites = self.pages.device, self.directory.shape[1]
                self._gathered = Gathered(sum(small), sites=sites, device=device)
        try:
            yield
        finally:  # also where one of them was refused: those before it are there to stay
            try:
                self.flush()
            finally:
                self._gathered = None

    def stage(self, buffer: torch.Tensor) -> torch.Tensor:
        """Start the long copy of an packed, or of its first 256 MiB, before anything is decided about its pages.

        A small one that comes in with others gets its place alone.

        Raises:
            ScuteError: SC805 when the device has no memory left beside the pool.
        """
        gathered = self._gathered
        if gathered is None or len(buffer) > SMALL_PAGES * PAGE_BYTES:
            return self._stage_alone(buffer)
        if not gathered.takes(len(buffer)):
            self.flush()
            gathered.rewind()
        return gathered.stage(buffer) if gathered.takes(len(buffer)) else self._stage_alone(buffer)

    def _stage_alone(self, buffer: torch.Tensor) -> torch.Tensor:
        part = buffer[: STAGING_PAGES * PAGE_BYTES]
        try:
            with self._writing():
                return part.to(self.pages.device, non_blocking=True, copy=True)
        except torch.OutOfMemoryError:
            _refuse_staging(len(part))

    def write_image(
        self, buffer: torch.Tensor, pages: torch.Tensor, start: int, *, staged: torch.Tensor | None = None
    ) -> None:
        """Bring an packed in: one contiguous copy into staging memory, and one scatter to its pages.

        A small one that comes in with others is only noted: the end of `together` copies and scatters all of them.

        Args:
            buffer: The packed's bytes on the host, whole pages.
            pages: Its physical pages, int32 on the host; they go to `page_map` from `start` on.
            start: First entry in `page_map`.
            staged: What `stage` returned for it.

        Raises:
            ScuteError: As `stage`.
        """
        count, gathered = len(pages), self._gathered
        if gathered is not None and gathered.holds(staged):
            gathered.place(buffer, pages, start)
            return
        # eight bytes at a time: pages are moved, not computed with
        target = self.pages.view(torch.int64)
        for first in range(0, count, STAGING_PAGES):
            last = min(first + STAGING_PAGES, count)
            part = self._stage_alone(buffer[first * PAGE_BYTES :]) if first or staged is None else staged
            with self._writing():
                entries = self.page_map[start + first : start + last]
                entries.copy_(self._pinned(pages[first:last]), non_blocking=True)
                target.index_copy_(0, entries.long(), part.view(torch.int64).view(last - first, -1))

    def write_shared(self, buffer: torch.Tensor, start: int) -> None:
        """Copy a shared factor's packed, whole pages, to page `start` of `shared`."""
        with self._writing():
            pages = self.shared.view(torch.uint8)[start : start + len(buffer) // PAGE_BYTES]
            pages.view(-1).copy_(buffer, non_blocking=True)

    def write_map(self, pages: Sequence[torch.Tensor]) -> None:
        """Replace the page map's beginning by the pages of all packed_adapters in turn; nothing may be held back."""
        if pages:
            entries = self._pinned(torch.cat(list(pages)))
            with self._writing():
                self.page_map[: len(entries)].copy_(entries, non_blocking=True)

    def clear_records(self, slot: int) -> None:
        """Let a slot hold no adapter."""
        self.write_records(slot, self._absent)

    def clear_unwritten(self) -> None:
        """Let slots hold no adapter whose clearing was held back and never done."""
        for slot in self.unwritten:
            self.clear_records(slot)

    def write_records(self, slot: int, records: torch.Tensor, *, at_once: bool = False) -> None:
        """Write the directory records `(sites, 16)` of a slot; `at_once` holds nothing back."""
        gathered = self._gathered
        if gathered is None or at_once:
            self._unwritten.discard(slot)
            with self._writing():
                self.directory[slot].copy_(self._pinned(records), non_blocking=True)
            return
        gathered.waiting[slot] = records

    def flush(self) -> None:
        """Do what was held back so far. Raises SC805 as `stage`."""
        gathered = self._gathered
        if gathered is None:
            return
        slots = gathered.waiting.keys()
        self._unwritten |= slots
        try:
            with self._writing():
                gathered.scatter(self.pages, self.page_map, self.directory, self._pinned)
        except torch.OutOfMemoryError:
            _refuse_staging(sum(map(len, gathered.buffers)))
        self._unwritten -= slots
        gathered.clear()

    def wait(self) -> None:
        """Make the current stream wait for all writes so far; the host doesn't wait."""
        if self._written is not None:
            torch.cuda.current_stream(self.pages.device).wait_event(self._written)

    def mark_use(self) -> torch.cuda.Event | None:
        """Return an event after everything that the current stream was given: the end of a step."""
        if self._stream is None:
            return None
        event = _event()
        event.record(torch.cuda.current_stream(self.pages.device))
        return event

    def write_after(self, use: torch.cuda.Event | None) -> None:
        """Let later writes wait for the end of a step, because they overwrite what it may read."""
        if self._stream is not None and use is not None:
            self._stream.wait_event(use)

    def settle(self) -> None:
        """Let later writes wait for everything that the current stream was given."""
        self.write_after(self.mark_use())

    @contextmanager
    def _writing(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:  # what was given to the stream before it broke off is to be waited for as well
            self._written = _event()
            self._written.record(self._stream)

    def _pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a pinned copy, which PyTorch keeps until the copies from it are done."""
        return tensor.pin_memory() if self.pin else tensor


def _refuse_staging(size: int) -> NoReturn:
    fail(
        Code.SC805,
        where="staging memory",
        found=f"no {size} bytes left on the device beside the pool",
        expected="room to stage an adapter that comes in",
        next="make the pool smaller, or give other tensors of the process back",
    )


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # PyTorch leaves it without annotations


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call] # likewise
