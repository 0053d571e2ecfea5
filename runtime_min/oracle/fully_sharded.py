"""Fully sharded low-rank terms: what a rank computes alone, before and after the ranks exchange the intermediate.

The layout is S-LoRA's (arXiv:2311.03285 section 6). Column-parallel site: each rank's rows of A and entries of d give
it some entries of the intermediate, all ranks gather all entries, and each multiplies its own columns of B.
Row-parallel site: each rank's inputs give partial sums of the whole intermediate, these are added over the ranks, and
each rank expands to its own interval of the outputs, inside the partial output that the ranks add up anyway.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from scute_compile.ir.expressions import Interval
from scute_compile.runtime_min.reference import TermTensors, expand, shrink, wide


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FullyShardedTerm:
    """One rank's part of a term. Exactly one of `rows` and `columns` is there."""

    tensors: TermTensors
    """Column site: A `(rows, K)`, d `(rows,)`, B `(R, N)`, e `(N,)`. Row site: A `(R, K)`, d `(R,)`, B `(R, columns)`,
    e `(columns,)`. K and N are what the rank holds of the site."""
    rows: Interval | None = None
    """The interval of the term's rank that this rank computes, of a column-parallel site."""
    columns: Interval | None = None
    """The interval of the outputs that this rank adds to, of a row-parallel site."""

    @property
    def gathered(self) -> bool:
        """Whether ranks put their entries side by side; they add them up otherwise."""
        return self.rows is not None


def shrink_part(x_TK: torch.Tensor, term: FullyShardedTerm) -> torch.Tensor:
    """Return this rank's part of the intermediate.

    **Semantics**: column site, `(x @ a.T) * d`, `(..., rows)`; row site, `x @ a.T`, `(..., R)`, to be added over ranks.

    Args:
        x_TK: What the rank holds of the layer's input.
        term: The rank's part of the term.
    """
    return shrink(x_TK, term.tensors.a, term.tensors.d if term.gathered else None)


def add_part(y_TN: torch.Tensor, h_TR: torch.Tensor, term: FullyShardedTerm) -> torch.Tensor:
    """Return `y` plus what this rank adds of the term; in the wide dtype.

    **Semantics**: column site, `y + (h @ b) * e`; row site, `y[:, columns] += ((h * d) @ b) * e`.

    Args:
        y_TN: The rank's outputs `(..., N)` of a column site, or its partial sums of all outputs of a row site.
        h_TR: The whole intermediate.
        term: The rank's part of the term.
    """
    dtype = wide(y_TN, h_TR)
    y, h, tensors = y_TN.to(dtype), h_TR.to(dtype), term.tensors
    if term.columns is None:
        return y + expand(h, tensors.b, tensors.e)
    if tensors.d is not None:
        h = h * tensors.d.to(dtype)
    start, stop = term.columns
    out = y.clone()
    out[..., start:stop] += expand(h, tensors.b, tensors.e)
    return out
