"""The tensors that kernels read adapters from, and the writes to them, which run beside the step on a side stream.

On a CUDA device every write goes to one side stream, in order, from pinned memory; `wait` makes the current stream
wait for the writes so far and for nothing else. On a CPU the same code runs in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from scute_compile.codes import Code
from scute_compile.diagnostics import fail
from scute_compile.runtime_min.record import PAGE_BYTES, absent_records

STAGING_PAGES = 131072
"""An image larger than this (256 MiB) comes in by several copies, so that staging never doubles the pool."""

SMALL_PAGES = 4096
"""Images up to this size (8 MiB) come in together: one by one, the host's work takes longer than their copies."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Gathered:
    """Small images that come in together; everything that is written for them is held back until all are placed."""

    staging: torch.Tensor
    """1-D uint8 on the device."""
    begin: int = 0
    used: int = 0
    """The part of it, in bytes, that placed images take."""
    staged: torch.Tensor | None = None
    """The image that came last, about which nothing is decided yet."""
    buffers: list[torch.Tensor] = field(default_factory=list)
    pages: list[torch.Tensor] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    records: dict[int, torch.Tensor] = field(default_factory=dict)
    """By slot, the last that was written."""


class DeviceMemory:
    """Pages, page map, directory and shared factors of one device."""

    pages: torch.Tensor
    """`(num_pages, values per page)`."""
    page_map: torch.Tensor
    """int32: the physical page of each logical page of every resident image."""
    directory: torch.Tensor
    """int32 `(slots, sites, 16)`; `scute_compile.runtime_min.record.Field` names the fields."""

    shared: torch.Tensor
    """`(shared_pages, values per page)`: shared factors, each in one piece: rows load without a look-up."""

    def __init__(self, pages: torch.Tensor, *, slots: int, sites: int, map_entries: int, shared_pages: int) -> None:
        device = pages.device
        self.shared = torch.zeros(shared_pages, pages.shape[1], dtype=pages.dtype, device=device)
        self.pages = pages
        self.page_map = torch.zeros(map_entries, dtype=torch.int32, device=device)
        self._absent = absent_records(sites)
        self.directory = self._absent.to(device).repeat(slots, 1, 1)
        self._stream = _stream(device) if device.type == "cuda" else None
        self._written: torch.cuda.Event | None = None
        self._gathered: _Gathered | None = None
        self.settle()

    @property
    def pin(self) -> bool:
        """Whether host memory should be pinned for this device."""
        return self._stream is not None

    @contextmanager
    def together(self, buffers: Sequence[torch.Tensor]) -> Iterator[None]:
        """Let small images that come in within a `with` block share one scatter, and one write to each table.

        Args:
            buffers: The images that may come in, of any size.

        Raises:
            ScuteError: As `stage`, before anything else happens.
        """
        small = [len(buffer) for buffer in buffers if len(buffer) <= SMALL_PAGES * PAGE_BYTES]
        if len(small) < 2:
            yield
            return
        size = min(sum(small), STAGING_PAGES * PAGE_BYTES)
        with self._writing(), _staging(size):
            self._gathered = _Gathered(staging=torch.empty(size, dtype=torch.uint8, device=self.pages.device))
        try:
            yield
        finally:  # also where one of them was refused: those before it are there to stay
            self._scatter()
            self._gathered = None

    def stage(self, buffer: torch.Tensor) -> torch.Tensor:
        """Start the long copy of an image, or of its first 256 MiB, before anything is decided about its pages.

        A small one that comes in with others gets its place alone.

        Raises:
            ScuteError: SC805 when the device has no memory left beside the pool.
        """
        if self._gathered is None or len(buffer) > SMALL_PAGES * PAGE_BYTES:
            return self._stage_alone(buffer)
        if self._gathered.used + len(buffer) > len(self._gathered.staging):
            self._scatter()
            self._gathered.begin = self._gathered.used = 0
        gathered = self._gathered
        gathered.staged = gathered.staging[gathered.used : gathered.used + len(buffer)]
        return gathered.staged

    def _stage_alone(self, buffer: torch.Tensor) -> torch.Tensor:
        part = buffer[: STAGING_PAGES * PAGE_BYTES]
        with self._writing(), _staging(len(part)):
            return part.to(self.pages.device, non_blocking=True, copy=True)

    def write_image(
        self, buffer: torch.Tensor, pages: torch.Tensor, start: int, *, staged: torch.Tensor | None = None
    ) -> None:
        """Bring an image in: one contiguous copy into staging memory, and one scatter to its pages.

        A small one that comes in with others is only noted: the end of `together` copies and scatters all of them.

        Args:
            buffer: The image's bytes on the host, whole pages.
            pages: Its physical pages, int32 on the host; they go to `page_map` from `start` on.
            start: First entry in `page_map`.
            staged: What `stage` returned for it.

        Raises:
            ScuteError: As `stage`.
        """
        count, gathered = len(pages), self._gathered
        if gathered is not None and staged is not None and staged is gathered.staged:
            gathered.used += len(staged)
            gathered.buffers.append(buffer)
            gathered.pages.append(pages)
            gathered.starts.append(start)
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
        """Copy a shared factor's image, whole pages, to page `start` of `shared`."""
        with self._writing():
            pages = self.shared.view(torch.uint8)[start : start + len(buffer) // PAGE_BYTES]
            pages.view(-1).copy_(buffer, non_blocking=True)

    def write_map(self, pages: Sequence[torch.Tensor]) -> None:
        """Replace the page map's beginning by the pages of all images, one image after the other."""
        self._scatter()
        if pages:
            entries = self._pinned(torch.cat(list(pages)))
            with self._writing():
                self.page_map[: len(entries)].copy_(entries, non_blocking=True)

    def clear_records(self, slot: int) -> None:
        """Let a slot hold no adapter."""
        self.write_records(slot, self._absent)

    def write_records(self, slot: int, records: torch.Tensor) -> None:
        """Write the directory records `(sites, 16)` of a slot."""
        if self._gathered is not None:
            self._gathered.records[slot] = records
            return
        with self._writing():
            self.directory[slot].copy_(self._pinned(records), non_blocking=True)

    def _scatter(self) -> None:
        """Do what was held back so far."""
        gathered = self._gathered
        if gathered is None:
            return
        if gathered.pages:
            entries = [
                torch.arange(x, x + len(p), dtype=torch.int32)
                for x, p in zip(gathered.starts, gathered.pages, strict=True)
            ]
            tables = self._pinned(torch.stack((torch.cat(entries), torch.cat(gathered.pages))))
            images = gathered.staging[gathered.begin : gathered.used]
            with self._writing():
                parts = torch.split(images, [len(buffer) for buffer in gathered.buffers])
                torch._foreach_copy_(list(parts), gathered.buffers, non_blocking=True)
                at, numbers = tables.to(self.pages.device, non_blocking=True)
                self.page_map.index_copy_(0, at.long(), numbers)
                pages = images.view(torch.int64).view(len(numbers), -1)
                self.pages.view(torch.int64).index_copy_(0, numbers.long(), pages)
        if gathered.records:
            slots = self._pinned(torch.tensor(list(gathered.records)))
            records = self._pinned(torch.stack(list(gathered.records.values())))
            with self._writing():
                device = self.pages.device
                self.directory.index_copy_(
                    0, slots.to(device, non_blocking=True), records.to(device, non_blocking=True)
                )  # fmt: skip
        self._gathered = _Gathered(
            staging=gathered.staging, begin=gathered.used, used=gathered.used, staged=gathered.staged
        )  # fmt: skip

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
        with torch.cuda.stream(self._stream):
            yield
        self._written = _event()
        self._written.record(self._stream)

    def _pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a pinned copy, which PyTorch keeps until the copies from it are done."""
        return tensor.pin_memory() if self.pin else tensor


@contextmanager
def _staging(size: int) -> Iterator[None]:
    """Refuse what doesn't fit beside the pool."""
    try:
        yield
    except torch.OutOfMemoryError:
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
