"""Batched staging of small adapters that are loaded together: their writes are deferred and done by one scatter.

When adapters are written one by one, the host's work for a small adapter takes longer than its copy. The batch
allocates all memory that the scatter needs before the first adapter is staged, so that a scatter can't run out of
memory halfway.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from scute_compile.runtime_min.pool.directory import FIELDS, PAGE_BYTES

SMALL_PAGES = 4096
"""Largest adapter (8 MiB) that is staged in a batch."""
BATCH_PAGES = 16384
"""Largest staging memory of a batch (32 MiB); more adapters take several scatters."""
ROWS_AT_ONCE = 64
"""Adapters whose directory rows are written by one copy."""


class StagingBatch:
    """Deferred writes of adapters. On a CUDA device all of its work runs on the stream of the pool's writes.

    Args:
        size: Bytes of all adapters that may be staged.
        sites: Entries of the directory.
        device: The pool's device.
    """

    def __init__(self, size: int, *, sites: int, device: torch.device) -> None:
        pages = min(size // PAGE_BYTES, BATCH_PAGES)
        self._staging = torch.empty(pages * PAGE_BYTES, dtype=torch.uint8, device=device)
        self._entries, self._pages64 = torch.empty(2, pages, dtype=torch.int64, device=device)
        """Entries of the page map, and the physical pages that they get."""
        self._pages32 = torch.empty(pages, dtype=torch.int32, device=device)
        """The physical pages in the page map's dtype."""
        self._indices = torch.empty(ROWS_AT_ONCE, dtype=torch.int64, device=device)
        self._rows = torch.empty(ROWS_AT_ONCE, sites, FIELDS, dtype=torch.int32, device=device)
        self._begin = self._used = 0
        """The interval of the staging memory, in bytes, that adapters with assigned pages take."""
        self._staged: torch.Tensor | None = None
        """The part of the staging memory that `stage` returned last, while its adapter has no pages yet."""
        self.buffers: list[torch.Tensor] = []
        """Host buffers of the adapters with assigned pages."""
        self._pages: list[torch.Tensor] = []
        self._starts: list[int] = []
        self.rows: dict[int, torch.Tensor] = {}
        """The directory rows to write, by adapter index; later rows replace earlier rows."""

    def has_room(self, size: int) -> bool:
        """Return whether an adapter of `size` bytes fits into the rest of the staging memory."""
        return self._used + size <= len(self._staging)

    def stage(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the part of the staging memory that `scatter` will copy an adapter to."""
        self._staged = self._staging[self._used : self._used + len(buffer)]
        return self._staged

    def is_last_staged(self, staged: torch.Tensor | None) -> bool:
        """Return whether `staged` is the tensor that `stage` returned last."""
        return staged is not None and staged is self._staged

    def place(self, buffer: torch.Tensor, pages: torch.Tensor, start: int) -> None:
        """Assign the adapter that was staged last its physical pages and its first entry in the page map."""
        self._used += len(buffer)
        self.buffers.append(buffer)
        self._pages.append(pages)
        self._starts.append(start)

    def rewind(self) -> None:
        """Reuse the staging memory from its beginning; no write may be pending."""
        self._begin = self._used = 0

    def scatter(
        self,
        pages: torch.Tensor,
        page_map: torch.Tensor,
        directory: torch.Tensor,
        pinned: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """Do the pending writes.

        Args:
            pages: The pool's pages.
            page_map: The pool's page map.
            directory: The pool's directory.
            pinned: Returns a copy in pinned memory, from which the device copies while the host goes on.
        """
        if self._pages:
            self._scatter_pages(pages, page_map, pinned)
        for first in range(0, len(self.rows), ROWS_AT_ONCE):  # copies of one stream may reuse the same memory
            indices = list(self.rows)[first : first + ROWS_AT_ONCE]
            used = slice(0, len(indices))
            self._indices[used].copy_(pinned(torch.tensor(indices)), non_blocking=True)
            self._rows[used].copy_(pinned(torch.stack([self.rows[index] for index in indices])), non_blocking=True)
            directory.index_copy_(0, self._indices[used], self._rows[used])

    def _scatter_pages(
        self, pages: torch.Tensor, page_map: torch.Tensor, pinned: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        staged = self._staging[self._begin : self._used]
        parts = torch.split(staged, [len(buffer) for buffer in self.buffers])
        # one call for all copies; PyTorch has no public name for it
        torch._foreach_copy_(list(parts), self.buffers, non_blocking=True)
        physical = torch.cat(self._pages)
        counts = torch.tensor([len(each) for each in self._pages])
        shifts = torch.repeat_interleave(counts.cumsum(0) - counts - torch.tensor(self._starts), counts)
        entries = torch.arange(len(physical)) - shifts
        used = slice(0, len(physical))
        self._entries[used].copy_(pinned(entries), non_blocking=True)
        self._pages64[used].copy_(pinned(physical.long()), non_blocking=True)
        self._pages32[used].copy_(pinned(physical), non_blocking=True)
        page_map.index_copy_(0, self._entries[used], self._pages32[used])
        values = staged.view(torch.int64).view(len(physical), -1)
        pages.view(torch.int64).index_copy_(0, self._pages64[used], values)

    def clear(self) -> None:
        """Drop the pending writes, which are done."""
        self._begin = self._used
        self.buffers, self._pages, self._starts, self.rows = [], [], [], {}
