"""Corrects vLLM's CPU kernels for LoRA, which up to vLLM 0.32 apply the last adapter to rows without one.

Index -1 means "no adapter", and those kernels use it as an index into the stacked weights. The guard zeroes the inputs
of such rows. If a probe shows that the kernels are correct, they are not changed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from vllm.lora.ops.torch_ops.lora_ops import bgmv_shrink

logger = logging.getLogger("vllm.scute")


def without_base_rows(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel that ignores rows without an adapter, or the original if it already does.

    Args:
        original: `bgmv_*(inputs, weights, out, indices, ...)`; `inputs` `(rows, in)`, `indices` `(rows,)`.
    """
    if not needs_guard():
        return original

    @wraps(original)
    def guarded(
        inputs: torch.Tensor, weights: torch.Tensor, out: torch.Tensor, indices: torch.Tensor, *rest: Any, **named: Any
    ) -> Any:
        has_adapter = (indices[: len(inputs)] >= 0).to(inputs.dtype).unsqueeze(-1)
        return original(inputs * has_adapter, weights, out, indices, *rest, **named)

    return guarded


@cache
def needs_guard() -> bool:
    """Return whether this vLLM applies the last adapter to a row without one."""
    out = torch.zeros(1, 1)
    bgmv_shrink(torch.ones(1, 2), torch.ones(2, 1, 1, 2), out, torch.tensor([-1]), 1.0)
    wrong = bool(out.any())
    if wrong:
        logger.info("scute: guarded vLLM's CPU kernels for LoRA, which apply an adapter to base rows")
    return wrong
