"""What a launch is told beside its tensors: the place of a fused GEMM, and what a step needs. Free of Triton.

Everything here packs into plain numbers, as custom ops take them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any, Protocol, Self

import torch

from scute_compile.runtime_min.step.plan import OWNED_ROWS, PAIR_RANKS, PAIR_TOKENS, TILE_TOKENS, Capacity, StepPlan


class Product(Protocol):
    """The base's product of one layer: `x @ W`, and its bias where it is asked for."""

    def __call__(self, rows: torch.Tensor, *, biased: bool) -> torch.Tensor:
        """Return `(rows, N)` in the dtype of `rows`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """What a captured graph must be able to do; a feature that is off costs nothing."""

    owned: bool = True
    shared: bool = True
    rotated: int = 0
    """Capacity of rotated rows."""
    whole_granules: bool = True
    """Every rotation block's width is a multiple of a granule."""
    prefill: bool = False
    tiles: int = 0
    """Token tiles of a prefill step."""
    programs: int = 0
    """Records of the owned shrink per slice and run."""
    shared_programs: int = 0
    """Records of the shared shrink per run."""
    segments: int = 0
    blocks: int = 0
    """Blocks of sixteen tokens of a shared pair."""
    tall: int = 0
    """Segments whose rank is large."""
    ranks: int = 0
    """Ranks of all rows together, of own terms; in the prefill form of shared pairs too."""

    def numbers(self) -> tuple[int, ...]:
        """Return the fields in their order, as `of_numbers` takes them."""
        return tuple(int(value) for value in astuple(self))

    @classmethod
    def of_numbers(cls, numbers: Sequence[int]) -> Self:
        """Return the features that `numbers` packed.

        >>> Features.of_numbers(Features(rotated=3, shared=False).numbers()) == Features(rotated=3, shared=False)
        True
        """
        defaults = {field.name: field.default for field in fields(cls)}
        kinds = (bool if isinstance(value, bool) else int for value in defaults.values())
        values: Any = {name: kind(number) for name, kind, number in zip(defaults, kinds, numbers, strict=True)}
        return cls(**values)


def capacity_numbers(capacity: Capacity) -> tuple[int, ...]:
    """Return a capacity as plain numbers."""
    return astuple(capacity)


def capacity_of(numbers: Sequence[int]) -> Capacity:
    """Return the capacity that `capacity_numbers` packed.

    >>> capacity_of(capacity_numbers(Capacity(tokens=2, ranks=16))) == Capacity(tokens=2, ranks=16)
    True
    """
    values: Any = {field.name: number for field, number in zip(fields(Capacity), numbers, strict=True)}
    return Capacity(**{**values, "prefill": bool(values["prefill"])})


def features_of(plan: StepPlan, *, whole_granules: bool) -> Features:
    """Return what one step needs and nothing more: for steps that are launched one by one."""
    return Features(
        owned=plan.owned,
        shared=plan.shared,
        rotated=plan.rotated,
        whole_granules=whole_granules,
        prefill=plan.prefill,
        tiles=plan.tiles,
        programs=plan.work,
        shared_programs=plan.shared_work,
        segments=plan.segments,
        blocks=plan.blocks,
        tall=plan.tall,
        ranks=plan.ranks,
    )


def fixed_features(
    capacity: Capacity, *, max_adapters: int, prefill: bool, whole_granules: bool, plain: bool = False
) -> Features:
    """Return what every step within a capacity may need: for graphs that are captured or compiled once.

    Args:
        capacity: Of the step's buffers.
        max_adapters: Most adapters of a step.
        prefill: Which form.
        whole_granules: Whether every rotation block's width is a multiple of a granule.
        plain: Whether no step has a shared pair or turns an input.
    """
    blocks = 0 if plain else min(capacity.tokens, capacity.tokens // PAIR_TOKENS + min(capacity.pairs, max_adapters))
    return Features(
        owned=True,
        shared=not plain,
        rotated=0 if plain else capacity.rotated,
        whole_granules=whole_granules,
        prefill=prefill,
        tiles=capacity.tokens // TILE_TOKENS + min(max_adapters, capacity.tokens) + 1 if prefill else 0,
        programs=max(1, capacity.ranks // OWNED_ROWS),
        shared_programs=blocks * -(-capacity.pair_ranks // PAIR_RANKS),
        segments=capacity.tokens,
        blocks=blocks,
        tall=capacity.tall,
        ranks=capacity.ranks,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemm:
    """One fused GEMM of the base: its sites are consecutive in the directory."""

    first_site: int
    widths: tuple[int, ...]
    """Output columns of each slice."""

    @property
    def padded(self) -> tuple[int, int, int]:
        """The widths with zeros for absent slices."""
        a, b, c = (*self.widths, 0, 0)[:3]
        return a, b, c


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolTensors:
    """The resident pool's tensors."""

    pages: torch.Tensor
    page_map: torch.Tensor
    directory: torch.Tensor
    shared: torch.Tensor
    """Shared factors end to end, each row padded to whole granules; not paged, since tensor cores want plain tiles."""

    @property
    def values(self) -> int:
        """Values per granule."""
        return 16 // self.pages.element_size()
