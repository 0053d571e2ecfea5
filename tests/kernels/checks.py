"""Checks that the kernels' tests share: whole adapted layers by kernels, against the reference in float64."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from scute_compile.runtime_min.pool.directory import Field
from tests.kernels.steps import Rows, Step, inputs, step_of

CLOSE = 2e-5
"""Relative to a row: sums of up to 520 products in float32, in another order than float64 adds them."""


@contextmanager
def spread_booleans() -> Iterator[None]:
    """Spread comparisons of scalars as booleans; Triton 3.9's interpreter spreads them as int32, which masks refuse.

    Compiled kernels have no such difference, and older interpreters take int32 masks.
    """
    from triton.language import int1
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    spread = InterpreterBuilder.create_splat

    def splat(self: object, block: Any, value: Any) -> object:  # noqa: ANN401 - Triton's, unannotated
        if value.data.dtype == np.bool_:
            return TensorHandle(np.full(block.shape, value.data.flat[0]), int1)
        return spread(self, block, value)

    with patch.object(InterpreterBuilder, "create_splat", splat):
        yield


def assert_close(computed: torch.Tensor, exact: torch.Tensor) -> None:
    """Compare two outputs row by row."""
    error = (computed.double() - exact).norm(dim=1) / exact.norm(dim=1)
    assert error.max() < CLOSE, (int(error.argmax()), error.max())


def check_reference(step: Step, number: int, *, bias: bool = True) -> None:
    """Compare the kernels with the reference for the GEMM of this number."""
    given = inputs(number, len(step.rows), bias=bias)
    assert_close(step.kernels(number, *given), step.reference(number, *given))


def check_repeats(*, prefill: bool) -> None:
    """Check that results repeat to the bit."""
    step = step_of((1, 5, None, 3), prefill=prefill)
    given = inputs(0, 4, bias=True)
    assert torch.equal(step.kernels(0, *given), step.kernels(0, *given))


def check_smaller_after_larger(*, prefill: bool) -> None:
    """Check a smaller step after a larger step, with launches that serve every step."""
    larger: Rows = (5, 6, 3, 1)
    buffers = step_of(larger, prefill=prefill, tokens=8).buffers
    for rows in (larger, (None, 6)):
        check_reference(step_of(rows, prefill=prefill, fixed=True, buffers=buffers), 0)


def by_row(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply row by row, so that a row does not depend on the number of rows."""
    y = torch.stack([row @ weight.T for row in x])
    return y if bias is None else y + bias


def check_row_alone(monkeypatch: pytest.MonkeyPatch, *, prefill: bool) -> None:
    """Check that a row does not depend on the rest of the batch."""
    monkeypatch.setattr(torch.nn.functional, "linear", by_row)
    rows = (3, 1, None, 5, 0, 6, 1)
    x, weight, bias = inputs(0, len(rows), bias=True)
    mixed = step_of(rows, prefill=prefill).kernels(0, x, weight, bias)
    for row in (2, 3, 6):
        # rotation decides where the bias is added, so a rotated row is in both batches
        alone = step_of((3, rows[row]), prefill=prefill).kernels(0, x[[0, row]], weight, bias)
        assert torch.equal(alone[1], mixed[row]), (row, rows[row])


ABSENT: Mapping[Field, int] = {
    Field.RANK: 0,
    Field.DS_OFFSET: -1,
    Field.SHIFT_OFFSET: -1,
    Field.R_OFFSET: -1,
    Field.D_OFFSET: -1,
    Field.E_OFFSET: -1,
}
CARRIERS = {field: 5 if field in (Field.D_OFFSET, Field.E_OFFSET) else 1 for field in ABSENT} | {Field.R_OFFSET: 3}
"""An adapter that has the field."""


def check_slot(field: Field, *, prefill: bool) -> None:
    """Check that removing the slot of a field changes the output of the rows that have it, and of no other row."""
    rows = (CARRIERS[field], None, 0 if field is not Field.RANK else 2)
    step = step_of(rows, prefill=prefill)
    directory = step.tables.directory.clone()
    directory[:, :, field] = ABSENT[field]
    if field is Field.RANK:
        directory[:, :, Field.PAIR] = -1
    without = replace(step, tables=replace(step.tables, directory=directory))
    given = inputs(0, len(rows), bias=False)
    part = without.kernels(0, *given)
    assert_close(part, without.reference(0, *given))
    moved = (part - whole(rows, prefill=prefill)).abs().amax(1)
    assert moved[0] > 0.01
    assert moved[1:].max() == 0


@cache
def whole(rows: Rows, *, prefill: bool) -> torch.Tensor:
    """Return the kernels' output of a step with all slots, without a bias."""
    return step_of(rows, prefill=prefill).kernels(0, *inputs(0, len(rows), bias=False))
