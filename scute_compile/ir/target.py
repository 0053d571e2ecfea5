"""What an adapter is compiled for: ranks, dtype, and the workload that routes are priced for."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from scute_compile.ir.dtypes import DType


class LoraSharding(StrEnum):
    """How the factors of a site's low-rank terms are divided among tensor-parallel ranks."""

    DEFAULT = "default"
    """Along the axis on which the base's weight is cut; the other factor is whole on every rank."""
    FULL = "full"
    """Fully sharded (S-LoRA, arXiv:2311.03285 section 6), both factors: A by rank and B by output on column-parallel
    sites, A by input and B by output on row-parallel sites."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The decode step that routes are priced for. Units: bytes, seconds."""

    tenants: int = 16
    """Distinct adapters in one step."""
    tokens: int = 16
    """Rows in one step, all tenants together."""
    bandwidth: float = 3.6e12
    """Memory bandwidth in bytes per second; the default was measured on one H200."""
    launch: float = 0.5e-6
    """Cost of one more kernel in a captured graph, in seconds."""
    activation_bytes: int = 2
    """Bytes per activation value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What to compile for."""

    tp: int = 1
    dtype: DType | None = None
    """None: the base's dtype, or float32 when values overflow or lose precision in it."""
    workload: Workload = Workload()
    lora_sharding: LoraSharding = LoraSharding.DEFAULT
