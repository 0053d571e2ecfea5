"""A guard for vLLM's own CPU operations for LoRA, which up to 0.32 give rows of the base the last slot's adapter.

Index -1 says "no adapter" and is used to index the stacked weights. The guard empties those rows' inputs first; where a
probe finds the operations right, nothing is changed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

import torch

GUARDED = ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice")


def needs_guard(operations: ModuleType) -> bool:
    """Return whether a row without an adapter comes out as the last slot's."""
    out = torch.zeros(1, 1)
    operations.bgmv_shrink(torch.ones(1, 2), torch.ones(2, 1, 1, 2), out, torch.tensor([-1]), 1.0)
    return bool(out.any())


def guard(operations: ModuleType) -> bool:
    """Guard vLLM's `torch_ops.lora_ops`, whose other functions call these by name. Returns whether it was needed.

    Other modules of vLLM hold some of them under the same names: what is added to logits goes through those.
    """
    if not needs_guard(operations):
        return False
    for name in GUARDED:
        original = getattr(operations, name)
        guarded = _without_base_rows(original)
        for module in [operations, *(held for where, held in sys.modules.items() if where.startswith("vllm.lora."))]:
            if vars(module).get(name) is original:
                setattr(module, name, guarded)
    return True


def _without_base_rows(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def guarded(
        inputs: torch.Tensor, weights: torch.Tensor, out: torch.Tensor, indices: torch.Tensor, *rest: Any, **named: Any
    ) -> Any:
        adapted = (indices[: len(inputs)] >= 0).to(inputs.dtype).unsqueeze(-1)
        return original(inputs * adapted, weights, out, indices, *rest, **named)

    return guarded
