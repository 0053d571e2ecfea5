"""Launches the kernels for one fused GEMM: the rotation before it, shrink and expand after it.

Decode and prefill use different kernels. The expand finishes the GEMM's output in place; it begins while the shrink
still runs, where the GPU supports that.
"""

from __future__ import annotations

import torch

from scute_compile.runtime_min.ranks.exchange import TermExchange
from scute_compile.runtime_min.step import launch_decode, launch_prefill
from scute_compile.runtime_min.step.arguments import Features, Gemm, PoolTensors, Product
from scute_compile.runtime_min.step.intermediates import Intermediates, completed
from scute_compile.runtime_min.step.plan import PAIR_RANKS, StepRegions


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
        gemm: The layer's sites.
        features: Features of the step, or of all steps that a captured graph will run.
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
    """Return the adapted output `(T, N)` of one fused GEMM, with the base's product left to the caller.

    Args:
        x: Inputs `(T, K)`, contiguous.
        multiply: The base's product, called once, for `x` with the delta rows of rotations below it.
        bias: `(N,)`, which `multiply` adds on request; None without.
        pool: Resident adapters.
        step: This step's metadata.
        gemm: The layer's sites.
        features: Features of the step, or of all steps that a captured graph will run.
        exchange: How ranks complete the intermediates of fully sharded terms; None in the default layout.
    """
    kernels = launch_prefill if features.prefill else launch_decode
    rotate = launch_prefill.rotate if features.prefill and features.whole_granules else launch_decode.rotate
    with_rows = rotate(x, pool, step, gemm, features) if features.rotated else x
    late_bias = bias is not None and features.rotated > 0
    y = multiply(with_rows, biased=not late_bias)
    intermediates = empty_intermediates(x, gemm, step, features, exchange.shares if exchange else 1)
    if features.owned or features.shared:
        kernels.shrink(x, intermediates, pool, step, gemm, features)
        intermediates = intermediates if exchange is None else completed(intermediates, exchange, x.shape[0], features)
    kernels.expand(y, intermediates, bias if late_bias else None, pool, step, gemm, features, len(x))
    return y[: x.shape[0]] if features.rotated else y


def empty_intermediates(
    x: torch.Tensor, gemm: Gemm, step: StepRegions, features: Features, shares: int = 1
) -> Intermediates:
    """Return uninitialized intermediates for the shrink of `x` on one of `shares` ranks that divide the terms."""
    k, slices, capacity = x.shape[1], len(gemm.widths), step.capacity
    runs = 1 if features.prefill else launch_decode.owned_split(k, 16 // x.element_size()).parts
    rows = capacity.tokens if features.shared and not features.prefill else 0
    pair_ranks = -(-capacity.pair_ranks // (shares * PAIR_RANKS)) * PAIR_RANKS  # the shrink writes whole blocks
    return Intermediates(
        h=x.new_empty((runs, slices, capacity.ranks // shares), dtype=torch.float32),
        hs=x.new_empty((slices, launch_decode.shared_split(k), rows, pair_ranks), dtype=torch.float32),
        shares=shares,
    )
