"""One adapter on the device, and the leases of the steps that read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from scute_compile.diagnostics import Code, fail
from scute_compile.runtime_min.pool.packed_adapter import PackedAdapter
from scute_compile.runtime_min.pool.pages import Holding


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentFacts:
    """What the plan needs to know of a resident adapter."""

    rank: int
    """Largest rank of its owned terms; 0 without any."""
    pair: int = -1
    """Index of its shared pair."""
    pair_rank: int = 0
    beside_pair: bool = False
    """Whether it has slots at sites that its shared pair does not touch."""
    rotated: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class Placed:
    """Pages of one packed, and where they stand in the page map."""

    holding: Holding
    start: int


@dataclass(slots=True, kw_only=True, eq=False)
class Resident:
    """One adapter on the device."""

    packed: PackedAdapter
    slot: int
    own: Placed
    pairs: tuple[int, ...]
    """Indices of its shared pair, by the packed's own numbers of windows."""
    facts: ResidentFacts
    """What the plan of a step needs to know of it."""
    uses: int = 0
    """Running steps that read it."""
    pinned: bool = False
    retired: bool = False
    """Whether it was replaced and stays for running steps alone."""
    last_use: torch.cuda.Event | None = None
    """The end of the last step that read it."""

    @property
    def held(self) -> bool:
        """Whether it must not be evicted."""
        return self.pinned or self.uses > 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lease:
    """The adapters of one step; they stay where they are until the lease is released."""

    indices: Mapping[str, int]
    """Slot in the directory by name."""
    residents: tuple[Resident, ...]


class Leases:
    """The leases that are held; each is given back once."""

    def __init__(self) -> None:
        self._open: set[Lease] = set()

    def take(self, indices: Mapping[str, int], residents: tuple[Resident, ...]) -> Lease:
        """Hold the adapters of a step."""
        lease = Lease(indices=indices, residents=residents)
        for resident in residents:
            resident.uses += 1
        self._open.add(lease)
        return lease

    def give_back(self, lease: Lease, end: torch.cuda.Event | None) -> None:
        """Let the adapters of a step go. Raises SC703 for a lease that isn't held (any more)."""
        if lease not in self._open:
            fail(
                Code.SC703,
                where="a lease of " + (", ".join(lease.indices) or "no adapter"),
                found="one that was given back already, or is another pool's",
                expected="a lease that is held",
                next="release each lease once, where it was acquired",
            )
        self._open.remove(lease)
        for resident in lease.residents:
            resident.uses -= 1
            resident.last_use = end
