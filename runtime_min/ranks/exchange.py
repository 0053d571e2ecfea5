"""Exchange of intermediates: the collective between shrink and expand where low-rank terms are fully sharded.

The layout is S-LoRA's (arXiv:2311.03285 section 6); `runtime_min.oracle.fully_sharded` states it. Pools hold a term's
rows in another order: an all-gather interleaves the ranks' entries (the first of each rank, then the second of each),
and the rows of B are stored in that order. The position of an entry then follows from its position on its rank alone,
whatever adapters a batch mixes, and the result of the all-gather only needs a transposition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from scute_compile.ir.expressions import Interval, Ranges
from scute_compile.runtime_min.ranks.group import Purpose, RankGroup


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TermExchange:
    """How the ranks complete the intermediates of one layer."""

    ranks: RankGroup
    part: Interval | None = None
    """The outputs of a row-parallel layer to which this rank expands; None for a column-parallel layer."""

    @property
    def shares(self) -> int:
        """Number of ranks that a term's rank is divided among: 1 for a row-parallel layer."""
        return self.ranks.size if self.part is None else 1

    def parts(self, outputs: int) -> tuple[Interval | None, ...]:
        """Return the intervals of outputs that are directory entries: this rank's `part`, and the rest on either side.

        >>> TermExchange(ranks=RankGroup(), part=(0, 2)).parts(6)
        ((0, 2), (2, 6))
        """
        if self.part is None:
            return (None,)
        start, stop = self.part
        return tuple(part for part in ((0, start), self.part, (stop, outputs)) if part[0] < part[1])

    @property
    def terms_index(self) -> int:
        """Index of the entry of `parts` that has the terms."""
        return 0 if self.part is None or self.part[0] == 0 else 1

    def complete(self, held: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return whole intermediates from this rank's parts of them, by one transfer.

        Args:
            held: Column-parallel: this rank's entries `(..., R / ranks)`, in the order of its rows of A.
                Row-parallel: partial sums `(..., R)`, which may be overwritten.

        Returns:
            `(..., R)` each, the entries in the order of `row_order`.
        """
        if not held:
            return []
        flat = held[0].reshape(-1) if len(held) == 1 else torch.cat([part.reshape(-1) for part in held])
        lengths = [part.numel() for part in held]
        if self.part is not None:
            sums = torch.split(self.ranks.all_reduce(flat, Purpose.ADAPTERS), lengths)
            return [whole.view(part.shape) for whole, part in zip(sums, held, strict=True)]
        every = torch.split(self.ranks.all_gather(flat, Purpose.ADAPTERS), lengths, dim=1)
        return [
            whole.t().reshape(*part.shape[:-1], part.shape[-1] * self.ranks.size)
            for whole, part in zip(every, held, strict=True)
        ]


def row_order(shares: Ranges) -> tuple[int, ...]:
    """Return the term's row at each position after the all-gather; -1 stands for a row of zeros.

    Ranks with fewer rows than others send zeros, so that all ranks send equally many rows.

    >>> row_order(((0, 2), (2, 3)))
    (0, 2, 1, -1)
    """
    longest = max(stop - start for start, stop in shares)
    return tuple(start + i if start + i < stop else -1 for i in range(longest) for start, stop in shares)


def share_order(shares: Ranges, rank: int) -> tuple[int, ...]:
    """Return the term's rows that one rank computes, in order; -1 stands for a row of zeros.

    >>> share_order(((0, 2), (2, 3)), 1)
    (2, -1)
    """
    return row_order(shares)[rank :: len(shares)]


def take_rows(tensor: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Return rows in another order, with a row of zeros for each -1.

    >>> take_rows(torch.tensor([[1], [2]]), (1, -1, 0)).tolist()
    [[2], [0], [1]]
    """
    padded = torch.cat([tensor, tensor.new_zeros((1, *tensor.shape[1:]))])
    return padded[torch.tensor(order, dtype=torch.long)]
