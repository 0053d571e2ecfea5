"""Rotate: appends the delta rows `x (R - I)` of every rotated token, one per slice, below a copy of x.

Multiplying them as extra rows of the one base GEMM keeps near-identity rotations exact: the product of the small
difference is added in float32 by `combine`, instead of being lost in a rounded `x R`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from scute_compile.runtime_min.kernels.paging import (
    OWN_PAGES,
    R_BLOCK,
    R_OFFSET,
    R_SHARED,
    RECORD,
    load_row,
    load_values,
)


@triton.jit
def _copy(token, column, x_ptr, out_ptr, K: tl.constexpr, BLOCK: tl.constexpr):
    k = column + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + token.to(tl.int64) * K + k, mask=k < K, other=0.0)
    tl.store(out_ptr + token.to(tl.int64) * K + k, x, mask=k < K)


@triton.jit
def _diagonal(
    column, x_row, out_row, pages_ptr, page_map_ptr, own, offset, K: tl.constexpr, BLOCK: tl.constexpr,
    VALUES: tl.constexpr,
):  # fmt: skip
    k = column + tl.arange(0, BLOCK)
    delta = load_values(pages_ptr, page_map_ptr, own, offset, k, k < K, VALUES).to(tl.float32)
    x = tl.load(x_row + k, mask=k < K, other=0.0).to(tl.float32)
    tl.store(out_row + k, (x * delta).to(out_row.dtype.element_ty), mask=k < K)


@triton.jit
def _granules(
    column, x_row, out_row, pages_ptr, page_map_ptr, own, offset, block, shared, K: tl.constexpr, BLOCK: tl.constexpr,
    DEPTH: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    STEP: tl.constexpr = BLOCK // VALUES
    k = column + tl.arange(0, STEP) * VALUES
    inside = k % block
    stored = tl.where(shared > 0, 0, k // block) * block
    total = tl.zeros([STEP, VALUES], dtype=tl.float32)
    for first in range(0, block, DEPTH):
        for step in tl.static_range(DEPTH):  # independent loads, and no reduction across threads
            j = first + step
            mask = (k < K) & (j < block)
            x = tl.load(x_row + k - inside + j, mask=mask, other=0.0).to(tl.float32)
            granule = offset + ((stored + j) * block + inside) // VALUES
            total += x[:, None] * load_row(pages_ptr, page_map_ptr, own, granule, mask, VALUES).to(tl.float32)
    where = k[:, None] + tl.arange(0, VALUES)[None, :]
    tl.store(out_row + where, total.to(out_row.dtype.element_ty), mask=(k < K)[:, None])


@triton.jit
def _entries(
    column, x_row, out_row, pages_ptr, page_map_ptr, own, offset, block, shared, K: tl.constexpr, BLOCK: tl.constexpr,
    VALUES: tl.constexpr,
):  # fmt: skip
    k = column + tl.arange(0, BLOCK)
    inside = k % block
    stored = tl.where(shared > 0, 0, k // block) * block
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for j in range(block):
        x = tl.load(x_row + k - inside + j, mask=k < K, other=0.0).to(tl.float32)
        index = (stored + j) * block + inside
        total += x * load_values(pages_ptr, page_map_ptr, own, offset, index, k < K, VALUES).to(tl.float32)
    tl.store(out_row + k, total.to(out_row.dtype.element_ty), mask=k < K)


@triton.jit
def rotate_kernel(
    x_ptr, out_ptr, pages_ptr, page_map_ptr, directory_ptr, counts_ptr, row_slot_ptr, rot_rows_ptr, sites, first_site,
    tokens,
    K: tl.constexpr, SLICES: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr, VALUES: tl.constexpr,
    WHOLE_GRANULES: tl.constexpr,
):  # fmt: skip
    """See `scute_compile.runtime_min.reference.rotate`. `(rows, K)` -> `(rows + delta rows, K)`.

    `WHOLE_GRANULES` promises that every block width is a multiple of a granule, so that blocks move in 16-byte loads.
    """
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK
    rotated = row - tokens
    if row < tokens:
        _copy(row, column, x_ptr, out_ptr, K, BLOCK)
    elif rotated < tl.load(counts_ptr + 4) * SLICES:
        which = rotated % SLICES
        token = tl.load(rot_rows_ptr + rotated // SLICES)
        record = directory_ptr + (tl.load(row_slot_ptr + token) * sites + first_site + which) * RECORD
        offset = tl.load(record + R_OFFSET)
        block = tl.load(record + R_BLOCK)
        shared = tl.load(record + R_SHARED)
        own = tl.load(record + OWN_PAGES)
        x_row = x_ptr + token.to(tl.int64) * K
        out_row = out_ptr + row.to(tl.int64) * K
        if offset < 0:
            at = column + tl.arange(0, BLOCK)
            tl.store(out_row + at, tl.zeros([BLOCK], dtype=out_ptr.dtype.element_ty), mask=at < K)
        elif block == 1:
            _diagonal(column, x_row, out_row, pages_ptr, page_map_ptr, own, offset, K, BLOCK, VALUES)
        elif WHOLE_GRANULES:
            _granules(
                column, x_row, out_row, pages_ptr, page_map_ptr, own, offset, block, shared, K, BLOCK, DEPTH, VALUES
            )
        else:
            _entries(column, x_row, out_row, pages_ptr, page_map_ptr, own, offset, block, shared, K, BLOCK, VALUES)
