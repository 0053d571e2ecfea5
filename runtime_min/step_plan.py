"""One step's batch metadata: which rows belong to which resident adapter, as one buffer of int32 on the device.

The buffer has a fixed place and layout, so that a captured graph reads the next step's mix from it. All layers share
it: a record of work names a segment and a block, and each layer finds its own factors through the directory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from scute_compile.codes import Code
from scute_compile.diagnostics import fail

OWNED_ROWS = 2
"""Rows of A per program of the decode shrink; of 1, 2 and 4 the best over the four fused sites on an H200."""
SEGMENT_ROWS = 2
"""Rows per decode segment: more rows of one adapter become more segments, which run at once; B comes from L2 then."""
PAIR_TOKENS = 16
PAIR_RANKS = 16
TILE_TOKENS = 64
PAIR_FIELDS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotFacts:
    """What the plan needs to know of a resident adapter."""

    rank: int
    """Largest rank of its owned terms; 0 without any."""
    pair: int = -1
    """Index of its shared pair."""
    pair_rank: int = 0
    rotated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """How large a step may be; fixes the buffer's layout and the sizes of intermediate buffers."""

    tokens: int
    ranks: int
    """Sum over the rows of their adapters' largest ranks."""
    pairs: int = 4
    pair_ranks: int = 256
    """Largest rank of a shared pair."""
    rotated: int = 0
    """Rows whose adapter turns its input."""

    def layout(self) -> Mapping[str, tuple[int, int]]:
        """Return name -> (start, length) of every region of the buffer."""
        t = self.tokens
        work = t + self.ranks // OWNED_ROWS + 1
        lengths = {
            "counts": 8, "row_slot": t, "seg_slot": t, "seg_start": t + 1, "seg_rows": t, "row_h": t,
            "work": work, "swork": (t // PAIR_TOKENS + self.pairs + 1) * 128,
            "block": 4 * (t // PAIR_TOKENS + self.pairs + 1),
            "pair_rows": t, "pair": PAIR_FIELDS * self.pairs, "rot_position": t, "rot_rows": max(1, self.rotated),
            "tile": 4 * (t // TILE_TOKENS + t + 1),
        }  # fmt: skip
        start, regions = 0, {}
        for name, length in lengths.items():
            regions[name] = (start, length)
            start += (length + 3) // 4 * 4
        return regions


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The regions of one step on the host, before they are copied to the device."""

    regions: Mapping[str, Sequence[int]] = field(repr=False)
    tokens: int
    owned: bool
    shared: bool
    rotated: int
    """Rows with a rotation."""
    tiles: int
    work: int
    """Records of the owned shrink per slice."""
    shared_work: int
    segments: int
    blocks: int
    prefill: bool = False


def plan_step(
    rows: Sequence[int], facts: Mapping[int, SlotFacts], pairs: Sequence[Sequence[int]], capacity: Capacity, *,
    prefill: bool = False,
) -> StepPlan:  # fmt: skip
    """Lay out one step.

    Args:
        rows: Slot of every row of the batch, -1 for the base alone.
        facts: By slot.
        pairs: Per shared pair: its rank, and zeros. Where its columns lie for a site, the directory's records say.
        capacity: What the buffers hold.
        prefill: Whether segments are whole, for tiles of many rows.

    Raises:
        ScuteError: SC804 when the batch is larger than the capacity.
    """
    by_slot: dict[int, list[int]] = {}
    for row, slot in enumerate(rows):
        by_slot.setdefault(slot, []).append(row)
    base_rows = by_slot.pop(-1, [])
    regions: dict[str, list[int]] = {"row_slot": list(rows), "seg_slot": [], "seg_start": [0], "seg_rows": []}
    row_h, position, work = [0] * len(rows), 0, []
    for slot, all_members in sorted(by_slot.items()):
        for members in _runs(all_members, SEGMENT_ROWS if not prefill else len(all_members)):
            rank = max(facts[slot].rank, 0)
            segment = len(regions["seg_slot"])
            regions["seg_slot"].append(slot)
            regions["seg_rows"] += members
            regions["seg_start"].append(len(regions["seg_rows"]))
            for row in members:
                row_h[row] = position
                position += max(rank, facts[slot].pair_rank if prefill else 0)
            work += [segment << 12 | block for block in range(-(-rank // OWNED_ROWS))]
    tiles = _tiles(regions["seg_slot"], regions["seg_start"])
    tiles += _base_tiles(len(regions["seg_rows"]), len(base_rows))
    segments = len(regions["seg_slot"])
    for members in _runs(base_rows, SEGMENT_ROWS if not prefill else max(1, len(base_rows))):
        regions["seg_slot"].append(-1)
        regions["seg_rows"] += members
        regions["seg_start"].append(len(regions["seg_rows"]))
    shared = _shared(rows, facts)
    rotated = [row for row, slot in enumerate(rows) if slot >= 0 and facts[slot].rotated]
    rot_position = [0] * len(rows)
    for place, row in enumerate(rotated):
        rot_position[row] = place
    regions |= {
        "row_h": row_h, "work": work, **shared, "pair": [value for pair in pairs for value in pair],
        "rot_position": rot_position, "rot_rows": rotated, "tile": [value for tile in tiles for value in tile],
    }  # fmt: skip
    blocks = len(shared["block"]) // 4
    base_segments = len(regions["seg_slot"]) - segments
    regions["counts"] = [
        len(work), len(shared["swork"]), segments, blocks, len(rotated), len(tiles), base_segments, 0
    ]  # fmt: skip
    _check(regions, capacity, position)
    return StepPlan(regions=regions, tokens=len(rows), owned=bool(work), shared=blocks > 0, rotated=len(rotated),
                    tiles=len(tiles), work=len(work), shared_work=len(shared["swork"]),
                    segments=segments + base_segments, blocks=blocks, prefill=prefill)  # fmt: skip


def _runs(members: Sequence[int], length: int) -> list[list[int]]:
    return [list(members[at : at + length]) for at in range(0, len(members), length)]


def _tiles(slots: Sequence[int], starts: Sequence[int]) -> list[tuple[int, int, int, int]]:
    return [
        (slot, first, min(TILE_TOKENS, starts[segment + 1] - first), 0)
        for segment, slot in enumerate(slots)
        for first in range(starts[segment], starts[segment + 1], TILE_TOKENS)
    ]


def _base_tiles(start: int, count: int) -> list[tuple[int, int, int, int]]:
    return [(-1, start + at, min(TILE_TOKENS, count - at), 0) for at in range(0, count, TILE_TOKENS)]


def _shared(rows: Sequence[int], facts: Mapping[int, SlotFacts]) -> dict[str, list[int]]:
    by_pair: dict[int, list[int]] = {}
    for row, slot in enumerate(rows):
        if slot >= 0 and facts[slot].pair >= 0:
            by_pair.setdefault(facts[slot].pair, []).append(row)
    swork: list[int] = []
    block: list[int] = []
    listed: list[int] = []
    for pair, members in sorted(by_pair.items()):
        rank = facts[rows[members[0]]].pair_rank
        for start in range(0, len(members), PAIR_TOKENS):
            number = len(block) // 4
            block += [pair, len(listed) + start, min(PAIR_TOKENS, len(members) - start), 0]
            swork += [number << 12 | ranks for ranks in range(-(-rank // PAIR_RANKS))]
        listed += members
    return {"swork": swork, "block": block, "pair_rows": listed}


def _check(regions: Mapping[str, Sequence[int]], capacity: Capacity, ranks: int) -> None:
    layout = capacity.layout()
    for name, values in regions.items():
        if len(values) > layout[name][1] or ranks > capacity.ranks:
            fail(
                Code.SC804, where=name, found=f"{len(values)} entries, ranks adding up to {ranks}",
                expected=f"at most {layout[name][1]} entries and ranks of {capacity.ranks}",
                next="split the batch, or make the runtime with a larger capacity",
            )  # fmt: skip


class StepRegions:
    """A step's metadata as kernels read it: one int32 tensor, and where its regions lie."""

    def __init__(self, capacity: Capacity, device_copy: torch.Tensor) -> None:
        self.capacity = capacity
        self.layout = capacity.layout()
        self.device_copy = device_copy

    def region(self, name: str) -> torch.Tensor:
        """Return a view of one region on the device."""
        start, length = self.layout[name]
        return self.device_copy[start : start + length]


HOST_COPIES = 4
"""Steps whose metadata may wait for the device while the host prepares the next one."""


LONG_REGION = 1 << 16
"""Entries from which on the unused part of a region is left out of the copy."""


class StepBuffers(StepRegions):
    """The device's copy of a step's plan, at a fixed address, and the host's copies that it is filled from.

    A copy to the device reads pinned memory after `fill` has returned. So the host has a few buffers in turn, and an
    event says when each may be written again. Steps that are filled on different streams are for the caller to order.
    """

    def __init__(self, capacity: Capacity, device: torch.device) -> None:
        size = sum((length + 3) // 4 * 4 for _, length in capacity.layout().values())
        super().__init__(capacity, torch.zeros(size, dtype=torch.int32, device=device))
        cuda = device.type == "cuda"
        self._hosts = [torch.zeros(size, dtype=torch.int32, pin_memory=cuda) for _ in range(HOST_COPIES if cuda else 1)]
        self._read: list[torch.cuda.Event | None] = [None] * len(self._hosts)
        self._turn = 0

    def fill(self, plan: StepPlan) -> None:
        """Copy a plan to the device in one piece, on the current stream; the host waits for older copies alone.

        Rows beyond the plan's tokens belong to no adapter, and tiles and blocks beyond its own hold no rows: a graph
        that was captured for larger steps launches programs for them too.
        """
        host = self._host()
        values = host.numpy()
        for name, absent in (("row_slot", -1), ("block", 0), ("tile", 0)):
            start, length = self.layout[name]
            values[start : start + length] = absent
        start, length = self.layout["tile"]
        values[start : start + length : 4] = -1
        for name, given in plan.regions.items():
            start, _ = self.layout[name]
            values[start : start + len(given)] = given
        # `work` has room for the largest rank in every row: in buffers of many rows nearly all of what is to be copied
        start, length = self.layout["work"]
        used = start + len(plan.regions["work"])
        whole = ((0, len(host)),)
        for first, last in whole if length < LONG_REGION else ((0, used), (start + length, len(host))):
            self.device_copy[first:last].copy_(host[first:last], non_blocking=True)
        if self.device_copy.is_cuda:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call] # torch leaves it unannotated
            event.record(torch.cuda.current_stream(self.device_copy.device))
            self._read[self._turn] = event
            self._turn = (self._turn + 1) % len(self._hosts)

    def _host(self) -> torch.Tensor:
        """Return the next host buffer, once the copy that last read it is done."""
        read = self._read[self._turn]
        if read is not None:
            read.synchronize()
        return self._hosts[self._turn]
