"""Device functions that read paged adapters: addresses of granules, and the fields of a directory row.

An adapter is one logical run of granules of 16 bytes; `page_map` gives the physical page of each 2 KiB of it. One
lookup serves a whole granule, so that data still moves in 16-byte loads.
"""

from __future__ import annotations

import triton
import triton.language as tl

PAGE_BYTES = 2048
GRANULE_BYTES = 16
FIELDS = 16

PAGE_GRANULES = tl.constexpr(PAGE_BYTES // GRANULE_BYTES)
DIR_FIELDS = tl.constexpr(FIELDS)
RANK = tl.constexpr(0)
A_PAGES = tl.constexpr(1)
A_OFFSET = tl.constexpr(2)
A_STRIDE = tl.constexpr(3)
B_PAGES = tl.constexpr(4)
B_OFFSET = tl.constexpr(5)
B_STRIDE = tl.constexpr(6)
OWN_PAGES = tl.constexpr(7)
DS_OFFSET = tl.constexpr(8)
SHIFT_OFFSET = tl.constexpr(9)
D_OFFSET = tl.constexpr(10)
E_OFFSET = tl.constexpr(11)
R_OFFSET = tl.constexpr(12)
R_BLOCK = tl.constexpr(13)
R_SHARED = tl.constexpr(14)
PAIR = tl.constexpr(15)


@triton.jit
def page_of(page_map_ptr, first_page, granule, mask):
    """Return the physical page of each logical granule.

    `evict_last`: the map is small and read at every site, and base weights would evict it from L2 between two steps.
    """
    return tl.load(
        page_map_ptr + first_page + granule // PAGE_GRANULES, mask=mask, other=0, eviction_policy="evict_last"
    )


@triton.jit
def in_page(page, granule):
    """Return the physical granule of each logical granule, given its physical page."""
    return page.to(tl.int64) * PAGE_GRANULES + granule % PAGE_GRANULES


@triton.jit
def place(page_map_ptr, first_page, granule, mask):
    """Return the physical granule of each logical granule."""
    return in_page(page_of(page_map_ptr, first_page, granule, mask), granule)


@triton.jit
def load_granules(pages_ptr, granule, mask, VALUES: tl.constexpr):
    """Return whole physical granules: `(G,)` -> `(G, VALUES)`."""
    where = granule[:, None] * VALUES + tl.arange(0, VALUES)[None, :]
    where = tl.max_contiguous(tl.multiple_of(where, [1, VALUES]), [1, VALUES])
    return tl.load(pages_ptr + where, mask=mask[:, None], other=0.0)


@triton.jit
def load_row(pages_ptr, page_map_ptr, first_page, granule, mask, VALUES: tl.constexpr):
    """Return whole granules of one row: `(G,)` granules -> `(G, VALUES)`."""
    return load_granules(pages_ptr, place(page_map_ptr, first_page, granule, mask), mask, VALUES)


@triton.jit
def load_rows(pages_ptr, page_map_ptr, first_page, granule, mask, VALUES: tl.constexpr):
    """Return whole granules of several rows: `(R, G)` granules -> `(R, G, VALUES)`.

    All lookups precede all loads. Without the barrier the compiler sinks each lookup to its load, to save registers,
    and a thread waits for memory twice per granule instead of twice in all.
    """
    first = place(page_map_ptr, first_page, granule, mask)[:, :, None] * VALUES
    tl.debug_barrier()
    where = first + tl.arange(0, VALUES)[None, None, :]
    where = tl.max_contiguous(tl.multiple_of(where, [1, 1, VALUES]), [1, 1, VALUES])
    return tl.load(pages_ptr + where, mask=mask[:, :, None], other=0.0)


@triton.jit
def field(dir_row, FIELD: tl.constexpr, mask=None, other=None):
    """Return a field of a directory row, or of several; kept in L2 as the page map is."""
    return tl.load(dir_row + FIELD, mask=mask, other=other, eviction_policy="evict_last")


@triton.jit
def load_values(pages_ptr, page_map_ptr, first_page, offset, index, mask, VALUES: tl.constexpr):
    """Return single values, `index` counting from granule `offset`, for short or unaligned tensors."""
    granule = place(page_map_ptr, first_page, offset + index // VALUES, mask)
    return tl.load(pages_ptr + granule * VALUES + index % VALUES, mask=mask, other=0.0)


@triton.jit
def load_shift(pages_ptr, page_map_ptr, first_page, offset, index, mask):
    """Return float32 values, four to a granule whatever the pool's dtype."""
    granule = place(page_map_ptr, first_page, offset + index // 4, mask)
    return tl.load(pages_ptr.to(tl.pointer_type(tl.float32)) + granule * 4 + index % 4, mask=mask, other=0.0)


@triton.jit
def slice_of(block, BLOCK: tl.constexpr, N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr):
    """Return the slice of a block of columns, the block's first column in it, the slice's width, and its start.

    A fused GEMM has up to three slices of N0, N1, N2 columns; 0 is an absent slice. No block spans two slices.
    """
    first = tl.cdiv(N0, BLOCK)
    second = first + tl.cdiv(N1, BLOCK)
    which = (block >= first).to(tl.int32) + (block >= second).to(tl.int32)
    inside = block - tl.where(which == 0, 0, tl.where(which == 1, first, second))
    width = tl.where(which == 0, N0, tl.where(which == 1, N1, N2))
    start = tl.where(which == 0, 0, tl.where(which == 1, N0, N0 + N1))
    return which, inside * BLOCK, width, start
