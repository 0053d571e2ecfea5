"""Launching the kernels for one fused GEMM: the rotation before it, shrink and expand after it.

Decode and prefill have kernels of their own. The expand finishes the GEMM's output in place; it begins while the shrink
still runs, where the GPU can do that.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton

from scute_compile.runtime_min.ranks.exchange import TermExchange
from scute_compile.runtime_min.step.arguments import Features, Gemm, PoolTensors, Product
from scute_compile.runtime_min.step.kernels.expand import expand_kernel
from scute_compile.runtime_min.step.kernels.prefill import (
    prefill_expand_kernel,
    prefill_rotate_kernel,
    prefill_shrink_kernel,
)
from scute_compile.runtime_min.step.kernels.rotate import rotate_kernel
from scute_compile.runtime_min.step.kernels.shrink import shrink_kernel
from scute_compile.runtime_min.step.plan import (
    OWNED_ROWS,
    PAIR_RANKS,
    PAIR_TOKENS,
    TILE_TOKENS,
    WIDE_RANK,
    Capacity,
    StepRegions,
)

# Settings with what chose them: ms added per decode step of 20 tenants of Llama-3.1-8B's shapes on an H200.
RUN_GRANULES = 1792
"""Granules of K per program of the owned shrink: all of `down_proj`'s, 1.21; a quarter of them, 1.26."""
SHRINK_WARPS, SHRINK_STAGES, OWNED_PROGRAMS = 4, 4, 132 * 8
"""Warps: 2 give 1.34, 4 give 1.21, 8 give 1.27. Stages, for 16 tenants of VeRA in one call: 3 give 1.46, 4 give 1.31, 5
give 1.41. Programs count where a graph is captured for more records than a step has: in one for 20 rows of rank 64,
twice as many give 1.37 in the place of 1.30."""
ROTATE_BLOCK, ROTATE_GROUPS, ROTATE_WARPS = 256, 4, 4
"""Columns per program, and threads for each granule of them: four give 1.62, two 1.71, one 1.83."""
ROTATE_DEPTH = 8
"""Rows of R on their way per thread; 32 spill registers in Triton 3.6 and give 11.1."""
PREFILL_COLUMNS, PREFILL_WARPS = 64, 4
PREFILL_REGISTERS: int | None = 128
"""Of the prefill expand: 4096 tokens over 8 adapters take 0.88 ms per layer with 128 columns, and 0.56 with these."""
PREFILL_TURN, PREFILL_STEPS, TURN_WARPS, TURN_REGISTERS = 64, 4, 8, 64
"""Of the prefill rotation: columns per product, products per program. Shares of a copy's rate at qkv, o, gate_up and
down, in one call: 0.58, 0.71, 0.62, 0.67; with 4 warps of at most 96 registers 0.53, 0.68, 0.59, 0.69; with loads of
the next product ahead (two stages, 128 registers) 0.42, 0.58, 0.48, 0.55. The limit suits 16-bit values on capability
9.0 with Triton 3.6: elsewhere it spills, and there is none."""
EXPAND_WARPS, SHARED_WARPS, EXPAND_STAGES = 2, 4, 3
"""Warps of steps with owned factors alone: 1 gives 1.31, 2 give 1.21, 4 give 1.24."""
SHARED_REGISTERS: int | None = 128
"""Where programs of owned factors want places beside those of pairs: five methods took 3.14 with this limit and 3.18
without, before each warp of the shared shrink had values of K of its own. VeRA alone, 16 tenants: 1.74 and 1.62."""
TALL_COLUMNS, TALL_ROWS, TALL_PROGRAMS = 16, 128, 132 * 4
"""Tiles of large ranks; with one adapter of rank 256 in the pool, 16 columns give 1.80, 32 give 2.04, 64 give 2.89."""
SHARED_ROWS = 64
"""Rows of a shared B per product."""
SHARED_STEP = 128
"""Values of K per product and warp of the shared shrink; with 16 tenants of VeRA 64 give 1.91, 128 give 1.62. Half as
many in float32, whose tiles would take more shared memory than some GPUs have."""


@dataclass(frozen=True, slots=True)
class _Split:
    parts: int
    step: int


def owned_split(k: int, values: int) -> _Split:
    """Return runs of K and granules per step of the owned shrink.

    4096 values per program keep 32 of A's values in each of 256 threads; longer inputs (`down_proj`) are cut in runs,
    so that a decode step has enough programs to fill the card.
    """
    granules = -(-k // values)
    parts = -(-granules // RUN_GRANULES)
    return _Split(parts, triton.next_power_of_2(-(-granules // parts)))


def shared_split(k: int) -> int:
    """Return runs of K of the shared shrink: every program of the expand adds their sums.

    With 16 tenants of VeRA on an H200, 64 values per product and 16 rows of A per program, 2 runs of 4096 gave 2.00 ms
    added per step, 4 gave 2.39 and 1 gave 2.17; of 14336, 4 runs gave 2.00 and 8 gave 2.10.
    """
    return 2 if k <= 8192 else 4


def held_ranks(capacity: Capacity, shares: int = 1) -> int:
    """Return ranks per row of `(x A^T) * d` on one of `shares` ranks: the shrink writes whole blocks."""
    return -(-capacity.pair_ranks // (shares * PAIR_RANKS)) * PAIR_RANKS


def shared_columns(columns: int) -> int:
    """Return columns per program of the shared expand: each program reads all of `h * d` again."""
    return 128 if columns >= 16384 else 64


def _early(x: torch.Tensor) -> dict[str, bool]:
    """Return the launch option that lets a kernel begin before the one ahead of it has ended."""
    return {"launch_pdl": True} if starts_early(x.device) else {}


@cache
def starts_early(device: torch.device) -> bool:
    """Return whether a kernel may begin before the one ahead of it has ended (programmatic dependent launch)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def adapted_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    pool: PoolTensors,
    step: StepRegions,
    gemm: Gemm,
    features: Features,
    exchange: TermExchange | None = None,
) -> torch.Tensor:
    """Return the adapted output `(T, N)` of one fused GEMM.

    Args:
        x: Inputs `(T, K)`, contiguous.
        weight: `(N, K)`.
        bias: `(N,)` or None.
        pool: Resident adapters.
        step: This step's metadata.
        gemm: Where the layer's sites stand.
        features: What the step may need.
        exchange: As for `adapted_output`.
    """

    def multiply(rows: torch.Tensor, *, biased: bool) -> torch.Tensor:
        return torch.nn.functional.linear(rows, weight, bias if biased else None)

    return adapted_output(x, multiply, bias, pool, step, gemm, features, exchange)


def adapted_output(
    x: torch.Tensor,
    multiply: Product,
    bias: torch.Tensor | None,
    pool: PoolTensors,
    step: StepRegions,
    gemm: Gemm,
    features: Features,
    exchange: TermExchange | None = None,
) -> torch.Tensor:
    """Return the adapted output `(T, N)` of one fused GEMM that the caller multiplies.

    Args:
        x: Inputs `(T, K)`, contiguous.
        multiply: The base's product; it is called once, for `x` with the delta rows of rotations below it.
        bias: `(N,)`, which `multiply` adds where it is asked to; None without.
        pool: Resident adapters.
        step: This step's metadata.
        gemm: Where the layer's sites stand.
        features: What the step may need.
        exchange: How ranks complete the intermediates of fully sharded terms; None where terms are cut on one side.
    """
    with_rows = _rotate(x, pool, step, gemm, features) if features.rotated else x
    late_bias = bias is not None and features.rotated > 0
    y = multiply(with_rows, biased=not late_bias)
    held = room_for(x, gemm, step, features, exchange.shares if exchange else 1)
    if features.owned or features.shared:
        _shrink(x, held, pool, step, gemm, features)
        held = held if exchange is None else _completed(held, exchange, x.shape[0], features)
    _expand(y, held, bias if late_bias else None, pool, step, gemm, features, x)
    return y[: x.shape[0]] if features.rotated else y


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Intermediates:
    """What the shrink leaves for the expand, in float32; a step's rows have as many entries as their adapters' ranks.

    Fully sharded, after the ranks' exchange, all slices of a GEMM see the same entries: one of them alone has terms.
    """

    h: torch.Tensor
    """`(runs, slices, entries)`: `x A^T` of owned terms, partial sums per run of K; in prefill of shared ones too."""
    hs: torch.Tensor
    """`(slices, runs, rows, ranks)`: `(x A^T) * d` of shared terms."""
    shares: int = 1
    """Among how many ranks the entries are divided; 1 when they are whole."""
    one_slice: bool = False

    @property
    def entries(self) -> int:
        """How far slices of h lie apart."""
        return 0 if self.one_slice else self.h.shape[2]

    @property
    def rows(self) -> int:
        """How many rows of hs slices lie apart, per run."""
        return 0 if self.one_slice else self.hs.shape[2]


def room_for(x: torch.Tensor, gemm: Gemm, step: StepRegions, features: Features, shares: int = 1) -> Intermediates:
    """Return room for what the shrink of `x` leaves, of which one of `shares` ranks computes a part."""
    k, slices, capacity = x.shape[1], len(gemm.widths), step.capacity
    parts = 1 if features.prefill else owned_split(k, 16 // x.element_size()).parts
    rows = capacity.tokens if features.shared and not features.prefill else 0
    return Intermediates(
        h=x.new_empty((parts, slices, capacity.ranks // shares), dtype=torch.float32),
        hs=x.new_empty((slices, shared_split(k), rows, held_ranks(capacity, shares)), dtype=torch.float32),
        shares=shares,
    )


def _completed(held: Intermediates, exchange: TermExchange, tokens: int, features: Features) -> Intermediates:
    """Let the ranks complete what this one computed for its terms, as far as the step's rows reach."""
    mine, found = exchange.which, []
    if features.owned or features.prefill:
        found.append(_total(held.h[:, mine, : features.ranks // held.shares], 0))
    if features.shared and not features.prefill:
        found.append(_total(held.hs[mine, :, : min(tokens, features.blocks * PAIR_TOKENS)], 0))
    whole = exchange.complete(found)
    h = whole.pop(0)[None, None] if features.owned or features.prefill else held.h
    return Intermediates(h=h, hs=whole[0][None, None] if whole else held.hs, one_slice=True)


def _total(parts: torch.Tensor, axis: int) -> torch.Tensor:
    """Return the sum over runs of K, in place where there is one."""
    return parts.select(axis, 0) if parts.shape[axis] == 1 else parts.sum(axis)


def _shrink(
    x: torch.Tensor, held: Intermediates, pool: PoolTensors, step: StepRegions, gemm: Gemm, features: Features
) -> None:
    h, hs = held.h, held.hs
    region, k, values, slices = step.region, x.shape[1], pool.values, len(gemm.widths)
    sites = pool.directory.shape[1]
    if features.prefill:
        prefill_shrink_kernel[features.tiles, slices, 4 if features.shared else 1](
            x,
            h,
            pool.shared,
            pool.pages,
            pool.page_map,
            pool.directory,
            region("tile"),
            region("seg_rows"),
            region("row_h"),
            sites,
            gemm.first_site,
            held.entries,
            K=k,
            BLOCK_T=TILE_TOKENS,
            BLOCK_R=16,
            BLOCK_R_S=64,
            BLOCK_K=128,
            VALUES=values,
            HAS_SHARED=features.shared,
            SHARES=held.shares,
            num_warps=4,
            num_stages=3,
        )
        return
    split = owned_split(k, values)
    shared_programs = features.shared_programs * shared_split(k) if features.shared else 0
    owned_units = features.programs * slices * split.parts if features.owned else 0
    shrink_kernel[(max(1, shared_programs + min(owned_units, OWNED_PROGRAMS)),)](
        x,
        h,
        hs,
        pool.shared,
        pool.pages,
        pool.page_map,
        pool.directory,
        region("work"),
        region("swork"),
        region("pair_rows"),
        region("pair_adapters"),
        region("pair"),
        sites,
        gemm.first_site,
        held.entries,
        shared_programs,
        owned_units,
        K=k,
        SLICES=slices,
        SPLIT=split.parts,
        ROWS=OWNED_ROWS,
        STEP=split.step,
        SPLIT_S=shared_split(k),
        BLOCK_K=SHARED_STEP * values // 8,
        LANES=SHRINK_WARPS,
        VALUES=values,
        BLOCK_T=PAIR_TOKENS,
        BLOCK_R=PAIR_RANKS,
        HS_ROWS=hs.shape[2],
        HS_RANKS=hs.shape[3],
        HAS_OWNED=features.owned,
        HAS_SHARED=features.shared,
        SHARES=held.shares,
        PDL=starts_early(x.device),
        num_warps=SHRINK_WARPS,
        num_stages=SHRINK_STAGES,
        **_early(x),
    )


def _rotate(x: torch.Tensor, pool: PoolTensors, step: StepRegions, gemm: Gemm, features: Features) -> torch.Tensor:
    tokens, k = x.shape
    slices = len(gemm.widths)
    out = x.new_empty((tokens + features.rotated * slices, k))
    if features.prefill and features.whole_granules:
        tiles = features.tiles + triton.cdiv(tokens, TILE_TOKENS)
        prefill_rotate_kernel[tiles, triton.cdiv(k, PREFILL_TURN * PREFILL_STEPS)](
            x,
            out,
            pool.pages,
            pool.page_map,
            pool.directory,
            step.region("tile"),
            step.region("seg_rows"),
            step.region("rot_position"),
            pool.directory.shape[1],
            gemm.first_site,
            tokens,
            features.tiles,
            K=k,
            SLICES=slices,
            BLOCK_T=TILE_TOKENS,
            BLOCK_C=PREFILL_TURN,
            STEPS=PREFILL_STEPS,
            VALUES=pool.values,
            num_warps=TURN_WARPS,
            num_stages=1,
            maxnreg=TURN_REGISTERS if pool.values == 8 and starts_early(x.device) else None,
        )
        return out
    rotate_kernel[(out.shape[0], triton.cdiv(k, ROTATE_BLOCK))](
        x,
        out,
        pool.pages,
        pool.page_map,
        pool.directory,
        step.region("rotated"),
        pool.directory.shape[1],
        gemm.first_site,
        tokens,
        K=k,
        SLICES=slices,
        BLOCK=ROTATE_BLOCK,
        DEPTH=ROTATE_DEPTH,
        GROUPS=ROTATE_GROUPS,
        VALUES=pool.values,
        WHOLE_GRANULES=features.whole_granules,
        PDL=starts_early(x.device),
        num_warps=ROTATE_WARPS,
        **_early(x),
    )
    return out


def _expand(
    y: torch.Tensor,
    held: Intermediates,
    bias: torch.Tensor | None,
    pool: PoolTensors,
    step: StepRegions,
    gemm: Gemm,
    features: Features,
    x: torch.Tensor,
) -> None:
    h, hs = held.h, held.hs
    n0, n1, n2 = gemm.padded
    region, sites, capacity, slices = step.region, pool.directory.shape[1], step.capacity, len(gemm.widths)
    tokens, given = len(x), bias if bias is not None else y
    if features.prefill:
        block_n = PREFILL_COLUMNS
        grid = (_blocks(gemm, block_n), features.tiles)
        prefill_expand_kernel[grid](
            y,
            h,
            given,
            pool.shared,
            pool.pages,
            pool.page_map,
            pool.directory,
            region("tile"),
            region("seg_rows"),
            region("row_h"),
            region("rot_position"),
            sites,
            gemm.first_site,
            held.entries,
            tokens,
            N0=n0,
            N1=n1,
            N2=n2,
            SLICES=slices,
            BLOCK_T=TILE_TOKENS,
            BLOCK_N=block_n,
            BLOCK_R=16,
            BLOCK_R_S=64,
            VALUES=pool.values,
            HAS_SHARED=features.shared,
            HAS_ROTATION=features.rotated > 0,
            HAS_BIAS=bias is not None,
            num_warps=PREFILL_WARPS,
            num_stages=2,
            maxnreg=PREFILL_REGISTERS,
        )
        return
    early = (features.owned or features.shared) and starts_early(x.device)
    warps = SHARED_WARPS if features.shared else EXPAND_WARPS
    block_n = 32 * warps * pool.values
    rows = max(16, min(SHARED_ROWS, triton.next_power_of_2(capacity.pair_ranks)))
    owned = _blocks(gemm, block_n) * features.segments
    columns = shared_columns(sum(gemm.widths))
    shared = _blocks(gemm, columns) * features.blocks if features.shared else 0
    tall = min(_blocks(gemm, TALL_COLUMNS) * features.tall, TALL_PROGRAMS)
    expand_kernel[(max(1, shared + tall + owned),)](
        y,
        h,
        hs,
        given,
        pool.shared,
        pool.pages,
        pool.page_map,
        pool.directory,
        region("counts"),
        region("segment"),
        region("tall"),
        region("block"),
        region("pair_rows"),
        region("pair_adapters"),
        region("pair"),
        region("rot_position"),
        sites,
        gemm.first_site,
        held.entries,
        tokens,
        shared,
        tall,
        N0=n0,
        N1=n1,
        N2=n2,
        SLICES=slices,
        SPLIT=h.shape[0],
        SPLIT_S=hs.shape[1],
        BLOCK_N=block_n,
        ROWS=WIDE_RANK,
        BLOCK_N_TALL=TALL_COLUMNS,
        BLOCK_R_TALL=TALL_ROWS,
        BLOCK_N_S=columns,
        BLOCK_R_S=rows,
        WRITTEN=PAIR_RANKS,
        BLOCK_T=PAIR_TOKENS,
        HS_ROWS=held.rows,
        HS_RANKS=hs.shape[3],
        VALUES=pool.values,
        HAS_SHARED=features.shared,
        HAS_TALL=features.tall > 0,
        HAS_ROTATION=features.rotated > 0,
        HAS_BIAS=bias is not None,
        PDL=early,
        num_warps=warps,
        num_stages=EXPAND_STAGES,
        maxnreg=SHARED_REGISTERS if features.shared and features.owned else None,
        **(_early(x) if early else {}),
    )


def _blocks(gemm: Gemm, columns: int) -> int:
    return sum(triton.cdiv(width, columns) for width in gemm.widths)
