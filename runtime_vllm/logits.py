"""vLLM's logits with LoRA, without the addition of zeros in steps where no slot holds weights of the head.

vLLM's layer shrinks and expands through buffers over the whole vocabulary wherever a step has an adapter, and fills a
slot of them with zeros whenever it activates one; few adapters have weights of the head. What is done around the
addition (the head's own product, the gather, the order of shards, padding) stays vLLM's.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

TAKEN = {
    "create_lora_weights": ("self", "max_loras", "lora_config", "model_config"),
    "reset_lora": ("self", "index"),
    "set_lora": ("self", "index", "lora_a", "lora_b"),
    "set_mapping": ("self", "punica_wrapper"),
}
"""Methods of vLLM's class that are extended, and what they take."""


class AdaptedLogits:
    """Remembers which slots hold weights; stands before vLLM's `LogitsProcessorWithLoRA` in the order of methods.

    A slot that isn't filled holds zeros as long as another one is filled: only then are the buffers read.
    """

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.filled: set[int] = set()
        self.slots = 0

    def create_lora_weights(self, max_loras: int, lora_config: Any, model_config: Any = None) -> None:
        """Make vLLM's buffers; they are zeros."""
        super().create_lora_weights(max_loras, lora_config, model_config)  # type: ignore[misc] # vLLM's class, next in order
        self.slots = max_loras

    def set_mapping(self, punica_wrapper: Any) -> None:
        """Take what adds to logits, and call it only where there is something to add."""
        super().set_mapping(Addition(punica=punica_wrapper, filled=self.filled))  # type: ignore[misc] # likewise

    def reset_lora(self, index: int) -> None:
        """Empty a slot, if anything is in it."""
        if index in self.filled:
            super().reset_lora(index)  # type: ignore[misc] # likewise
            self.filled.discard(index)

    def set_lora(self, index: int, lora_a: Any, lora_b: Any) -> None:
        """Fill a slot."""
        self.reset_lora(index)
        if not self.filled:  # nothing reads the buffers until now, and an engine that slept may have lost them
            for slot in range(self.slots):
                super().reset_lora(slot)  # type: ignore[misc] # likewise
        try:
            super().set_lora(index, lora_a, lora_b)  # type: ignore[misc] # likewise
        finally:
            self.filled.add(index)  # also where it failed halfway

    def vacate(self, adapters: Sequence[int | None]) -> None:
        """Empty the slots that no adapter has any more, before a step.

        Not when an adapter goes: the step before may not have computed its logits by then.

        Args:
            adapters: vLLM's number of the adapter in each slot, None where there is none.
        """
        for index in [index for index in self.filled if adapters[index] is None]:
            self.reset_lora(index)


@dataclass(frozen=True, slots=True, kw_only=True)
class Addition:
    """vLLM's wrapper of LoRA kernels as one layer of logits sees it."""

    punica: Any
    filled: Collection[int]
    """The layer's own set, which changes."""

    def add_lora_logits(self, y: torch.Tensor, *args: Any, **named: Any) -> Any:
        """Add to the logits `y` `(rows, vocabulary)`, or leave them; returns what vLLM's would.

        vLLM computes logits after its graphs. If it ever captured them, the graph would have to hold for filled slots.
        """
        captured = y.is_cuda and torch.cuda.is_current_stream_capturing()
        if self.filled or captured:
            return self.punica.add_lora_logits(y, *args, **named)
        return y

    def __getattr__(self, name: str) -> Any:
        return getattr(self.punica, name)


def adapted(original: Any) -> Any:
    """Return vLLM's class with `AdaptedLogits` before it.

    None where it is missing, or has other methods than those that are extended: vLLM is to be left as it is then.
    """
    for name, parameters in TAKEN.items():
        method = getattr(original, name, None)
        if method is None or tuple(inspect.signature(method).parameters) != parameters:
            return None
    return type("LogitsProcessorWithLoRA", (AdaptedLogits, original), {})
