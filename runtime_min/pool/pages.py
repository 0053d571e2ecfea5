"""Fixed pages of device memory, of which any serves any adapter: nothing fragments and nothing ever moves.

Adapters and a KV cache draw on one budget: the pool lends pages, whose numbers the borrower may address in `pages`, and
takes them back.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from scute_compile.diagnostics import Code, fail
from scute_compile.runtime_min.pool.directory import PAGE_BYTES, pages_of


@dataclass(frozen=True, slots=True, kw_only=True)
class PageCounts:
    """What the pages of a pool are used for. Units: pages, where nothing else is said."""

    total: int
    in_use: int
    """Held by adapters and shared factors."""
    lent: int
    """Held by a borrower such as a KV cache."""
    free: int
    moved: int
    """Copied from page to page to make room: always 0, since any free page serves as well as any other."""
    payload: int
    """Bytes of the tensors that the pages in use hold."""

    @property
    def wasted(self) -> int:
        """Bytes of pages in use that hold no tensor: ends of last pages, and ends of granules."""
        return self.in_use * PAGE_BYTES - self.payload

    @property
    def waste_ratio(self) -> float:
        """Wasted bytes by bytes in use; 0 for an empty pool."""
        return self.wasted / (self.in_use * PAGE_BYTES) if self.in_use else 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Holding:
    """Pages that one packed holds."""

    pages: torch.Tensor
    """Physical page of each logical page: int32, on the CPU."""
    payload: int
    """Bytes of the tensors in them."""


class PagePool:
    """Pages of 2 KiB and the list of free ones. Not safe for several threads."""

    def __init__(self, num_pages: int, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate `pages`, `(num_pages, 2048 / itemsize)` in `dtype`, as zeros."""
        self.pages = torch.zeros(num_pages, PAGE_BYTES // dtype.itemsize, dtype=dtype, device=device)
        # a stack whose upper end is taken first, so that a fresh pool fills from page 0; numpy, because a large adapter
        # has 40000 pages, and this bookkeeping stands before its copy
        self._free = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self._top = num_pages
        self._taken = np.zeros(num_pages, dtype=np.bool_)
        self._lent = np.zeros(num_pages, dtype=np.bool_)
        self._lent_count = 0  # kept beside the marks: a pool of several GB has millions of pages to count
        self._payload = 0

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return self._top

    @property
    def counts(self) -> PageCounts:
        """What the pages are used for at this moment."""
        total, lent = len(self._free), self._lent_count
        return PageCounts(
            total=total,
            in_use=total - self._top - lent,
            lent=lent,
            free=self._top,
            moved=0,
            payload=self._payload,
        )

    def allocate(self, count: int, *, payload: int | None = None) -> Holding:
        """Take `count` free pages.

        Args:
            count: Number of pages.
            payload: Bytes of what will lie in them; None: all of it.

        Raises:
            ScuteError: SC805 when fewer are free.
        """
        payload = count * PAGE_BYTES if payload is None else payload
        if pages_of(payload) > count:
            raise ValueError(f"{payload} bytes do not fit into {count} pages")
        pages = self._take(count, "adapters")
        self._payload += payload
        return Holding(pages=pages, payload=payload)

    def release(self, holding: Holding) -> None:
        """Give back pages that `allocate` returned."""
        self._return(holding.pages.numpy())
        self._payload -= holding.payload

    def lend(self, count: int) -> torch.Tensor:
        """Lend `count` free pages and return their numbers: int32, on the CPU.

        Raises:
            ScuteError: SC805 when fewer are free; SC703 for less than none.
        """
        if count < 0:
            fail(
                Code.SC703,
                where="a loan",
                found=f"{count} pages",
                expected="at least 0 pages",
                next="borrow as many pages as the cache grows by",
            )
        pages = self._take(count, "a loan")
        self._lent[pages.numpy()] = True
        self._lent_count += count
        return pages

    def reclaim(self, pages: torch.Tensor) -> None:
        """Take back lent pages, all of a loan or a part of it.

        Raises:
            ScuteError: SC703 for pages that aren't lent, and for one that stands there twice. Nothing is taken then.
        """
        given = self._numbers(pages)
        self._lent[given] = False
        self._lent_count -= len(given)
        self._return(given)

    def _numbers(self, pages: torch.Tensor) -> npt.NDArray[np.int64]:
        """Return the numbers of lent pages: an adapter's own page among them would be overwritten while it is read."""
        given = pages.reshape(-1).cpu().numpy()
        whole = given.astype(np.int64)
        inside = (whole == given) & (whole >= 0) & (whole < len(self._lent))
        wrong = given[~inside] if not inside.all() else whole[~self._lent[whole]]
        if len(wrong) or len(np.unique(whole)) < len(whole):
            what = f"page {wrong[0]}, which is not lent" if len(wrong) else "a page that stands there twice"
            fail(
                Code.SC703,
                where="a loan that is given back",
                found=what,
                expected="pages of a loan, each once",
                next="give back each page of a loan once",
            )
        return whole

    def _take(self, count: int, purpose: str) -> torch.Tensor:
        if count > self._top:
            counts = self.counts
            fail(
                Code.SC805,
                where=purpose,
                found=f"{count * PAGE_BYTES} bytes needed, {counts.free * PAGE_BYTES} free "
                f"({counts.in_use * PAGE_BYTES} hold adapters, {counts.lent * PAGE_BYTES} are lent)",
                expected=f"at most the free part of {counts.total * PAGE_BYTES} bytes",
                next="make the pool larger, or evict or reclaim first",
            )
        self._top -= count
        pages = self._free[self._top : self._top + count][::-1].copy()
        self._taken[pages] = True
        return torch.from_numpy(pages)

    def _return(self, pages: npt.NDArray[np.integer]) -> None:
        if not self._taken[pages].all():
            raise ValueError("a page was given back twice")
        self._taken[pages] = False
        self._free[self._top : self._top + len(pages)] = pages[::-1]
        self._top += len(pages)


class Runs:
    """Runs of consecutive entries, best fit first: of the page map, and of the pages of shared factors."""

    def __init__(self, entries: int) -> None:
        self._entries = entries
        self._free: list[tuple[int, int]] = [(0, entries)]

    @property
    def free(self) -> int:
        """Entries in no run, wherever they lie."""
        return sum(length for _, length in self._free)

    def has_gaps(self, counts: Iterable[int]) -> bool:
        """Return whether runs of all these lengths can be allocated."""
        before = list(self._free)
        found = all(self.allocate(count) is not None for count in counts)
        self._free = before
        return found

    def allocate(self, count: int) -> int | None:
        """Return the start of a run of `count` entries, or None when no gap is long enough."""
        fitting = [(length, start) for start, length in self._free if length >= count]
        if not fitting:
            return None
        length, start = min(fitting)
        position = bisect.bisect_left(self._free, (start, length))
        self._free[position : position + 1] = [(start + count, length - count)] if length > count else []
        return start

    def release(self, start: int, count: int) -> None:
        """Give back a run; it joins the gaps beside it."""
        position = bisect.bisect_left(self._free, (start, count))
        if position < len(self._free) and self._free[position][0] == start + count:
            count += self._free.pop(position)[1]
        if position and sum(self._free[position - 1]) == start:
            position -= 1
            start, length = self._free.pop(position)
            count += length
        self._free.insert(position, (start, count))

    def clear(self) -> None:
        """Forget all runs."""
        self._free = [(0, self._entries)]
