"""Tensor parallelism, simulated: every rank multiplies its own shard of the base with its own file's tensors.

The ranks' files are never joined. Column-parallel: each rank's outputs are put at their place. Row-parallel: partial
sums stay wide, are added, and only one rank adds the base's bias and the shift. With one rank it is the plain layer.
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
    """Return an adapted layer's output as its ranks compute it together.

    Args:
        x_TK: The layer's input `(..., in)`.
        weight_NK: The base's whole weight `(out, in)`; each rank takes its shard.
        bias_N: The base's bias, or None.
        site: The layer's tensors on all ranks.

    Returns:
        `(..., out)` in the dtype of `x`, rounded once.
    """
    hs = exchange(x_TK, site.ranks)
    if site.record.split is Split.ROW:
        partial = [_run_rank(x_TK, weight_NK, bias_N, rank, hs) for rank in site.ranks]
        total = partial[0]
        for one in partial[1:]:
            total = total + one
        return total.to(x_TK.dtype)
    if site.record.split is Split.COLUMN:
        out_TN = x_TK.new_empty((*x_TK.shape[:-1], site.record.out_features))
        for rank in reversed(site.ranks):  # where ranks hold copies, the first one's stay
            part = _run_rank(x_TK, weight_NK, bias_N, rank, hs).to(x_TK.dtype)
            position = 0
            for start, stop in rank.outputs:
                out_TN[..., start:stop] = part[..., position : position + stop - start]
                position += stop - start
        return out_TN
    whole = next(rank for rank in site.ranks if rank.adds_bias)
    return _run_rank(x_TK, weight_NK, bias_N, whole, hs).to(x_TK.dtype)


def exchange(x_TK: torch.Tensor, ranks: Sequence[RankSite]) -> tuple[torch.Tensor, ...]:
    """Return the whole intermediate of every fully sharded term, as the ranks have it after they exchanged theirs."""
    whole = []
    for parts in zip(*(rank.sharded for rank in ranks), strict=True):
        held = [shrink_part(take(x_TK, -1, rank.inputs), part) for rank, part in zip(ranks, parts, strict=True)]
        whole.append(torch.cat(held, -1) if parts[0].gathered else torch.stack(held).sum(0))
    return tuple(whole)


def _run_rank(
    x_TK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    rank: RankSite,
    hs: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Return what one rank computes, in the wide dtype; `hs` are the intermediates of fully sharded terms."""
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
    for h, term in zip(hs, rank.sharded, strict=True):
        out = add_part(out, h, term)
    return out
