"""Simulated tensor parallelism: every rank computes with its shard of the base and the tensors of its file.

The ranks' files are never joined. Column-parallel: the ranks' outputs are concatenated. Row-parallel: partial sums stay
in the wide dtype until they are added, and only one rank adds the base's bias and the shift.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from scute_compile.ir.linear import Split
from scute_compile.runtime_min.oracle.fully_sharded import add_part, shrink_part
from scute_compile.runtime_min.oracle.site_tensors import LoadedSite, RankSite
from scute_compile.runtime_min.reference import apply_site, rotate, take, wide


def run_site(
    x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, site: LoadedSite
) -> torch.Tensor:
    """Return an adapted layer's output, computed rank by rank.

    Args:
        x_TK: The layer's input `(..., in)`.
        weight_NK: The base's whole weight `(out, in)`; each rank takes its shard.
        bias_N: The base's bias, or None.
        site: The layer's tensors on all ranks.

    Returns:
        `(..., out)` in the dtype of `x`, rounded once.
    """
    hs = exchanged(x_TK, site.ranks)
    if site.record.split is Split.ROW:
        partial = [_run_rank(x_TK, weight_NK, bias_N, rank, hs) for rank in site.ranks]
        total = partial[0]
        for part in partial[1:]:
            total = total + part
        return total.to(x_TK.dtype)
    if site.record.split is Split.COLUMN:
        out_TN = x_TK.new_empty((*x_TK.shape[:-1], site.record.out_features))
        for rank in reversed(site.ranks):  # where several ranks hold an output, the first rank's is kept
            part = _run_rank(x_TK, weight_NK, bias_N, rank, hs).to(x_TK.dtype)
            position = 0
            for start, stop in rank.outputs:
                out_TN[..., start:stop] = part[..., position : position + stop - start]
                position += stop - start
        return out_TN
    whole = next(rank for rank in site.ranks if rank.adds_bias)
    return _run_rank(x_TK, weight_NK, bias_N, whole, hs).to(x_TK.dtype)


def exchanged(x_TK: torch.Tensor, ranks: Sequence[RankSite]) -> tuple[torch.Tensor, ...]:
    """Return the whole intermediate of every fully sharded term, from the parts of all ranks."""
    intermediates = []
    for terms in zip(*(rank.fully_sharded for rank in ranks), strict=True):
        parts = [shrink_part(take(x_TK, -1, rank.inputs), term) for rank, term in zip(ranks, terms, strict=True)]
        intermediates.append(torch.cat(parts, -1) if terms[0].all_gathered else torch.stack(parts).sum(0))
    return tuple(intermediates)


def _run_rank(
    x_TK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    rank: RankSite,
    hs: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Return one rank's output in the wide dtype; `hs` are the whole intermediates of fully sharded terms."""
    dtype = wide(x_TK, weight_NK)
    x = take(x_TK, -1, rank.inputs).to(dtype)
    weight = take(take(weight_NK, 0, rank.outputs), 1, rank.inputs).to(dtype)
    y = x @ weight.T
    if bias_N is not None and rank.adds_bias:
        y = y + take(bias_N, 0, rank.outputs).to(dtype)
    tensors = rank.tensors
    delta_y = None
    if tensors.rotation is not None and tensors.delta is not None:
        delta_y = rotate(x, tensors.delta, tensors.rotation) @ weight.T
    out = apply_site(y, x, delta_y, tensors, out_dtype=dtype)
    for h, term in zip(hs, rank.fully_sharded, strict=True):
        out = add_part(out, h, term)
    return out
