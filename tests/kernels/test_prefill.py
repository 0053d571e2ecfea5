"""The prefill kernels: rotation, shrink and expand over tiles of one adapter's tokens."""

from __future__ import annotations

import pytest

from scute_compile.runtime_min.pool.directory import Field
from scute_compile.runtime_min.reference import shrink as reference
from tests.kernels.checks import (
    ABSENT,
    assert_close,
    check_reference,
    check_repeats,
    check_row_alone,
    check_slot,
    check_smaller_after_larger,
)
from tests.kernels.steps import GEMMS, ROWS, Rows, check_delta_rows, gemm_of, inputs, step_of, term_of


@pytest.mark.parametrize(("number", "bias"), [(0, True), (1, False)])
def test_the_prefill_kernels_match_the_reference(number: int, bias: bool) -> None:
    check_reference(step_of(ROWS, prefill=True), number, bias=bias)


@pytest.mark.parametrize("number", [0, 1])
def test_the_shrink_writes_the_scaled_entries_of_every_term(number: int) -> None:
    from scute_compile.runtime_min.step import launch, launch_prefill

    step = step_of(ROWS, prefill=True)
    x, *_ = inputs(number, len(ROWS), bias=False)
    intermediates = launch.empty_intermediates(x, gemm_of(number), step.buffers, step.features)
    launch_prefill.shrink(x, intermediates, step.tables, step.buffers, gemm_of(number), step.features)
    starts = step.buffers.region("row_h").tolist()
    checked = set()
    for row in range(len(ROWS)):
        for part in range(len(GEMMS[number][1])):
            term = term_of(step, row, number, part)
            if term is not None:
                entries = intermediates.h[0, part, starts[row] : starts[row] + len(term.a)]
                d = None if term.d is None else term.d.double()
                assert_close(entries[None], reference(x[row][None].double(), term.a.double(), d))
                checked.add(d is None)
    assert checked == {False, True}


@pytest.mark.parametrize("number", [0, 1])
def test_delta_rows_match_the_reference(number: int) -> None:
    from scute_compile.runtime_min.step import launch_prefill

    check_delta_rows(launch_prefill.rotate, step_of(ROWS, prefill=True), number)


def test_results_repeat_to_the_bit() -> None:
    check_repeats(prefill=True)


def test_more_tokens_than_a_tile_holds_match_the_reference() -> None:
    check_reference(step_of((*(1,) * 70, 6, None, 3), prefill=True), 0)


@pytest.mark.parametrize("rows", [(None, None), (2,), (5, None), (3, 4)])
def test_steps_with_one_kind_of_adapter_match_the_reference(rows: Rows) -> None:
    check_reference(step_of(rows, prefill=True), 0)


def test_a_smaller_step_after_a_larger_one_matches_the_reference() -> None:
    check_smaller_after_larger(prefill=True)


def test_a_row_does_not_depend_on_the_rest_of_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    check_row_alone(monkeypatch, prefill=True)


@pytest.mark.parametrize("field", ABSENT, ids=lambda field: field.name)
def test_every_slot_changes_its_rows_only(field: Field) -> None:
    check_slot(field, prefill=True)
