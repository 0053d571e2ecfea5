"""Allocation of pages and of runs in the page map: no fragmentation, no page held twice, counts that add up."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scute_compile.diagnostics import ScuteError
from scute_compile.runtime_min.pool.directory import PAGE_BYTES
from scute_compile.runtime_min.pool.pages import PageAllocation, PagePool, Runs

CPU = torch.device("cpu")


@pytest.mark.parametrize(("dtype", "values"), [(torch.bfloat16, 1024), (torch.float32, 512)])
def test_a_page_is_two_kibibytes_in_every_dtype(dtype: torch.dtype, values: int) -> None:
    assert PagePool(3, dtype, CPU).pages.shape == (3, values)


def test_a_full_pool_names_the_needed_and_the_free_bytes() -> None:
    pool = PagePool(10, torch.float16, CPU)
    pool.allocate(9)
    with pytest.raises(ScuteError, match="4096 bytes needed, 2048 free"):
        pool.allocate(2)
    assert (pool.counts.in_use, pool.counts.free) == (9, 1)


def test_releasing_a_page_twice_raises() -> None:
    pool = PagePool(4, torch.float16, CPU)
    allocation = pool.allocate(2)
    pool.release(allocation)
    with pytest.raises(ValueError, match="twice"):
        pool.release(allocation)


def test_waste_is_the_part_of_pages_in_use_without_tensors() -> None:
    pool = PagePool(8, torch.bfloat16, CPU)
    assert pool.counts.waste_ratio == 0
    pool.allocate(2, payload=PAGE_BYTES + 24)
    assert pool.counts.wasted == PAGE_BYTES - 24
    assert pool.counts.waste_ratio == (PAGE_BYTES - 24) / (2 * PAGE_BYTES)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(0, 99)), max_size=60))
def test_random_allocations_never_fragment_pages(steps: list[tuple[bool, int, int]]) -> None:
    """All free pages can be allocated at once, and no page is allocated twice."""
    pool = PagePool(24, torch.float16, CPU)
    held: list[PageAllocation] = []
    for take, count, which in steps:
        if take and count <= pool.free:
            held.append(pool.allocate(count))
        elif held and not take:
            pool.release(held.pop(which % len(held)))
        pages = [page for allocation in held for page in allocation.pages.tolist()]
        assert len(set(pages)) == len(pages) == pool.counts.in_use
    assert len(pool.allocate(pool.free).pages) + len(pages if steps else []) == 24


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9), st.integers(0, 99)), max_size=60))
def test_runs_never_overlap_and_gaps_merge(steps: list[tuple[bool, int, int]]) -> None:
    runs, held = Runs(40), list[tuple[int, int]]()
    for take, count, which in steps:
        if take and (start := runs.allocate(count)) is not None:
            held.append((start, count))
        elif held and not take:
            runs.release(*held.pop(which % len(held)))
        entries = [entry for start, length in held for entry in range(start, start + length)]
        assert len(set(entries)) == len(entries) == 40 - runs.free
    for start, count in held:
        runs.release(start, count)
    assert runs.allocate(40) == 0
