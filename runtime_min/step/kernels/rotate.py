"""Rotate: appends the delta rows `x (R - I)` of every rotated token, one per slice, below a copy of x.

The base GEMM multiplies them as extra rows, which keeps near-identity rotations exact: the product of the small
difference is added in float32 by the expand, instead of being lost in a rounded `x R`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda as tlc

from scute_compile.runtime_min.step.kernels.paging import (
    DIR_FIELDS,
    OWN_PAGES,
    R_BLOCK,
    R_OFFSET,
    R_SHARED,
    field,
    in_page,
    load_values,
    page_of,
)


@triton.jit
def _copy(token, column, x_ptr, out_ptr, K: tl.constexpr, BLOCK: tl.constexpr):
    k = column + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + token.to(tl.int64) * K + k, mask=k < K, other=0.0)
    tl.store(out_ptr + token.to(tl.int64) * K + k, x, mask=k < K)


@triton.jit
def _diagonal(
    column, x_row, out_row, pages_ptr, page_map_ptr, own_page, offset, K: tl.constexpr, BLOCK: tl.constexpr,
    VALUES: tl.constexpr,
):  # fmt: skip
    k = column + tl.arange(0, BLOCK)
    delta = load_values(pages_ptr, page_map_ptr, own_page, offset, k, k < K, VALUES).to(tl.float32)
    x = tl.load(x_row + k, mask=k < K, other=0.0).to(tl.float32)
    tl.store(out_row + k, (x * delta).to(out_row.dtype.element_ty), mask=k < K)


@triton.jit
def _granules(
    column, x_row, out_row, pages_ptr, page_map_ptr, own_page, offset, block, shared, K: tl.constexpr, BLOCK: tl.constexpr,
    DEPTH: tl.constexpr, GROUPS: tl.constexpr, VALUES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`GROUPS` threads share a granule of columns and take every so many-th row, so that a block's rows come at once."""
    STEP: tl.constexpr = BLOCK // VALUES
    k = (column + tl.arange(0, STEP) * VALUES)[None, :]
    inside = k % block
    stored = tl.where(shared > 0, 0, k // block) * block
    group = tl.arange(0, GROUPS)[:, None]
    total = tl.zeros([GROUPS, STEP, VALUES], dtype=tl.float32)
    for first in range(0, block, DEPTH * GROUPS):
        pages = ()
        for step in tl.static_range(0, DEPTH * GROUPS, GROUPS):
            j = first + step + group
            granule = offset + ((stored + j) * block + inside) // VALUES
            pages = pages + (page_of(page_map_ptr, own_page, granule, (k < K) & (j < block)),)
        tl.debug_barrier()
        factors = ()
        for number in tl.static_range(DEPTH):
            j = first + number * GROUPS + group
            granule = offset + ((stored + j) * block + inside) // VALUES
            where = in_page(pages[number], granule)[:, :, None] * VALUES + tl.arange(0, VALUES)[None, None, :]
            where = tl.max_contiguous(tl.multiple_of(where, [1, 1, VALUES]), [1, 1, VALUES])
            factors = factors + (tl.load(pages_ptr + where, mask=((k < K) & (j < block))[:, :, None], other=0.0),)
        tl.debug_barrier()  # x is loaded after R, so that no product can be moved up between R's loads
        if PDL:
            tlc.gdc_wait()
        for number in tl.static_range(DEPTH):
            j = first + number * GROUPS + group
            x = tl.load(x_row + k - inside + j, mask=(k < K) & (j < block), other=0.0).to(tl.float32)
            total += x[:, :, None] * factors[number].to(tl.float32)
    out = column + tl.arange(0, BLOCK)
    rotated = tl.reshape(tl.sum(total, axis=0), [BLOCK])
    tl.store(out_row + out, rotated.to(out_row.dtype.element_ty), mask=out < K)


@triton.jit
def _entries(
    column, x_row, out_row, pages_ptr, page_map_ptr, own_page, offset, block, shared, K: tl.constexpr, BLOCK: tl.constexpr,
    VALUES: tl.constexpr,
):  # fmt: skip
    k = column + tl.arange(0, BLOCK)
    inside = k % block
    stored = tl.where(shared > 0, 0, k // block) * block
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for j in range(block):
        x = tl.load(x_row + k - inside + j, mask=k < K, other=0.0).to(tl.float32)
        index = (stored + j) * block + inside
        total += x * load_values(pages_ptr, page_map_ptr, own_page, offset, index, k < K, VALUES).to(tl.float32)
    tl.store(out_row + k, total.to(out_row.dtype.element_ty), mask=k < K)


@triton.jit(do_not_specialize=["first_site", "tokens"])
def rotate_kernel(
    x_ptr, out_ptr, pages_ptr, page_map_ptr, directory_ptr, rotated_ptr, sites, first_site, tokens,
    K: tl.constexpr, SLICES: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr, GROUPS: tl.constexpr,
    VALUES: tl.constexpr, WHOLE_GRANULES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """See `scute_compile.runtime_min.reference.rotate`. `(rows, K)` -> `(rows + delta rows, K)`.

    With `WHOLE_GRANULES` every block width is a multiple of a granule, so that blocks move in 16-byte loads.
    With `PDL`, R is loaded before the kernel that writes x has ended; the pool is written on another stream.
    """
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK
    if row < tokens:
        if PDL:
            tlc.gdc_wait()
        _copy(row, column, x_ptr, out_ptr, K, BLOCK)
    else:
        item = rotated_ptr + (row - tokens) // SLICES * 2
        which = (row - tokens) % SLICES
        token, adapter = tl.load(item), tl.load(item + 1)
        if adapter >= 0:
            dir_row = directory_ptr + (adapter * sites + first_site + which) * DIR_FIELDS
            offset, own_page = field(dir_row, R_OFFSET), field(dir_row, OWN_PAGES)
            block, shared = field(dir_row, R_BLOCK), field(dir_row, R_SHARED)
            x_row = x_ptr + token.to(tl.int64) * K
            out_row = out_ptr + row.to(tl.int64) * K
            if offset < 0:
                at = column + tl.arange(0, BLOCK)
                tl.store(out_row + at, tl.zeros([BLOCK], dtype=out_ptr.dtype.element_ty), mask=at < K)
            elif (block > 1) & WHOLE_GRANULES:
                _granules(
                    column, x_row, out_row, pages_ptr, page_map_ptr, own_page, offset, block, shared, K, BLOCK, DEPTH, GROUPS,
                    VALUES, PDL,
                )  # fmt: skip
            else:
                if PDL:
                    tlc.gdc_wait()
                if block == 1:
                    _diagonal(column, x_row, out_row, pages_ptr, page_map_ptr, own_page, offset, K, BLOCK, VALUES)
                else:
                    _entries(
                        column, x_row, out_row, pages_ptr, page_map_ptr, own_page, offset, block, shared, K, BLOCK, VALUES
                    )  # fmt: skip
    if PDL:
        tlc.gdc_wait()  # in every program
