"""The kernels under Triton's interpreter, in float32; `tests/test_kernels.py` runs this file in a process of its own.

Triton reads TRITON_INTERPRET when it is imported, and other tests import it first. Buffers that nothing wrote hold NaN
here, so a value that is read too early, or never written, shows.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from scute_compile.runtime_min.pool.directory import Field
from scute_compile.runtime_min.step.arguments import Gemm
from tests.runtime_min.step.kernel_steps import ADAPTERS, GEMMS, PAIR_RANK, ROWS, first_site, inputs, pool, step_of

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")

CLOSE = 2e-5
"""Relative to a row: sums of up to 520 products in float32, in another order than float64 adds them."""


@contextmanager
def spread_booleans() -> Iterator[None]:
    """Spread comparisons of scalars as booleans: Triton 3.9's interpreter spreads them as int32, which no mask may be.

    Compiled kernels have no such difference, and older interpreters take int32 masks.
    """
    from triton.language import int1
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    spread = InterpreterBuilder.create_splat

    def splat(self: object, block: Any, value: Any) -> object:  # noqa: ANN401 - Triton's own, unannotated
        if value.data.dtype == np.bool_:
            return TensorHandle(np.full(block.shape, value.data.flat[0]), int1)
        return spread(self, block, value)

    with patch.object(InterpreterBuilder, "create_splat", splat):
        yield


@pytest.fixture(autouse=True)
def booleans() -> Iterator[None]:
    """Let every check run so."""
    with spread_booleans():
        yield


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fill every new buffer with NaN, and cut K in several runs, each of several products, although it is short."""
    from scute_compile.runtime_min.step import launch_decode

    monkeypatch.setattr(launch_decode, "RUN_GRANULES", 48)
    monkeypatch.setattr(launch_decode, "SHARED_STEP", 32)
    monkeypatch.setattr(launch_decode, "OWNED_PROGRAMS", 100)
    monkeypatch.setattr(launch_decode, "TALL_PROGRAMS", 4)
    torch.use_deterministic_algorithms(mode=True)
    assert torch.zeros(1).new_empty(64).isnan().all()
    yield
    torch.use_deterministic_algorithms(mode=False)


def assert_close(ours: torch.Tensor, exact: torch.Tensor) -> None:
    error = (ours.double() - exact).norm(dim=1) / exact.norm(dim=1)
    assert error.max() < CLOSE, (int(error.argmax()), error.max())


@pytest.mark.parametrize(("number", "bias"), [(0, True), (1, False)])
@pytest.mark.parametrize("prefill", [False, True])
def test_kernels_are_the_reference(prefill: bool, number: int, bias: bool) -> None:
    step = step_of(ROWS, prefill=prefill)
    given = inputs(number, len(ROWS), bias=bias)
    assert_close(step.kernels(number, *given), step.reference(number, *given))


@pytest.mark.parametrize("prefill", [False, True])
def test_results_repeat_to_the_bit(prefill: bool) -> None:
    step = step_of((1, 5, None, 3), prefill=prefill)
    given = inputs(0, 4, bias=True)
    assert torch.equal(step.kernels(0, *given), step.kernels(0, *given))


def test_more_rows_of_a_shared_pair_than_a_block_holds() -> None:
    rows = (*(5, 6) * 8, 5, None)
    step = step_of(rows, prefill=False)
    given = inputs(1, len(rows), bias=True)
    assert_close(step.kernels(1, *given), step.reference(1, *given))


def test_more_tokens_of_one_adapter_than_a_tile_holds() -> None:
    rows = (*(1,) * 70, 6, None, 3)
    step = step_of(rows, prefill=True)
    given = inputs(0, len(rows), bias=True)
    assert_close(step.kernels(0, *given), step.reference(0, *given))


@pytest.mark.parametrize("rows", [(None, None), (2,), (5, None), (3, 4)])
@pytest.mark.parametrize("prefill", [False, True])
def test_steps_with_one_kind_of_adapter_alone(rows: tuple[int | None, ...], prefill: bool) -> None:
    step = step_of(rows, prefill=prefill)
    given = inputs(0, len(rows), bias=True)
    assert_close(step.kernels(0, *given), step.reference(0, *given))


@pytest.mark.parametrize("prefill", [False, True])
def test_a_launch_for_every_step_serves_a_smaller_one_after_a_larger_one(prefill: bool) -> None:
    larger: tuple[int | None, ...] = (5, 6, 3, 1)
    buffers = step_of(larger, prefill=prefill).buffers
    for rows in (larger, (None, 6)):
        step = step_of(rows, prefill=prefill, fixed=True, buffers=buffers)
        given = inputs(0, len(rows), bias=True)
        assert_close(step.kernels(0, *given), step.reference(0, *given))


def test_blocks_that_are_no_whole_granules_go_entry_by_entry() -> None:
    step = step_of((3, 9, 4), prefill=False)
    step = replace(step, features=replace(step.features, whole_granules=False))
    given = inputs(0, 3, bias=False)
    assert_close(step.kernels(0, *given), step.reference(0, *given))


def by_row(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """A GEMM whose rows don't depend on how many there are."""
    y = torch.stack([row @ weight.T for row in x])
    return y if bias is None else y + bias


@pytest.mark.parametrize("prefill", [False, True])
def test_a_row_does_not_depend_on_the_rest_of_the_batch(prefill: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.functional, "linear", by_row)
    rows = (3, 1, None, 5, 0, 6, 1)
    x, weight, bias = inputs(0, len(rows), bias=True)
    mixed = step_of(rows, prefill=prefill).kernels(0, x, weight, bias)
    for place in (2, 3, 6):
        # rotation decides where the bias is added, so a rotated row rides along
        alone = step_of((3, rows[place]), prefill=prefill).kernels(0, x[[0, place]], weight, bias)
        assert torch.equal(alone[1], mixed[place]), (place, rows[place])


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


@pytest.mark.parametrize("prefill", [False, True])
@pytest.mark.parametrize("field", ABSENT, ids=lambda field: field.name)
def test_every_slot_counts_and_moves_its_own_rows_alone(field: Field, prefill: bool) -> None:
    rows = (CARRIERS[field], None, 0 if field is not Field.RANK else 2)
    step = step_of(rows, prefill=prefill)
    given = inputs(0, len(rows), bias=False)
    whole = step.kernels(0, *given)
    directory = step.tables.directory.clone()
    directory[:, :, field] = ABSENT[field]
    if field is Field.RANK:
        directory[:, :, Field.PAIR] = -1
    without = replace(step, tables=replace(step.tables, directory=directory))
    part = without.kernels(0, *given)
    assert_close(part, without.reference(0, *given))
    moved = (part - whole).abs().amax(1)
    assert moved[0] > 0.01
    assert moved[1:].max() == 0


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("fixed", [False, True])
def test_padded_steps_of_an_engine_have_one_form_for_every_mix(fixed: bool, bias: bool) -> None:
    from scute_compile.runtime_min.step.launch import adapted_output
    from scute_compile.runtime_min.step.op import adapted_output as reference
    from scute_compile.runtime_min.step.writer import StepLimits
    from scute_compile.runtime_vllm.engine_steps import EngineSteps

    limits = StepLimits(
        max_num_batched_tokens=40, max_num_seqs=8, max_lora_rank=37, pair_rank=PAIR_RANK, rotations=True
    )
    steps = EngineSteps(pool(), limits)
    tables = step_of((None,), prefill=False).tables
    gemm = Gemm(first_site=first_site(0), widths=GEMMS[0][1])
    for rows, padded in (((5, 3, None, 1), 8), ((None, 6), 3), ((*range(10), None, 7), 16)):
        x, weight, added = inputs(0, padded, bias=bias)
        product = _Product(weight=weight, bias=added)
        names = [None if row is None else ADAPTERS[row] for row in rows]
        steps.hold(names)
        steps.write(names)
        buffers, features = steps.arguments_for(padded, fixed=fixed)
        assert features.prefill == (padded > 8)
        ours = adapted_output(x, product, added, tables, buffers, gemm, features)
        exact = reference(x.double(), product, tables, buffers, gemm)
        assert_close(ours[: len(rows)], exact[: len(rows)])
    steps.release()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Product:
    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, rows: torch.Tensor, *, biased: bool) -> torch.Tensor:
        bias = self.bias.to(rows.dtype) if biased and self.bias is not None else None
        return torch.nn.functional.linear(rows, self.weight.to(rows.dtype), bias)
