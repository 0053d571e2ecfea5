"""The normal form that every adapter is rewritten into, as frozen data.

    F(x) = ((x R) W) * s + b + sum_k c_k * ((((x A_k) * d_k) B_k) * e_k)

A `Program` is one adapter; a `Site` is one adapted linear layer; a slot that is None holds the identity. Factors are
held rank-major, as they are stored and multiplied: A as its transpose `(rank, in)`, B as `(rank, out)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from scute_compile.diagnostics import Diagnostic
from scute_compile.ir.expressions import Expression
from scute_compile.ir.linear import Cut, Linear
from scute_compile.ir.target import Target


class Owner(StrEnum):
    """Who owns a factor; it decides whether a slot may merge into it."""

    ADAPTER = "adapter"
    SHARED = "shared"
    BASE = "base"


class RotationKind(StrEnum):
    """Shapes of R."""

    BLOCKS = "blocks"
    """Block-diagonal: `delta` is `(blocks, size, size)`; one block repeats when it alone is given."""
    DIAGONAL = "diagonal"
    """`delta` is `(in,)`."""


class Route(StrEnum):
    """Where in the serving pipeline a live slot is computed."""

    EXPAND = "in the expand"
    SHRINK = "in the shrink"
    BEFORE_GEMM = "before the GEMM"
    DELTA_ROWS = "delta rows of the same GEMM"
    SEPARATE_PASS = "a separate pass"  # noqa: S105 - a pass over memory, no password
    MERGED_COPY = "a private merged copy"
    AS_LORA = "conversion to LoRA"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """The slot R, held as `R - I`."""

    kind: RotationKind
    delta: Expression

    @property
    def block(self) -> int:
        """Width of one block; 1 for a diagonal."""
        return self.delta.shape[1] if self.kind is RotationKind.BLOCKS else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """A or B of a low-rank term, rank-major: `(rank, features)`."""

    value: Expression
    owner: Owner = Owner.ADAPTER
    shared: Expression | None = None
    """The whole shared matrix `(rank, at least features)` of which `value` is the first `features` columns."""

    @property
    def rank(self) -> int:
        """Rows of the factor."""
        return self.value.shape[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """Adds `c * ((((x A) * d) B) * e)` to a site's output."""

    a: Factor
    b: Factor
    d: Expression | None = None
    """Shape `(rank,)`, between the factors."""
    e: Expression | None = None
    """Shape `(out,)`, after B."""
    c: float = 1.0

    @property
    def rank(self) -> int:
        """Inner dimension."""
        return self.a.rank


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteChoice:
    """A live slot's recommended route, with what every candidate would move for the workload."""

    slot: str
    route: Route
    candidates: tuple[tuple[Route, int], ...]
    """Bytes per step of each candidate, the chosen one included, cheapest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One linear projection that the adapter touches, with its slots."""

    linear: Linear
    rotation: Rotation | None = None
    s: Expression | None = None
    beta: Expression | None = None
    """Before folding: the bias that the adapted layer adds, when it isn't the base's own."""
    b: Expression | None = None
    """After folding: the shift on top of `y + y * ds`, where `y` holds the base's bias already."""
    terms: tuple[Term, ...] = ()
    cut: Cut | None = None
    routes: tuple[RouteChoice, ...] = ()

    @property
    def name(self) -> str:
        """Module path of the layer."""
        return self.linear.name

    @property
    def empty(self) -> bool:
        """Whether every slot is the identity."""
        return not (self.terms or self.rotation or self.s or self.beta or self.b)


class Action(StrEnum):
    """What became of a slot."""

    MERGED = "merged"
    LIVE = "live"
    DROPPED = "dropped"
    MOVED = "moved"
    PLANNED = "planned"


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """One rewrite, or one decision to leave a slot live: what `explain-folds` shows."""

    site: str
    slot: str
    """`R`, `s`, `b`, `d`, `e`, `c`, `A`, `B`, with the term's number when there are several."""
    action: Action
    rule: str
    neighbours: tuple[tuple[str, Owner], ...] = ()
    why: str = ""
    route: Route | None = None
    candidates: tuple[tuple[Route, int], ...] = ()


class Stage(StrEnum):
    """How far a program has come; the spec says what each stage may hold."""

    PARSED = "parse"
    PLACED = "place"
    FOLDED = "fold"
    SCALED = "scale"
    SHARDED = "shard"
    ROUTED = "route"


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One adapter in normal form."""

    method: str
    """`lora`, `dora`, `ia3`, `vera`, `oft`, `adalora`; what the artifact calls itself."""
    stage: Stage
    sites: tuple[Site, ...]
    target: Target = field(default_factory=Target)
    notes: tuple[Note, ...] = ()
    findings: tuple[Diagnostic, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Adapter module path -> base module path, where keys matched only after one unique re-rooting."""
    settings: tuple[tuple[str, str], ...] = ()
    """What the front end read and a reader may want to see: `rank`, `alpha`, `series`, ..."""
