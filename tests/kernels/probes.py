"""Small kernels that store what the device functions of paging return."""

from __future__ import annotations

import triton
import triton.language as tl

from scute_compile.runtime_min.step.kernels.paging import (
    field,
    load_row,
    load_rows,
    load_shift,
    load_values,
    place,
    slice_of,
)


@triton.jit
def field_kernel(out_ptr, directory_ptr, dir_fields, FIELD: tl.constexpr):
    """Read one field of every directory row."""
    row = tl.program_id(0)
    tl.store(out_ptr + row, field(directory_ptr + row * dir_fields, FIELD))


@triton.jit
def place_kernel(out_ptr, page_map_ptr, first_page, COUNT: tl.constexpr):
    """Read the physical granules of the first logical ones."""
    granule = tl.arange(0, COUNT)
    tl.store(out_ptr + granule, place(page_map_ptr, first_page, granule, granule >= 0))


@triton.jit
def tensor_kernel(
    out_ptr, pages_ptr, page_map_ptr, first_page, offset, size, COUNT: tl.constexpr, VALUES: tl.constexpr
):
    """Read a tensor by single values, by a row of granules, by rows of granules, and as float32."""
    index = tl.arange(0, COUNT)
    granule = tl.arange(0, COUNT // VALUES)
    inside = granule * VALUES < size
    value = load_values(pages_ptr, page_map_ptr, first_page, offset, index, index < size, VALUES)
    tl.store(out_ptr + index, value)
    row = load_row(pages_ptr, page_map_ptr, first_page, offset + granule, inside, VALUES)
    tl.store(out_ptr + COUNT + index, tl.reshape(row, [COUNT]))
    rows = load_rows(pages_ptr, page_map_ptr, first_page, (offset + granule)[None, :], inside[None, :], VALUES)
    tl.store(out_ptr + 2 * COUNT + index, tl.reshape(rows, [COUNT]))
    shift = load_shift(pages_ptr, page_map_ptr, first_page, offset, index, index < size)
    tl.store(out_ptr + 3 * COUNT + index, shift)


@triton.jit
def slice_kernel(out_ptr, BLOCK: tl.constexpr, N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr):
    """Read where each block of columns lies."""
    block = tl.program_id(0)
    which, column, width, start = slice_of(block, BLOCK, N0, N1, N2)
    tl.store(out_ptr + block * 4, which)
    tl.store(out_ptr + block * 4 + 1, column)
    tl.store(out_ptr + block * 4 + 2, width)
    tl.store(out_ptr + block * 4 + 3, start)
