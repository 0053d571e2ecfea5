"""Prefill kernels: many rows per adapter, so all products run on tensor cores over tiles of one adapter's tokens.

`prefill_rotate` writes delta rows below a copy of x, as in decode, and reads each of R's blocks once per tile.
`prefill_shrink` writes `h * d`; `prefill_expand` multiplies by B and finishes its output tile: base, ds, b and e in
float32, one rounding. The directory row holds the addresses of owned factors and of shared ones.
"""

from __future__ import annotations

import triton
import triton.language as tl

from scute_compile.runtime_min.step.kernels.expand import in_halves
from scute_compile.runtime_min.step.kernels.paging import (
    A_OFFSET,
    A_PAGES,
    A_STRIDE,
    B_OFFSET,
    B_PAGES,
    B_STRIDE,
    D_OFFSET,
    DIR_FIELDS,
    DS_OFFSET,
    E_OFFSET,
    OWN_PAGES,
    PAIR,
    R_BLOCK,
    R_OFFSET,
    R_SHARED,
    RANK,
    SHIFT_OFFSET,
    load_rows,
    load_shift,
    load_values,
    place,
    slice_of,
)


@triton.jit
def _blocks_of(
    own_page, offset, block, repeats, start, column, pages_ptr, page_map_ptr, K: tl.constexpr, BLOCK_C: tl.constexpr,
    VALUES: tl.constexpr,
):  # fmt: skip
    """Return R - I of `BLOCK_C` inputs and as many outputs: stored blocks on the diagonal, zeros elsewhere."""
    k = start + tl.arange(0, BLOCK_C)
    first = column + tl.arange(0, BLOCK_C // VALUES) * VALUES  # a granule lies in one block
    stored = tl.where(repeats, 0, first // block) * block
    where = offset + ((stored[None, :] + (k % block)[:, None]) * block + (first % block)[None, :]) // VALUES
    mask = ((k // block)[:, None] == (first // block)[None, :]) & (first < K)[None, :] & (k < K)[:, None]
    at = place(page_map_ptr, own_page, where, mask)[:, :, None] * VALUES + tl.arange(0, VALUES)[None, None, :]
    at = tl.max_contiguous(tl.multiple_of(at, [1, 1, VALUES]), [1, 1, VALUES])
    return tl.reshape(tl.load(pages_ptr + at, mask=mask[:, :, None], other=0.0), [BLOCK_C, BLOCK_C])


@triton.jit
def _rotated(
    x_row, own_page, offset, block, repeats, column, held, pages_ptr, page_map_ptr, K: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Return `x (R - I)` of a tile `(BLOCK_T, BLOCK_C)`, where blocks of R extend beyond the tile."""
    total = tl.zeros([BLOCK_T, BLOCK_C], dtype=tl.float32)
    for start in range(column // block * block, tl.minimum(K, column + BLOCK_C + block - 1) // block * block, BLOCK_C):
        k = start + tl.arange(0, BLOCK_C)
        x = tl.load(x_row[:, None] + k[None, :], mask=held[:, None] & (k < K)[None, :], other=0.0)
        factor = _blocks_of(
            own_page, offset, block, repeats, start, column, pages_ptr, page_map_ptr, K, BLOCK_C, VALUES
        )
        total = tl.dot(x, factor, total, input_precision="ieee")
    return total


@triton.jit
def _rest(
    x_ptr, out_ptr, rot_position_ptr, rows, begin, tokens,
    K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Copy the rows of a run that no adapter rotates."""
    row = rows * BLOCK_T + tl.arange(0, BLOCK_T)
    plain = tl.load(rot_position_ptr + row, mask=row < tokens, other=0) < 0
    for step in range(STEPS):
        columns = begin + step * BLOCK_C + tl.arange(0, BLOCK_C)
        mask = plain[:, None] & (columns < K)[None, :]
        where = row.to(tl.int64)[:, None] * K + columns[None, :]
        tl.store(out_ptr + where, tl.load(x_ptr + where, mask=mask), mask=mask)


@triton.jit
def _any_delta(
    x_row, copy_row, copies, out_row, dir_row, begin, held, pages_ptr, page_map_ptr,
    K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, STEPS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Write `x (R - I)` of one slice with any blocks, or zeros at a site without R, and a copy of x."""
    own_page, offset, block = tl.load(dir_row + OWN_PAGES), tl.load(dir_row + R_OFFSET), tl.load(dir_row + R_BLOCK)
    repeats = tl.load(dir_row + R_SHARED) > 0
    for step in range(STEPS):
        column = begin + step * BLOCK_C
        columns = column + tl.arange(0, BLOCK_C)
        mask = held[:, None] & (columns < K)[None, :]
        x = tl.load(x_row[:, None] + columns[None, :], mask=mask, other=0.0)
        tl.store(copy_row[:, None] + columns[None, :], x, mask=mask & copies)
        total = tl.zeros([BLOCK_T, BLOCK_C], dtype=tl.float32)
        if block == 1:
            delta = load_values(pages_ptr, page_map_ptr, own_page, offset, columns, columns < K, VALUES)
            total = x.to(tl.float32) * delta.to(tl.float32)[None, :]
        elif offset >= 0:
            total = _rotated(
                x_row, own_page, offset, block, repeats, column, held, pages_ptr, page_map_ptr, K, BLOCK_T, BLOCK_C, VALUES,
            )  # fmt: skip
        tl.store(out_row[:, None] + columns[None, :], total.to(out_row.dtype.element_ty), mask=mask)


@triton.jit
def _deltas(
    x_row, copy_row, out_row, dir_row, begin, held, pages_ptr, page_map_ptr,
    K: tl.constexpr, SLICES: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, STEPS: tl.constexpr,
    VALUES: tl.constexpr,
):  # fmt: skip
    """Write a copy of x and `x (R - I)` of all slices, if all blocks divide a tile's columns; x is read once."""
    own_pages, offsets, blocks, repeats = (), (), (), ()
    for which in tl.static_range(SLICES):
        site = dir_row + which * DIR_FIELDS
        own_pages, offsets = own_pages + (tl.load(site + OWN_PAGES),), offsets + (tl.load(site + R_OFFSET),)
        blocks, repeats = blocks + (tl.load(site + R_BLOCK),), repeats + (tl.load(site + R_SHARED) > 0,)
    for step in range(STEPS):
        column = begin + step * BLOCK_C
        columns = column + tl.arange(0, BLOCK_C)
        mask = held[:, None] & (columns < K)[None, :]
        x = tl.load(x_row[:, None] + columns[None, :], mask=mask, other=0.0)
        tl.store(copy_row[:, None] + columns[None, :], x, mask=mask)
        for which in tl.static_range(SLICES):
            factor = _blocks_of(
                own_pages[which], offsets[which], blocks[which], repeats[which], column, column, pages_ptr, page_map_ptr,
                K, BLOCK_C, VALUES,
            )  # fmt: skip
            total = tl.dot(x, factor, input_precision="ieee")
            target = (out_row + which * K)[:, None] + columns[None, :]
            tl.store(target, total.to(out_row.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["first_site", "tokens", "tiles"])
def prefill_rotate_kernel(
    x_ptr, out_ptr, pages_ptr, page_map_ptr, directory_ptr, tile_ptr, seg_rows_ptr, rot_position_ptr, sites, first_site,
    tokens, tiles,
    K: tl.constexpr, SLICES: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, STEPS: tl.constexpr,
    VALUES: tl.constexpr,
):  # fmt: skip
    """See `scute_compile.runtime_min.reference.rotate`. Grid: tiles, then runs of rows; columns."""
    item, begin = tl.program_id(0), tl.program_id(1) * BLOCK_C * STEPS
    if item >= tiles:
        _rest(x_ptr, out_ptr, rot_position_ptr, item - tiles, begin, tokens, K, BLOCK_T, BLOCK_C, STEPS)
    else:
        tile = tile_ptr + item * 4
        adapter, first, count = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
        held = tl.arange(0, BLOCK_T) < count
        token = tl.load(seg_rows_ptr + first + tl.arange(0, BLOCK_T), mask=held, other=0).to(tl.int64)
        rotated = tl.load(rot_position_ptr + token, mask=held, other=-1)
        if (adapter >= 0) & (tl.max(rotated) >= 0):
            dir_row = directory_ptr + (adapter * sites + first_site) * DIR_FIELDS
            x_row, copy_row = x_ptr + token * K, out_ptr + token * K
            out_row = out_ptr + (tokens + rotated * SLICES).to(tl.int64) * K
            whole = True
            for number in tl.static_range(SLICES):
                offset, block = (
                    tl.load(dir_row + number * DIR_FIELDS + R_OFFSET),
                    tl.load(dir_row + number * DIR_FIELDS + R_BLOCK),
                )
                whole = whole & (offset >= 0) & (block > 1) & (BLOCK_C % tl.maximum(block, 1) == 0)
            if whole:
                _deltas(
                    x_row, copy_row, out_row, dir_row, begin, held, pages_ptr, page_map_ptr,
                    K, SLICES, BLOCK_T, BLOCK_C, STEPS, VALUES,
                )  # fmt: skip
            else:
                for which in range(SLICES):
                    _any_delta(
                        x_row, copy_row, which == 0, out_row + which * K, dir_row + which * DIR_FIELDS, begin, held, pages_ptr, page_map_ptr,
                        K, BLOCK_T, BLOCK_C, STEPS, VALUES,
                    )  # fmt: skip


@triton.jit(do_not_specialize=["first_site", "h_capacity"])
def prefill_shrink_kernel(
    x_ptr, h_ptr, shared_ptr, pages_ptr, page_map_ptr, directory_ptr, tile_ptr, seg_rows_ptr, row_h_ptr,
    sites, first_site, h_capacity,
    K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_R_S: tl.constexpr, BLOCK_K: tl.constexpr,
    VALUES: tl.constexpr, HAS_SHARED: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """See `scute_compile.runtime_min.reference.shrink`; `SHARES` as in decode. Grid: tiles, slices, blocks of ranks."""
    tile, which = tl.program_id(0), tl.program_id(1)
    adapter = tl.load(tile_ptr + tile * 4)
    first, count = tl.load(tile_ptr + tile * 4 + 1), tl.load(tile_ptr + tile * 4 + 2)
    if adapter >= 0:
        dir_row = directory_ptr + (adapter * sites + first_site + which) * DIR_FIELDS
        rank = tl.load(dir_row + RANK) // SHARES
        first_page, offset, stride = (
            tl.load(dir_row + A_PAGES), tl.load(dir_row + A_OFFSET), tl.load(dir_row + A_STRIDE)
        )  # fmt: skip
        own_page, d_offset = tl.load(dir_row + OWN_PAGES), tl.load(dir_row + D_OFFSET)
        pair = tl.load(dir_row + PAIR)
        a_first, a_stride = offset.to(tl.int64) * VALUES, stride * VALUES  # of a shared factor, which is not paged
        held = tl.arange(0, BLOCK_T) < count
        token = tl.load(seg_rows_ptr + first + tl.arange(0, BLOCK_T), mask=held, other=0)
        h_row = tl.load(row_h_ptr + token, mask=held, other=0) // SHARES
        h_place = h_ptr + which * h_capacity + h_row
        if HAS_SHARED & (pair >= 0):
            for start in range(tl.program_id(2) * BLOCK_R_S, rank, tl.num_programs(2) * BLOCK_R_S):
                rows = start + tl.arange(0, BLOCK_R_S)
                total = tl.zeros([BLOCK_T, BLOCK_R_S], dtype=tl.float32)
                for step in range(0, K, BLOCK_K):
                    k = step + tl.arange(0, BLOCK_K)
                    mask = held[:, None] & (k < K)[None, :]
                    x = tl.load(x_ptr + token.to(tl.int64)[:, None] * K + k[None, :], mask=mask, other=0.0)
                    a = tl.load(
                        shared_ptr + a_first + rows[None, :] * a_stride + k[:, None],
                        mask=(rows < rank)[None, :] & (k < K)[:, None], other=0.0,
                    )  # fmt: skip
                    total = tl.dot(x, a, total, input_precision="ieee")
                if d_offset >= 0:
                    d = load_values(pages_ptr, page_map_ptr, own_page, d_offset, rows, rows < rank, VALUES)
                    total *= d.to(tl.float32)[None, :]
                tl.store(h_place[:, None] + rows[None, :], total, mask=held[:, None] & (rows < rank)[None, :])
        else:
            STEP: tl.constexpr = BLOCK_K // VALUES
            for start in range(tl.program_id(2) * BLOCK_R, rank, tl.num_programs(2) * BLOCK_R):
                rows = start + tl.arange(0, BLOCK_R)
                total = tl.zeros([BLOCK_T, BLOCK_R], dtype=tl.float32)
                for step in range(0, K, BLOCK_K):
                    k = step + tl.arange(0, BLOCK_K)
                    mask = held[:, None] & (k < K)[None, :]
                    x = tl.load(x_ptr + token.to(tl.int64)[:, None] * K + k[None, :], mask=mask, other=0.0)
                    granule = step // VALUES + tl.arange(0, STEP)
                    a = tl.reshape(
                        load_rows(
                            pages_ptr, page_map_ptr, first_page, offset + rows[:, None] * stride + granule[None, :],
                            (rows < rank)[:, None] & (granule * VALUES < K)[None, :], VALUES,
                        ),
                        [BLOCK_R, BLOCK_K],
                    )  # fmt: skip
                    total = tl.dot(x, tl.trans(a), total, input_precision="ieee")
                tl.store(h_place[:, None] + rows[None, :], total, mask=held[:, None] & (rows < rank)[None, :])


@triton.jit
def _rows_of_h(h_row, rows, rank, held):
    """Return a tile of the shrink's result."""
    return tl.load(h_row[:, None] + rows[None, :], mask=held[:, None] & (rows < rank)[None, :], other=0.0)


@triton.jit
def _times_b(
    h_row, dir_row, rank, column, width, held, shared_ptr, pages_ptr, page_map_ptr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_R_S: tl.constexpr,
    VALUES: tl.constexpr, HAS_SHARED: tl.constexpr,
):  # fmt: skip
    """Return `h B` of a tile `(BLOCK_T, BLOCK_N)` in float32."""
    first_page, offset, stride = (
        tl.load(dir_row + B_PAGES), tl.load(dir_row + B_OFFSET), tl.load(dir_row + B_STRIDE)
    )  # fmt: skip
    columns = column + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_T, BLOCK_N], dtype=tl.float32)
    if HAS_SHARED & (tl.load(dir_row + PAIR) >= 0):  # larger blocks, which depend on the adapter only, not on the batch
        b_first, b_stride = offset.to(tl.int64) * VALUES, stride * VALUES
        for start in range(0, rank, BLOCK_R_S):
            rows = start + tl.arange(0, BLOCK_R_S)
            b = tl.load(
                shared_ptr + b_first + rows[:, None] * b_stride + columns[None, :],
                mask=(rows < rank)[:, None] & (columns < width)[None, :], other=0.0,
            )  # fmt: skip
            total = in_halves(total, _rows_of_h(h_row, rows, rank, held), b)
    else:
        granule = column // VALUES + tl.arange(0, BLOCK_N // VALUES)
        for start in range(0, rank, BLOCK_R):
            rows = start + tl.arange(0, BLOCK_R)
            b = tl.reshape(
                load_rows(
                    pages_ptr, page_map_ptr, first_page, offset + rows[:, None] * stride + granule[None, :],
                    (rows < rank)[:, None] & (granule * VALUES < width)[None, :], VALUES,
                ),
                [BLOCK_R, BLOCK_N],
            )  # fmt: skip
            total = in_halves(total, _rows_of_h(h_row, rows, rank, held), b)
    return total


@triton.jit(do_not_specialize=["first_site", "h_capacity", "tokens"])
def prefill_expand_kernel(
    y_ptr, h_ptr, bias_ptr, shared_ptr, pages_ptr, page_map_ptr, directory_ptr, tile_ptr, seg_rows_ptr, row_h_ptr,
    rot_position_ptr, sites, first_site, h_capacity, tokens,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, SLICES: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_R_S: tl.constexpr, VALUES: tl.constexpr,
    HAS_SHARED: tl.constexpr, HAS_ROTATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """See `scute_compile.runtime_min.reference.apply_site`; tiles with adapter index -1 get the base's bias only."""
    N: tl.constexpr = N0 + N1 + N2
    tile = tl.program_id(1)
    which, column, width, origin = slice_of(tl.program_id(0), BLOCK_N, N0, N1, N2)
    adapter = tl.load(tile_ptr + tile * 4)
    first, count = tl.load(tile_ptr + tile * 4 + 1), tl.load(tile_ptr + tile * 4 + 2)
    held = tl.arange(0, BLOCK_T) < count
    token = tl.load(seg_rows_ptr + first + tl.arange(0, BLOCK_T), mask=held, other=0).to(tl.int64)
    columns = column + tl.arange(0, BLOCK_N)
    in_slice = columns < width
    inside = held[:, None] & in_slice[None, :]
    where = token[:, None] * N + origin + columns[None, :]
    if adapter >= 0:
        dir_row = directory_ptr + (adapter * sites + first_site + which) * DIR_FIELDS
        rank, own_page = tl.load(dir_row + RANK), tl.load(dir_row + OWN_PAGES)
        ds_offset, shift_offset = tl.load(dir_row + DS_OFFSET), tl.load(dir_row + SHIFT_OFFSET)
        e_offset, r_offset = tl.load(dir_row + E_OFFSET), tl.load(dir_row + R_OFFSET)
        if (rank > 0) | (ds_offset >= 0) | (shift_offset >= 0) | (r_offset >= 0) | HAS_BIAS:
            # these loads are in flight during the products
            base = tl.load(y_ptr + where, mask=inside, other=0.0)
            ds = load_values(
                pages_ptr, page_map_ptr, own_page, ds_offset, columns, in_slice & (ds_offset >= 0), VALUES
            )  # fmt: skip
            e = load_values(pages_ptr, page_map_ptr, own_page, e_offset, columns, in_slice & (e_offset >= 0), VALUES)
            total = tl.zeros([BLOCK_T, BLOCK_N], dtype=tl.float32)
            if rank > 0:
                h_row = tl.load(row_h_ptr + token, mask=held, other=0)
                total = _times_b(
                    h_ptr + which * h_capacity + h_row, dir_row, rank, column, width, held, shared_ptr, pages_ptr, page_map_ptr,
                    BLOCK_T, BLOCK_N, BLOCK_R, BLOCK_R_S, VALUES, HAS_SHARED,
                )  # fmt: skip
                if e_offset >= 0:
                    total *= e.to(tl.float32)[None, :]
            z = base.to(tl.float32)
            if HAS_BIAS:
                z += tl.load(bias_ptr + origin + columns, mask=in_slice, other=0.0).to(tl.float32)[None, :]
            if HAS_ROTATION:
                if r_offset >= 0:
                    row = tokens + tl.load(rot_position_ptr + token, mask=held, other=0) * SLICES + which
                    place = row.to(tl.int64)[:, None] * N + origin + columns[None, :]
                    z += tl.load(y_ptr + place, mask=inside, other=0.0).to(tl.float32)
            total += z * (1.0 + ds.to(tl.float32))[None, :]
            if shift_offset >= 0:
                total += load_shift(pages_ptr, page_map_ptr, own_page, shift_offset, columns, in_slice)[None, :]
            tl.store(y_ptr + where, total.to(y_ptr.dtype.element_ty), mask=inside)
    elif HAS_BIAS:
        z = tl.load(y_ptr + where, mask=inside, other=0.0).to(tl.float32)
        z += tl.load(bias_ptr + origin + columns, mask=in_slice, other=0.0).to(tl.float32)[None, :]
        tl.store(y_ptr + where, z.to(y_ptr.dtype.element_ty), mask=inside)
