"""Decode expand: what the low-rank terms add, `delta = ((h * d) B) * e` in float32, for owned and shared factors.

It runs beside the base GEMM, which it doesn't depend on; `combine` adds its result to the base's output. Partial sums
of the shrink are added here in their order. A row's columns are written by one program only.
"""

from __future__ import annotations

import triton
import triton.language as tl

from scute_compile.runtime_min.kernels.paging import (
    B_OFFSET,
    B_PAGES,
    B_STRIDE,
    D_OFFSET,
    E_OFFSET,
    OWN_PAGES,
    PAIR,
    RANK,
    RECORD,
    load_rows,
    load_values,
    slice_of,
)


@triton.jit
def _owned(
    work, h_ptr, delta_ptr, pages_ptr, page_map_ptr, directory_ptr, seg_slot_ptr, seg_start_ptr, seg_rows_ptr,
    row_h_ptr, sites, first_site, h_capacity,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, SLICES: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = tl.cdiv(N0, BLOCK_N) + tl.cdiv(N1, BLOCK_N) + tl.cdiv(N2, BLOCK_N)
    segment = work // BLOCKS
    which, column, width, origin = slice_of(work % BLOCKS, BLOCK_N, N0, N1, N2)
    record = directory_ptr + (tl.load(seg_slot_ptr + segment) * sites + first_site + which) * RECORD
    rank = tl.load(record + RANK)
    first_page = tl.load(record + B_PAGES)
    offset = tl.load(record + B_OFFSET)
    stride = tl.load(record + B_STRIDE)
    start, stop = tl.load(seg_start_ptr + segment), tl.load(seg_start_ptr + segment + 1)
    if (rank > 0) & (tl.load(record + PAIR) < 0):
        STEP: tl.constexpr = BLOCK_N // VALUES
        granule = column // VALUES + tl.arange(0, STEP)
        held = granule * VALUES < width
        columns = column + tl.arange(0, STEP)[:, None] * VALUES + tl.arange(0, VALUES)[None, :]
        for position in range(start, stop):
            token = tl.load(seg_rows_ptr + position)
            mine = h_ptr + which * h_capacity + tl.load(row_h_ptr + token)
            total = tl.zeros([STEP, VALUES], dtype=tl.float32)
            for first in range(0, rank, BLOCK_R):
                rows = first + tl.arange(0, BLOCK_R)
                h = tl.zeros([BLOCK_R], dtype=tl.float32)
                for part in tl.static_range(SPLIT):
                    h += tl.load(mine + part * SLICES * h_capacity + rows, mask=rows < rank, other=0.0)
                b = load_rows(
                    pages_ptr, page_map_ptr, first_page, offset + rows[:, None] * stride + granule[None, :],
                    (rows < rank)[:, None] & held[None, :], VALUES,
                )  # fmt: skip
                total += tl.sum(b.to(tl.float32) * h[:, None, None], axis=0)
            where = token.to(tl.int64) * (N0 + N1 + N2) + origin + columns
            tl.store(delta_ptr + where, total, mask=columns < width)


@triton.jit
def _shared(
    work, hs_ptr, delta_ptr, pages_ptr, page_map_ptr, directory_ptr, block_ptr, pair_rows_ptr, pair_ptr, row_slot_ptr,
    sites, first_site, hs_rows, hs_ranks,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, SPLIT: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = tl.cdiv(N0, BLOCK_N) + tl.cdiv(N1, BLOCK_N) + tl.cdiv(N2, BLOCK_N)
    block = work // BLOCKS
    which, column, width, origin = slice_of(work % BLOCKS, BLOCK_N, N0, N1, N2)
    pair = tl.load(block_ptr + block * 4)
    first, count = tl.load(block_ptr + block * 4 + 1), tl.load(block_ptr + block * 4 + 2)
    held = tl.arange(0, BLOCK_T) < count
    token = tl.load(pair_rows_ptr + first + tl.arange(0, BLOCK_T), mask=held, other=0)
    slot = tl.load(row_slot_ptr + token, mask=held, other=0)
    record = directory_ptr + (slot * sites + first_site + which) * RECORD
    mine = held & (tl.load(record + PAIR, mask=held, other=-1) == pair)
    if tl.sum(mine.to(tl.int32)) > 0:
        own = tl.load(record + OWN_PAGES, mask=mine, other=0)
        d_offset = tl.load(record + D_OFFSET, mask=mine, other=-1)
        e_offset = tl.load(record + E_OFFSET, mask=mine, other=-1)
        rank = tl.load(pair_ptr + pair * 8)
        first_page, offset, stride = (
            tl.load(pair_ptr + pair * 8 + 4), tl.load(pair_ptr + pair * 8 + 5), tl.load(pair_ptr + pair * 8 + 6)
        )  # fmt: skip
        STEP: tl.constexpr = BLOCK_N // VALUES
        granule = column // VALUES + tl.arange(0, STEP)
        in_slice = granule * VALUES < width
        total = tl.zeros([BLOCK_T, BLOCK_N], dtype=tl.float32)
        for step in range(0, rank, BLOCK_R):
            rows = step + tl.arange(0, BLOCK_R)
            both = mine[:, None] & (rows < rank)[None, :]
            where = (first + tl.arange(0, BLOCK_T))[:, None] * hs_ranks + rows[None, :]
            h = tl.zeros([BLOCK_T, BLOCK_R], dtype=tl.float32)
            for part in tl.static_range(SPLIT):
                h += tl.load(hs_ptr + part * hs_rows * hs_ranks + where, mask=both, other=0.0)
            has_d = both & (d_offset >= 0)[:, None]
            d = load_values(pages_ptr, page_map_ptr, own[:, None], d_offset[:, None], rows[None, :], has_d, VALUES)
            h = tl.where(has_d, h * d.to(tl.float32), h)
            b = load_rows(
                pages_ptr, page_map_ptr, first_page, offset + rows[:, None] * stride + granule[None, :],
                (rows < rank)[:, None] & in_slice[None, :], VALUES,
            )  # fmt: skip
            b = tl.reshape(b, [BLOCK_R, BLOCK_N])
            # two products keep h to sixteen bits; one rounding of it would show beside a bf16 reference
            high = h.to(b.dtype)
            total = tl.dot(high, b, total, input_precision="ieee")
            if b.dtype != tl.float32:
                total = tl.dot((h - high.to(tl.float32)).to(b.dtype), b, total)
        columns = column + tl.arange(0, BLOCK_N)
        inside = mine[:, None] & (columns < width)[None, :]
        has_e = inside & (e_offset >= 0)[:, None]
        e = load_values(pages_ptr, page_map_ptr, own[:, None], e_offset[:, None], columns[None, :], has_e, VALUES)
        total = tl.where(has_e, total * e.to(tl.float32), total)
        place = token.to(tl.int64)[:, None] * (N0 + N1 + N2) + origin + columns[None, :]
        tl.store(delta_ptr + place, total, mask=inside)


@triton.jit
def expand_kernel(
    h_ptr, hs_ptr, delta_ptr, pages_ptr, page_map_ptr, directory_ptr, counts_ptr, row_slot_ptr, seg_slot_ptr,
    seg_start_ptr, seg_rows_ptr, row_h_ptr, block_ptr, pair_rows_ptr, pair_ptr,
    sites, first_site, h_capacity, hs_rows, hs_ranks,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, SLICES: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, SPLIT_S: tl.constexpr, BLOCK_NS: tl.constexpr,
    BLOCK_RS: tl.constexpr, BLOCK_T: tl.constexpr, VALUES: tl.constexpr,
    HAS_OWNED: tl.constexpr, HAS_SHARED: tl.constexpr,
):  # fmt: skip
    """See `scute_compile.runtime_min.reference.expand`; without the base tile, which `combine` adds."""
    OWNED: tl.constexpr = tl.cdiv(N0, BLOCK_N) + tl.cdiv(N1, BLOCK_N) + tl.cdiv(N2, BLOCK_N)
    SHARED: tl.constexpr = tl.cdiv(N0, BLOCK_NS) + tl.cdiv(N1, BLOCK_NS) + tl.cdiv(N2, BLOCK_NS)
    owned = tl.load(counts_ptr + 2) * OWNED
    shared = tl.load(counts_ptr + 3) * SHARED
    for work in range(tl.program_id(0), owned + shared, tl.num_programs(0)):
        if HAS_SHARED:
            if work < shared:
                _shared(
                    work, hs_ptr, delta_ptr, pages_ptr, page_map_ptr, directory_ptr, block_ptr, pair_rows_ptr,
                    pair_ptr, row_slot_ptr, sites, first_site, hs_rows, hs_ranks,
                    N0, N1, N2, SPLIT_S, BLOCK_NS, BLOCK_RS, BLOCK_T, VALUES,
                )  # fmt: skip
        if HAS_OWNED:
            if work >= shared:
                _owned(
                    work - shared, h_ptr, delta_ptr, pages_ptr, page_map_ptr, directory_ptr, seg_slot_ptr,
                    seg_start_ptr, seg_rows_ptr, row_h_ptr, sites, first_site, h_capacity,
                    N0, N1, N2, SLICES, SPLIT, BLOCK_N, BLOCK_R, VALUES,
                )  # fmt: skip
