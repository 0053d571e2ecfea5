"""The base model as the compiler sees it: linear layers, their shapes, and how ranks share them. No weights."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from scute_compile.ir.expressions import Ranges, Ref


class Split(StrEnum):
    """How tensor parallelism divides a linear layer, in Megatron's words."""

    COLUMN = "column"
    """By output: each rank holds some columns of `W [in, out]`."""
    ROW = "row"
    """By input: each rank holds some rows of `W`, and partial sums are added."""
    REPLICATED = "replicated"
    """Every rank holds all of it."""
    UNKNOWN = "unknown"
    """Nothing says how; tensor parallelism above 1 is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A run of a layer's split axis that is divided among the ranks on its own: q, k, v, gate, up, or all of it."""

    name: str
    size: int
    unit: int = 1
    """Entries that must stay together: a head's width."""
    replicable: bool = False
    """Whether ranks may hold copies when there are more ranks than units (key and value heads)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """Where the input of a layer comes from when it is an element-wise product: `down(act(gate) * up)`."""

    site: str
    """The layer whose output is the plain factor of the product (`up_proj`, or a fused `gate_up_proj`)."""
    part: int = 0
    """Which part of that layer's output it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """One linear projection of the base."""

    name: str
    in_features: int
    out_features: int
    weight: Ref
    transposed: bool = False
    """Conv1D: the weight is stored `(in, out)` and not `(out, in)`."""
    bias: Ref | None = None
    split: Split = Split.UNKNOWN
    parts: tuple[Part, ...] = ()
    """Of the output axis for `COLUMN`, of the input axis for `ROW`; sizes add up to that axis."""
    gemm: str = ""
    """Name of the engine's multiplication that this layer is part of: equal for q, k and v. The fused site."""
    input_product: Product | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TermCut:
    """What each rank holds of a low-rank term beyond the site's own cut: an interval per rank, in order, some empty."""

    rows: Ranges | None = None
    """Of the term's rank: rows of A, and d. None: every rank holds all."""
    columns: Ranges | None = None
    """Of the site's outputs: columns of B, and e. None: the outputs that the rank holds of the site."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """What each rank holds of a site's two axes, one entry per rank."""

    inputs: tuple[Ranges, ...]
    outputs: tuple[Ranges, ...]
    terms: tuple[TermCut, ...] = ()
    """One per low-rank term when these are cut as well; empty when they follow the site's axes."""
