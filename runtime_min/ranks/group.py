"""The ranks of one model: their collectives over a process group, and the bytes that these send."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import sha256

import torch
import torch.distributed as dist

from scute_compile.diagnostics import Code, fail

# torch before 2.12 has only the older name
_all_gather: Callable[..., object] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Purpose(StrEnum):
    """What a counted transfer is for."""

    BASE = "base"
    """All-reduces of row-parallel layers, which the model needs without adapters as well."""
    ADAPTERS = "adapters"
    """Intermediates of fully sharded terms."""


@dataclass(slots=True, kw_only=True)
class Traffic:
    """Bytes that one rank sends in ring collectives, by purpose.

    Of V bytes, an all-gather sends (N - 1) / N V and an all-reduce twice that (arXiv:2311.03285 section 6.3).
    """

    sent: dict[Purpose, float] = field(default_factory=lambda: dict.fromkeys(Purpose, 0.0))

    def reset(self) -> None:
        """Set all counts to zero."""
        self.sent = dict.fromkeys(Purpose, 0.0)


class RankGroup:
    """The ranks of a model, and which of them this process is.

    Args:
        group: The process group; None for the default group, or for one rank when `torch.distributed` isn't
            initialised.
        distributed: False for a group of one rank even where `torch.distributed` is initialised.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, distributed: bool = True) -> None:
        self._group = group
        initialised = distributed and dist.is_available() and dist.is_initialized()
        self.size = dist.get_world_size(group) if initialised else 1
        self.rank = dist.get_rank(group) if initialised else 0
        self.traffic = Traffic()

    @contextmanager
    def all_or_none(self, name: str, device: torch.device) -> Iterator[None]:
        """Run the block on all ranks; where it raises on some of them, raise on all.

        Args:
            name: The adapter that the block loads, for the message.
            device: A device that the group's backend sends from.

        Raises:
            ScuteError: SC815 on the ranks where the block did not raise.
        """
        try:
            yield
        except BaseException:
            self._failed_ranks(device, failed=True)
            raise
        if failed := self._failed_ranks(device, failed=False):
            fail(
                Code.SC815,
                where=name,
                found=f"{len(failed)} of {self.size} ranks that refused it: {failed}",
                expected="an adapter that every rank loads",
                next=f"see the error of rank {failed[0]}, and load the adapter on all ranks again",
            )

    def check_same(self, name: str, digest: str, device: torch.device) -> None:
        """Refuse an adapter for which ranks read different artifacts (SC815, on all ranks)."""
        if self.size == 1:
            return
        words = torch.frombuffer(bytearray(sha256(digest.encode()).digest()), dtype=torch.int32)
        every = self.all_gather(words.to(device))
        if others := (every != every[0]).any(1).nonzero().flatten().tolist():
            fail(
                Code.SC815,
                where=name,
                found=f"another artifact on ranks {others} than on rank 0",
                expected="one artifact, of which each rank reads its own file",
                next="use one store for all ranks, and load the adapter on all of them again",
            )

    def _failed_ranks(self, device: torch.device, *, failed: bool) -> list[int]:
        if self.size == 1:
            return []
        every = self.all_gather(torch.tensor([failed], dtype=torch.int32, device=device))
        return every.flatten().nonzero().flatten().tolist()

    def all_reduce(self, part: torch.Tensor, purpose: Purpose | None = None) -> torch.Tensor:
        """Return the sum of all ranks' parts, equal on every rank, in the dtype of `part`; may overwrite `part`."""
        if self.size == 1:
            return part
        part = part.contiguous()
        dist.all_reduce(part, group=self._group)
        if purpose is not None:
            self.traffic.sent[purpose] += 2 * (self.size - 1) / self.size * part.numel() * part.element_size()
        return part

    def all_gather(self, part: torch.Tensor, purpose: Purpose | None = None) -> torch.Tensor:
        """Return all ranks' parts, `(ranks, *part.shape)`; parts have one shape on all ranks."""
        if self.size == 1:
            return part.unsqueeze(0)
        whole = part.new_empty((self.size, *part.shape))
        _all_gather(whole.view(-1), part.contiguous().view(-1), group=self._group)
        if purpose is not None:
            self.traffic.sent[purpose] += (self.size - 1) * part.numel() * part.element_size()
        return whole
