"""One step's batch metadata: which rows belong to which resident adapter, as one int32 buffer on the device.

The buffer has a fixed address and layout, so that a captured graph reads the next step's mix from it. All layers share
it: a work item names a segment and a block, and each layer finds its factors through the directory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from scute_compile.diagnostics import Code, fail
from scute_compile.runtime_min.pool.leases import ResidentFacts

OWNED_ROWS = 1
"""Rows of A per program of the decode shrink; 1 was faster than 2 and 4 over the four fused sites on an H200."""
WIDE_RANK = 16
"""Largest rank of the wide tiles of the decode expand; segments of larger ranks are listed for the tall tiles too."""
PAIR_TOKENS, PAIR_RANKS = 16, 8
"""Tokens of a shared pair, and rows of its A, per program of the shared shrink. With 16 rows fewer programs run at
once: with three stages, 16 tenants of VeRA added 1.78 ms to a decode step on an H200, and 1.68 with 8."""
TILE_TOKENS = 64
PAIR_FIELDS = 8
ITEM_FIELDS = 4
"""int32 fields of a work item, a segment, a block and a tile."""

Segment = tuple[int, Sequence[int]]
"""An adapter index, -1 for the base, and its rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The size of the largest step, which fixes the buffer's layout and the sizes of intermediate buffers."""

    tokens: int
    ranks: int
    """Sum of the rows' ranks; a row's rank is its adapter's largest."""
    pairs: int = 4
    pair_ranks: int = 256
    """Largest rank of a shared pair."""
    rotated: int = 0
    """Rows whose adapter rotates its input."""
    prefill: bool = False
    """Whether the buffer is for the prefill form, whose regions differ from those of the decode form."""

    @property
    def tall(self) -> int:
        """Largest number of rows whose adapters have ranks above `WIDE_RANK`."""
        return min(self.tokens, self.ranks // (WIDE_RANK + 1))

    def layout(self) -> Mapping[str, tuple[int, int]]:
        """Return name -> (start, length) of every region of the buffer."""
        t = self.tokens
        blocks = t // PAIR_TOKENS + self.pairs + 1
        lengths = {
            "counts": 4,
            "row_adapter": t,
            "pair": PAIR_FIELDS * self.pairs,
            "rot_position": t,
            "rotated": 2 * max(1, self.rotated),
        }
        if self.prefill:
            lengths |= {"row_h": t, "seg_rows": t, "tile": ITEM_FIELDS * (t // TILE_TOKENS + t + 1)}
        else:
            lengths |= {
                "segment": ITEM_FIELDS * t,
                "tall": ITEM_FIELDS * max(1, self.tall),
                "work": ITEM_FIELDS * (t + self.ranks // OWNED_ROWS + 1),
                "swork": ITEM_FIELDS * blocks * -(-self.pair_ranks // PAIR_RANKS),
                "block": ITEM_FIELDS * blocks,
                "pair_rows": t,
                "pair_adapters": t,
            }
        start, regions = 0, {}
        for name, length in lengths.items():
            regions[name] = (start, length)
            start += (length + 3) // 4 * 4
        return regions


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The regions of one step on the host."""

    regions: Mapping[str, Sequence[int]] = field(repr=False)
    tokens: int
    owned: bool
    shared: bool
    rotated: int
    """Rows with a rotation."""
    tiles: int
    work: int
    """Work items of the owned shrink per slice."""
    shared_work: int
    segments: int
    blocks: int
    tall: int
    ranks: int
    """Sum of the rows' ranks."""
    prefill: bool = False

    @property
    def rows(self) -> Sequence[int]:
        """The adapter index of every row, -1 for the base."""
        return self.regions["row_adapter"]


def plan_step(
    rows: Sequence[int], facts: Mapping[int, ResidentFacts], pairs: Sequence[Sequence[int]], capacity: Capacity
) -> StepPlan:
    """Plan one step in the form of its buffers, decode or prefill.

    Args:
        rows: Adapter index of every row of the batch, -1 for the base.
        facts: Facts about resident adapters, by adapter index.
        pairs: Per shared pair: its rank, and zeros. The columns that a site uses are in the directory.
        capacity: The buffers' capacity.

    Raises:
        ScuteError: SC804 when the batch is larger than the capacity.
    """
    by_adapter: dict[int, list[int]] = {}
    for row, adapter in enumerate(rows):
        by_adapter.setdefault(adapter, []).append(row)
    base_rows = by_adapter.pop(-1, [])
    segments = [*by_adapter.items(), (-1, base_rows)]  # by row: adapter indices may differ between ranks
    rotated = [row for row, adapter in enumerate(rows) if adapter >= 0 and facts[adapter].rotated]
    form, ranks = _prefill(segments, facts, len(rows)) if capacity.prefill else _decode(segments, facts, rows)
    regions: dict[str, Sequence[int]] = {
        "row_adapter": rows,
        "pair": [value for pair in pairs for value in pair],
        "rot_position": _positions(rotated, len(rows)),
        "rotated": [value for row in rotated for value in (row, rows[row])],
        **form,
    }
    _check(regions, capacity, ranks)
    return StepPlan(
        regions=regions,
        tokens=len(rows),
        owned=ranks > 0,
        shared=any(facts[adapter].pair >= 0 for adapter in by_adapter),
        rotated=len(rotated),
        tiles=_items(regions, "tile"),
        work=_items(regions, "work"),
        shared_work=_items(regions, "swork"),
        segments=_items(regions, "segment"),
        blocks=_items(regions, "block"),
        tall=_items(regions, "tall"),
        ranks=ranks,
        prefill=capacity.prefill,
    )


def _prefill(
    segments: Sequence[Segment], facts: Mapping[int, ResidentFacts], rows: int
) -> tuple[dict[str, Sequence[int]], int]:
    """Return tiles of one adapter's tokens, and the sum of the rows' ranks, those of shared pairs included."""
    row_h, position = [0] * rows, 0
    for adapter, members in segments[:-1]:
        rank = max(facts[adapter].rank, facts[adapter].pair_rank)
        for row in members:
            row_h[row] = position
            position += rank
    return {
        "row_h": row_h,
        "seg_rows": [row for _, members in segments for row in members],
        "tile": _tiles(segments),
    }, position


def _decode(
    segments: Sequence[Segment], facts: Mapping[int, ResidentFacts], rows: Sequence[int]
) -> tuple[dict[str, Sequence[int]], int]:
    """Return work items, each with all that a program needs at its start, and the sum of the rows' owned ranks."""
    work: list[int] = []
    segment: list[int] = []
    tall: list[int] = []
    position = 0
    for adapter, members in segments:
        rank = facts[adapter].rank if adapter >= 0 else 0
        for row in members:
            item = (adapter, row, position, 0)
            for block in range(-(-rank // OWNED_ROWS)):
                work += (adapter << 12 | block, row, position, 0)
            if adapter < 0 or _owns(facts[adapter]):
                segment += item
            if rank > WIDE_RANK:
                tall += item
            position += rank
    work[3::ITEM_FIELDS] = [len(work) // ITEM_FIELDS] * (len(work) // ITEM_FIELDS)
    return {
        "work": work,
        "segment": segment,
        "tall": tall,
        "counts": [len(tall) // ITEM_FIELDS],
        **_shared(rows, facts),
    }, position


def _owns(facts: ResidentFacts) -> bool:
    """Return whether the adapter needs segments beside the blocks of its shared pair."""
    return facts.pair < 0 or facts.beside_pair


def _items(regions: Mapping[str, Sequence[int]], name: str) -> int:
    return len(regions.get(name, ())) // ITEM_FIELDS


def _positions(listed: Sequence[int], rows: int) -> list[int]:
    """Return each row's position among the listed rows; -1 for other rows."""
    positions = [-1] * rows
    for position, row in enumerate(listed):
        positions[row] = position
    return positions


def _tiles(segments: Sequence[Segment]) -> list[int]:
    tiles: list[int] = []
    start = 0
    for adapter, members in segments:
        for first in range(0, len(members), TILE_TOKENS):
            tiles += [adapter, start + first, min(TILE_TOKENS, len(members) - first), 0]
        start += len(members)
    return tiles


def _shared(rows: Sequence[int], facts: Mapping[int, ResidentFacts]) -> dict[str, list[int]]:
    by_pair: dict[int, list[int]] = {}
    for row, adapter in enumerate(rows):
        if adapter >= 0 and facts[adapter].pair >= 0:
            by_pair.setdefault(facts[adapter].pair, []).append(row)
    swork: list[int] = []
    block: list[int] = []
    listed: list[int] = []
    for pair, members in by_pair.items():
        rank = facts[rows[members[0]]].pair_rank
        for start in range(0, len(members), PAIR_TOKENS):
            part = (pair, len(listed) + start, min(PAIR_TOKENS, len(members) - start))
            block += [*part, 0]
            swork += [value for ranks in range(-(-rank // PAIR_RANKS)) for value in (*part, ranks)]
        listed += members
    return {"swork": swork, "block": block, "pair_rows": listed, "pair_adapters": [rows[row] for row in listed]}


def _check(regions: Mapping[str, Sequence[int]], capacity: Capacity, ranks: int) -> None:
    layout = capacity.layout()
    for name, values in regions.items():
        if len(values) > layout[name][1] or ranks > capacity.ranks:
            fail(
                Code.SC804,
                where=name,
                found=f"{len(values)} entries, and ranks that add up to {ranks}",
                expected=f"at most {layout[name][1]} entries, and ranks that add up to {capacity.ranks}",
                next="split the batch, or make the runtime with a larger capacity",
            )


class StepRegions:
    """A step's metadata as kernels read it: one int32 tensor, and the layout of its regions."""

    def __init__(self, capacity: Capacity, device_copy: torch.Tensor) -> None:
        self.capacity = capacity
        self.layout = capacity.layout()
        self.device_copy = device_copy

    def region(self, name: str) -> torch.Tensor:
        """Return a view of one region on the device."""
        return self._part(self.device_copy, name)

    def _part(self, whole: torch.Tensor, name: str) -> torch.Tensor:
        start, length = self.layout[name]
        return whole[start : start + length]


HOST_COPIES = 4
"""Number of host buffers: so many copies may be pending while the host prepares the next step."""


class StepBuffers(StepRegions):
    """The device's copy of a step's plan, at a fixed address, and the host buffers that it is filled from.

    A copy to the device reads pinned memory after `fill` has returned. So several host buffers are used in turn, and
    an event marks when each may be written again. The caller orders steps that are filled on different streams.
    """

    def __init__(self, capacity: Capacity, device: torch.device) -> None:
        size = sum((length + 3) // 4 * 4 for _, length in capacity.layout().values())
        super().__init__(capacity, torch.zeros(size, dtype=torch.int32, device=device))
        cuda = device.type == "cuda"
        self._hosts = [torch.zeros(size, dtype=torch.int32, pin_memory=cuda) for _ in range(HOST_COPIES if cuda else 1)]
        self._absent = torch.zeros(size, dtype=torch.int32)
        for name in ("row_adapter", "rotated", "rot_position", *(() if capacity.prefill else ("segment", "work"))):
            self._part(self._absent, name).fill_(-1)
        if capacity.prefill:
            self._part(self._absent, "tile")[::ITEM_FIELDS] = -1
        self._read: list[torch.cuda.Event | None] = [None] * len(self._hosts)
        self._next = 0

    def fill(self, plan: StepPlan) -> None:
        """Copy a plan to the device in one piece, on the current stream; the host waits for older copies only.

        Rows beyond the plan's tokens get no adapter, and work items beyond the plan's hold no rows: a graph that was
        captured for larger steps launches programs for them too.
        """
        host = self._host()
        values = host.numpy()
        values[:] = self._absent.numpy()
        for name, region in plan.regions.items():
            start, _ = self.layout[name]
            values[start : start + len(region)] = region
        self.device_copy.copy_(host, non_blocking=True)
        if self.device_copy.is_cuda:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call] # PyTorch does not annotate it
            event.record(torch.cuda.current_stream(self.device_copy.device))
            self._read[self._next] = event
            self._next = (self._next + 1) % len(self._hosts)

    def _host(self) -> torch.Tensor:
        """Return the next host buffer, once the last copy from it is done."""
        read = self._read[self._next]
        if read is not None:
            read.synchronize()
        return self._hosts[self._next]
