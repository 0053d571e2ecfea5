"""Decode expand: finishes the output of a fused GEMM in place.

`out = z + z * ds + b + ((h * d) B) * e` on the rows that have an adapter, in float32 with one rounding, where `z` is the
base's output plus the row's own delta row where its input was rotated. Owned factors: a program holds a run of B's
columns for one segment and multiplies in registers. Shared factors: sixteen tokens at once on tensor cores, from `h * d` that
`scale_shared` left in two halves. Partial sums of the shrink are added in their order; an element of the output is written by one program only.

With `PDL` the launch may begin while the shrink still runs: everything that doesn't depend on the shrink is loaded
before the wait.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda as tlc

from scute_compile.runtime_min.kernels.paging import (
    B_OFFSET,
    B_PAGES,
    B_STRIDE,
    DS_OFFSET,
    E_OFFSET,
    OWN_PAGES,
    PAIR,
    R_OFFSET,
    RANK,
    RECORD,
    SHIFT_OFFSET,
    load_row,
    load_rows,
    load_shift,
    load_values,
    slice_of,
)


@triton.jit
def _rows_in_turn(
    h_ptr, pages_ptr, page_map_ptr, first_page, offset, stride, granule, held, rank, h_capacity,
    SLICES: tl.constexpr, SPLIT: tl.constexpr, STEP: tl.constexpr, BLOCK_R: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Each thread owns its columns for all rows, and no sum crosses threads.

    Measured on an H200 (20 LoRA tenants, all 32 layers): 1.60 ms added; a tile of sixteen rows at once 3.53 ms.
    """
    total = tl.zeros([STEP, VALUES], dtype=tl.float32)
    for first in range(0, rank, BLOCK_R):
        for inside in tl.static_range(BLOCK_R):
            row = first + inside
            b = load_row(
                pages_ptr, page_map_ptr, first_page, offset + row * stride + granule, held & (row < rank), VALUES
            )
            h = tl.load(h_ptr + row, mask=row < rank, other=0.0)
            for part in tl.static_range(1, SPLIT):
                h += tl.load(h_ptr + part * SLICES * h_capacity + row, mask=row < rank, other=0.0)
            total += h * b.to(tl.float32)
    return total


@triton.jit
def _owned(
    work, y_ptr, h_ptr, bias_ptr, pages_ptr, page_map_ptr, directory_ptr, seg_slot_ptr, seg_start_ptr, seg_rows_ptr,
    row_h_ptr, rot_position_ptr, sites, first_site, h_capacity, tokens,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, SLICES: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, VALUES: tl.constexpr, HAS_ROTATION: tl.constexpr,
    HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    N: tl.constexpr = N0 + N1 + N2
    BLOCKS: tl.constexpr = tl.cdiv(N0, BLOCK_N) + tl.cdiv(N1, BLOCK_N) + tl.cdiv(N2, BLOCK_N)
    segment = work // BLOCKS
    which, column, width, origin = slice_of(work % BLOCKS, BLOCK_N, N0, N1, N2)
    slot = tl.load(seg_slot_ptr + segment)
    start, stop = tl.load(seg_start_ptr + segment), tl.load(seg_start_ptr + segment + 1)
    record = directory_ptr + (tl.maximum(slot, 0) * sites + first_site + which) * RECORD
    rank = tl.load(record + RANK)
    pair = tl.load(record + PAIR)
    first_page, offset, stride = tl.load(record + B_PAGES), tl.load(record + B_OFFSET), tl.load(record + B_STRIDE)
    own = tl.load(record + OWN_PAGES)
    ds_offset, shift_offset, r_offset = (
        tl.load(record + DS_OFFSET), tl.load(record + SHIFT_OFFSET), tl.load(record + R_OFFSET)
    )  # fmt: skip
    if slot < 0:
        rank, pair, ds_offset, shift_offset, r_offset = 0, -1, -1, -1, -1
    touched = (rank > 0) | (ds_offset >= 0) | (shift_offset >= 0) | (r_offset >= 0) | HAS_BIAS
    if touched & (pair < 0):
        STEP: tl.constexpr = BLOCK_N // VALUES
        granule = column // VALUES + tl.arange(0, STEP)
        held = granule * VALUES < width
        index = granule[:, None] * VALUES + tl.arange(0, VALUES)[None, :]
        inside = index < width
        scale = tl.full([STEP, VALUES], 1.0, dtype=tl.float32)
        if ds_offset >= 0:
            scale += load_row(pages_ptr, page_map_ptr, own, ds_offset + granule, held, VALUES).to(tl.float32)
        if PDL:
            tlc.gdc_wait()
        for position in range(start, stop):
            token = tl.load(seg_rows_ptr + position).to(tl.int64)
            where = token * N + origin + index
            z = tl.load(y_ptr + where, mask=inside, other=0.0).to(tl.float32)
            if HAS_BIAS:
                z += tl.load(bias_ptr + origin + index, mask=inside, other=0.0).to(tl.float32)
            if HAS_ROTATION:
                if r_offset >= 0:
                    row = (tokens + tl.load(rot_position_ptr + token) * SLICES + which).to(tl.int64)
                    z += tl.load(y_ptr + row * N + origin + index, mask=inside, other=0.0).to(tl.float32)
            total = z * scale
            if shift_offset >= 0:
                total += load_shift(pages_ptr, page_map_ptr, own, shift_offset, index, inside)
            if rank > 0:
                mine = h_ptr + which * h_capacity + tl.load(row_h_ptr + token)
                total += _rows_in_turn(
                    mine, pages_ptr, page_map_ptr, first_page, offset, stride, granule, held, rank, h_capacity,
                    SLICES, SPLIT, STEP, BLOCK_R, VALUES,
                )  # fmt: skip
            tl.store(y_ptr + where, total.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _shared(
    work, y_ptr, hd_ptr, bias_ptr, shared_ptr, pages_ptr, page_map_ptr, directory_ptr, block_ptr, pair_rows_ptr,
    pair_ptr, row_slot_ptr, rot_position_ptr, sites, first_site, hs_rows, hs_ranks, tokens,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, SLICES: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr, VALUES: tl.constexpr,
    HAS_ROTATION: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    N: tl.constexpr = N0 + N1 + N2
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
    b_start = tl.max(tl.load(record + B_OFFSET, mask=mine, other=-1))  # one place for all tenants of a pair
    if b_start >= 0:
        own = tl.load(record + OWN_PAGES, mask=mine, other=0)
        e_offset = tl.load(record + E_OFFSET, mask=mine, other=-1)
        rank = tl.load(pair_ptr + pair * 8)
        b_first = b_start.to(tl.int64) * VALUES
        stride = tl.max(tl.load(record + B_STRIDE, mask=mine, other=0)) * VALUES
        columns = column + tl.arange(0, BLOCK_N)
        in_slice = columns < width
        inside = mine[:, None] & in_slice[None, :]
        granule = column // VALUES + tl.arange(0, BLOCK_N // VALUES)
        has_e = mine & (e_offset >= 0)
        e = load_rows(
            pages_ptr, page_map_ptr, own[:, None], e_offset[:, None] + granule[None, :],
            has_e[:, None] & (granule * VALUES < width)[None, :], VALUES,
        )  # fmt: skip
        e = tl.where(has_e[:, None], tl.reshape(e, [BLOCK_T, BLOCK_N]).to(tl.float32), 1.0)
        if PDL:
            tlc.gdc_wait()
        total = tl.zeros([BLOCK_T, BLOCK_N], dtype=tl.float32)
        place_h = (which * hs_rows + first + tl.arange(0, BLOCK_T))[:, None] * hs_ranks
        for step in range(0, rank, BLOCK_R):
            rows = step + tl.arange(0, BLOCK_R)
            b = tl.load(
                shared_ptr + b_first + rows[:, None] * stride + columns[None, :],
                mask=(rows < rank)[:, None] & in_slice[None, :], other=0.0, eviction_policy="evict_last",
            )  # fmt: skip
            both = mine[:, None] & (rows < rank)[None, :]
            high = tl.load(hd_ptr + place_h + rows[None, :], mask=both, other=0.0)
            total = tl.dot(high, b, total, input_precision="ieee")
            if b.dtype != tl.float32:
                low = tl.load(hd_ptr + SLICES * hs_rows * hs_ranks + place_h + rows[None, :], mask=both, other=0.0)
                total = tl.dot(low, b, total)
        total *= e
        place = token.to(tl.int64)[:, None] * N + origin + columns[None, :]
        z = tl.load(y_ptr + place, mask=inside, other=0.0).to(tl.float32)
        if HAS_BIAS:
            z += tl.load(bias_ptr + origin + columns, mask=in_slice, other=0.0).to(tl.float32)[None, :]
        if HAS_ROTATION:
            turned = inside & (tl.load(record + R_OFFSET, mask=mine, other=-1) >= 0)[:, None]
            row = (tokens + tl.load(rot_position_ptr + token, mask=mine, other=0) * SLICES + which).to(tl.int64)
            z += tl.load(y_ptr + row[:, None] * N + origin + columns[None, :], mask=turned, other=0.0).to(tl.float32)
        ds_offset = tl.load(record + DS_OFFSET, mask=mine, other=-1)
        if tl.max(ds_offset) >= 0:
            has = inside & (ds_offset >= 0)[:, None]
            ds = load_values(pages_ptr, page_map_ptr, own[:, None], ds_offset[:, None], columns[None, :], has, VALUES)
            total += z * ds.to(tl.float32)
        shift_offset = tl.load(record + SHIFT_OFFSET, mask=mine, other=-1)
        if tl.max(shift_offset) >= 0:
            has = inside & (shift_offset >= 0)[:, None]
            total += load_shift(pages_ptr, page_map_ptr, own[:, None], shift_offset[:, None], columns[None, :], has)
        tl.store(y_ptr + place, (z + total).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def expand_kernel(
    y_ptr, h_ptr, hd_ptr, bias_ptr, shared_ptr, pages_ptr, page_map_ptr, directory_ptr, counts_ptr, row_slot_ptr,
    seg_slot_ptr, seg_start_ptr, seg_rows_ptr, row_h_ptr, block_ptr, pair_rows_ptr, pair_ptr, rot_position_ptr,
    sites, first_site, h_capacity, hs_rows, hs_ranks, tokens,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, SLICES: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_NS: tl.constexpr,
    BLOCK_RS: tl.constexpr, BLOCK_T: tl.constexpr, VALUES: tl.constexpr,
    HAS_SHARED: tl.constexpr, HAS_ROTATION: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """See `scute_compile.runtime_min.reference.apply_site`. Programs take records of work in turn."""
    OWNED: tl.constexpr = tl.cdiv(N0, BLOCK_N) + tl.cdiv(N1, BLOCK_N) + tl.cdiv(N2, BLOCK_N)
    SHARED: tl.constexpr = tl.cdiv(N0, BLOCK_NS) + tl.cdiv(N1, BLOCK_NS) + tl.cdiv(N2, BLOCK_NS)
    segments = tl.load(counts_ptr + 2)
    if HAS_BIAS:
        segments += tl.load(counts_ptr + 6)  # the base's own rows need the bias too
    shared = 0
    if HAS_SHARED:
        shared = tl.load(counts_ptr + 3) * SHARED
    for work in range(tl.program_id(0), segments * OWNED + shared, tl.num_programs(0)):
        if HAS_SHARED:
            if work < shared:
                _shared(
                    work, y_ptr, hd_ptr, bias_ptr, shared_ptr, pages_ptr, page_map_ptr, directory_ptr, block_ptr,
                    pair_rows_ptr, pair_ptr, row_slot_ptr, rot_position_ptr, sites, first_site, hs_rows, hs_ranks, tokens,
                    N0, N1, N2, SLICES, BLOCK_NS, BLOCK_RS, BLOCK_T, VALUES, HAS_ROTATION, HAS_BIAS, PDL,
                )  # fmt: skip
            else:
                _owned(
                    work - shared, y_ptr, h_ptr, bias_ptr, pages_ptr, page_map_ptr, directory_ptr, seg_slot_ptr,
                    seg_start_ptr, seg_rows_ptr, row_h_ptr, rot_position_ptr, sites, first_site, h_capacity, tokens,
                    N0, N1, N2, SLICES, SPLIT, BLOCK_N, BLOCK_R, VALUES, HAS_ROTATION, HAS_BIAS, PDL,
                )  # fmt: skip
        else:
            _owned(
                work, y_ptr, h_ptr, bias_ptr, pages_ptr, page_map_ptr, directory_ptr, seg_slot_ptr, seg_start_ptr,
                seg_rows_ptr, row_h_ptr, rot_position_ptr, sites, first_site, h_capacity, tokens,
                N0, N1, N2, SLICES, SPLIT, BLOCK_N, BLOCK_R, VALUES, HAS_ROTATION, HAS_BIAS, PDL,
            )  # fmt: skip
    if PDL:
        tlc.gdc_wait()  # also where there was no work: what follows this grid relies on the shrink having ended
