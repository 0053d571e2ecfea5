"""Launches of the decode kernels: shrink, rotate and expand for steps with few rows per adapter.

Each setting is documented with the measurements that selected it: ms added per decode step of 20 tenants of
Llama-3.1-8B's shapes on an H200.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton

from scute_compile.runtime_min.step.arguments import Features, Gemm, PoolTensors
from scute_compile.runtime_min.step.intermediates import Intermediates
from scute_compile.runtime_min.step.kernels.expand import expand_kernel
from scute_compile.runtime_min.step.kernels.rotate import rotate_kernel
from scute_compile.runtime_min.step.kernels.shrink import shrink_kernel
from scute_compile.runtime_min.step.plan import OWNED_ROWS, PAIR_RANKS, PAIR_TOKENS, WIDE_RANK, StepRegions

RUN_GRANULES = 1792
"""Granules of K per program of the owned shrink: all of `down_proj`'s give 1.21, a quarter of them 1.26."""
SHRINK_WARPS, SHRINK_STAGES, OWNED_PROGRAMS = 4, 4, 132 * 8
"""Warps: 2 give 1.34, 4 give 1.21, 8 give 1.27. Stages, for 16 tenants of VeRA in one call: 3 give 1.46, 4 give 1.31, 5
give 1.41. The number of programs matters where a graph is captured for more work items than a step has: in a graph for
20 rows of rank 64, twice as many programs give 1.37 instead of 1.30."""
ROTATE_BLOCK, ROTATE_GROUPS, ROTATE_WARPS = 256, 4, 4
"""Columns per program, and threads for each granule of them: four give 1.62, two 1.71, one 1.83."""
ROTATE_DEPTH = 8
"""Rows of R that a thread loads ahead; 32 spill registers in Triton 3.6 and give 11.1."""
EXPAND_WARPS, SHARED_WARPS, EXPAND_STAGES = 2, 4, 3
"""Warps of steps with owned factors only: 1 gives 1.31, 2 give 1.21, 4 give 1.24."""
SHARED_REGISTERS: int | None = 128
"""The limit where programs of owned factors run beside those of pairs: five methods took 3.14 with it and 3.18 without,
before the warps of the shared shrink divided K among them. VeRA only, 16 tenants: 1.74 and 1.62."""
TALL_COLUMNS, TALL_ROWS, TALL_PROGRAMS = 16, 128, 132 * 4
"""Tiles of large ranks; with one adapter of rank 256 in the pool, 16 columns give 1.80, 32 give 2.04, 64 give 2.89."""
SHARED_ROWS = 64
"""Rows of a shared B per product."""
SHARED_STEP = 128
"""Values of K per product and warp of the shared shrink; with 16 tenants of VeRA 64 give 1.91, 128 give 1.62. Half as
many in float32, whose tiles would otherwise take more shared memory than some GPUs have."""


@dataclass(frozen=True, slots=True)
class _Split:
    parts: int
    step: int


def owned_split(k: int, values: int) -> _Split:
    """Return the number of runs of K, and of granules per step, of the owned shrink.

    4096 values per program keep 32 of A's values in each of 256 threads; longer inputs (`down_proj`) are cut into runs,
    so that a decode step has enough programs to fill the GPU.
    """
    granules = -(-k // values)
    parts = -(-granules // RUN_GRANULES)
    return _Split(parts, triton.next_power_of_2(-(-granules // parts)))


def shared_split(k: int) -> int:
    """Return the number of runs of K of the shared shrink; every program of the expand adds their partial sums.

    With 16 tenants of VeRA on an H200, 64 values per product and 16 rows of A per program, 2 runs of 4096 gave 2.00 ms
    added per step, 4 gave 2.39 and 1 gave 2.17; of 14336, 4 runs gave 2.00 and 8 gave 2.10.
    """
    return 2 if k <= 8192 else 4


def shared_columns(columns: int) -> int:
    """Return the number of columns per program of the shared expand; every program reads all of `h * d`."""
    return 128 if columns >= 16384 else 64


def _early(x: torch.Tensor) -> dict[str, bool]:
    """Return the launch option that lets a kernel begin before the previous one has ended."""
    return {"launch_pdl": True} if starts_early(x.device) else {}


@cache
def starts_early(device: torch.device) -> bool:
    """Return whether a kernel may begin before the previous one has ended (programmatic dependent launch)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def blocks(gemm: Gemm, columns: int) -> int:
    """Return the number of blocks of `columns` columns over a GEMM's output; no block spans two slices."""
    return sum(triton.cdiv(width, columns) for width in gemm.widths)


def shrink(
    x: torch.Tensor,
    intermediates: Intermediates,
    pool: PoolTensors,
    step: StepRegions,
    gemm: Gemm,
    features: Features,
) -> None:
    """Launch the decode shrink, which writes the intermediates of `x`."""
    h, hs = intermediates.h, intermediates.hs
    region, k, values, slices = step.region, x.shape[1], pool.values, len(gemm.widths)
    sites = pool.directory.shape[1]
    split = owned_split(k, values)
    shared_programs = features.shared_programs * shared_split(k) if features.shared else 0
    owned_items = features.programs * slices * split.parts if features.owned else 0
    shrink_kernel[(max(1, shared_programs + min(owned_items, OWNED_PROGRAMS)),)](
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
        intermediates.entries,
        shared_programs,
        owned_items,
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
        SHARES=intermediates.shares,
        PDL=starts_early(x.device),
        num_warps=SHRINK_WARPS,
        num_stages=SHRINK_STAGES,
        **_early(x),
    )


def rotate(x: torch.Tensor, pool: PoolTensors, step: StepRegions, gemm: Gemm, features: Features) -> torch.Tensor:
    """Launch the decode rotation and return `x` with the delta rows of the step's rotations below it."""
    tokens, k = x.shape
    slices = len(gemm.widths)
    out = x.new_empty((tokens + features.rotated * slices, k))
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


def expand(
    y: torch.Tensor,
    intermediates: Intermediates,
    bias: torch.Tensor | None,
    pool: PoolTensors,
    step: StepRegions,
    gemm: Gemm,
    features: Features,
    tokens: int,
) -> None:
    """Launch the decode expand, which finishes the output `y`, in place.

    Args:
        y: The base's output, with its delta rows below.
        intermediates: The intermediates that the shrink wrote.
        bias: The base's bias if its product was computed without it, else None.
        pool: Resident adapters.
        step: This step's metadata.
        gemm: The layer's sites.
        features: The step's features.
        tokens: Number of rows, not counting delta rows.
    """
    h, hs = intermediates.h, intermediates.hs
    n0, n1, n2 = gemm.padded
    region, sites, capacity, slices = step.region, pool.directory.shape[1], step.capacity, len(gemm.widths)
    early = (features.owned or features.shared) and starts_early(y.device)
    warps = SHARED_WARPS if features.shared else EXPAND_WARPS
    block_n = 32 * warps * pool.values
    rows = max(16, min(SHARED_ROWS, triton.next_power_of_2(capacity.pair_ranks)))
    owned = blocks(gemm, block_n) * features.segments
    columns = shared_columns(sum(gemm.widths))
    shared = blocks(gemm, columns) * features.blocks if features.shared else 0
    tall = min(blocks(gemm, TALL_COLUMNS) * features.tall, TALL_PROGRAMS)
    expand_kernel[(max(1, shared + tall + owned),)](
        y,
        h,
        hs,
        bias if bias is not None else y,
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
        intermediates.entries,
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
        HS_ROWS=intermediates.rows,
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
        **(_early(y) if early else {}),
    )
