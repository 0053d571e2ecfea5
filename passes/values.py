"""Decides from the scan's facts whether a value is known to be all zeros or all ones."""

from __future__ import annotations

from scute_compile.ir.expressions import (
    Expression,
    Fill,
    Multiply,
    Ref,
    Reshape,
    RotationBlocks,
    Scale,
    ScaleColumns,
    ScaleRows,
    Source,
    Subtract,
    Transpose,
)
from scute_compile.passes.scan import Facts


def is_zero(x: Expression | None, facts: Facts) -> bool:  # noqa: PLR0911 - one return per kind of expression
    """Return whether every entry of `x` is known to be 0."""
    match x:
        case Ref(source=Source.ADAPTER):
            return facts[x.key].zero
        case Fill():
            return x.value == 0
        case Transpose() | Reshape():
            return is_zero(x.x, facts)
        case Scale():
            return x.factor == 0 or is_zero(x.x, facts)
        case Multiply():
            return is_zero(x.x, facts) or is_zero(x.y, facts)
        case ScaleRows() | ScaleColumns():
            return is_zero(x.x, facts) or is_zero(x.v, facts)
        case Subtract():
            return x.x == x.y or (is_ones(x.x, facts) and is_ones(x.y, facts))
        case RotationBlocks():  # a zero skew block is the identity rotation; a square one must be symmetric
            return len(x.x.shape) == 2 and is_zero(x.x, facts)
        case _:
            return False


def is_ones(x: Expression | None, facts: Facts) -> bool:
    """Return whether every entry of `x` is known to be 1."""
    match x:
        case Ref(source=Source.ADAPTER):
            return facts[x.key].ones
        case Fill():
            return x.value == 1
        case Reshape():
            return is_ones(x.x, facts)
        case Multiply():
            return is_ones(x.x, facts) and is_ones(x.y, facts)
        case _:
            return False
