"""Combine: `out = z + z * ds + b + delta` on the rows that have an adapter, in place, in float32 with one rounding.

`z` is the base's output, plus the row's own delta row where its input was rotated. The base's bias is added here for
every row when the GEMM ran without it (delta rows must not get it).
"""

from __future__ import annotations

import triton
import triton.language as tl

from scute_compile.runtime_min.kernels.paging import (
    DS_OFFSET,
    OWN_PAGES,
    R_OFFSET,
    RANK,
    RECORD,
    SHIFT_OFFSET,
    load_row,
    place,
    slice_of,
)


@triton.jit
def load_shift(pages_ptr, page_map_ptr, first_page, offset, index, mask):
    """Return float32 values, which lie four to a granule whatever the pool's dtype."""
    granule = place(page_map_ptr, first_page, offset + index // 4, mask)
    return tl.load(pages_ptr.to(tl.pointer_type(tl.float32)) + granule * 4 + index % 4, mask=mask, other=0.0)


@triton.jit
def combine_kernel(
    y_ptr, delta_ptr, bias_ptr, pages_ptr, page_map_ptr, directory_ptr, row_slot_ptr, rot_position_ptr,
    sites, first_site, tokens,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, SLICES: tl.constexpr, BLOCK_N: tl.constexpr,
    VALUES: tl.constexpr, HAS_TERMS: tl.constexpr, HAS_ROTATION: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """See `scute_compile.runtime_min.reference.apply_site`."""
    N: tl.constexpr = N0 + N1 + N2
    token = tl.program_id(0).to(tl.int64)
    which, column, width, origin = slice_of(tl.program_id(1), BLOCK_N, N0, N1, N2)
    STEP: tl.constexpr = BLOCK_N // VALUES
    granule = column // VALUES + tl.arange(0, STEP)
    index = granule[:, None] * VALUES + tl.arange(0, VALUES)[None, :]
    inside = index < width
    where = token * N + origin + index
    slot = tl.load(row_slot_ptr + token)
    if slot < 0:
        if HAS_BIAS:
            y = tl.load(y_ptr + where, mask=inside, other=0.0).to(tl.float32)
            y += tl.load(bias_ptr + origin + index, mask=inside, other=0.0).to(tl.float32)
            tl.store(y_ptr + where, y.to(y_ptr.dtype.element_ty), mask=inside)
    else:
        record = directory_ptr + (slot * sites + first_site + which) * RECORD
        own = tl.load(record + OWN_PAGES)
        ds_offset = tl.load(record + DS_OFFSET)
        shift_offset = tl.load(record + SHIFT_OFFSET)
        rank = tl.load(record + RANK)
        r_offset = tl.load(record + R_OFFSET)
        touched = (ds_offset >= 0) | (shift_offset >= 0) | (rank > 0) | (r_offset >= 0)
        if touched | HAS_BIAS:
            z = tl.load(y_ptr + where, mask=inside, other=0.0).to(tl.float32)
            if HAS_BIAS:
                z += tl.load(bias_ptr + origin + index, mask=inside, other=0.0).to(tl.float32)
            if HAS_ROTATION:
                if r_offset >= 0:
                    row = tokens + tl.load(rot_position_ptr + token) * SLICES + which
                    z += tl.load(y_ptr + row.to(tl.int64) * N + origin + index, mask=inside, other=0.0).to(tl.float32)
            out = z
            if ds_offset >= 0:
                ds = load_row(pages_ptr, page_map_ptr, own, ds_offset + granule, granule * VALUES < width, VALUES)
                out += z * ds.to(tl.float32)
            if shift_offset >= 0:
                out += load_shift(pages_ptr, page_map_ptr, own, shift_offset, index, inside)
            if HAS_TERMS:
                if rank > 0:
                    out += tl.load(delta_ptr + where, mask=inside, other=0.0)
            tl.store(y_ptr + where, out.to(y_ptr.dtype.element_ty), mask=inside)
