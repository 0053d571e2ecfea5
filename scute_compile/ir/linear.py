"""A linear layer of the base: its shape, how tensor-parallel ranks cut it, and the GEMM that it belongs to."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from scute_compile.ir.expressions import Ranges, Ref


class Split(StrEnum):
    """How tensor parallelism divides a linear layer (Megatron-LM, arXiv:1909.08053 section 3)."""

    COLUMN = "column"
    """By output: each rank holds some columns of `W [in, out]`."""
    ROW = "row"
    """By input: each rank holds some rows of `W`, and partial sums are added."""
    REPLICATED = "replicated"
    """Every rank holds all of it."""
    UNKNOWN = "unknown"
    """Not known; a tensor-parallel degree above 1 is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A contiguous run of a layer's split axis that is cut by itself: q, k, v, gate, up, or the whole axis."""

    name: str
    size: int
    unit: int = 1
    """Entries that no cut may separate: the width of a head."""
    replicable: bool = False
    """Whether several ranks may hold the same unit when there are more ranks than units (key and value heads)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """The source of a layer's input when that is an element-wise product: `down(act(gate) * up)`."""

    site: str
    """The layer whose output is the factor without activation (`up_proj`, or a fused `gate_up_proj`)."""
    part: int = 0
    """The index of the factor among that layer's parts."""


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
    """Name of the fused site, the GEMM that this layer is part of: equal for q, k and v. Empty: the layer is alone."""
    input_product: Product | None = None

    @property
    def fused_site(self) -> str:
        """`gemm`, or the layer's name when the layer is alone."""
        return self.gemm or self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class TermCut:
    """What each rank holds of a fully sharded low-rank term: one interval per rank, in order, possibly empty."""

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
    """One per low-rank term when terms are fully sharded; empty when they follow the site's axes."""
