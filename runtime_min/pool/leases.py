"""Resident adapters, and the leases of the steps that read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from scute_compile.diagnostics import Code, fail
from scute_compile.runtime_min.pool.packed_adapter import PackedAdapter
from scute_compile.runtime_min.pool.pages import PageAllocation


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentFacts:
    """Facts about a resident adapter from which steps are planned."""

    rank: int
    """Largest rank of its owned terms; 0 without any."""
    pair: int = -1
    """Index of its shared pair."""
    pair_rank: int = 0
    beside_pair: bool = False
    """Whether it has tensors at sites where its shared pair has no window."""
    rotated: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class Placement:
    """The pages of one adapter, and where the page map lists them."""

    allocation: PageAllocation
    start: int
    """First entry in the page map."""


@dataclass(slots=True, kw_only=True, eq=False)
class Resident:
    """One adapter on the device."""

    packed: PackedAdapter
    index: int
    """The adapter index: its position on the directory's first axis."""
    placement: Placement
    pairs: tuple[int, ...]
    """Index of the shared pair of each of the adapter's windows."""
    facts: ResidentFacts
    uses: int = 0
    """Number of running steps that read it."""
    retired: bool = False
    """Whether it was replaced and stays only for running steps."""
    last_use: torch.cuda.Event | None = None
    """The end of the last step that read it."""

    @property
    def held(self) -> bool:
        """Whether running steps read it, so that it must not be evicted."""
        return self.uses > 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lease:
    """The adapters of one step, which stay on the device until the lease is released."""

    indices: Mapping[str, int]
    """Adapter index by name."""
    residents: tuple[Resident, ...]


class Leases:
    """The leases of running steps, which count the uses of their adapters."""

    def __init__(self) -> None:
        self._open: set[Lease] = set()

    def acquire(self, indices: Mapping[str, int], residents: tuple[Resident, ...]) -> Lease:
        """Return a lease that holds the adapters of a step."""
        lease = Lease(indices=indices, residents=residents)
        for resident in residents:
            resident.uses += 1
        self._open.add(lease)
        return lease

    def release(self, lease: Lease, end: torch.cuda.Event | None) -> None:
        """Release a lease; `end` marks the end of its step. Raises SC703 for a lease that isn't held."""
        if lease not in self._open:
            fail(
                Code.SC703,
                where="a lease of " + (", ".join(lease.indices) or "no adapter"),
                found="a lease that was released already, or is another pool's",
                expected="a lease that is held",
                next="release each lease once, in the pool where it was acquired",
            )
        self._open.remove(lease)
        for resident in lease.residents:
            resident.uses -= 1
            resident.last_use = end
