"""Pages: any free one serves, none moves, and what adapters, loans and nobody hold adds up."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scute_compile.diagnostics import ScuteError
from scute_compile.runtime_min.pool.directory import PAGE_BYTES
from scute_compile.runtime_min.pool.pages import Holding, PagePool, Runs

CPU = torch.device("cpu")


@pytest.mark.parametrize(("dtype", "values"), [(torch.bfloat16, 1024), (torch.float32, 512)])
def test_a_page_is_two_kibibytes_in_every_dtype(dtype: torch.dtype, values: int) -> None:
    assert PagePool(3, dtype, CPU).pages.shape == (3, values)


def test_a_full_pool_says_what_is_needed_and_what_is_there() -> None:
    pool = PagePool(10, torch.float16, CPU)
    pool.allocate(6)
    pool.lend(3)
    with pytest.raises(ScuteError, match=r"4096 bytes needed, 2048 free \(12288 hold adapters, 6144 are lent\)"):
        pool.allocate(2)
    assert (pool.counts.in_use, pool.counts.lent, pool.counts.free) == (6, 3, 1)


def test_a_page_given_back_twice_is_our_own_fault_and_raises() -> None:
    pool = PagePool(4, torch.float16, CPU)
    holding = pool.allocate(2)
    pool.release(holding)
    with pytest.raises(ValueError, match="twice"):
        pool.release(holding)


def test_loans_are_taken_back_in_parts() -> None:
    pool = PagePool(8, torch.bfloat16, CPU)
    loan = pool.lend(5)
    pool.reclaim(loan[1:4])
    assert (pool.counts.lent, pool.free) == (2, 6)
    pool.reclaim(loan[[0, 4]])
    assert (pool.counts.lent, pool.free) == (0, 8)


def test_waste_is_what_the_tensors_leave_of_their_pages() -> None:
    pool = PagePool(8, torch.bfloat16, CPU)
    assert pool.counts.waste_ratio == 0
    pool.allocate(2, payload=PAGE_BYTES + 24)
    assert pool.counts.wasted == PAGE_BYTES - 24
    assert pool.counts.waste_ratio == (PAGE_BYTES - 24) / (2 * PAGE_BYTES)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(0, 99)), max_size=60))
def test_churn_never_fragments(steps: list[tuple[bool, int, int]]) -> None:
    """Whatever was taken and given back, as many pages as are free can be taken at once, and none is held twice."""
    pool = PagePool(24, torch.float16, CPU)
    held: list[Holding] = []
    for take, count, which in steps:
        if take and count <= pool.free:
            held.append(pool.allocate(count))
        elif held and not take:
            pool.release(held.pop(which % len(held)))
        pages = [page for holding in held for page in holding.pages.tolist()]
        assert len(set(pages)) == len(pages) == pool.counts.in_use
    assert len(pool.allocate(pool.free).pages) + len(pages if steps else []) == 24
    assert pool.counts.moved == 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9), st.integers(0, 99)), max_size=60))
def test_runs_of_the_page_map_never_overlap_and_gaps_join(steps: list[tuple[bool, int, int]]) -> None:
    ranges, held = Runs(40), list[tuple[int, int]]()
    for take, count, which in steps:
        if take and (start := ranges.allocate(count)) is not None:
            held.append((start, count))
        elif held and not take:
            ranges.release(*held.pop(which % len(held)))
        entries = [entry for start, length in held for entry in range(start, start + length)]
        assert len(set(entries)) == len(entries) == 40 - ranges.free
    for start, count in held:
        ranges.release(start, count)
    assert ranges.allocate(40) == 0


WRONG_RETURNS = {
    "an adapter's page": [0],
    "a free page": [7],
    "one page twice": [4, 4],
    "a negative number": [-4],
    "a number past the end": [8],
    "no whole number": [4.5],
}


@pytest.mark.parametrize("what", WRONG_RETURNS)
def test_pages_that_are_not_lent_are_never_taken_back(what: str) -> None:
    """Such a page would be free while an adapter reads it, and the next one would be written over it."""
    pool = PagePool(8, torch.bfloat16, CPU)
    holding, loan = pool.allocate(4), pool.lend(2)
    before = pool.counts
    with pytest.raises(ScuteError, match="SC703"):
        pool.reclaim(torch.tensor(WRONG_RETURNS[what]))
    assert pool.counts == before
    pool.reclaim(loan)
    pool.release(holding)
    assert pool.counts.free == 8


def test_no_pages_are_lent_backwards() -> None:
    pool = PagePool(8, torch.bfloat16, CPU)
    with pytest.raises(ScuteError, match="SC703"):
        pool.lend(-1)
    assert pool.counts.free == 8
