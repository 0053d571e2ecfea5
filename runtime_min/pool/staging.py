"""Small packed_adapters that come in together: what is written for them is held back, and done by one scatter for all.

One by one, the host's work for each takes longer than its copy. All memory that the scatter needs is taken before the
first packed moves, so that it can't fail for want of memory halfway.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from scute_compile.runtime_min.pool.directory import FIELDS, PAGE_BYTES

SMALL_PAGES = 4096
"""Images up to this size (8 MiB) come in together."""
ROOM_PAGES = 16384
"""Room for what is held back at a time (32 MiB); with more, there are several scatters."""
RECORDS = 64
"""Slots whose records are written at a time."""


class Gathered:
    """What is held back. On a CUDA device all of it happens on the stream of the writes.

    Args:
        size: Bytes of all packed_adapters that may come in.
        sites: Of the directory.
        device: Where they come in.
    """

    def __init__(self, size: int, *, sites: int, device: torch.device) -> None:
        room = min(size // PAGE_BYTES, ROOM_PAGES)
        self._staging = torch.empty(room * PAGE_BYTES, dtype=torch.uint8, device=device)
        self._entries, self._numbers = torch.empty(2, room, dtype=torch.int64, device=device)
        self._narrow = torch.empty(room, dtype=torch.int32, device=device)
        """The numbers of pages once more, in the page map's dtype."""
        self._slots = torch.empty(RECORDS, dtype=torch.int64, device=device)
        self._records = torch.empty(RECORDS, sites, FIELDS, dtype=torch.int32, device=device)
        self._begin = self._used = 0
        """The part of the staging memory, in bytes, that placed packed_adapters take."""
        self._staged: torch.Tensor | None = None
        """The packed that came last, about which nothing is decided yet."""
        self.buffers: list[torch.Tensor] = []
        """Of the packed_adapters that are held back, on the host."""
        self._pages: list[torch.Tensor] = []
        self._starts: list[int] = []
        self.waiting: dict[int, torch.Tensor] = {}
        """By slot, the records that were written last."""

    def takes(self, size: int) -> bool:
        """Return whether an packed of `size` bytes is small enough, and has room now."""
        return self._used + size <= len(self._staging)

    def stage(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return an packed's place in the staging memory, in which it lies once it was scattered."""
        self._staged = self._staging[self._used : self._used + len(buffer)]
        return self._staged

    def holds(self, staged: torch.Tensor | None) -> bool:
        """Return whether `staged` is the place that `stage` returned last."""
        return staged is not None and staged is self._staged

    def place(self, buffer: torch.Tensor, pages: torch.Tensor, start: int) -> None:
        """Hold back the packed that was staged last: its physical pages, and its first entry in the page map."""
        self._used += len(buffer)
        self.buffers.append(buffer)
        self._pages.append(pages)
        self._starts.append(start)

    def rewind(self) -> None:
        """Use the staging memory from its beginning again; nothing may be held back."""
        self._begin = self._used = 0

    def scatter(
        self,
        pages: torch.Tensor,
        page_map: torch.Tensor,
        directory: torch.Tensor,
        pinned: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """Write what was held back so far.

        Args:
            pages: Of the pool.
            page_map: Likewise.
            directory: Likewise.
            pinned: Returns a copy that a device can read while the host goes on.
        """
        if self._pages:
            packed_adapters = self._staging[self._begin : self._used]
            parts = torch.split(packed_adapters, [len(buffer) for buffer in self.buffers])
            # one call for all copies, where PyTorch offers it; it has no public name
            torch._foreach_copy_(list(parts), self.buffers, non_blocking=True)
            numbers = torch.cat(self._pages)
            counts = torch.tensor([len(each) for each in self._pages])
            before = torch.repeat_interleave(counts.cumsum(0) - counts - torch.tensor(self._starts), counts)
            entries = torch.arange(len(numbers)) - before
            held = slice(0, len(numbers))
            self._entries[held].copy_(pinned(entries), non_blocking=True)
            self._numbers[held].copy_(pinned(numbers.long()), non_blocking=True)
            self._narrow[held].copy_(pinned(numbers), non_blocking=True)
            page_map.index_copy_(0, self._entries[held], self._narrow[held])
            whole = packed_adapters.view(torch.int64).view(len(numbers), -1)
            pages.view(torch.int64).index_copy_(0, self._numbers[held], whole)
        for first in range(0, len(self.waiting), RECORDS):  # on one stream, so the next ones may use the same room
            slots = list(self.waiting)[first : first + RECORDS]
            held = slice(0, len(slots))
            self._slots[held].copy_(pinned(torch.tensor(slots)), non_blocking=True)
            self._records[held].copy_(pinned(torch.stack([self.waiting[slot] for slot in slots])), non_blocking=True)
            directory.index_copy_(0, self._slots[held], self._records[held])

    def clear(self) -> None:
        """Forget what was held back: it is written."""
        self._begin = self._used
        self.buffers, self._pages, self._starts, self.waiting = [], [], [], {}
