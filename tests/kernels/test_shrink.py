"""The decode shrink: `x A^T` of owned terms, and `(x A^T) * d` of shared pairs."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from scute_compile.runtime_min.pool.directory import Field
from scute_compile.runtime_min.reference import shrink as reference
from scute_compile.runtime_min.step.intermediates import Intermediates
from tests.kernels.checks import assert_close, check_reference, check_slot
from tests.kernels.steps import GEMMS, ROWS, gemm_of, inputs, step_of, term_of


@cache
def shrunk(number: int) -> Intermediates:
    """Return what the shrink writes for the inputs of one GEMM."""
    from scute_compile.runtime_min.step import launch, launch_decode

    step = step_of(ROWS, prefill=False)
    x, *_ = inputs(number, len(ROWS), bias=False)
    intermediates = launch.empty_intermediates(x, gemm_of(number), step.buffers, step.features)
    launch_decode.shrink(x, intermediates, step.tables, step.buffers, gemm_of(number), step.features)
    return intermediates


@pytest.mark.parametrize("number", [0, 1])
def test_runs_of_k_add_up_to_the_entries_of_owned_terms(number: int) -> None:
    step, intermediates = step_of(ROWS, prefill=False), shrunk(number)
    x, *_ = inputs(number, len(ROWS), bias=False)
    items = step.buffers.region("work").view(-1, 4)[: step.features.programs].tolist()
    starts = {row: start for _, row, start, _ in items}
    checked = 0
    for row, start in starts.items():
        for part in range(len(GEMMS[number][1])):
            term = term_of(step, row, number, part)
            if term is not None:
                entries = intermediates.h[:, part, start : start + len(term.a)].sum(0)
                assert_close(entries[None], reference(x[row][None].double(), term.a.double()))
                checked += 1
    assert checked >= len(starts)


@pytest.mark.parametrize("number", [0, 1])
def test_runs_of_k_add_up_to_the_scaled_entries_of_shared_pairs(number: int) -> None:
    step, intermediates = step_of(ROWS, prefill=False), shrunk(number)
    x, *_ = inputs(number, len(ROWS), bias=False)
    rows = [row for row, adapter in enumerate(ROWS) if adapter in (5, 6)]
    for place, row in enumerate(step.buffers.region("pair_rows")[: len(rows)].tolist()):
        for part in range(len(GEMMS[number][1])):
            term = term_of(step, row, number, part)
            assert term is not None
            assert term.d is not None
            entries = intermediates.hs[part, :, place].sum(0)
            exact = reference(x[row][None].double(), term.a.double(), term.d.double())
            assert_close(entries[None, : len(term.a)], exact)
            assert not entries[len(term.a) :].any(), "the expand loads whole blocks"


def test_more_rows_of_a_pair_than_a_block_holds_match_the_reference() -> None:
    rows = (*(5, 6) * 8, 5, None)
    check_reference(step_of(rows, prefill=False), 1)


@pytest.mark.parametrize("field", [Field.RANK, Field.D_OFFSET], ids=lambda field: field.name)
def test_slots_of_the_shrink_change_their_rows_only(field: Field) -> None:
    check_slot(field, prefill=False)


def test_a_step_of_the_base_computes_nothing() -> None:
    step = step_of((None, None), prefill=False)
    assert not step.features.owned
    assert not step.features.shared
    assert torch.equal(step.kernels(0, *inputs(0, 2, bias=False)), _product(0))


def _product(number: int) -> torch.Tensor:
    x, weight, _ = inputs(number, 2, bias=False)
    return torch.nn.functional.linear(x, weight)
