"""Decode expand: finishes the output of a fused GEMM in place.

`out = z + z * ds + b + ((h * d) B) * e` on the rows that have an adapter, in float32 with one rounding, where `z` is the
base's output plus the row's delta row where its input was rotated. An element of the output is written by one program
only, so no atomics are needed and results repeat to the bit.

Owned factors: a program holds a run of B's columns for one row and multiplies in registers. Tiles are wide or tall:
wide tiles have a granule of columns per thread and add rows inside each thread; tall tiles, for large ranks, spread
rows over threads, so that more loads are in flight at once.
Shared factors: sixteen tokens at once on tensor cores, with `h * d` in two halves, since one rounding of it would be
visible beside a bf16 reference.

With `PDL` the launch begins while the shrink still runs: all that does not depend on the shrink, mainly B, is loaded
before the wait. Barriers keep the compiler from sinking those loads to where they are used.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda as tlc

from scute_compile.runtime_min.step.kernels.paging import (
    B_OFFSET,
    B_PAGES,
    B_STRIDE,
    DIR_FIELDS,
    DS_OFFSET,
    E_OFFSET,
    OWN_PAGES,
    PAIR,
    R_OFFSET,
    RANK,
    SHIFT_OFFSET,
    field,
    in_page,
    load_granules,
    load_row,
    load_rows,
    load_shift,
    load_values,
    page_of,
    slice_of,
)


@triton.jit
def _segment(
    work, segment_ptr, directory_ptr, sites, first_site, N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return a program's columns, its adapter and segment, and the adapter's directory row at the site."""
    BLOCKS: tl.constexpr = tl.cdiv(N0, BLOCK_N) + tl.cdiv(N1, BLOCK_N) + tl.cdiv(N2, BLOCK_N)
    segment = segment_ptr + work // BLOCKS * 4
    which, column, width, origin = slice_of(work % BLOCKS, BLOCK_N, N0, N1, N2)
    adapter = tl.load(segment)
    dir_row = directory_ptr + (tl.maximum(adapter, 0) * sites + first_site + which) * DIR_FIELDS
    return which, column, width, origin, adapter, segment, dir_row


@triton.jit
def _base(
    y_ptr, bias_ptr, rot_position_ptr, token, which, origin, index, inside, rotated, tokens,
    N: tl.constexpr, SLICES: tl.constexpr, HAS_ROTATION: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Return the base's output of one row in float32: with the bias, and the delta row where the input was `rotated`."""
    z = tl.load(y_ptr + token * N + origin + index, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        z += tl.load(bias_ptr + origin + index, mask=inside, other=0.0).to(tl.float32)
    if HAS_ROTATION:
        if rotated:
            row = (tokens + tl.load(rot_position_ptr + token) * SLICES + which).to(tl.int64)
            z += tl.load(y_ptr + row * N + origin + index, mask=inside, other=0.0).to(tl.float32)
    return z


@triton.jit
def _partial_sums(h_ptr, rows, mask, PART, SPLIT: tl.constexpr):
    """Return the shrink's result, its partial sums added in order."""
    h = tl.load(h_ptr + rows, mask=mask, other=0.0)
    for part in tl.static_range(1, SPLIT):
        h += tl.load(h_ptr + part * PART + rows, mask=mask, other=0.0)
    return h


@triton.jit
def _wide(
    work, y_ptr, h_ptr, bias_ptr, pages_ptr, page_map_ptr, directory_ptr, segment_ptr, rot_position_ptr,
    sites, first_site, h_capacity, tokens,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, SLICES: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_N: tl.constexpr, ROWS: tl.constexpr, VALUES: tl.constexpr, HAS_TALL: tl.constexpr,
    HAS_ROTATION: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Finish columns of one row: a thread has a granule of columns and up to `ROWS` rows of B, so no sum crosses threads.

    The rows are a tuple, since a tile of rows would be converted to float32 as a whole, in twice the registers.
    """
    N: tl.constexpr = N0 + N1 + N2
    which, column, width, origin, adapter, segment, dir_row = _segment(
        work, segment_ptr, directory_ptr, sites, first_site, N0, N1, N2, BLOCK_N
    )
    token, h_row = tl.load(segment + 1).to(tl.int64), tl.load(segment + 2)
    rank, pair, own_page = field(dir_row, RANK), field(dir_row, PAIR), field(dir_row, OWN_PAGES)
    first_page, offset, stride = field(dir_row, B_PAGES), field(dir_row, B_OFFSET), field(dir_row, B_STRIDE)
    ds_offset, shift_offset, r_offset = (
        field(dir_row, DS_OFFSET),
        field(dir_row, SHIFT_OFFSET),
        field(dir_row, R_OFFSET),
    )
    if adapter < 0:
        rank, pair, ds_offset, shift_offset, r_offset = 0, -1, -1, -1, -1
    wanted = (rank > 0) | (ds_offset >= 0) | (shift_offset >= 0) | (r_offset >= 0) | HAS_BIAS
    wanted = wanted & (pair < 0) & (token >= 0)
    if HAS_TALL:
        wanted = wanted & (rank <= ROWS)
    if wanted:
        STEP: tl.constexpr = BLOCK_N // VALUES
        granule = column // VALUES + tl.arange(0, STEP)
        held = granule * VALUES < width
        index = granule[:, None] * VALUES + tl.arange(0, VALUES)[None, :]
        inside = index < width
        pages = ()
        for row in tl.static_range(ROWS):
            pages = pages + (page_of(page_map_ptr, first_page, offset + row * stride + granule, held & (row < rank)),)
        has_ds = held & (ds_offset >= 0)
        ds_page = page_of(page_map_ptr, own_page, ds_offset + granule, has_ds)
        tl.debug_barrier()
        b = ()
        for row in tl.static_range(ROWS):
            where = in_page(pages[row], offset + row * stride + granule)
            b = b + (load_granules(pages_ptr, where, held & (row < rank), VALUES),)
        ds = load_granules(pages_ptr, in_page(ds_page, ds_offset + granule), has_ds, VALUES)
        tl.debug_barrier()
        if PDL:
            tlc.gdc_wait()
        z = _base(
            y_ptr, bias_ptr, rot_position_ptr, token, which, origin, index, inside, r_offset >= 0, tokens,
            N, SLICES, HAS_ROTATION, HAS_BIAS,
        )  # fmt: skip
        h_first = h_ptr + which * h_capacity + h_row
        total = z + z * ds.to(tl.float32)
        for row in tl.static_range(ROWS):
            total += _partial_sums(h_first, row, row < rank, SLICES * h_capacity, SPLIT) * b[row].to(tl.float32)
        if shift_offset >= 0:
            total += load_shift(pages_ptr, page_map_ptr, own_page, shift_offset, index, inside)
        tl.store(y_ptr + token * N + origin + index, total.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _tall(
    work, y_ptr, h_ptr, bias_ptr, pages_ptr, page_map_ptr, directory_ptr, segment_ptr, rot_position_ptr,
    sites, first_site, h_capacity, tokens,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, SLICES: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, ROWS: tl.constexpr, VALUES: tl.constexpr,
    HAS_ROTATION: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Finish few columns of one row, by `BLOCK_R` rows of B at a time over all threads, for ranks above `ROWS`."""
    N: tl.constexpr = N0 + N1 + N2
    which, column, width, origin, adapter, segment, dir_row = _segment(
        work, segment_ptr, directory_ptr, sites, first_site, N0, N1, N2, BLOCK_N
    )
    token, h_row = tl.load(segment + 1).to(tl.int64), tl.load(segment + 2)
    rank, own_page = field(dir_row, RANK), field(dir_row, OWN_PAGES)
    first_page, offset, stride = field(dir_row, B_PAGES), field(dir_row, B_OFFSET), field(dir_row, B_STRIDE)
    ds_offset, shift_offset, r_offset = (
        field(dir_row, DS_OFFSET),
        field(dir_row, SHIFT_OFFSET),
        field(dir_row, R_OFFSET),
    )
    if (adapter >= 0) & (rank > ROWS) & (field(dir_row, PAIR) < 0):
        STEP: tl.constexpr = BLOCK_N // VALUES
        granule = column // VALUES + tl.arange(0, STEP)
        held = granule * VALUES < width
        index = granule[:, None] * VALUES + tl.arange(0, VALUES)[None, :]
        inside = index < width
        rows = tl.arange(0, BLOCK_R)
        b = load_rows(
            pages_ptr, page_map_ptr, first_page, offset + rows[:, None] * stride + granule[None, :],
            (rows < rank)[:, None] & held[None, :], VALUES,
        )  # fmt: skip
        scale = tl.full([STEP, VALUES], 1.0, dtype=tl.float32)
        if ds_offset >= 0:
            scale += load_row(pages_ptr, page_map_ptr, own_page, ds_offset + granule, held, VALUES).to(tl.float32)
        if PDL:
            tlc.gdc_wait()
        z = _base(
            y_ptr, bias_ptr, rot_position_ptr, token, which, origin, index, inside, r_offset >= 0, tokens,
            N, SLICES, HAS_ROTATION, HAS_BIAS,
        )  # fmt: skip
        h_first = h_ptr + which * h_capacity + h_row
        h = _partial_sums(h_first, rows, rows < rank, SLICES * h_capacity, SPLIT)
        total = z * scale + tl.sum(h[:, None, None] * b.to(tl.float32), axis=0)
        for first in range(BLOCK_R, rank, BLOCK_R):
            later = first + rows
            more = load_rows(
                pages_ptr, page_map_ptr, first_page, offset + later[:, None] * stride + granule[None, :],
                (later < rank)[:, None] & held[None, :], VALUES,
            )  # fmt: skip
            h = _partial_sums(h_first, later, later < rank, SLICES * h_capacity, SPLIT)
            total += tl.sum(h[:, None, None] * more.to(tl.float32), axis=0)
        if shift_offset >= 0:
            total += load_shift(pages_ptr, page_map_ptr, own_page, shift_offset, index, inside)
        tl.store(y_ptr + token * N + origin + index, total.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def in_halves(total, h, b):
    """Add `h B` on tensor cores, with h in two halves of B's dtype: its rounding, and the remainder."""
    high = h.to(b.dtype)
    total = tl.dot(high, b, total, input_precision="ieee")
    if b.dtype != tl.float32:
        total = tl.dot((h - high.to(tl.float32)).to(b.dtype), b, total)
    return total


@triton.jit
def _times_shared_b(
    h_first, b_first, stride, rank, of_pair, in_slice,
    SPLIT: tl.constexpr, PART: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, WRITTEN: tl.constexpr,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Return `(h * d) B` of a tile `(BLOCK_T, BLOCK_N)`; the shrink wrote whole blocks of `WRITTEN` ranks."""
    rows = tl.arange(0, BLOCK_R)
    written = tl.cdiv(rank, WRITTEN) * WRITTEN
    total = tl.zeros([BLOCK_T, BLOCK_N], dtype=tl.float32)
    for step in range(0, rank, BLOCK_R):
        mask = (step + rows < rank)[:, None] & in_slice[None, :]
        b = tl.load(b_first + (step + rows)[:, None] * stride, mask=mask, other=0.0, eviction_policy="evict_last")
        both = of_pair[:, None] & (step + rows < written)[None, :]
        h = _partial_sums(h_first, (step + rows)[None, :], both, PART, SPLIT)
        total = in_halves(total, h, b)
    return total


@triton.jit
def _e_of(
    pages_ptr, page_map_ptr, own_page, offset, of_pair, column, width,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Return each row's e in float32, `(BLOCK_T, BLOCK_N)`; ones where it has none."""
    granule = column // VALUES + tl.arange(0, BLOCK_N // VALUES)
    has = of_pair & (offset >= 0)
    e = load_rows(
        pages_ptr, page_map_ptr, own_page[:, None], offset[:, None] + granule[None, :],
        has[:, None] & (granule * VALUES < width)[None, :], VALUES,
    )  # fmt: skip
    return tl.where(has[:, None], tl.reshape(e, [BLOCK_T, BLOCK_N]).to(tl.float32), 1.0)


@triton.jit
def _shared(
    work, y_ptr, hs_ptr, bias_ptr, shared_ptr, pages_ptr, page_map_ptr, directory_ptr, block_ptr, pair_rows_ptr,
    pair_adapters_ptr, pair_ptr, rot_position_ptr, sites, first_site, tokens,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, SLICES: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, WRITTEN: tl.constexpr, BLOCK_T: tl.constexpr,
    HS_ROWS: tl.constexpr, HS_RANKS: tl.constexpr, VALUES: tl.constexpr, HAS_ROTATION: tl.constexpr,
    HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Finish columns of up to sixteen rows of a shared pair."""
    N: tl.constexpr = N0 + N1 + N2
    BLOCKS: tl.constexpr = tl.cdiv(N0, BLOCK_N) + tl.cdiv(N1, BLOCK_N) + tl.cdiv(N2, BLOCK_N)
    block = block_ptr + work // BLOCKS * 4
    which, column, width, origin = slice_of(work % BLOCKS, BLOCK_N, N0, N1, N2)
    pair, first, count = tl.load(block), tl.load(block + 1), tl.load(block + 2)
    places = tl.arange(0, BLOCK_T)
    held = places < count
    token = tl.load(pair_rows_ptr + first + places, mask=held, other=0)
    adapter = tl.load(pair_adapters_ptr + first + places, mask=held, other=0)
    rank = tl.load(pair_ptr + pair * 8)
    dir_row = directory_ptr + (adapter * sites + first_site + which) * DIR_FIELDS
    of_pair = held & (field(dir_row, PAIR, held, -1) == pair)
    b_start = tl.max(field(dir_row, B_OFFSET, of_pair, -1))  # the same for all tenants of a pair
    if b_start >= 0:
        stride = tl.max(field(dir_row, B_STRIDE, of_pair, 0)) * VALUES
        columns = column + tl.arange(0, BLOCK_N)
        in_slice = columns < width
        inside = of_pair[:, None] & in_slice[None, :]
        b_first = shared_ptr + b_start.to(tl.int64) * VALUES + columns[None, :]
        own_page, e_offset = field(dir_row, OWN_PAGES, of_pair, 0), field(dir_row, E_OFFSET, of_pair, -1)
        ds_offset, shift_offset = field(dir_row, DS_OFFSET, of_pair, -1), field(dir_row, SHIFT_OFFSET, of_pair, -1)
        e = _e_of(pages_ptr, page_map_ptr, own_page, e_offset, of_pair, column, width, BLOCK_T, BLOCK_N, VALUES)
        tl.debug_barrier()
        if PDL:
            tlc.gdc_wait()
        where = token.to(tl.int64)[:, None] * N + origin + columns[None, :]
        z = tl.load(y_ptr + where, mask=inside, other=0.0).to(tl.float32)
        if HAS_BIAS:
            z += tl.load(bias_ptr + origin + columns, mask=in_slice, other=0.0).to(tl.float32)[None, :]
        if HAS_ROTATION:
            rotated = inside & (field(dir_row, R_OFFSET, of_pair, -1) >= 0)[:, None]
            row = (tokens + tl.load(rot_position_ptr + token, mask=of_pair, other=0) * SLICES + which).to(tl.int64)
            z += tl.load(y_ptr + row[:, None] * N + origin + columns[None, :], mask=rotated, other=0.0).to(tl.float32)
        h_first = hs_ptr + (which * SPLIT * HS_ROWS + first + places)[:, None] * HS_RANKS
        total = _times_shared_b(
            h_first, b_first, stride, rank, of_pair, in_slice,
            SPLIT, HS_ROWS * HS_RANKS, BLOCK_N, BLOCK_R, WRITTEN, BLOCK_T,
        )  # fmt: skip
        total *= e
        if tl.max(ds_offset) >= 0:
            has = inside & (ds_offset >= 0)[:, None]
            ds = load_values(
                pages_ptr, page_map_ptr, own_page[:, None], ds_offset[:, None], columns[None, :], has, VALUES
            )
            total += z * ds.to(tl.float32)
        if tl.max(shift_offset) >= 0:
            has = inside & (shift_offset >= 0)[:, None]
            total += load_shift(
                pages_ptr, page_map_ptr, own_page[:, None], shift_offset[:, None], columns[None, :], has
            )
        tl.store(y_ptr + where, (z + total).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["first_site", "h_capacity", "tokens", "shared_programs", "tall_programs"])
def expand_kernel(
    y_ptr, h_ptr, hs_ptr, bias_ptr, shared_ptr, pages_ptr, page_map_ptr, directory_ptr, counts_ptr, segment_ptr,
    tall_ptr, block_ptr, pair_rows_ptr, pair_adapters_ptr, pair_ptr, rot_position_ptr,
    sites, first_site, h_capacity, tokens, shared_programs, tall_programs,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, SLICES: tl.constexpr, SPLIT: tl.constexpr,
    SPLIT_S: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, BLOCK_N_TALL: tl.constexpr,
    BLOCK_R_TALL: tl.constexpr, BLOCK_N_S: tl.constexpr, BLOCK_R_S: tl.constexpr, WRITTEN: tl.constexpr,
    BLOCK_T: tl.constexpr, HS_ROWS: tl.constexpr, HS_RANKS: tl.constexpr, VALUES: tl.constexpr,
    HAS_SHARED: tl.constexpr, HAS_TALL: tl.constexpr, HAS_ROTATION: tl.constexpr, HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """See `scute_compile.runtime_min.reference.apply_site`.

    Programs of shared blocks come first, since they take longest, then those of large ranks, then those of
    segments, one work item each: a loop over items would load its bound before everything else. Segments of large ranks
    are few and their number is on the device, so each of their programs takes several.
    """
    work = tl.program_id(0)
    if work >= shared_programs + tall_programs:
        _wide(
            work - shared_programs - tall_programs, y_ptr, h_ptr, bias_ptr, pages_ptr, page_map_ptr, directory_ptr,
            segment_ptr, rot_position_ptr, sites, first_site, h_capacity, tokens,
            N0, N1, N2, SLICES, SPLIT, BLOCK_N, ROWS, VALUES, HAS_TALL, HAS_ROTATION, HAS_BIAS, PDL,
        )  # fmt: skip
    elif work >= shared_programs:
        if HAS_TALL:
            TALL: tl.constexpr = tl.cdiv(N0, BLOCK_N_TALL) + tl.cdiv(N1, BLOCK_N_TALL) + tl.cdiv(N2, BLOCK_N_TALL)
            for tall in range(work - shared_programs, tl.load(counts_ptr) * TALL, tall_programs):
                _tall(
                    tall, y_ptr, h_ptr, bias_ptr, pages_ptr, page_map_ptr, directory_ptr, tall_ptr, rot_position_ptr,
                    sites, first_site, h_capacity, tokens,
                    N0, N1, N2, SLICES, SPLIT, BLOCK_N_TALL, BLOCK_R_TALL, ROWS, VALUES, HAS_ROTATION, HAS_BIAS, PDL,
                )  # fmt: skip
    elif HAS_SHARED:
        _shared(
            work, y_ptr, hs_ptr, bias_ptr, shared_ptr, pages_ptr, page_map_ptr, directory_ptr, block_ptr,
            pair_rows_ptr, pair_adapters_ptr, pair_ptr, rot_position_ptr, sites, first_site, tokens,
            N0, N1, N2, SLICES, SPLIT_S, BLOCK_N_S, BLOCK_R_S, WRITTEN, BLOCK_T, HS_ROWS, HS_RANKS, VALUES,
            HAS_ROTATION, HAS_BIAS, PDL,
        )  # fmt: skip
    if PDL:
        tlc.gdc_wait()  # also without work: the next grid relies on the shrink having ended
