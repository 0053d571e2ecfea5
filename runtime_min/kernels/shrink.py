"""Decode shrink: `h = x A^T` for a row or a few rows per adapter, and for the rows of a shared pair together.

Owned factors: a program holds a few rows of A over a run of K and multiplies in registers (no tensor cores: with one
token per tenant there is nothing to reuse). Shared factors: sixteen tokens by sixteen rows of A on tensor cores, so
the matrix is read once for all its tenants. Both kinds are records of one launch; runs of K leave partial sums that
the expand adds in order, so no atomics are needed.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda as tlc

from scute_compile.runtime_min.kernels.paging import (
    A_OFFSET,
    A_PAGES,
    A_STRIDE,
    D_OFFSET,
    OWN_PAGES,
    PAIR,
    RANK,
    RECORD,
    load_row,
    load_rows,
)


@triton.jit
def _owned(
    work, x_ptr, h_ptr, pages_ptr, page_map_ptr, directory_ptr, work_ptr, seg_slot_ptr, seg_start_ptr, seg_rows_ptr,
    row_h_ptr, sites, first_site, h_capacity,
    K: tl.constexpr, SLICES: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
    VALUES: tl.constexpr,
):  # fmt: skip
    part = work % SPLIT
    which = (work // SPLIT) % SLICES
    packed = tl.load(work_ptr + work // (SPLIT * SLICES))
    segment, rank_block = packed >> 12, packed & 4095
    record = directory_ptr + (tl.load(seg_slot_ptr + segment) * sites + first_site + which) * RECORD
    rank = tl.load(record + RANK)
    first_page = tl.load(record + A_PAGES)
    offset = tl.load(record + A_OFFSET)
    stride = tl.load(record + A_STRIDE)
    start, stop = tl.load(seg_start_ptr + segment), tl.load(seg_start_ptr + segment + 1)
    rows = rank_block * ROWS + tl.arange(0, ROWS)
    if (tl.load(record + PAIR) < 0) & (rank_block * ROWS < rank):
        GRANULES: tl.constexpr = (K + VALUES - 1) // VALUES
        RUN: tl.constexpr = (GRANULES + SPLIT - 1) // SPLIT
        lanes = tl.arange(0, VALUES)
        for position in range(start, stop):
            token = tl.load(seg_rows_ptr + position)
            total = tl.zeros([ROWS, STEP, VALUES], dtype=tl.float32)
            for step in tl.static_range(0, RUN, STEP):
                inside = step + tl.arange(0, STEP)
                granule = part * RUN + inside
                held = (inside < RUN) & (granule < GRANULES)
                k = granule[:, None] * VALUES + lanes[None, :]
                x = tl.load(x_ptr + token.to(tl.int64) * K + k, mask=held[:, None] & (k < K), other=0.0)
                mask = (rows < rank)[:, None] & held[None, :]
                a = load_rows(
                    pages_ptr,
                    page_map_ptr,
                    first_page,
                    offset + rows[:, None] * stride + granule[None, :],
                    mask,
                    VALUES,
                )
                total += a.to(tl.float32) * x.to(tl.float32)[None, :, :]
            h = tl.sum(tl.sum(total, axis=2), axis=1)
            where = (part * SLICES + which) * h_capacity + tl.load(row_h_ptr + token) + rows
            tl.store(h_ptr + where, h, mask=rows < rank)


@triton.jit
def _shared(
    work, x_ptr, hs_ptr, shared_ptr, directory_ptr, swork_ptr, block_ptr, pair_rows_ptr, pair_ptr,
    row_slot_ptr, sites, first_site, hs_rows, hs_ranks,
    K: tl.constexpr, SLICES: tl.constexpr, SPLIT: tl.constexpr, BLOCK_K: tl.constexpr, VALUES: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    part = work % SPLIT
    packed = tl.load(swork_ptr + work // SPLIT)
    block, rank_block = packed >> 12, packed & 4095
    pair = tl.load(block_ptr + block * 4)
    first, count = tl.load(block_ptr + block * 4 + 1), tl.load(block_ptr + block * 4 + 2)
    held = tl.arange(0, BLOCK_T) < count
    token = tl.load(pair_rows_ptr + first + tl.arange(0, BLOCK_T), mask=held, other=0)
    slot = tl.load(row_slot_ptr + token, mask=held, other=0)
    origin = tl.full([BLOCK_T], -1, dtype=tl.int32)  # one place for all tenants of a pair and all slices of a GEMM
    stride = tl.zeros([BLOCK_T], dtype=tl.int32)
    for which in tl.static_range(SLICES):
        record = directory_ptr + (slot * sites + first_site + which) * RECORD
        mine = held & (tl.load(record + PAIR, mask=held, other=-1) == pair)
        origin = tl.maximum(origin, tl.load(record + A_OFFSET, mask=mine, other=-1))
        stride = tl.maximum(stride, tl.load(record + A_STRIDE, mask=mine, other=0))
    a_start = tl.max(origin)
    if a_start >= 0:  # a site that no tenant adapts costs nothing
        rank = tl.load(pair_ptr + pair * 8)
        a_first = a_start.to(tl.int64) * VALUES
        stride = tl.max(stride) * VALUES
        RUN: tl.constexpr = ((K + SPLIT - 1) // SPLIT + BLOCK_K - 1) // BLOCK_K * BLOCK_K
        rows = rank_block * BLOCK_R + tl.arange(0, BLOCK_R)
        total = tl.zeros([BLOCK_T, BLOCK_R], dtype=tl.float32)
        for step in range(0, RUN, BLOCK_K):
            k = part * RUN + step + tl.arange(0, BLOCK_K)
            x = tl.load(
                x_ptr + token.to(tl.int64)[:, None] * K + k[None, :], mask=held[:, None] & (k < K)[None, :], other=0.0
            )
            a = tl.load(
                shared_ptr + a_first + rows[None, :] * stride + k[:, None],
                mask=(rows < rank)[None, :] & (k < K)[:, None], other=0.0, eviction_policy="evict_last",
            )  # fmt: skip
            total = tl.dot(x, a, total, input_precision="ieee")
        where = (part * hs_rows + first + tl.arange(0, BLOCK_T)[:, None]) * hs_ranks + rows[None, :]
        tl.store(hs_ptr + where, total, mask=held[:, None] & (rows < rank)[None, :])


@triton.jit
def shrink_kernel(
    x_ptr, h_ptr, hs_ptr, shared_ptr, pages_ptr, page_map_ptr, directory_ptr, counts_ptr, row_slot_ptr, seg_slot_ptr,
    seg_start_ptr, seg_rows_ptr, row_h_ptr, work_ptr, swork_ptr, block_ptr, pair_rows_ptr, pair_ptr,
    sites, first_site, h_capacity, hs_rows, hs_ranks,
    K: tl.constexpr, SLICES: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
    SPLIT_S: tl.constexpr, BLOCK_K: tl.constexpr, VALUES: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr,
    HAS_OWNED: tl.constexpr, HAS_SHARED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """See `scute_compile.runtime_min.reference.shrink`. Programs take records in turn; the counts lie on the device."""
    if PDL:
        tlc.gdc_launch_dependents()  # the expand may load its own factors meanwhile; it waits for all of this grid
    owned = tl.load(counts_ptr) * SLICES * SPLIT
    shared = tl.load(counts_ptr + 1) * SPLIT_S
    for work in range(tl.program_id(0), owned + shared, tl.num_programs(0)):
        # shared records first: they are the longer ones
        if HAS_SHARED:
            if work < shared:
                _shared(
                    work, x_ptr, hs_ptr, shared_ptr, directory_ptr, swork_ptr, block_ptr, pair_rows_ptr,
                    pair_ptr, row_slot_ptr, sites, first_site, hs_rows, hs_ranks,
                    K, SLICES, SPLIT_S, BLOCK_K, VALUES, BLOCK_T, BLOCK_R,
                )  # fmt: skip
        if HAS_OWNED:
            if work >= shared:
                _owned(
                    work - shared, x_ptr, h_ptr, pages_ptr, page_map_ptr, directory_ptr, work_ptr, seg_slot_ptr,
                    seg_start_ptr, seg_rows_ptr, row_h_ptr, sites, first_site, h_capacity,
                    K, SLICES, SPLIT, ROWS, STEP, VALUES,
                )  # fmt: skip


@triton.jit
def scale_shared_kernel(
    hs_ptr, hd_ptr, pages_ptr, page_map_ptr, directory_ptr, block_ptr, pair_rows_ptr, pair_ptr, row_slot_ptr,
    sites, first_site, hs_rows, hs_ranks,
    SLICES: tl.constexpr, SPLIT: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr, VALUES: tl.constexpr,
    HALVES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`h * d` of the shared rows of each slice, the partial sums added in order: `(halves, slices, rows, ranks)`.

    It leaves the value's rounding to the pool's dtype and, for half precision, the rounding error as a second half: two
    products keep h to sixteen bits, since one rounding of it would show beside a bf16 reference.
    """
    block, inside, which = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if PDL:
        tlc.gdc_launch_dependents()
        tlc.gdc_wait()  # in every program: the expand after this grid relies on the shrink having ended too
    pair = tl.load(block_ptr + block * 4)
    first, count = tl.load(block_ptr + block * 4 + 1), tl.load(block_ptr + block * 4 + 2)
    if inside < count:
        row = first + inside
        slot = tl.load(row_slot_ptr + tl.load(pair_rows_ptr + row))
        record = directory_ptr + (slot * sites + first_site + which) * RECORD
        rank = tl.load(pair_ptr + pair * 8)
        own, d_offset = tl.load(record + OWN_PAGES), tl.load(record + D_OFFSET)
        if tl.load(record + PAIR) == pair:
            for start in range(0, rank, BLOCK_R):
                piece = start // VALUES + tl.arange(0, BLOCK_R // VALUES)
                rows = piece[:, None] * VALUES + tl.arange(0, VALUES)[None, :]
                d = load_row(
                    pages_ptr, page_map_ptr, own, d_offset + piece, (d_offset >= 0) & (piece * VALUES < rank), VALUES
                ).to(tl.float32)
                d = tl.where(d_offset >= 0, d, 1.0)
                h = tl.zeros([BLOCK_R // VALUES, VALUES], dtype=tl.float32)
                for part in tl.static_range(SPLIT):
                    h += tl.load(hs_ptr + (part * hs_rows + row) * hs_ranks + rows, mask=rows < rank, other=0.0)
                h *= d
                place = (which * hs_rows + row) * hs_ranks + rows
                high = h.to(hd_ptr.dtype.element_ty)
                tl.store(hd_ptr + place, high, mask=rows < rank)
                if HALVES == 2:
                    low = (h - high.to(tl.float32)).to(hd_ptr.dtype.element_ty)
                    tl.store(hd_ptr + SLICES * hs_rows * hs_ranks + place, low, mask=rows < rank)
