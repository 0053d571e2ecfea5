"""Decode shrink: `h = x A^T` row by row, and `(x A^T) * d` for the rows of a shared pair together.

Owned factors: a program holds a few rows of A over a run of K and multiplies in registers (no tensor cores: with one
token per tenant there is nothing to reuse). Shared factors: sixteen tokens by eight rows of A on tensor cores, so that
the matrix is read once for all its tenants. Both kinds are work items of one launch; runs of K write partial sums,
which the expand adds in order, so no atomics are needed.

With `PDL` the launch begins while the previous GEMM ends. The shrink reads nothing of that GEMM's output; but the
expand does and waits for the shrink only, so every program of the shrink waits for the GEMM before it ends.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda as tlc

from scute_compile.runtime_min.step.kernels.paging import (
    A_OFFSET,
    A_PAGES,
    A_STRIDE,
    D_OFFSET,
    DIR_FIELDS,
    OWN_PAGES,
    PAIR,
    RANK,
    field,
    in_page,
    load_rows,
    page_of,
)


@triton.jit
def _owned(
    work, x_ptr, h_ptr, pages_ptr, page_map_ptr, directory_ptr, work_ptr, sites, first_site, h_capacity,
    K: tl.constexpr, SLICES: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
    VALUES: tl.constexpr, SHARES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    part = work % SPLIT
    which = (work // SPLIT) % SLICES
    item = work_ptr + work // (SPLIT * SLICES) * 4
    packed, token, h_row = tl.load(item), tl.load(item + 1).to(tl.int64), tl.load(item + 2) // SHARES
    adapter, rank_block = packed >> 12, packed & 4095
    dir_row = directory_ptr + (tl.maximum(adapter, 0) * sites + first_site + which) * DIR_FIELDS
    rank, pair = field(dir_row, RANK) // SHARES, field(dir_row, PAIR)
    first_page, offset, stride = field(dir_row, A_PAGES), field(dir_row, A_OFFSET), field(dir_row, A_STRIDE)
    rows = rank_block * ROWS + tl.arange(0, ROWS)
    if (adapter >= 0) & (pair < 0) & (rank_block * ROWS < rank):
        GRANULES: tl.constexpr = (K + VALUES - 1) // VALUES
        RUN: tl.constexpr = (GRANULES + SPLIT - 1) // SPLIT
        lanes = tl.arange(0, VALUES)
        total = tl.zeros([ROWS, STEP, VALUES], dtype=tl.float32)
        for step in tl.static_range(0, RUN, STEP):
            inside = step + tl.arange(0, STEP)
            granule = part * RUN + inside
            held = (inside < RUN) & (granule < GRANULES)
            k = granule[:, None] * VALUES + lanes[None, :]
            x = tl.load(x_ptr + token * K + k, mask=held[:, None] & (k < K), other=0.0)
            a = load_rows(
                pages_ptr, page_map_ptr, first_page, offset + rows[:, None] * stride + granule[None, :],
                (rows < rank)[:, None] & held[None, :], VALUES,
            )  # fmt: skip
            total += a.to(tl.float32) * x.to(tl.float32)[None, :, :]
        h = tl.sum(tl.sum(total, axis=2), axis=1)
        if PDL:
            tlc.gdc_wait()
        tl.store(h_ptr + (part * SLICES + which) * h_capacity + h_row + rows, h, mask=rows < rank)


@triton.jit
def _product(
    x_ptr, a_ptr, a_stride, rows, rank, token, held, start,
    K: tl.constexpr, RUN: tl.constexpr, BLOCK_K: tl.constexpr, LANES: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Return `x A^T` of a tile `(BLOCK_T, BLOCK_R)` over a run of K, of which each of `LANES` warps takes a part."""
    lanes = tl.arange(0, LANES)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    sums = tl.zeros([LANES, BLOCK_T, BLOCK_R], dtype=tl.float32)
    for step in range(0, RUN, LANES * BLOCK_K):
        k = start + step + lanes
        x = tl.load(
            x_ptr + token.to(tl.int64)[None, :, None] * K + k[:, None, :],
            mask=held[None, :, None] & (k < K)[:, None, :], other=0.0,
        )  # fmt: skip
        a = tl.load(
            a_ptr + rows[None, None, :] * a_stride + k[:, :, None],
            mask=(rows < rank)[None, None, :] & (k < K)[:, :, None], other=0.0, eviction_policy="evict_last",
        )  # fmt: skip
        sums = tl.dot(x, a, sums, input_precision="ieee")
    return tl.sum(sums, axis=0)


@triton.jit
def _shared(
    work, x_ptr, hs_ptr, shared_ptr, pages_ptr, page_map_ptr, directory_ptr, swork_ptr, pair_rows_ptr,
    pair_adapters_ptr, pair_ptr, sites, first_site,
    K: tl.constexpr, SLICES: tl.constexpr, SPLIT: tl.constexpr, BLOCK_K: tl.constexpr, LANES: tl.constexpr, VALUES: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, HS_ROWS: tl.constexpr, HS_RANKS: tl.constexpr,
    SHARES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    part = work % SPLIT
    item = swork_ptr + work // SPLIT * 4
    pair, first, count, rank_block = tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    places = tl.arange(0, BLOCK_T)
    held = places < count
    token = tl.load(pair_rows_ptr + first + places, mask=held, other=0)
    adapter = tl.load(pair_adapters_ptr + first + places, mask=held, other=0)
    rank = tl.load(pair_ptr + tl.maximum(pair, 0) * 8) // SHARES
    granule = rank_block * (BLOCK_R // VALUES) + tl.arange(0, BLOCK_R // VALUES)
    origin = tl.full([BLOCK_T], -1, dtype=tl.int32)  # the same for all tenants of a pair and all slices of a GEMM
    stride = tl.zeros([BLOCK_T], dtype=tl.int32)
    pages, d_granules = (), ()
    for which in tl.static_range(SLICES):
        dir_row = directory_ptr + (adapter * sites + first_site + which) * DIR_FIELDS
        of_pair = held & (field(dir_row, PAIR, held, -1) == pair)
        origin = tl.maximum(origin, tl.where(of_pair, field(dir_row, A_OFFSET, held, -1), -1))
        stride = tl.maximum(stride, tl.where(of_pair, field(dir_row, A_STRIDE, held, 0), 0))
        own_page, d_offset = field(dir_row, OWN_PAGES, held, 0), field(dir_row, D_OFFSET, held, -1)
        has_d = (of_pair & (d_offset >= 0))[:, None] & (granule * VALUES < rank)[None, :]
        d_granule = tl.where(has_d, d_offset[:, None] + granule[None, :], -1)
        pages = pages + (page_of(page_map_ptr, own_page[:, None], d_granule, has_d),)
        d_granules = d_granules + (d_granule,)
    a_start = tl.max(origin)
    wanted = a_start >= 0  # false at a site that no tenant changes
    if SHARES > 1:  # there are items for the whole rank
        wanted = wanted & (rank_block * BLOCK_R < rank)
    if wanted:
        a_first, a_stride = a_start.to(tl.int64) * VALUES, tl.max(stride) * VALUES
        STRIDE: tl.constexpr = LANES * BLOCK_K
        RUN: tl.constexpr = ((K + SPLIT - 1) // SPLIT + STRIDE - 1) // STRIDE * STRIDE
        rows = rank_block * BLOCK_R + tl.arange(0, BLOCK_R)
        scales = ()
        for which in tl.static_range(SLICES):  # before the products, which hide the latency of these loads
            has_d = d_granules[which] >= 0
            at = in_page(pages[which], d_granules[which])[:, :, None] * VALUES + tl.arange(0, VALUES)[None, None, :]
            at = tl.max_contiguous(tl.multiple_of(at, [1, 1, VALUES]), [1, 1, VALUES])
            d = tl.load(pages_ptr + at, mask=has_d[:, :, None], other=1.0)
            scales = scales + (tl.reshape(d, [BLOCK_T, BLOCK_R]),)
        total = _product(
            x_ptr, shared_ptr + a_first, a_stride, rows, rank, token, held, part * RUN,
            K, RUN, BLOCK_K, LANES, BLOCK_T, BLOCK_R,
        )  # fmt: skip
        if PDL:
            tlc.gdc_wait()
        for which in tl.static_range(SLICES):
            where = ((which * SPLIT + part) * HS_ROWS + first + places)[:, None] * HS_RANKS + rows[None, :]
            # rows beyond the rank get zeros, so that the expand may load whole blocks
            tl.store(
                hs_ptr + where,
                tl.where((rows < rank)[None, :], total * scales[which].to(tl.float32), 0.0),
                mask=held[:, None],
            )


@triton.jit(do_not_specialize=["first_site", "h_capacity", "shared_programs", "owned_items"])
def shrink_kernel(
    x_ptr, h_ptr, hs_ptr, shared_ptr, pages_ptr, page_map_ptr, directory_ptr, work_ptr, swork_ptr,
    pair_rows_ptr, pair_adapters_ptr, pair_ptr, sites, first_site, h_capacity, shared_programs,
    owned_items,
    K: tl.constexpr, SLICES: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
    SPLIT_S: tl.constexpr, BLOCK_K: tl.constexpr, LANES: tl.constexpr, VALUES: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr,
    HS_ROWS: tl.constexpr, HS_RANKS: tl.constexpr, HAS_OWNED: tl.constexpr, HAS_SHARED: tl.constexpr,
    SHARES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """See `scute_compile.runtime_min.reference.shrink`. One work item per program, the longer shared items first.

    Where `SHARES` ranks divide the terms' rank, each computes an equal share of a row's entries. Programs take several
    items only where there are very many, in the step or in the capacity of a captured graph.
    """
    if PDL:
        tlc.gdc_launch_dependents()  # the expand may load its factors meanwhile; it waits for all of this grid
    work = tl.program_id(0)
    if work >= shared_programs:
        if HAS_OWNED:
            item = work - shared_programs
            end = owned_items
            while item < end:
                # an item holds the number of items: a step often has fewer than its graph was captured for
                end = tl.load(work_ptr + item // (SPLIT * SLICES) * 4 + 3) * (SPLIT * SLICES)
                _owned(
                    item, x_ptr, h_ptr, pages_ptr, page_map_ptr, directory_ptr, work_ptr, sites, first_site, h_capacity,
                    K, SLICES, SPLIT, ROWS, STEP, VALUES, SHARES, PDL,
                )  # fmt: skip
                item += tl.num_programs(0) - shared_programs
    elif HAS_SHARED:
        _shared(
            work, x_ptr, hs_ptr, shared_ptr, pages_ptr, page_map_ptr, directory_ptr, swork_ptr, pair_rows_ptr,
            pair_adapters_ptr, pair_ptr, sites, first_site,
            K, SLICES, SPLIT_S, BLOCK_K, LANES, VALUES, BLOCK_T, BLOCK_R, HS_ROWS, HS_RANKS, SHARES,
            PDL,
        )  # fmt: skip
    if PDL:
        tlc.gdc_wait()  # also without work: the expand relies on the GEMM before this grid having ended
