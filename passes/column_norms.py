"""Streaming DoRA's column norms: each base weight is read once, tile by tile, for all adapters of a call."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from scute_compile.expressions import ColumnNorm, Expression
from scute_compile.passes.evaluate import Array
from scute_compile.passes.scale import NormPlan, plan_norm


@dataclass(frozen=True, slots=True)
class NormRequest:
    """One adapter's norm over one weight."""

    owner: int
    """Which adapter of the call asks."""
    norm: ColumnNorm


ReadRows = Callable[[str, int, int], torch.Tensor]
"""Base key, first and last stored row -> those rows in the dtype they are stored in."""
Evaluate = Callable[[int, Expression], Array]
"""Owner and a small expression over its file tensors -> value."""


def stream_norms(
    requests: Iterable[NormRequest], read_rows: ReadRows, evaluate: Evaluate, advance: Callable[[int], None]
) -> Iterator[tuple[NormRequest, npt.NDArray[np.float64]]]:
    """Yield every request with its norm, `(out,)`, one base weight at a time.

    Peak memory is one tile and the factors of one weight's requests, whatever the size of the model. Products and
    squares are float32, sums over inputs float64 across tiles.

    Args:
        requests: what is wanted.
        read_rows: reads stored rows of a base tensor.
        evaluate: evaluates A and B of a request.
        advance: called with the number of weights after each tile.
    """
    by_weight: dict[tuple[str, bool], list[NormRequest]] = defaultdict(list)
    for request in requests:
        by_weight[request.norm.weight.key, request.norm.transposed].append(request)
    for (_, transposed), wanted in by_weight.items():
        plan = plan_norm(wanted[0].norm)
        factors = [_Factors.of(request, evaluate) for request in wanted]
        squares = _transposed_squares if transposed else _squares
        for request, total in zip(wanted, squares(plan, factors, read_rows, advance), strict=True):
            yield request, np.sqrt(total)


@dataclass(frozen=True, slots=True)
class _Factors:
    a: torch.Tensor
    """(rank, in)"""
    b: torch.Tensor
    """(out, rank), c folded in."""

    @classmethod
    def of(cls, request: NormRequest, evaluate: Evaluate) -> _Factors:
        a = evaluate(request.owner, request.norm.a)
        b = evaluate(request.owner, request.norm.b).T * request.norm.c
        return cls(*(torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32)) for x in (a, b)))


def _squares(
    plan: NormPlan, factors: list[_Factors], read_rows: ReadRows, advance: Callable[[int], None]
) -> list[npt.NDArray[np.float64]]:
    """Rows are outputs: each tile finishes its rows."""
    totals = [np.zeros(plan.rows) for _ in factors]
    product = torch.empty(plan.rows_per_tile, plan.row_width)
    for start, stop in plan.tiles():
        tile = read_rows(plan.key, start, stop).float()
        for total, factor in zip(totals, factors, strict=True):
            sums = torch.addmm(tile, factor.b[start:stop], factor.a, out=product[: stop - start])
            total[start:stop] = _row_squares(sums)
        advance((stop - start) * plan.row_width)
    return totals


def _row_squares(rows: torch.Tensor) -> npt.NDArray[np.float64]:
    norms: torch.Tensor = torch.linalg.vector_norm(rows, dim=1)
    return norms.double().square().numpy()


def _transposed_squares(
    plan: NormPlan, factors: list[_Factors], read_rows: ReadRows, advance: Callable[[int], None]
) -> list[npt.NDArray[np.float64]]:
    """Rows are inputs (Conv1D): squares add up over the tiles, always in the same order."""
    totals = [np.zeros(plan.row_width) for _ in factors]
    for start, stop in plan.tiles():
        tile = read_rows(plan.key, start, stop).float()
        for total, factor in zip(totals, factors, strict=True):
            sums = torch.addmm(tile, factor.a[:, start:stop].T, factor.b.T)
            total += sums.double().square().sum(0).numpy()
        advance((stop - start) * plan.row_width)
    return totals
