"""The decode expand, tested in whole adapted layers in the decode form."""

from __future__ import annotations

import pytest

from scute_compile.runtime_min.pool.directory import Field
from tests.kernels.checks import (
    check_reference,
    check_repeats,
    check_row_alone,
    check_slot,
    check_smaller_after_larger,
)
from tests.kernels.steps import ROWS, Rows, step_of


@pytest.mark.parametrize(("number", "bias"), [(0, True), (1, False)])
def test_the_decode_kernels_match_the_reference(number: int, bias: bool) -> None:
    check_reference(step_of(ROWS, prefill=False), number, bias=bias)


def test_results_repeat_to_the_bit() -> None:
    check_repeats(prefill=False)


@pytest.mark.parametrize("rows", [(None, None), (2,), (5, None), (3, 4)])
def test_steps_with_one_kind_of_adapter_match_the_reference(rows: Rows) -> None:
    check_reference(step_of(rows, prefill=False), 0)


def test_a_smaller_step_after_a_larger_one_matches_the_reference() -> None:
    check_smaller_after_larger(prefill=False)


def test_a_row_does_not_depend_on_the_rest_of_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    check_row_alone(monkeypatch, prefill=False)


@pytest.mark.parametrize("field", [Field.DS_OFFSET, Field.SHIFT_OFFSET, Field.E_OFFSET], ids=lambda field: field.name)
def test_slots_of_the_expand_change_their_rows_only(field: Field) -> None:
    check_slot(field, prefill=False)
