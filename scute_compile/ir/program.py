"""The normal form that every adapter is rewritten into, as frozen data.

    F(x) = ((x R) W) * s + b + sum_k c_k * ((((x A_k) * d_k) B_k) * e_k)

A `Program` is one adapter; a `Site` is one adapted linear layer; a slot that is None holds the identity. Factors are
held rank-major, as they are stored and multiplied: A as its transpose `(rank, in)`, B as `(rank, out)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType

from scute_compile.diagnostics import Diagnostic
from scute_compile.ir.expressions import Expression
from scute_compile.ir.linear import Cut, Linear
from scute_compile.ir.method import Method
from scute_compile.ir.target import Target


class Owner(StrEnum):
    """The owner of a factor; a slot merges only into a factor that the adapter owns."""

    ADAPTER = "adapter"
    SHARED = "shared"
    BASE = "base"


class RotationKind(StrEnum):
    """The structure of R."""

    BLOCKS = "blocks"
    """Block-diagonal: `delta` is `(blocks, size, size)`; a single block is repeated along the input."""
    DIAGONAL = "diagonal"
    """`delta` is `(in,)`."""


class Route(StrEnum):
    """Where in the serving pipeline a live slot is computed."""

    EXPAND = "in the expand"
    """s, b and e: on the output tile that the expand holds."""
    SHRINK = "in the shrink"
    """d: on the shrink's result."""
    DELTA_ROWS = "delta rows of the same GEMM"
    """R: the rows `x (R - I)` are appended to the base's GEMM."""


class Alternative(StrEnum):
    """Another way to compute a live slot, compared with the route by cost and never chosen: it rounds once more."""

    BEFORE_GEMM = "before the GEMM"
    SEPARATE_PASS = "a separate pass"  # noqa: S105 - a pass over memory, no password
    MERGED_COPY = "a private merged copy"
    AS_LORA = "conversion to LoRA"


Costs = tuple[tuple[Route | Alternative, int], ...]
"""A live slot's route and its alternatives, each with its bytes per step, in ascending order of bytes."""


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
    """A live slot's route, with the costs of the route and of its alternatives for the workload."""

    slot: str
    route: Route
    candidates: Costs


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One linear projection that the adapter touches, with its slots."""

    linear: Linear
    rotation: Rotation | None = None
    s: Expression | None = None
    beta: Expression | None = None
    """Before folding: the bias that the adapted layer adds; None when it is the base's."""
    b: Expression | None = None
    """After folding: the shift added to `y + y * ds`, where `y` includes the base's bias."""
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

    def expressions(self) -> Iterator[Expression]:
        """Yield the value of every slot and factor."""
        rotation = self.rotation.delta if self.rotation else None
        for value in (rotation, self.s, self.beta, self.b):
            if value is not None:
                yield value
        for term in self.terms:
            yield from (value for value in (term.a.value, term.b.value, term.d, term.e) if value is not None)

    def rewritten(self, change: Callable[[Expression], Expression]) -> Site:
        """Return the site with `change` applied to every node of every value."""

        def new(value: Expression | None) -> Expression | None:
            return None if value is None else value.rewritten(change)

        def factor(old: Factor) -> Factor:
            return replace(old, value=old.value.rewritten(change), shared=new(old.shared))

        rotation = self.rotation
        return replace(
            self,
            rotation=replace(rotation, delta=rotation.delta.rewritten(change)) if rotation else None,
            s=new(self.s),
            beta=new(self.beta),
            b=new(self.b),
            terms=tuple(replace(t, a=factor(t.a), b=factor(t.b), d=new(t.d), e=new(t.e)) for t in self.terms),
        )


class Action(StrEnum):
    """The outcome of a pass for one slot."""

    MERGED = "merged"
    LIVE = "live"
    DROPPED = "dropped"
    MOVED = "moved"
    PLANNED = "planned"


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """One rewrite, or one decision to leave a slot live. `explain-folds` shows the notes."""

    site: str
    slot: str
    """`R`, `s`, `b`, `d`, `e`, `c`, `A` or `B`; followed by the term's number when there are several terms."""
    action: Action
    rule: str
    neighbours: tuple[tuple[str, Owner], ...] = ()
    why: str = ""
    route: Route | None = None
    candidates: Costs = ()


class Stage(StrEnum):
    """The last pass that a program went through. The spec lists the invariants of each stage."""

    OPENED = "open"
    """The adapter is open; the program has no sites yet."""
    PARSED = "parse"
    PLACED = "place"
    FOLDED = "fold"
    SCALED = "scale"
    SHARDED = "shard"
    ROUTED = "route"


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One adapter in normal form."""

    method: Method
    stage: Stage
    sites: tuple[Site, ...]
    target: Target = field(default_factory=Target)
    notes: tuple[Note, ...] = ()
    findings: tuple[Diagnostic, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Adapter module path -> base module path, where keys matched only after one unique re-rooting."""
    settings: tuple[tuple[str, str], ...] = ()
    """Settings that the front end read, for display: `rank`, `alpha`, `series`, ..."""
