"""Two captured graphs where vLLM captures one: for steps of plain adapters, and for steps of any adapters.

A graph launches all that any later step may need. Shared pairs and rotations cost time even in a step without them:
the GEMM multiplies rows for rotations, and kernels with more features run fewer programs at once. Plain LoRA, DoRA
and IA3 need neither, so each size is captured a second time without them. vLLM's key of a graph includes a number of
active adapters; the plugin adds one value of it, for plain graphs. A step runs in a plain graph only after its
adapters are set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scute_compile.runtime_vllm.engine_steps import EngineSteps

STEPS = "scute_steps"
"""Attribute of vLLM's dispatcher that holds the steps of its engine."""


def plain_case(max_loras: int) -> int:
    """Return the number of active adapters that denotes plain steps; vLLM uses numbers up to `max_loras + 1`."""
    return max_loras + 2


def lora_cases(original: Callable[[Any], list[int]]) -> Callable[[Any], list[int]]:
    """Return `CudagraphDispatcher._get_lora_cases()` with the case of plain steps added."""

    @wraps(original)
    def cases(dispatcher: Any) -> list[int]:
        numbers = original(dispatcher)
        if steps_of(dispatcher) is None:
            return numbers
        max_loras = dispatcher.vllm_config.lora_config.max_loras
        return [*numbers, plain_case(max_loras)] if max_loras + 1 in numbers else numbers

    return cases


def capturing(
    original: Callable[[Any], Sequence[tuple[Any, list[Any]]]],
) -> Callable[[Any], list[tuple[Any, list[Any]]]]:
    """Return `CudagraphDispatcher.get_capture_descs()` with the plain graph of each size last.

    vLLM captures the first two graphs as a trial. It reserves memory before the KV cache: that of the first graph once,
    and that of the second for each further graph. The general graph needs more memory.
    """

    @wraps(original)
    def descriptors(dispatcher: Any) -> list[tuple[Any, list[Any]]]:
        modes = list(original(dispatcher))
        if steps_of(dispatcher) is None:
            return modes
        case = plain_case(dispatcher.vllm_config.lora_config.max_loras)
        return [
            (mode, sorted(graphs, key=lambda graph: (graph.num_tokens, graph.num_active_loras != case), reverse=True))
            for mode, graphs in modes
        ]

    return descriptors


def dispatching(original: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, Any]]:
    """Return `CudagraphDispatcher.dispatch(...)` that selects plain graphs for plain steps and for their capture."""

    @wraps(original)
    def dispatch(dispatcher: Any, *args: Any, num_active_loras: int = 0, **named: Any) -> tuple[Any, Any]:
        mode, descriptor = original(dispatcher, *args, num_active_loras=num_active_loras, **named)
        steps = steps_of(dispatcher)
        if steps is not None and num_active_loras > 0:
            case = plain_case(dispatcher.vllm_config.lora_config.max_loras)
            plain = replace(descriptor, num_active_loras=case)
            if (num_active_loras == case or steps.plain) and plain in dispatcher.cudagraph_keys.get(mode, ()):
                return mode, plain
        return mode, descriptor

    return dispatch


def executing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `GPUModelRunner.execute_model(...)` that first marks the written step as outdated.

    A graph that is chosen before the step's adapters are set must not be chosen by the previous step's adapters.
    """

    @wraps(original)
    def execute_model(runner: Any, *args: Any, **named: Any) -> Any:
        steps = steps_of(getattr(runner, "cudagraph_dispatcher", None))
        if steps is not None:
            steps.current = False
        return original(runner, *args, **named)

    return execute_model


def captures_plain(context: Any, max_loras: int) -> bool:
    """Return whether the graph that is being captured will run plain steps only.

    Args:
        context: vLLM's forward context.
        max_loras: The engine's max_loras.
    """
    descriptor = getattr(context, "batch_descriptor", None)
    return getattr(descriptor, "num_active_loras", 0) == plain_case(max_loras)


def steps_of(dispatcher: Any) -> EngineSteps | None:
    """Return the steps of a dispatcher's engine, found through its adapted layers; None without adapters."""
    if dispatcher is None or dispatcher.vllm_config.lora_config is None:
        return None
    if getattr(dispatcher, STEPS, None) is None:
        layers = dispatcher.compilation_config.static_forward_context.values()
        attachments: Iterator[Any] = (getattr(layer, "attachment", None) for layer in layers)
        steps_found = (attachment.steps for attachment in attachments if hasattr(attachment, "steps"))
        setattr(dispatcher, STEPS, next(steps_found, None))
    steps: EngineSteps | None = getattr(dispatcher, STEPS)
    return steps
