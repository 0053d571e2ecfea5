"""What the ranks of one model do together, over whatever backend their process group has, and the bytes it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import sha256

import torch
import torch.distributed as dist

from scute_compile.diagnostics import Code, fail

# the newer name of one function; torch before 2.12 has the older one alone
_all_gather: Callable[..., object] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Purpose(StrEnum):
    """Who needs a transfer."""

    BASE = "base"
    """The row-parallel layers' all-reduce, which the model does without adapters as well."""
    OUTPUTS = "outputs"
    """Gathering the outputs of a column-parallel layer whose successor reads them whole; engines have none."""
    ADAPTERS = "adapters"
    """Intermediates of fully sharded terms."""
    LOADING = "loading"
    """What is exchanged once, when an adapter is loaded."""


@dataclass(slots=True, kw_only=True)
class Traffic:
    """Bytes that one rank sends, by purpose, as a ring does it.

    Of V bytes an all-gather sends (N - 1) / N V, an all-reduce twice that (arXiv:2311.03285 section 6.3 counts alike).
    """

    sent: dict[Purpose, float] = field(default_factory=lambda: dict.fromkeys(Purpose, 0.0))
    calls: dict[Purpose, int] = field(default_factory=lambda: dict.fromkeys(Purpose, 0))

    def count(self, purpose: Purpose, sent: float) -> None:
        """Add one transfer."""
        self.sent[purpose] += sent
        self.calls[purpose] += 1

    def reset(self) -> None:
        """Begin anew."""
        self.sent = dict.fromkeys(Purpose, 0.0)
        self.calls = dict.fromkeys(Purpose, 0)


class RankGroup:
    """This process's place among the ranks of a model.

    Args:
        group: The process group; None: the default one, or a group of one when `torch.distributed` isn't initialised.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        there = dist.is_available() and dist.is_initialized()
        self.size = dist.get_world_size(group) if there else 1
        self.rank = dist.get_rank(group) if there else 0
        self.traffic = Traffic()

    @contextmanager
    def together(self, name: str, device: torch.device) -> Iterator[None]:
        """Let all ranks do what may fail on some of them; where one raises, all do.

        Args:
            name: What it is done to.
            device: One that the group's backend sends from.

        Raises:
            ScuteError: SC815 on ranks where nothing failed.
        """
        try:
            yield
        except BaseException:
            self._failed(device, failed=True)
            raise
        if others := self._failed(device, failed=False):
            fail(
                Code.SC815,
                where=name,
                found=f"{len(others)} of {self.size} ranks that refused it: {others}",
                expected="an adapter that every rank loads",
                next=f"see what rank {others[0]} says, and load the adapter on all ranks again",
            )

    def check_same(self, name: str, digest: str, device: torch.device) -> None:
        """Refuse an adapter of which ranks read different artifacts: SC815, on all of them."""
        own = torch.frombuffer(bytearray(sha256(digest.encode()).digest()), dtype=torch.int32)
        every = self.gather(own.to(device), Purpose.LOADING)
        if others := (every != every[0]).any(1).nonzero().flatten().tolist():
            fail(
                Code.SC815,
                where=name,
                found=f"another artifact on ranks {others} than on rank 0",
                expected="one artifact, of which each rank reads its own file",
                next="give all ranks the same store, and load the adapter on all of them again",
            )

    def _failed(self, device: torch.device, *, failed: bool) -> list[int]:
        """Return the ranks that say they failed."""
        said = self.gather(torch.tensor([failed], dtype=torch.int32, device=device), Purpose.LOADING)
        return said.flatten().nonzero().flatten().tolist()

    def all_reduce(self, part: torch.Tensor, purpose: Purpose) -> torch.Tensor:
        """Return the sum of all ranks' parts, the same on every rank, in the dtype of `part`; may overwrite `part`."""
        if self.size == 1:
            return part
        part = part.contiguous()
        dist.all_reduce(part, group=self._group)
        self.traffic.count(purpose, 2 * (self.size - 1) / self.size * part.numel() * part.element_size())
        return part

    def gather(self, part: torch.Tensor, purpose: Purpose) -> torch.Tensor:
        """Return all ranks' parts, `(ranks, *part.shape)`; parts have one shape on all ranks."""
        if self.size == 1:
            return part.unsqueeze(0)
        whole = part.new_empty((self.size, *part.shape))
        _all_gather(whole.view(-1), part.contiguous().view(-1), group=self._group)
        self.traffic.count(purpose, (self.size - 1) * part.numel() * part.element_size())
        return whole
