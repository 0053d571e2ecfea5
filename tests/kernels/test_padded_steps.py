"""Padded calls of an engine run the same kernels for every mix of adapters."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from scute_compile.runtime_min.step.op import adapted_output as reference
from scute_compile.runtime_min.step.writer import StepLimits
from tests.kernels.checks import assert_close
from tests.kernels.steps import ADAPTERS, PAIR_RANK, gemm_of, inputs, pool, step_of


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("fixed", [False, True])
def test_padded_steps_of_an_engine_have_one_form_for_every_mix(fixed: bool, bias: bool) -> None:
    from scute_compile.runtime_min.step.launch import adapted_output
    from scute_compile.runtime_vllm.engine_steps import EngineSteps

    limits = StepLimits(
        max_num_batched_tokens=40, max_num_seqs=8, max_lora_rank=37, pair_rank=PAIR_RANK, rotations=True
    )
    steps = EngineSteps(pool(), limits)
    tables, gemm = step_of((None,), prefill=False).tables, gemm_of(0)
    for rows, padded in (((5, 3, None, 1), 8), ((None, 6), 3), ((*range(10), None, 7), 16)):
        x, weight, added = inputs(0, padded, bias=bias)
        product = _Product(weight=weight, bias=added)
        names = [None if row is None else ADAPTERS[row] for row in rows]
        steps.hold(names)
        steps.write(names)
        buffers, features = steps.arguments_for(padded, fixed=fixed)
        assert features.prefill == (padded > 8)
        computed = adapted_output(x, product, added, tables, buffers, gemm, features)
        exact = reference(x.double(), product, tables, buffers, gemm)
        assert_close(computed[: len(rows)], exact[: len(rows)])
    steps.release()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Product:
    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, rows: torch.Tensor, *, biased: bool) -> torch.Tensor:
        bias = self.bias.to(rows.dtype) if biased and self.bias is not None else None
        return torch.nn.functional.linear(rows, self.weight.to(rows.dtype), bias)
