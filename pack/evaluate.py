"""Evaluates expressions with numpy; arithmetic is done in float64.

A reference without arithmetic keeps its file's precision. `ColumnNorm` and `VeraProjection` are computed elsewhere and
passed in `given`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from scute_compile.ir.expressions import (
    Add,
    AsStored,
    Concatenate,
    Divide,
    Expression,
    Fill,
    Multiply,
    Ref,
    Reshape,
    RotationBlocks,
    RotationForm,
    Scale,
    ScaleColumns,
    ScaleRows,
    Subtract,
    Take,
    Transpose,
)

Array = npt.NDArray[np.floating]
Given = Mapping[Expression, Array]
Read = Callable[[Ref], Array]
Rounding = Callable[[Array], Array]
"""Rounds to the artifact's dtype and returns the rounded values in float64."""


def evaluate(  # noqa: C901, PLR0911, PLR0912 - one branch per kind of expression, nothing else
    x: Expression, read: Read, given: Given, rounding: Rounding
) -> Array:
    """Return the value of `x`.

    Args:
        x: The expression.
        read: Returns a file tensor in float32 or float64.
        given: Values that were computed elsewhere, by expression.
        rounding: The artifact's rounding, for values that depend on stored ones.
    """

    def value(inner: Expression) -> Array:
        return evaluate(inner, read, given, rounding)

    def wide(inner: Expression) -> npt.NDArray[np.float64]:
        return value(inner).astype(np.float64)

    if x in given:
        return given[x]
    match x:
        case Ref():
            return read(x).reshape(x.shape)
        case Fill():
            return np.full(x.shape, x.value, np.float64)
        case Transpose():
            return value(x.x).T
        case Reshape():
            return value(x.x).reshape(x.shape)
        case Take():
            pieces = [np.take(value(x.x), np.arange(start, stop), axis=x.axis) for start, stop in x.ranges]
            return np.concatenate(pieces, axis=x.axis)
        case Concatenate():
            return np.concatenate([wide(part) for part in x.parts])
        case Scale():
            return wide(x.x) * x.factor
        case ScaleRows():
            return wide(x.x) * wide(x.v)[:, None]
        case ScaleColumns():
            return wide(x.x) * wide(x.v)[None, :]
        case AsStored():
            return 1.0 + rounding(wide(x.x) - 1.0)
        case RotationBlocks():
            return rotation_delta(wide(x.x), x)
        case Add() | Subtract() | Multiply() | Divide():
            with np.errstate(all="ignore"):  # rounding refuses values that aren't finite
                return np.asarray(_OPERATIONS[type(x)](wide(x.x), wide(x.y)))
    raise TypeError(x)


_OPERATIONS: Mapping[type[Expression], np.ufunc] = {
    Add: np.add,
    Subtract: np.subtract,
    Multiply: np.multiply,
    Divide: np.divide,
}


def skew_blocks(saved: npt.NDArray[np.float64], size: int) -> npt.NDArray[np.float64]:
    """Return the skew-symmetric Q, `(blocks, size, size)`, from strict upper triangles or whole blocks."""
    if saved.ndim == 3:
        return (saved - saved.transpose(0, 2, 1)) / 2
    q = np.zeros((saved.shape[0], size, size))
    rows, columns = np.triu_indices(size, 1)
    q[:, rows, columns] = saved
    return q - q.transpose(0, 2, 1)


def rotation_delta(saved: npt.NDArray[np.float64], x: RotationBlocks) -> npt.NDArray[np.float64]:
    """Return `R - I` without forming R, so that small rotations keep their precision."""
    q = skew_blocks(saved, x.size)
    if x.norm_limit is not None:
        norms = np.linalg.norm(q, axis=(1, 2), keepdims=True)
        q = np.where(norms > x.norm_limit, q * (x.norm_limit / np.maximum(norms, np.finfo(np.float64).tiny)), q)
    if x.form is RotationForm.CAYLEY:
        # (I - Q)(I + Q)^-1 - I = -2 Q (I + Q)^-1, and Q commutes with the inverse
        return np.asarray(-2.0 * np.linalg.solve(np.eye(x.size) + q, q), np.float64)
    return _series(q, x)


def _series(q: npt.NDArray[np.float64], x: RotationBlocks) -> npt.NDArray[np.float64]:
    delta = np.zeros_like(q)
    power = q
    if x.form is RotationForm.SERIES_DOUBLED:
        for _ in range(1, x.terms):
            delta = delta + 2.0 * power
            power = power @ q
        return delta
    # three terms equal four: PEFT's loop adds the doubled Q^2 before it checks the count
    terms = 4 if x.terms == 3 else x.terms
    for exponent in range(1, terms):
        last = exponent == terms - 1 and terms > 2
        delta = delta + (1.0 if last else 2.0) * power
        power = power @ q
    return delta
