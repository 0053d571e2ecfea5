"""The intermediates of low-rank terms, which the shrink writes and the expand reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from scute_compile.runtime_min.ranks.exchange import TermExchange
from scute_compile.runtime_min.step.arguments import Features
from scute_compile.runtime_min.step.plan import PAIR_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Intermediates:
    """The shrink's results in float32; a step's rows have as many entries as their adapters' ranks.

    Fully sharded, after the ranks' exchange, all slices of a GEMM read the same entries: only one slice has terms.
    """

    h: torch.Tensor
    """`(runs, slices, entries)`: `x A^T` of owned terms, partial sums per run of K; in prefill of shared ones too."""
    hs: torch.Tensor
    """`(slices, runs, rows, ranks)`: `(x A^T) * d` of shared terms."""
    shares: int = 1
    """Number of ranks among which the entries are divided; 1 when they are whole."""
    one_slice: bool = False
    """Whether all slices of the GEMM read the entries of one slice."""

    @property
    def entries(self) -> int:
        """The distance between slices of h."""
        return 0 if self.one_slice else self.h.shape[2]

    @property
    def rows(self) -> int:
        """The distance between slices of hs in rows, per run."""
        return 0 if self.one_slice else self.hs.shape[2]


def completed(intermediates: Intermediates, exchange: TermExchange, tokens: int, features: Features) -> Intermediates:
    """Return whole intermediates from this rank's parts, for the step's rows; all ranks must call this.

    Args:
        intermediates: The shrink's results on this rank.
        exchange: How the ranks complete them.
        tokens: Number of rows of the call.
        features: The step's features.
    """
    index, parts = exchange.terms_index, []
    if features.owned or features.prefill:
        parts.append(_total(intermediates.h[:, index, : features.ranks // intermediates.shares], 0))
    if features.shared and not features.prefill:
        parts.append(_total(intermediates.hs[index, :, : min(tokens, features.blocks * PAIR_TOKENS)], 0))
    whole = exchange.complete(parts)
    h = whole.pop(0)[None, None] if features.owned or features.prefill else intermediates.h
    return Intermediates(h=h, hs=whole[0][None, None] if whole else intermediates.hs, one_slice=True)


def _total(parts: torch.Tensor, axis: int) -> torch.Tensor:
    """Return the sum over runs of K; a view where there is only one run."""
    return parts.select(axis, 0) if parts.shape[axis] == 1 else parts.sum(axis)
