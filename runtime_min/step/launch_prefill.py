"""Launches of the prefill kernels: shrink, rotate and expand for tiles of many rows of one adapter.

Each setting is documented with the measurements that selected it, on an H200.
"""

from __future__ import annotations

import torch
import triton

from scute_compile.runtime_min.step.arguments import Features, Gemm, PoolTensors
from scute_compile.runtime_min.step.intermediates import Intermediates
from scute_compile.runtime_min.step.kernels.prefill import (
    prefill_expand_kernel,
    prefill_rotate_kernel,
    prefill_shrink_kernel,
)
from scute_compile.runtime_min.step.launch_decode import blocks, starts_early
from scute_compile.runtime_min.step.plan import TILE_TOKENS, StepRegions

EXPAND_COLUMNS, EXPAND_WARPS = 64, 4
EXPAND_REGISTERS: int | None = 128
"""4096 tokens over 8 adapters take 0.88 ms per layer with 128 columns, and 0.56 with these settings."""
ROTATE_COLUMNS, ROTATE_STEPS, ROTATE_WARPS, ROTATE_REGISTERS = 64, 4, 8, 64
"""Columns per product, products per program. Fractions of a copy's rate at qkv, o, gate_up and down, in one call: 0.58,
0.71, 0.62, 0.67; with 4 warps of at most 96 registers 0.53, 0.68, 0.59, 0.69; with the next product's loads ahead (two
stages, 128 registers) 0.42, 0.58, 0.48, 0.55. The limit of registers suits 16-bit values on capability 9.0 with Triton
3.6; elsewhere registers would spill, and there is no limit."""


def shrink(
    x: torch.Tensor,
    intermediates: Intermediates,
    pool: PoolTensors,
    step: StepRegions,
    gemm: Gemm,
    features: Features,
) -> None:
    """Launch the prefill shrink, which writes the intermediates of `x`."""
    region = step.region
    prefill_shrink_kernel[features.tiles, len(gemm.widths), 4 if features.shared else 1](
        x,
        intermediates.h,
        pool.shared,
        pool.pages,
        pool.page_map,
        pool.directory,
        region("tile"),
        region("seg_rows"),
        region("row_h"),
        pool.directory.shape[1],
        gemm.first_site,
        intermediates.entries,
        K=x.shape[1],
        BLOCK_T=TILE_TOKENS,
        BLOCK_R=16,
        BLOCK_R_S=64,
        BLOCK_K=128,
        VALUES=pool.values,
        HAS_SHARED=features.shared,
        SHARES=intermediates.shares,
        num_warps=4,
        num_stages=3,
    )


def rotate(x: torch.Tensor, pool: PoolTensors, step: StepRegions, gemm: Gemm, features: Features) -> torch.Tensor:
    """Launch the prefill rotation, for blocks of whole granules, and return `x` with the delta rows below it."""
    tokens, k = x.shape
    slices = len(gemm.widths)
    out = x.new_empty((tokens + features.rotated * slices, k))
    tiles = features.tiles + triton.cdiv(tokens, TILE_TOKENS)
    prefill_rotate_kernel[tiles, triton.cdiv(k, ROTATE_COLUMNS * ROTATE_STEPS)](
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
        BLOCK_C=ROTATE_COLUMNS,
        STEPS=ROTATE_STEPS,
        VALUES=pool.values,
        num_warps=ROTATE_WARPS,
        num_stages=1,
        maxnreg=ROTATE_REGISTERS if pool.values == 8 and starts_early(x.device) else None,
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
    """Launch the prefill expand, which finishes the output `y`, in place.

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
    n0, n1, n2 = gemm.padded
    region = step.region
    prefill_expand_kernel[blocks(gemm, EXPAND_COLUMNS), features.tiles](
        y,
        intermediates.h,
        bias if bias is not None else y,
        pool.shared,
        pool.pages,
        pool.page_map,
        pool.directory,
        region("tile"),
        region("seg_rows"),
        region("row_h"),
        region("rot_position"),
        pool.directory.shape[1],
        gemm.first_site,
        intermediates.entries,
        tokens,
        N0=n0,
        N1=n1,
        N2=n2,
        SLICES=len(gemm.widths),
        BLOCK_T=TILE_TOKENS,
        BLOCK_N=EXPAND_COLUMNS,
        BLOCK_R=16,
        BLOCK_R_S=64,
        VALUES=pool.values,
        HAS_SHARED=features.shared,
        HAS_ROTATION=features.rotated > 0,
        HAS_BIAS=bias is not None,
        num_warps=EXPAND_WARPS,
        num_stages=2,
        maxnreg=EXPAND_REGISTERS,
    )
