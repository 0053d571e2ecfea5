"""Streaming DoRA's column norms: each base weight is read once, tile by tile, for all adapters of a call.

Weights are shared out to threads whole, and a thread computes alone: no bit depends on the number of threads.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from scute_compile.expressions import ColumnNorm, Expression
from scute_compile.passes.evaluate import Array
from scute_compile.passes.scale import NormPlan, plan_norm

CANCELLING = 4.0
"""`|c A B| / |W + c A B|` of a column from which on float32 products lose too much: they leave about 1e-7 of `c A B`."""


@dataclass(frozen=True, slots=True)
class NormRequest:
    """One adapter's norm over one weight."""

    owner: int
    """Which adapter of the call asks."""
    norm: ColumnNorm


ReadTiles = Callable[[NormPlan], Iterator[torch.Tensor]]
"""Yields a weight's tiles as the plan orders them, `(rows, row_width)`, in the dtype they are stored in; each may lie
where the one before it lay."""
Evaluate = Callable[[int, Expression], Array]
"""Owner and a small expression over its file tensors -> value."""


def stream_norms(
    requests: Iterable[NormRequest], read_tiles: ReadTiles, evaluate: Evaluate, advance: Callable[[int], None]
) -> Iterator[tuple[NormRequest, npt.NDArray[np.float64]]]:
    """Yield every request with its norm, `(out,)`, one base weight at a time.

    Peak memory is per thread one tile and the factors of one weight's requests, whatever the size of the model.

    Args:
        requests: what is wanted.
        read_tiles: reads the tiles of a base tensor; called from several threads.
        evaluate: evaluates A and B of a request; called from several threads.
        advance: called with the number of weights (entries) that were read.
    """
    by_weight: dict[tuple[str, bool], list[NormRequest]] = defaultdict(list)
    for request in requests:
        by_weight[request.norm.weight.key, request.norm.transposed].append(request)
    with _single_threads() as pool:
        totals = pool.map(partial(_weight_norms, read_tiles, evaluate), by_weight.values())
        for wanted, norms in zip(by_weight.values(), totals, strict=True):
            advance(math.prod(wanted[0].norm.weight.shape))
            yield from zip(wanted, norms, strict=True)


@contextmanager
def _single_threads() -> Iterator[ThreadPoolExecutor]:
    """Give as many threads as torch would use for one operation, and let torch use one for each operation.

    A tile is too small to be worth a barrier between threads, and on a busy machine barriers cost most of the time.
    """
    threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
    torch.set_num_threads(1)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)


def _weight_norms(
    read_tiles: ReadTiles, evaluate: Evaluate, wanted: list[NormRequest]
) -> list[npt.NDArray[np.float64]]:
    plan = plan_norm(wanted[0].norm)
    factors = [_Factors.of(request, evaluate) for request in wanted]
    norms = _transposed_norms if wanted[0].norm.transposed else _row_norms
    return [total.numpy() for total in norms(plan, factors, read_tiles(plan))]


@dataclass(frozen=True, slots=True)
class _Factors:
    a: torch.Tensor
    """(rank, in), float64"""
    b: torch.Tensor
    """(out, rank), float64, c folded in."""

    @classmethod
    def of(cls, request: NormRequest, evaluate: Evaluate) -> _Factors:
        a, b = (evaluate(request.owner, x).astype(np.float64) for x in (request.norm.a, request.norm.b))
        return cls(torch.from_numpy(a), torch.from_numpy(b.T * request.norm.c).contiguous())

    def product_norms(self) -> torch.Tensor:
        """Return `|c A B|` by column, `(out,)`, from the factors' Gram matrix: no product is formed."""
        return ((self.b @ (self.a @ self.a.T)) * self.b).sum(1).clamp(min=0).sqrt()


def _row_norms(plan: NormPlan, factors: list[_Factors], tiles: Iterator[torch.Tensor]) -> list[torch.Tensor]:
    """Rows are outputs: each tile finishes its rows, in float32; columns that cancel are computed in float64."""
    totals = [torch.empty(plan.rows, dtype=torch.float64) for _ in factors]
    narrow = [(factor.a.float(), factor.b.float(), factor.product_norms()) for factor in factors]
    sums = torch.empty(plan.rows_per_tile, plan.row_width)
    for (start, stop), tile in zip(plan.tiles(), tiles, strict=True):
        for total, factor, (a, b, product_norms) in zip(totals, factors, narrow, strict=True):
            columns = sums[: stop - start].copy_(tile).addmm_(b[start:stop], a)
            norms = total[start:stop].copy_(torch.linalg.vector_norm(columns, dim=1))
            cancelling = product_norms[start:stop] > CANCELLING * norms
            if cancelling.any():
                exact = torch.addmm(tile[cancelling].double(), factor.b[start:stop][cancelling], factor.a)
                norms[cancelling] = torch.linalg.vector_norm(exact, dim=1)
    return totals


def _transposed_norms(plan: NormPlan, factors: list[_Factors], tiles: Iterator[torch.Tensor]) -> list[torch.Tensor]:
    """Rows are inputs (Conv1D): squares add up over the tiles, in float64, always in the same order."""
    totals = [torch.zeros(plan.row_width, dtype=torch.float64) for _ in factors]
    sums = torch.empty(plan.rows_per_tile, plan.row_width, dtype=torch.float64)
    for (start, stop), tile in zip(plan.tiles(), tiles, strict=True):
        for total, factor in zip(totals, factors, strict=True):
            entries = sums[: stop - start].copy_(tile).addmm_(factor.a[:, start:stop].T, factor.b.T)
            total += entries.square_().sum(0)
    return [total.sqrt_() for total in totals]
