"""Allocation of device pages, any of which can hold any part of an adapter, and of contiguous runs in the page map."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from scute_compile.diagnostics import Code, fail
from scute_compile.runtime_min.pool.directory import PAGE_BYTES, pages_of


@dataclass(frozen=True, slots=True, kw_only=True)
class PageCounts:
    """The use of a pool's pages. Units: pages, except for `payload` and `wasted`."""

    total: int
    in_use: int
    free: int
    payload: int
    """Bytes of the tensors that the pages in use hold."""

    @property
    def wasted(self) -> int:
        """Bytes of pages in use that hold no tensor: ends of last pages, and ends of granules."""
        return self.in_use * PAGE_BYTES - self.payload

    @property
    def waste_ratio(self) -> float:
        """Wasted bytes over bytes in use; 0 for an empty pool."""
        return self.wasted / (self.in_use * PAGE_BYTES) if self.in_use else 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PageAllocation:
    """The pages of one adapter."""

    pages: torch.Tensor
    """Physical page of each logical page: int32, on the CPU."""
    payload: int
    """Bytes of the tensors in them."""


class PagePool:
    """Pages of 2 KiB and a list of the free ones. Not safe for several threads."""

    def __init__(self, num_pages: int, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate `pages`, zeros of shape `(num_pages, 2048 / itemsize)`."""
        self.pages = torch.zeros(num_pages, PAGE_BYTES // dtype.itemsize, dtype=dtype, device=device)
        # A stack whose top is taken first, so that an empty pool fills from page 0. It is a numpy array for speed: a
        # large adapter has 40000 pages, and its copy starts after this bookkeeping.
        self._free = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self._top = num_pages
        self._taken = np.zeros(num_pages, dtype=np.bool_)
        self._payload = 0

    @property
    def free(self) -> int:
        """Number of free pages."""
        return self._top

    @property
    def counts(self) -> PageCounts:
        """The present use of the pages."""
        total = len(self._free)
        return PageCounts(total=total, in_use=total - self._top, free=self._top, payload=self._payload)

    def allocate(self, count: int, *, payload: int | None = None) -> PageAllocation:
        """Take `count` free pages.

        Args:
            count: Number of pages.
            payload: Bytes of the tensors that they will hold; None for all bytes.

        Raises:
            ScuteError: SC805 when fewer are free.
        """
        payload = count * PAGE_BYTES if payload is None else payload
        if pages_of(payload) > count:
            raise ValueError(f"{payload} bytes do not fit into {count} pages")
        if count > self._top:
            counts = self.counts
            fail(
                Code.SC805,
                where="adapters",
                found=f"{count * PAGE_BYTES} bytes needed, {counts.free * PAGE_BYTES} free",
                expected=f"at most the free part of {counts.total * PAGE_BYTES} bytes",
                next="make the pool larger, or evict adapters first",
            )
        self._top -= count
        pages = self._free[self._top : self._top + count][::-1].copy()
        self._taken[pages] = True
        self._payload += payload
        return PageAllocation(pages=torch.from_numpy(pages), payload=payload)

    def release(self, allocation: PageAllocation) -> None:
        """Free the pages of an allocation."""
        pages = allocation.pages.numpy()
        if not self._taken[pages].all():
            raise ValueError("a page was released twice")
        self._taken[pages] = False
        self._free[self._top : self._top + len(pages)] = pages[::-1]
        self._top += len(pages)
        self._payload -= allocation.payload


class Runs:
    """Best-fit allocation of contiguous runs: of entries of the page map, and of pages of shared factors."""

    def __init__(self, entries: int) -> None:
        self._entries = entries
        self._free: list[tuple[int, int]] = [(0, entries)]
        """Start and length of each gap, in order."""

    @property
    def free(self) -> int:
        """Free entries of all gaps together."""
        return sum(length for _, length in self._free)

    def can_allocate(self, counts: Iterable[int]) -> bool:
        """Return whether runs of all these lengths can be allocated together."""
        before = list(self._free)
        found = all(self.allocate(count) is not None for count in counts)
        self._free = before
        return found

    def allocate(self, count: int) -> int | None:
        """Return the start of a new run of `count` entries, or None when no gap is long enough."""
        fitting = [(length, start) for start, length in self._free if length >= count]
        if not fitting:
            return None
        length, start = min(fitting)
        position = bisect.bisect_left(self._free, (start, length))
        self._free[position : position + 1] = [(start + count, length - count)] if length > count else []
        return start

    def release(self, start: int, count: int) -> None:
        """Free a run and merge it with the gaps beside it."""
        position = bisect.bisect_left(self._free, (start, count))
        if position < len(self._free) and self._free[position][0] == start + count:
            count += self._free.pop(position)[1]
        if position and sum(self._free[position - 1]) == start:
            position -= 1
            start, length = self._free.pop(position)
            count += length
        self._free.insert(position, (start, count))

    def clear(self) -> None:
        """Free all runs."""
        self._free = [(0, self._entries)]
