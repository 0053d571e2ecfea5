"""The decode rotation: delta rows `x (R - I)` below a copy of x."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from scute_compile.runtime_min.pool.directory import Field
from tests.kernels.checks import check_reference, check_slot
from tests.kernels.steps import ROWS, check_delta_rows, inputs, step_of


@pytest.mark.parametrize("number", [0, 1])
def test_delta_rows_match_the_reference(number: int) -> None:
    from scute_compile.runtime_min.step import launch_decode

    check_delta_rows(launch_decode.rotate, step_of(ROWS, prefill=False), number)


def test_blocks_that_do_not_fill_granules_are_read_entry_by_entry() -> None:
    step = step_of((3, 9, 4), prefill=False)
    step = replace(step, features=replace(step.features, whole_granules=False))
    check_reference(step, 0, bias=False)


def test_the_rotation_changes_its_rows_only() -> None:
    check_slot(Field.R_OFFSET, prefill=False)


def test_a_step_without_rotations_multiplies_x_itself() -> None:
    step = step_of((2, None), prefill=False)
    x, weight, _ = inputs(0, 2, bias=False)
    assert step.features.rotated == 0
    assert torch.equal(step.kernels(0, x, weight, None)[1], torch.nn.functional.linear(x, weight)[1])
