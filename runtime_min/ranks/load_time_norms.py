"""DoRA's scale from the shards of a base that an engine holds, for adapters that are loaded without compiling.

`s = m / colnorm(W + c A B)` (DoRA, arXiv:2402.09353 section 4). A column-parallel rank holds all inputs of its outputs
and computes their norms alone. A row-parallel rank holds some inputs of all outputs: it sums its squares, and these are
all-reduced before the root. The compiler computes the same from the base's files (`scute_compile.pack.column_norms`).
"""

from __future__ import annotations

import torch

from scute_compile.ir.linear import Split
from scute_compile.runtime_min.ranks.group import RankGroup

TILE_VALUES = 1 << 22
"""Weights that are converted to float64 at a time: 32 MiB."""


def shard_scale(
    weight_NK: torch.Tensor,
    a_RK: torch.Tensor,
    b_RN: torch.Tensor,
    c: float,
    magnitude_N: torch.Tensor,
    *,
    split: Split,
    ranks: RankGroup,
) -> torch.Tensor:
    """Return DoRA's `s` for the outputs that this rank holds, `(N,)`, in float64.

    On a row-parallel site all ranks must call it, and get equal bits. An artifact holds `s - 1`, rounded once.

    Args:
        weight_NK: The rank's part of the base's weight, `(N, K)` as `nn.Linear` stores it; a Conv1D's is transposed.
        a_RK: The adapter's A for the rank's inputs, all R rows.
        b_RN: The adapter's B for the rank's outputs, all R rows.
        c: The adapter's scaling.
        magnitude_N: The magnitudes of the rank's outputs.
        split: How the ranks share the layer.
        ranks: The group.
    """
    squares = squared_norms(weight_NK, a_RK, b_RN, c)
    if split is Split.ROW:
        squares = ranks.all_reduce(squares)
    return magnitude_N.to(torch.float64) / squares.sqrt()


def squared_norms(weight_NK: torch.Tensor, a_RK: torch.Tensor, b_RN: torch.Tensor, c: float) -> torch.Tensor:
    """Return the sum over K of `(W + c A B)^2` for each output, `(N,)`, in float64, by tiles of the weight."""
    outputs, inputs = weight_NK.shape
    a, b = a_RK.to(torch.float64), c * b_RN.to(torch.float64)
    squares = torch.empty(outputs, dtype=torch.float64, device=weight_NK.device)
    step = max(1, TILE_VALUES // max(1, inputs))
    for start in range(0, outputs, step):
        rows = slice(start, min(start + step, outputs))
        squares[rows] = torch.addmm(weight_NK[rows].to(torch.float64), b[:, rows].T, a).square_().sum(1)
    return squares
