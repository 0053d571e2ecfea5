"""Scalar launch arguments: the sites of a fused GEMM, and the features of a step. Independent of Triton.

Features and capacities convert to plain numbers, because custom operators take no other structures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any, Protocol, Self

import torch

from scute_compile.runtime_min.pool.device_memory import DeviceMemory
from scute_compile.runtime_min.step.plan import OWNED_ROWS, PAIR_RANKS, PAIR_TOKENS, TILE_TOKENS, Capacity, StepPlan


class Product(Protocol):
    """The base's product of one layer: `x @ W`, with the bias on request."""

    def __call__(self, rows: torch.Tensor, *, biased: bool) -> torch.Tensor:
        """Return `(rows, N)` in the dtype of `rows`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """What the launches of a step, or of a captured graph, must support; a feature that is off costs nothing."""

    owned: bool = True
    shared: bool = True
    rotated: int = 0
    """Largest number of rows with a rotation."""
    whole_granules: bool = True
    """Every rotation block's width is a multiple of a granule."""
    prefill: bool = False
    tiles: int = 0
    """Token tiles of a prefill step."""
    programs: int = 0
    """Work items of the owned shrink per slice and run of K."""
    shared_programs: int = 0
    """Work items of the shared shrink per run of K."""
    segments: int = 0
    blocks: int = 0
    """Blocks of sixteen tokens of a shared pair."""
    tall: int = 0
    """Segments whose rank is above `WIDE_RANK`."""
    ranks: int = 0
    """Sum of the rows' ranks: those of owned terms, and in the prefill form those of shared pairs too."""

    def numbers(self) -> tuple[int, ...]:
        """Return the fields in their order, as `of_numbers` takes them."""
        return tuple(int(value) for value in astuple(self))

    @classmethod
    def of_numbers(cls, numbers: Sequence[int]) -> Self:
        """Return the features that `numbers` converted.

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
    """Return the capacity that `capacity_numbers` converted.

    >>> capacity_of(capacity_numbers(Capacity(tokens=2, ranks=16))) == Capacity(tokens=2, ranks=16)
    True
    """
    values: Any = {field.name: number for field, number in zip(fields(Capacity), numbers, strict=True)}
    return Capacity(**{**values, "prefill": bool(values["prefill"])})


def features_of(plan: StepPlan, *, whole_granules: bool) -> Features:
    """Return the features of one step, for steps that are launched one by one."""
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


def fixed_features(capacity: Capacity, *, max_adapters: int, whole_granules: bool, plain: bool = False) -> Features:
    """Return the features of every step within a capacity, for graphs that are captured or compiled once.

    Args:
        capacity: The capacity of the step's buffers.
        max_adapters: Largest number of adapters of a step.
        whole_granules: Whether every rotation block's width is a multiple of a granule.
        plain: Whether no step has a shared pair or a rotation.
    """
    blocks = 0 if plain else min(capacity.tokens, capacity.tokens // PAIR_TOKENS + min(capacity.pairs, max_adapters))
    return Features(
        owned=True,
        shared=not plain,
        rotated=0 if plain else capacity.rotated,
        whole_granules=whole_granules,
        prefill=capacity.prefill,
        tiles=capacity.tokens // TILE_TOKENS + min(max_adapters, capacity.tokens) + 1 if capacity.prefill else 0,
        programs=max(1, capacity.ranks // OWNED_ROWS),
        shared_programs=blocks * -(-capacity.pair_ranks // PAIR_RANKS),
        segments=capacity.tokens,
        blocks=blocks,
        tall=capacity.tall,
        ranks=capacity.ranks,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemm:
    """One fused GEMM of the base; its sites are consecutive in the directory."""

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
    """Shared factors end to end, each row padded to whole granules; not paged, since tensor cores read plain tiles."""

    @classmethod
    def of(cls, memory: DeviceMemory) -> Self:
        """Return the tensors of a pool's device memory."""
        return cls(pages=memory.pages, page_map=memory.page_map, directory=memory.directory, shared=memory.shared)

    @property
    def values(self) -> int:
        """Values per granule."""
        return 16 // self.pages.element_size()
