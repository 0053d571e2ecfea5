"""Streams DoRA's column norms: each base weight is read once, tile by tile, for all adapters of a call.

Each weight is processed by one thread, so that the norms' bits don't depend on the number of threads.
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

from scute_compile.ir.expressions import ColumnNorm, Expression
from scute_compile.pack.evaluate import Array

CANCELLING = 4.0
"""Columns whose `|c A B| / |W + c A B|` exceeds this are computed in float64: float32 errs by about 1e-7 of `c A B`."""

RUN = 1024
"""Largest number of squares that are summed in float32; a sum of 28672 squares of bfloat16 values is off by 3e-6."""


@dataclass(frozen=True, slots=True)
class NormRequest:
    """The norms of one adapter over one weight, which are to be computed."""

    package: int
    """The index of the adapter's package in the call."""
    norm: ColumnNorm


ReadTiles = Callable[[ColumnNorm], Iterator[torch.Tensor]]
"""Yields the tiles of a norm's weight in order, `(rows, row_width)`, in their stored dtype; each tile may overwrite the
previous one."""
Evaluate = Callable[[int, Expression], Array]
"""A package's index and an expression over the adapter's file tensors -> the value."""


def stream_norms(
    requests: Iterable[NormRequest], read_tiles: ReadTiles, evaluate: Evaluate, advance: Callable[[int], None]
) -> Iterator[tuple[NormRequest, npt.NDArray[np.float64]]]:
    """Yield every request with its norms, `(out,)`, one base weight at a time.

    Peak memory per thread is one tile and the factors of one weight's requests, for models of any size.

    Args:
        requests: The norms to compute.
        read_tiles: Reads the tiles of a base tensor; called from several threads.
        evaluate: Evaluates A and B of a request; called from several threads.
        advance: Called with the number of weights (entries) that were read.
    """
    by_weight: dict[tuple[str, bool], list[NormRequest]] = defaultdict(list)
    for request in requests:
        by_weight[request.norm.weight.key, request.norm.transposed].append(request)
    with _pool() as pool:
        totals = pool.map(partial(_weight_norms, read_tiles, evaluate), by_weight.values())
        for group, norms in zip(by_weight.values(), totals, strict=True):
            advance(math.prod(group[0].norm.weight.shape))
            yield from zip(group, norms, strict=True)


@contextmanager
def one_thread_per_operation() -> Iterator[int]:
    """Limit torch to one thread per operation inside the block; yield the number of threads before.

    The operations are too small to split: on a busy machine, threads would mostly wait for each other.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield threads
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _pool() -> Iterator[ThreadPoolExecutor]:
    with one_thread_per_operation() as threads:
        pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
        try:
            yield pool
        finally:
            pool.shutdown(cancel_futures=True)


def _weight_norms(
    read_tiles: ReadTiles, evaluate: Evaluate, requests: list[NormRequest]
) -> list[npt.NDArray[np.float64]]:
    plan = requests[0].norm  # the tiles depend on the weight's shape alone
    factors = [_Factors.of(request, evaluate) for request in requests]
    if requests[0].norm.transposed:
        return [total.numpy() for total in _transposed_norms(plan, factors, read_tiles)]
    totals = _row_norms(plan, factors, read_tiles)
    for total, factor in zip(totals, factors, strict=True):
        cancelling = factor.product_norms() > CANCELLING * total
        if bool(cancelling.any()):
            _correct(total, cancelling, plan, factor, read_tiles)
    return [total.numpy() for total in totals]


@dataclass(frozen=True, slots=True)
class _Factors:
    a: torch.Tensor
    """(rank, in), as evaluated."""
    b: torch.Tensor
    """(out, rank), as evaluated."""
    c: float

    @classmethod
    def of(cls, request: NormRequest, evaluate: Evaluate) -> _Factors:
        a, b = (torch.from_numpy(np.array(evaluate(request.package, x))) for x in (request.norm.a, request.norm.b))
        return cls(a, b.T.contiguous(), request.norm.c)

    def exact(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A and c B in float64; not cached, since a call may hold the factors of many adapters."""
        return self.a.double(), self.b.double() * self.c

    def product_norms(self) -> torch.Tensor:
        """Return `|c A B|` by column, `(out,)`, from A's Gram matrix: the product is not formed."""
        a, b = self.exact()
        return ((b @ (a @ a.T)) * b).sum(1).clamp(min=0).sqrt()


def _row_norms(plan: ColumnNorm, factors: list[_Factors], read_tiles: ReadTiles) -> list[torch.Tensor]:
    """Compute norms of a weight whose rows are outputs: products, and sums of one run, in float32."""
    totals = [torch.empty(plan.shape[0], dtype=torch.float64) for _ in factors]
    narrow = [tuple(x.float() for x in factor.exact()) for factor in factors]
    row_width = plan.weight.shape[1]
    sums, run = torch.empty(plan.tile_rows, row_width), math.gcd(row_width, RUN)
    for (start, stop), tile in zip(plan.tiles(), read_tiles(plan), strict=True):
        for total, (a, b) in zip(totals, narrow, strict=True):
            columns = sums[: stop - start].copy_(tile).addmm_(b[start:stop], a)
            runs = torch.linalg.vector_norm(columns.view(stop - start, -1, run), dim=2)
            torch.linalg.vector_norm(runs, dim=1, dtype=torch.float64, out=total[start:stop])
    return totals


def _correct(
    total: torch.Tensor, cancelling: torch.Tensor, plan: ColumnNorm, factor: _Factors, read_tiles: ReadTiles
) -> None:
    """Recompute the norms of cancelling columns in float64; this rare case reads the weight a second time."""
    a, b = factor.exact()
    for (start, stop), tile in zip(plan.tiles(), read_tiles(plan), strict=True):
        chosen = cancelling[start:stop]
        exact = torch.addmm(tile[chosen].double(), b[start:stop][chosen], a)
        total[start:stop][chosen] = torch.linalg.vector_norm(exact, dim=1)


def _transposed_norms(plan: ColumnNorm, factors: list[_Factors], read_tiles: ReadTiles) -> list[torch.Tensor]:
    """Compute norms of a weight whose rows are inputs (Conv1D): squares are summed over tiles in float64, in order."""
    totals = [torch.zeros(plan.shape[0], dtype=torch.float64) for _ in factors]
    exact = [factor.exact() for factor in factors]
    sums = torch.empty(plan.tile_rows, plan.weight.shape[1], dtype=torch.float64)
    for (start, stop), tile in zip(plan.tiles(), read_tiles(plan), strict=True):
        for total, (a, b) in zip(totals, exact, strict=True):
            entries = sums[: stop - start].copy_(tile).addmm_(a[:, start:stop].T, b.T)
            total.add_(entries.square_().sum(0))
    return [total.sqrt_() for total in totals]
