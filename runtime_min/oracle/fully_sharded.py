"""Fully sharded low-rank terms: what one rank computes before and after the ranks exchange the intermediate.

The layout is S-LoRA's (arXiv:2311.03285 section 6). Column-parallel site: each rank computes some entries of the
intermediate from its rows of A and entries of d, an all-gather gives every rank all entries, and each rank multiplies
them by its columns of B. Row-parallel site: each rank computes partial sums of the whole intermediate from its inputs,
an all-reduce adds them, and each rank expands to its interval of the outputs, inside the partial outputs that the ranks
add anyway.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from scute_compile.ir.expressions import Interval
from scute_compile.runtime_min.reference import TermTensors, expand, shrink, wide


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FullyShardedTerm:
    """One rank's part of a term; either `rows` or `columns` is set."""

    tensors: TermTensors
    """Column site: A `(rows, K)`, d `(rows,)`, B `(R, N)`, e `(N,)`. Row site: A `(R, K)`, d `(R,)`, B `(R, columns)`,
    e `(columns,)`. K and N are the rank's inputs and outputs of the site."""
    rows: Interval | None = None
    """Column site: the interval of the term's rank that this rank computes."""
    columns: Interval | None = None
    """Row site: the interval of the outputs to which this rank expands."""

    @property
    def all_gathered(self) -> bool:
        """Whether the ranks' entries are concatenated (column site); partial sums are added otherwise (row site)."""
        return self.rows is not None


def shrink_part(x_TK: torch.Tensor, term: FullyShardedTerm) -> torch.Tensor:
    """Return this rank's part of the intermediate.

    **Semantics**: column site, `(x @ a.T) * d`, `(..., rows)`; row site, `x @ a.T`, `(..., R)`, a partial sum.

    Args:
        x_TK: The rank's part of the layer's input.
        term: The rank's part of the term.
    """
    return shrink(x_TK, term.tensors.a, term.tensors.d if term.all_gathered else None)


def add_part(y_TN: torch.Tensor, h_TR: torch.Tensor, term: FullyShardedTerm) -> torch.Tensor:
    """Return `y` plus this rank's part of the term, in the wide dtype.

    **Semantics**: column site, `y + (h @ b) * e`; row site, `y[:, columns] += ((h * d) @ b) * e`.

    Args:
        y_TN: Column site: the rank's outputs `(..., N)`. Row site: its partial sums of all outputs.
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
