"""Values as the IR holds them: a reference into a file, or a small expression over references.

No expression holds a tensor. Each has a shape, prints, compares and hashes; only packing evaluates it. Values have one
or two dimensions, except for `RotationBlocks`, which is a stack of square blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from enum import StrEnum

Shape = tuple[int, ...]
Interval = tuple[int, int]
"""A half-open interval along one axis."""
Ranges = tuple[Interval, ...]
"""Half-open intervals along one axis, in the order in which they are concatenated."""


def width(ranges: Ranges) -> int:
    """Return how many entries `ranges` cover.

    >>> width(((0, 4), (8, 12)))
    8
    """
    return sum(stop - start for start, stop in ranges)


class Source(StrEnum):
    """The checkpoint that a reference points into."""

    ADAPTER = "adapter"
    BASE = "base"


class Expression:
    """The base of all values: a shape, and operands."""

    __slots__ = ()

    @property
    def shape(self) -> Shape:
        """Dimensions of the value."""
        raise NotImplementedError

    def operands(self) -> Iterator[Expression]:
        """Yield the expressions that this one is computed from, one level down."""
        for field in fields(self):  # type: ignore[arg-type] # every subclass is a dataclass
            value = getattr(self, field.name)
            if isinstance(value, Expression):
                yield value
            elif isinstance(value, tuple):
                yield from (item for item in value if isinstance(item, Expression))

    def walk(self) -> Iterator[Expression]:
        """Yield this expression and everything below it."""
        yield self
        for operand in self.operands():
            yield from operand.walk()

    def rewritten(self, change: Callable[[Expression], Expression]) -> Expression:
        """Return the expression with `change` applied to every node, operands before the nodes that use them."""
        changed: dict[str, object] = {}
        for field in fields(self):  # type: ignore[arg-type] # every subclass is a dataclass
            value = getattr(self, field.name)
            if isinstance(value, Expression):
                rewritten = value.rewritten(change)
                if rewritten is not value:
                    changed[field.name] = rewritten
            elif isinstance(value, tuple) and any(isinstance(item, Expression) for item in value):
                changed[field.name] = tuple(item.rewritten(change) for item in value)
        return change(replace(self, **changed) if changed else self)  # type: ignore[type-var] # likewise

    def references(self, source: Source | None = None) -> Iterator[Ref]:
        """Yield the file tensors that the value depends on."""
        for node in self.walk():
            if isinstance(node, Ref) and source in (None, node.source):
                yield node


@dataclass(frozen=True, slots=True)
class Ref(Expression):
    """A tensor in a file."""

    source: Source
    key: str
    dims: Shape
    dtype: str
    """The safetensors name: `F32`, `BF16`, ..."""

    @property
    def shape(self) -> Shape:
        return self.dims


@dataclass(frozen=True, slots=True)
class Fill(Expression):
    """The same number everywhere."""

    value: float
    dims: Shape

    @property
    def shape(self) -> Shape:
        return self.dims


@dataclass(frozen=True, slots=True)
class Transpose(Expression):
    """Rows and columns exchanged."""

    x: Expression

    @property
    def shape(self) -> Shape:
        rows, columns = self.x.shape
        return columns, rows


@dataclass(frozen=True, slots=True)
class Reshape(Expression):
    """The same entries in row-major order under other dimensions."""

    x: Expression
    dims: Shape

    @property
    def shape(self) -> Shape:
        return self.dims


@dataclass(frozen=True, slots=True)
class Scale(Expression):
    """`x * factor` for a plain number."""

    x: Expression
    factor: float

    @property
    def shape(self) -> Shape:
        return self.x.shape


@dataclass(frozen=True, slots=True)
class Add(Expression):
    """`x + y` for equal shapes."""

    x: Expression
    y: Expression

    @property
    def shape(self) -> Shape:
        return self.x.shape


@dataclass(frozen=True, slots=True)
class Subtract(Expression):
    """`x - y` for equal shapes."""

    x: Expression
    y: Expression

    @property
    def shape(self) -> Shape:
        return self.x.shape


@dataclass(frozen=True, slots=True)
class Multiply(Expression):
    """`x * y`, element by element, for equal shapes."""

    x: Expression
    y: Expression

    @property
    def shape(self) -> Shape:
        return self.x.shape


@dataclass(frozen=True, slots=True)
class Divide(Expression):
    """`x / y`, element by element, for equal shapes."""

    x: Expression
    y: Expression

    @property
    def shape(self) -> Shape:
        return self.x.shape


@dataclass(frozen=True, slots=True)
class ScaleRows(Expression):
    """`diag(v) x`: row i of a matrix times `v[i]`."""

    x: Expression
    v: Expression

    @property
    def shape(self) -> Shape:
        return self.x.shape


@dataclass(frozen=True, slots=True)
class ScaleColumns(Expression):
    """`x diag(v)`: column j of a matrix times `v[j]`."""

    x: Expression
    v: Expression

    @property
    def shape(self) -> Shape:
        return self.x.shape


@dataclass(frozen=True, slots=True)
class Concatenate(Expression):
    """Vectors end to end."""

    parts: tuple[Expression, ...]

    @property
    def shape(self) -> Shape:
        return (sum(part.shape[0] for part in self.parts),)


@dataclass(frozen=True, slots=True)
class Take(Expression):
    """The entries of `x` along one axis that lie in `ranges`."""

    x: Expression
    axis: int
    ranges: Ranges

    @property
    def shape(self) -> Shape:
        dims = list(self.x.shape)
        dims[self.axis] = width(self.ranges)
        return tuple(dims)


@dataclass(frozen=True, slots=True)
class ColumnNorm(Expression):
    """`colnorm(W + c A B)`, the Euclidean norm of each output's weights: shape `(out,)`.

    All operands are file tensors, never slots, so that `e` can still fold into B (DoRA, arXiv:2402.09353 section 4;
    PEFT `tuners/lora/dora.py`). `weight` is as stored: `(out, in)`, or `(in, out)` when `transposed`.

    The weight is read in tiles of stored rows, from the first to the last. The tiles depend on the weight's shape
    alone, so norms of different adapters over one weight are read together, and every tensor-parallel degree gets the
    same bits.
    """

    weight: Ref
    transposed: bool
    a: Expression
    """A as rank-major rows: `(rank, in)`."""
    b: Expression
    """B as rank-major rows: `(rank, out)`."""
    c: float
    tile_rows: int = 0
    """Stored rows of `weight` per tile; 0 before the scale pass."""

    @property
    def shape(self) -> Shape:
        return (self.b.shape[1],)

    def tiles(self) -> Iterator[Interval]:
        """Yield the stored rows of each tile as half-open intervals, in reading order."""
        rows = self.weight.shape[0]
        for start in range(0, rows, self.tile_rows):
            yield start, min(start + self.tile_rows, rows)


class RotationForm(StrEnum):
    """How a rotation block follows from the saved numbers."""

    SERIES = "series"
    """PEFT >= 0.18: I + 2Q + ... + 2Q^(t-2) + Q^(t-1); approximates (I+Q)(I-Q)^-1."""
    SERIES_DOUBLED = "series-doubled"
    """PEFT 0.16 and 0.17: I + 2Q + ... + 2Q^(t-1), the last coefficient doubled too."""
    CAYLEY = "cayley"
    """(I-Q)(I+Q)^-1, solved exactly: rotates in the opposite direction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RotationBlocks(Expression):
    """`R - I`, block by block: shape `(blocks, size, size)` (OFT, PEFT `tuners/oft/layer.py`).

    `x` holds either the strict upper triangle of each skew block, row-major, `(blocks, size (size - 1) / 2)`, or whole
    square blocks `(blocks, size, size)` whose skew part `(X - X^T) / 2` counts.
    """

    x: Expression
    size: int
    form: RotationForm
    terms: int = 0
    """Number of terms of a series; unused by `CAYLEY`."""
    norm_limit: float | None = None
    """Constrained OFT: a block Q whose Frobenius norm exceeds this is scaled back to it first."""

    @property
    def shape(self) -> Shape:
        return self.x.shape[0], self.size, self.size


@dataclass(frozen=True, slots=True, kw_only=True)
class VeraProjection(Expression):
    """A VeRA projection regenerated from its key, as PEFT generates it (`tuners/vera/model.py`).

    One CPU generator seeded with `seed` fills A `(rank, max_in)` first and B `(max_out, rank)` second, Kaiming-uniform
    in float32; both then pass through `rounding`, the base's dtype.
    """

    which: str
    """`A` or `B`."""
    seed: int
    rank: int
    max_in: int
    max_out: int
    rounding: str

    @property
    def shape(self) -> Shape:
        return (self.rank, self.max_in) if self.which == "A" else (self.max_out, self.rank)


@dataclass(frozen=True, slots=True)
class AsStored(Expression):
    """`1 + round(x - 1)`: the value that a reader restores of a slot that is stored as its difference from 1."""

    x: Expression

    @property
    def shape(self) -> Shape:
        return self.x.shape
