"""The base model as the compiler sees it: linear layers, their shapes, and how ranks share them. No weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from scute_compile.expressions import Ref


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
class ModelStructure:
    """Names and shapes of a base model."""

    model_type: str
    linears: Mapping[str, Linear]
    """By module path, in the order of the checkpoint's names."""
    tensors: Mapping[str, Ref]
    """Every tensor of the checkpoint by key."""
    embeddings: frozenset[str] = frozenset()
    """Module paths of embeddings and output heads: in the checkpoint, but not sites."""
    dtype: str = "float32"
    """The dtype in which the base is stored: float32, bfloat16 or float16."""
    tp_source: str = ""
    """What says how ranks divide it: `transformers plan`, `table`, or nothing."""
    parameters: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))
    """The configuration fields that matter for identity (hidden size, heads, ...)."""
