"""Skips vLLM's LoRA of the output head in steps in which no loaded adapter has weights of the head."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch


class AdaptedLogits:
    """Mixin before vLLM's `LogitsProcessorWithLoRA` that tracks which adapter indices hold weights of the head.

    While any index is filled, the others hold zeros. While none is, the buffers are not read.
    """

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.filled: set[int] = set()
        self.max_loras = 0

    def create_lora_weights(self, max_loras: int, lora_config: Any, model_config: Any = None) -> None:
        """Allocate vLLM's buffers, which start as zeros."""
        super().create_lora_weights(max_loras, lora_config, model_config)  # type: ignore[misc] # vLLM's class, next in order
        self.max_loras = max_loras

    def set_mapping(self, punica_wrapper: Any) -> None:
        """Set vLLM's wrapper of the LoRA kernels, which is then called only while an index is filled."""
        super().set_mapping(LogitsKernels(punica=punica_wrapper, filled=self.filled))  # type: ignore[misc] # likewise

    def reset_lora(self, index: int) -> None:
        """Zero the weights of an adapter index, if it holds any."""
        if index in self.filled:
            super().reset_lora(index)  # type: ignore[misc] # likewise
            self.filled.discard(index)

    def set_lora(self, index: int, lora_a: Any, lora_b: Any) -> None:
        """Set the weights of an adapter index."""
        self.reset_lora(index)
        if not self.filled:  # the zeros are read from now on, and an engine that slept may have lost them
            for position in range(self.max_loras):
                super().reset_lora(position)  # type: ignore[misc] # likewise
        try:
            super().set_lora(index, lora_a, lora_b)  # type: ignore[misc] # likewise
        finally:
            self.filled.add(index)  # also after a copy that failed halfway

    def vacate(self, lora_ids: Sequence[int | None]) -> None:
        """Zero the indices that no longer have an adapter; called before each step.

        Removing an adapter does not zero them: the step before may not have computed its logits by then.

        Args:
            lora_ids: vLLM's id of the adapter at each index; None at a free index.
        """
        for index in [index for index in self.filled if lora_ids[index] is None]:
            self.reset_lora(index)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsKernels:
    """vLLM's wrapper of the LoRA kernels for one layer of logits; other attributes are the wrapper's."""

    punica: Any
    filled: Collection[int]
    """Adapter indices that hold weights; the layer changes this set."""

    def add_lora_logits(self, y: torch.Tensor, *args: Any, **named: Any) -> Any:
        """Add LoRA to the logits `y` `(rows, vocabulary)` if an index is filled; returns what vLLM's wrapper returns.

        vLLM computes logits outside its graphs. A captured graph must serve filled indices too, so a capture always
        adds.
        """
        captured = y.is_cuda and torch.cuda.is_current_stream_capturing()
        if self.filled or captured:
            return self.punica.add_lora_logits(y, *args, **named)
        return y

    def __getattr__(self, name: str) -> Any:
        return getattr(self.punica, name)


def adapted(original: type[Any]) -> type[Any]:
    """Return vLLM's `LogitsProcessorWithLoRA` with `AdaptedLogits` before it in the method resolution order."""
    return type("LogitsProcessorWithLoRA", (AdaptedLogits, original), {})
