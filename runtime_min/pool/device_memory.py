"""The tensors that kernels read adapters from, and writes to them, which overlap the step on a side stream.

On a CUDA device all writes go to one side stream, in order, from pinned memory; `wait` makes the current stream wait
for the writes so far. On a CPU the same code runs in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NoReturn

import torch

from scute_compile.diagnostics import Code, fail
from scute_compile.runtime_min.pool.directory import PAGE_BYTES, absent_rows
from scute_compile.runtime_min.pool.staging import SMALL_PAGES, StagingBatch

COPY_PAGES = 131072
"""Pages of one copy (256 MiB): larger adapters take several, so that staging memory never doubles the pool."""


class DeviceMemory:
    """Pages, page map, directory and shared factors of one device."""

    pages: torch.Tensor
    """`(num_pages, values per page)`."""
    page_map: torch.Tensor
    """int32: the physical page of each logical page of every resident adapter."""
    directory: torch.Tensor
    """int32 `(max_adapters, sites, 16)`: by adapter index and site, the fields of `pool.directory.Field`."""

    shared: torch.Tensor
    """`(shared_pages, values per page)`: shared factors, each contiguous, so that kernels need no page map for them."""

    def __init__(
        self, pages: torch.Tensor, *, max_adapters: int, sites: int, map_entries: int, shared_pages: int
    ) -> None:
        device = pages.device
        self.shared = torch.zeros(shared_pages, pages.shape[1], dtype=pages.dtype, device=device)
        self.pages = pages
        self.page_map = torch.zeros(map_entries, dtype=torch.int32, device=device)
        self._absent = absent_rows(sites)
        self.directory = self._absent.to(device).repeat(max_adapters, 1, 1)
        self._stream = _stream(device) if device.type == "cuda" else None
        self._written: torch.cuda.Event | None = None
        self._batch: StagingBatch | None = None
        self._unwritten: set[int] = set()
        self.settle()

    @property
    def pin(self) -> bool:
        """Whether host memory should be pinned for this device."""
        return self._stream is not None

    @property
    def unwritten(self) -> frozenset[int]:
        """Adapter indices whose deferred writes failed."""
        return frozenset(self._unwritten)

    @contextmanager
    def batch(self, buffers: Sequence[torch.Tensor]) -> Iterator[None]:
        """Defer the writes of small adapters inside a `with` block, and do them by one scatter at its end.

        Where the device has no memory for the batch beside the pool, each adapter is written on its own.

        Args:
            buffers: Host buffers of the adapters that the block may write, of any size.
        """
        small = [len(buffer) for buffer in buffers if len(buffer) <= SMALL_PAGES * PAGE_BYTES]
        if len(small) > 1:
            with self._writing(), suppress(torch.OutOfMemoryError):
                device, sites = self.pages.device, self.directory.shape[1]
                self._batch = StagingBatch(sum(small), sites=sites, device=device)
        try:
            yield
        finally:  # adapters that were placed before one was refused stay resident
            try:
                self.flush()
            finally:
                self._batch = None

    def stage(self, buffer: torch.Tensor) -> torch.Tensor:
        """Start to copy an adapter, or its first 256 MiB, to the device, before its pages are known.

        A small adapter of a batch only gets its place in the staging memory.

        Raises:
            ScuteError: SC805 when the device has no memory left beside the pool.
        """
        batch = self._batch
        if batch is None or len(buffer) > SMALL_PAGES * PAGE_BYTES:
            return self._copy(buffer)
        if not batch.has_room(len(buffer)):
            self.flush()
            batch.rewind()
        return batch.stage(buffer) if batch.has_room(len(buffer)) else self._copy(buffer)

    def _copy(self, buffer: torch.Tensor) -> torch.Tensor:
        part = buffer[: COPY_PAGES * PAGE_BYTES]
        try:
            with self._writing():
                return part.to(self.pages.device, non_blocking=True, copy=True)
        except torch.OutOfMemoryError:
            _refuse_staging(len(part))

    def write_adapter(
        self, buffer: torch.Tensor, pages: torch.Tensor, start: int, *, staged: torch.Tensor | None = None
    ) -> None:
        """Write an adapter to its pages, by contiguous copies into staging memory and a scatter of each.

        The write of a small adapter of a batch is deferred.

        Args:
            buffer: The adapter's bytes on the host, whole pages.
            pages: Its physical pages, int32 on the host; `page_map` lists them from `start` on.
            start: First entry in `page_map`.
            staged: What `stage` returned for the buffer.

        Raises:
            ScuteError: As `stage`.
        """
        count, batch = len(pages), self._batch
        if batch is not None and batch.is_last_staged(staged):
            batch.place(buffer, pages, start)
            return
        # int64 views: the pages are only moved
        target = self.pages.view(torch.int64)
        for first in range(0, count, COPY_PAGES):
            last = min(first + COPY_PAGES, count)
            part = self._copy(buffer[first * PAGE_BYTES :]) if first or staged is None else staged
            with self._writing():
                entries = self.page_map[start + first : start + last]
                entries.copy_(self._pinned(pages[first:last]), non_blocking=True)
                target.index_copy_(0, entries.long(), part.view(torch.int64).view(last - first, -1))

    def write_shared(self, buffer: torch.Tensor, start: int) -> None:
        """Write a shared factor, whole pages, to `shared` from page `start` on."""
        with self._writing():
            pages = self.shared.view(torch.uint8)[start : start + len(buffer) // PAGE_BYTES]
            pages.view(-1).copy_(buffer, non_blocking=True)

    def write_map(self, pages: Sequence[torch.Tensor]) -> None:
        """Write the pages of all adapters to the page map, from its beginning; no deferred write may be pending."""
        if pages:
            entries = self._pinned(torch.cat(list(pages)))
            with self._writing():
                self.page_map[: len(entries)].copy_(entries, non_blocking=True)

    def clear_rows(self, index: int) -> None:
        """Write the rows of an adapter without tensors to an adapter index."""
        self.write_rows(index, self._absent)

    def clear_unwritten(self) -> None:
        """Clear the rows of the adapter indices whose deferred writes failed."""
        for index in self.unwritten:
            self.clear_rows(index)

    def write_rows(self, index: int, rows: torch.Tensor, *, deferred: bool = True) -> None:
        """Write the directory rows `(sites, 16)` of an adapter index; inside a batch, at its end if `deferred`."""
        batch = self._batch
        if batch is None or not deferred:
            self._unwritten.discard(index)
            with self._writing():
                self.directory[index].copy_(self._pinned(rows), non_blocking=True)
            return
        batch.rows[index] = rows

    def flush(self) -> None:
        """Do the deferred writes. Raises SC805 as `stage`."""
        batch = self._batch
        if batch is None:
            return
        indices = batch.rows.keys()
        self._unwritten |= indices
        try:
            with self._writing():
                batch.scatter(self.pages, self.page_map, self.directory, self._pinned)
        except torch.OutOfMemoryError:
            _refuse_staging(sum(map(len, batch.buffers)))
        self._unwritten -= indices
        batch.clear()

    def wait(self) -> None:
        """Make the current stream wait for all writes so far; the host doesn't wait."""
        if self._written is not None:
            torch.cuda.current_stream(self.pages.device).wait_event(self._written)

    def mark_use(self) -> torch.cuda.Event | None:
        """Return an event after all work that was launched on the current stream: the end of a step."""
        if self._stream is None:
            return None
        event = _event()
        event.record(torch.cuda.current_stream(self.pages.device))
        return event

    def write_after(self, use: torch.cuda.Event | None) -> None:
        """Make later writes wait for the end of a step, which may read what they overwrite."""
        if self._stream is not None and use is not None:
            self._stream.wait_event(use)

    def settle(self) -> None:
        """Make later writes wait for all work that was launched on the current stream."""
        self.write_after(self.mark_use())

    @contextmanager
    def _writing(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:  # work that was launched before an error is waited for as well
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
        expected="memory to stage an adapter",
        next="make the pool smaller, or free other tensors of the process",
    )


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # PyTorch does not annotate it


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call] # likewise
