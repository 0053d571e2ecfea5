"""Two captured graphs where vLLM captures one: for steps of plain adapters, and for steps of any.

A graph does what any later step may need. Shared pairs and rotations cost even where a step has none: rotated rows
stand in the product, and a kernel that can do more fits fewer programs on the GPU. Plain LoRA, DoRA and IA3 need
neither, so each size is captured once more without. vLLM tells its graphs apart by a number of active adapters, of
which the plugin adds one; a step is sent to the plain graph only when the plugin knows what that very step holds.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scute_compile.runtime_vllm.engine_steps import EngineSteps

logger = logging.getLogger("vllm.scute")
RUNNERS = "vllm.v1.worker.gpu_model_runner"
STEPS = "scute_steps"
"""An attribute of vLLM's dispatcher: the steps of its engine."""


def install() -> None:
    """Hook into vLLM's choice among its graphs, once per process; without what is needed, steps have one kind of graph.

    Called where an engine's adapters are set up: the class that runs its steps is loaded by then.
    """
    from vllm.v1 import cudagraph_dispatcher

    dispatcher = cudagraph_dispatcher.CudagraphDispatcher
    runner: Any = getattr(sys.modules.get(RUNNERS), "GPUModelRunner", None)
    if hasattr(dispatcher, STEPS):
        return
    asked = inspect.signature(dispatcher.dispatch).parameters
    wanted = ("_get_lora_cases", "get_capture_descs")
    if runner is None or not all(hasattr(dispatcher, name) for name in wanted) or "num_active_loras" not in asked:
        logger.info("scute: this vLLM chooses graphs in another way; plain LoRA runs in graphs that hold all methods")
        return
    setattr(dispatcher, STEPS, None)
    dispatcher._get_lora_cases = lora_cases(dispatcher._get_lora_cases)
    dispatcher.get_capture_descs = capturing(dispatcher.get_capture_descs)
    dispatcher.dispatch = dispatching(dispatcher.dispatch)
    runner.execute_model = executing(runner.execute_model)


def plain_case(max_loras: int) -> int:
    """Return the number of active adapters that stands for plain steps; vLLM's own end at `max_loras + 1`."""
    return max_loras + 2


def lora_cases(original: Callable[[Any], list[int]]) -> Callable[[Any], list[int]]:
    """Return `CudagraphDispatcher._get_lora_cases()` with the case of plain steps."""

    @wraps(original)
    def cases(dispatcher: Any) -> list[int]:
        found = original(dispatcher)
        if steps_of(dispatcher) is None:
            return found
        most = dispatcher.vllm_config.lora_config.max_loras
        return [*found, plain_case(most)] if most + 1 in found else found

    return cases


def capturing(
    original: Callable[[Any], Sequence[tuple[Any, list[Any]]]],
) -> Callable[[Any], list[tuple[Any, list[Any]]]]:
    """Return `CudagraphDispatcher.get_capture_descs()`, in which the plain graph of a size comes last.

    vLLM captures the first two for a trial: the memory of the first is what all share, that of the second is taken for
    each of the others, and both are kept from the KV cache. The graph for all adapters is the one that needs most.
    """

    @wraps(original)
    def descriptors(dispatcher: Any) -> list[tuple[Any, list[Any]]]:
        found = list(original(dispatcher))
        if steps_of(dispatcher) is None:
            return found
        case = plain_case(dispatcher.vllm_config.lora_config.max_loras)
        return [
            (mode, sorted(each, key=lambda one: (one.num_tokens, one.num_active_loras != case), reverse=True))
            for mode, each in found
        ]

    return descriptors


def dispatching(original: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, Any]]:
    """Return `CudagraphDispatcher.dispatch(...)`, which sends plain steps, and their capture, to plain graphs."""

    @wraps(original)
    def dispatch(dispatcher: Any, *args: Any, num_active_loras: int = 0, **named: Any) -> tuple[Any, Any]:
        mode, descriptor = original(dispatcher, *args, num_active_loras=num_active_loras, **named)
        steps = steps_of(dispatcher)
        if steps is not None and num_active_loras > 0:
            case = plain_case(dispatcher.vllm_config.lora_config.max_loras)
            other = replace(descriptor, num_active_loras=case)
            wanted = num_active_loras == case or steps.plain
            if wanted and other in dispatcher.cudagraph_keys.get(mode, ()):
                return mode, other
        return mode, descriptor

    return dispatch


def executing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `GPUModelRunner.execute_model(...)`, before which no step is the current one.

    Were a graph chosen before the step's adapters are set, it would be chosen for the step before.
    """

    @wraps(original)
    def execute_model(runner: Any, *args: Any, **named: Any) -> Any:
        steps = steps_of(getattr(runner, "cudagraph_dispatcher", None))
        if steps is not None:
            steps.current = False
        return original(runner, *args, **named)

    return execute_model


def captures_plain(context: Any, max_loras: int) -> bool:
    """Whether the graph that is being captured will run plain steps alone.

    Args:
        context: vLLM's forward context.
        max_loras: Of the engine.
    """
    descriptor = getattr(context, "batch_descriptor", None)
    return getattr(descriptor, "num_active_loras", 0) == plain_case(max_loras)


def steps_of(dispatcher: Any) -> EngineSteps | None:
    """Return the steps of a dispatcher's engine: those that its adapted layers read; None where it has none."""
    if dispatcher is None or dispatcher.vllm_config.lora_config is None:
        return None
    if getattr(dispatcher, STEPS, None) is None:
        layers = dispatcher.compilation_config.static_forward_context.values()
        attachments = (getattr(layer, "attachment", None) for layer in layers)
        found = next((one.steps for one in attachments if one is not None and hasattr(one, "steps")), None)
        setattr(dispatcher, STEPS, found)
    steps: EngineSteps | None = getattr(dispatcher, STEPS)
    return steps
