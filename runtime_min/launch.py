"""Launching the kernels for one fused GEMM: what runs beside the GEMM, and what after it.

Decode: shrink and expand run on a side stream while the base GEMM runs, since neither needs its output; `combine` adds
their float32 result to the base's output. Prefill: the shrink runs beside the GEMM and the expand finishes the tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton

from scute_compile.runtime_min.kernels.expand import expand_kernel
from scute_compile.runtime_min.kernels.prefill import prefill_expand_kernel, prefill_shrink_kernel
from scute_compile.runtime_min.kernels.rotate import rotate_kernel
from scute_compile.runtime_min.kernels.shrink import scale_shared_kernel, shrink_kernel
from scute_compile.runtime_min.step_form import PROGRAMS, Features, Gemm, PoolTensors, Product
from scute_compile.runtime_min.step_plan import OWNED_ROWS, PAIR_RANKS, PAIR_TOKENS, TILE_TOKENS, StepRegions

RUN_GRANULES = 512
ROTATE_BLOCK = (256, 1)
SHRINK_WARPS = 4


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


def expand_block(columns: int) -> tuple[int, int]:
    """Return columns per program of the owned expand, and its warps."""
    return (1024, 4) if columns >= 16384 else (512, 4)


SHARED_BLOCK = 64
SHARED_RANKS = 64


def shared_split(k: int) -> int:
    """Return runs of K of the shared shrink: about 512 values each."""
    return max(1, min(32, k // 512))


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream on which terms run beside the GEMM; its programs go first where both wait for a place."""
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call] # torch leaves it unannotated


def adapted_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, pool: PoolTensors, step: StepRegions, gemm: Gemm,
    features: Features,
) -> torch.Tensor:  # fmt: skip
    """Return the adapted output `(T, N)` of one fused GEMM.

    Args:
        x: Inputs `(T, K)`, contiguous.
        weight: `(N, K)`.
        bias: `(N,)` or None.
        pool: Resident adapters.
        step: This step's metadata.
        gemm: Where the layer's sites stand.
        features: What the step may need.
    """

    def multiply(rows: torch.Tensor, *, biased: bool) -> torch.Tensor:
        return torch.nn.functional.linear(rows, weight, bias if biased else None)

    return adapted_output(x, multiply, bias, pool, step, gemm, features)


def adapted_output(
    x: torch.Tensor, multiply: Product, bias: torch.Tensor | None, pool: PoolTensors, step: StepRegions, gemm: Gemm,
    features: Features,
) -> torch.Tensor:  # fmt: skip
    """Return the adapted output `(T, N)` of one fused GEMM that the caller multiplies.

    Args:
        x: Inputs `(T, K)`, contiguous.
        multiply: The base's product; it is called once, for `x` with the delta rows of rotations below it.
        bias: `(N,)`, which `multiply` adds where it is asked to; None without.
        pool: Resident adapters.
        step: This step's metadata.
        gemm: Where the layer's sites stand.
        features: What the step may need.
    """
    tokens = x.shape[0]
    h, hs, hd = _buffers(x, gemm, step, features)
    terms = features.owned or features.shared
    beside = terms and features.beside and x.is_cuda
    if beside:
        main, side = torch.cuda.current_stream(x.device), side_stream(x.device)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            _shrink(x, h, hs, hd, pool, step, gemm, features)
    with_rows = _rotate(x, pool, step, gemm, features) if features.rotated else x
    late_bias = bias is not None and features.rotated > 0
    y = multiply(with_rows, biased=not late_bias)
    if beside:
        torch.cuda.current_stream(x.device).wait_stream(side_stream(x.device))
    elif terms:
        _shrink(x, h, hs, hd, pool, step, gemm, features)
    _expand(y, h, hd, bias if late_bias else None, pool, step, gemm, features, (tokens, x.shape[1]))
    return y[:tokens] if features.rotated else y


def _buffers(
    x: torch.Tensor, gemm: Gemm, step: StepRegions, features: Features
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    values = 16 // x.element_size()
    capacity = step.capacity
    parts = 1 if features.prefill else owned_split(x.shape[1], values).parts
    h = x.new_empty(parts * len(gemm.widths) * capacity.ranks, dtype=torch.float32)
    rows = capacity.tokens if features.shared and not features.prefill else 0
    pairs = rows * capacity.pair_ranks
    halves = 1 if x.dtype is torch.float32 else 2
    return (
        h,
        x.new_empty(shared_split(x.shape[1]) * pairs, dtype=torch.float32),
        x.new_empty(halves * len(gemm.widths) * pairs),
    )


def _shrink(
    x: torch.Tensor, h: torch.Tensor, hs: torch.Tensor, hd: torch.Tensor, pool: PoolTensors, step: StepRegions,
    gemm: Gemm, features: Features,
) -> None:  # fmt: skip
    region, k, values, capacity = step.region, x.shape[1], pool.values, step.capacity
    sites = pool.directory.shape[1]
    if features.prefill:
        prefill_shrink_kernel[features.tiles, len(gemm.widths), 1](
            x, h, pool.shared, pool.pages, pool.page_map, pool.directory, region("tile"), region("seg_rows"),
            region("row_h"), sites, gemm.first_site, capacity.ranks,
            K=k, BLOCK_T=TILE_TOKENS, BLOCK_R=16, BLOCK_K=128, VALUES=values, num_warps=4, num_stages=3,
        )  # fmt: skip
        return
    split, split_s, slices = owned_split(k, values), shared_split(k), len(gemm.widths)
    programs = features.programs * slices * split.parts if features.owned else 0
    programs += features.shared_programs * split_s if features.shared else 0
    shrink_kernel[(max(1, min(programs, PROGRAMS)),)](
        x, h, hs, pool.shared, pool.pages, pool.page_map, pool.directory, region("counts"), region("row_slot"),
        region("seg_slot"), region("seg_start"), region("seg_rows"), region("row_h"), region("work"), region("swork"),
        region("block"), region("pair_rows"), region("pair"), sites, gemm.first_site, capacity.ranks, capacity.tokens,
        capacity.pair_ranks,
        K=k, SLICES=slices, SPLIT=split.parts, ROWS=OWNED_ROWS, STEP=split.step, SPLIT_S=split_s, BLOCK_K=128,
        VALUES=values, BLOCK_T=PAIR_TOKENS, BLOCK_R=PAIR_RANKS, HAS_OWNED=features.owned, HAS_SHARED=features.shared,
        PDL=features.pdl, num_warps=SHRINK_WARPS,
    )  # fmt: skip
    if features.shared:
        scale_shared_kernel[features.blocks, PAIR_TOKENS, slices](
            hs, hd, pool.pages, pool.page_map, pool.directory, region("block"), region("pair_rows"), region("pair"),
            region("row_slot"), sites, gemm.first_site, capacity.tokens, capacity.pair_ranks,
            SLICES=slices, SPLIT=split_s, BLOCK_R=256, BLOCK_T=PAIR_TOKENS, VALUES=values,
            HALVES=1 if x.dtype is torch.float32 else 2, PDL=features.pdl, num_warps=1, **_early(features),
        )  # fmt: skip


def _early(features: Features) -> dict[str, bool]:
    """Return the launch option that lets a kernel begin before the one ahead of it has ended."""
    return {"launch_pdl": True} if features.pdl else {}


def _rotate(x: torch.Tensor, pool: PoolTensors, step: StepRegions, gemm: Gemm, features: Features) -> torch.Tensor:
    tokens, k = x.shape
    slices = len(gemm.widths)
    out = x.new_empty((tokens + features.rotated * slices, k))
    block, warps = ROTATE_BLOCK
    rotate_kernel[(out.shape[0], triton.cdiv(k, block))](
        x, out, pool.pages, pool.page_map, pool.directory, step.region("counts"), step.region("row_slot"),
        step.region("rot_rows"), pool.directory.shape[1], gemm.first_site, tokens,
        K=k, SLICES=slices, BLOCK=block, DEPTH=16, VALUES=pool.values, WHOLE_GRANULES=features.whole_granules,
        num_warps=warps,
    )  # fmt: skip
    return out


def _expand(
    y: torch.Tensor, h: torch.Tensor, hd: torch.Tensor, bias: torch.Tensor | None, pool: PoolTensors,
    step: StepRegions, gemm: Gemm, features: Features, size: tuple[int, int],
) -> None:  # fmt: skip
    n0, n1, n2 = gemm.padded
    region, sites, capacity, slices = step.region, pool.directory.shape[1], step.capacity, len(gemm.widths)
    (tokens, k), given = size, bias if bias is not None else y
    if features.prefill:
        block_n = 128
        grid = (sum(triton.cdiv(n, block_n) for n in gemm.widths), features.tiles)
        prefill_expand_kernel[grid](
            y, h, given, pool.shared, pool.pages, pool.page_map, pool.directory, region("tile"), region("seg_rows"),
            region("row_h"), region("rot_position"), sites, gemm.first_site, capacity.ranks, tokens,
            N0=n0, N1=n1, N2=n2, SLICES=slices, BLOCK_T=TILE_TOKENS, BLOCK_N=block_n, BLOCK_R=16,
            VALUES=pool.values, HAS_ROTATION=features.rotated > 0, HAS_BIAS=bias is not None, num_warps=8, num_stages=2,
        )  # fmt: skip
        return
    block_n, warps = expand_block(sum(gemm.widths))
    programs = sum(triton.cdiv(n, block_n) for n in gemm.widths) * features.segments
    if features.shared:
        programs += sum(triton.cdiv(n, SHARED_BLOCK) for n in gemm.widths) * features.blocks
    expand_kernel[(max(1, min(programs, PROGRAMS)),)](
        y, h, hd, given, pool.shared, pool.pages, pool.page_map, pool.directory, region("counts"), region("row_slot"),
        region("seg_slot"), region("seg_start"), region("seg_rows"), region("row_h"), region("block"),
        region("pair_rows"), region("pair"), region("rot_position"), sites, gemm.first_site, capacity.ranks,
        capacity.tokens, capacity.pair_ranks, tokens,
        N0=n0, N1=n1, N2=n2, SLICES=slices, SPLIT=owned_split(k, pool.values).parts, BLOCK_N=block_n, BLOCK_R=16,
        BLOCK_NS=SHARED_BLOCK, BLOCK_RS=SHARED_RANKS, BLOCK_T=PAIR_TOKENS, VALUES=pool.values,
        HAS_SHARED=features.shared, HAS_ROTATION=features.rotated > 0, HAS_BIAS=bias is not None, PDL=features.pdl,
        num_warps=warps, **_early(features),
    )  # fmt: skip
