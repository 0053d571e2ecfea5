"""The plugin's entry point: vLLM calls `register` once in each of its processes, before it builds a model."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

from scute_compile.diagnostics import ScuteError

logger = logging.getLogger("vllm.scute")
TESTED = ("0.26.0", "0.32.0")
"""Versions of vLLM that the tests ran against; the hooks had the same signatures in all from 0.20 to 0.33."""
_registered = False


def register() -> None:
    """Let vLLM serve compiled adapters. Where a hook is missing, say so and change nothing."""
    global _registered  # noqa: PLW0603 - once per process, whoever calls
    if _registered:
        return
    _registered = True
    try:
        missing = _missing_hooks()
    except ImportError as error:
        missing = [str(error)]
    if missing:
        logger.error(
            "scute: this vLLM lacks what the plugin needs (%s); compiled adapters will not be served. Tested: %s",
            "; ".join(missing),
            ", ".join(TESTED),
        )
        return
    try:
        _install()
    except ScuteError as error:
        raise ValueError(str(error)) from None


def _missing_hooks() -> list[str]:
    """Return the hooks that this vLLM doesn't have in the shape that the plugin uses."""
    from vllm.lora import utils
    from vllm.lora.model_manager import LRUCacheLoRAModelManager
    from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor import Executor
    from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

    wanted: list[tuple[Any, str, tuple[str, ...] | None]] = [
        (LRUCacheWorkerLoRAManager, "_load_adapter", ("self", "lora_request")),
        (LRUCacheWorkerLoRAManager, "_manager_cls", None),
        (LRUCacheWorkerLoRAManager, "_apply_adapters", ("self", "lora_requests")),
        (LRUCacheLoRAModelManager, "_create_merged_loras_inplace", ("self", "lora_model")),
        (LRUCacheLoRAModelManager, "activate_adapter", ("self", "lora_id")),
        (LRUCacheLoRAModelManager, "deactivate_adapter", ("self", "adapter_id")),
        (LRUCacheLoRAModelManager, "_deactivate_adapter", ("self", "lora_id")),
        (LRUCacheLoRAModelManager, "_set_adapter_mapping", ("self", "mapping")),
        (utils, "_all_lora_classes", None),
        (kv_cache_utils, "_gen_lora_extra_hash_keys", ("request",)),
        (EngineCore, "add_lora", ("self", "lora_request")),
        (EngineCore, "remove_lora", ("self", "lora_id")),
        (LoRAModelRunnerMixin, "add_lora", ("self", "lora_request")),
        (Executor, "collective_rpc", None),
        (EngineCore, "add_request", ("self", "request", "request_wave")),
    ]
    missing = []
    for owner, name, parameters in wanted:
        hook = getattr(owner, name, None)
        if hook is None:
            missing.append(f"no {owner.__name__}.{name}")
        elif parameters is not None and tuple(inspect.signature(hook).parameters) != parameters:
            missing.append(f"{owner.__name__}.{name} takes other arguments")
    return missing


def _install() -> None:
    from vllm.lora import utils
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager, WorkerLoRAManager
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

    from scute_compile.runtime_vllm import engine_requests, logits
    from scute_compile.runtime_vllm.adapter_manager import AdapterManager
    from scute_compile.runtime_vllm.cpu_guard import guard
    from scute_compile.runtime_vllm.layers import ADAPTED, AdaptedLinear
    from scute_compile.runtime_vllm.loading import in_one_order, loading
    from scute_compile.runtime_vllm.options import Options

    options = Options.read()
    AdapterManager.options, AdaptedLinear.stock_kernels = options, options.stock_kernels
    utils._all_lora_classes = (*ADAPTED, *utils._all_lora_classes)
    LRUCacheWorkerLoRAManager._manager_cls = AdapterManager
    WorkerLoRAManager._load_adapter = loading(WorkerLoRAManager._load_adapter)
    LRUCacheWorkerLoRAManager._apply_adapters = in_one_order(LRUCacheWorkerLoRAManager._apply_adapters)
    kv_cache_utils._gen_lora_extra_hash_keys = engine_requests.hash_keys(kv_cache_utils._gen_lora_extra_hash_keys)
    EngineCore.add_lora = engine_requests.adding_lora(EngineCore.add_lora)
    LoRAModelRunnerMixin.add_lora = engine_requests.answering_faults(LoRAModelRunnerMixin.add_lora)
    LLMEngine.add_request = engine_requests.adding_to_engine(LLMEngine.add_request)
    EngineCore.remove_lora = engine_requests.removing_lora(EngineCore.remove_lora)
    EngineCore.add_request = engine_requests.adding_request(EngineCore.add_request)
    _install_in_server(engine_requests.answering)
    head = logits.adapted(getattr(utils, "LogitsProcessorWithLoRA", None))
    if head is None:
        logger.info("scute: this vLLM adds to logits in a way of its own, which is left as it is")
    else:
        utils.LogitsProcessorWithLoRA = head
    if guard(lora_ops):
        logger.info("scute: guarded vLLM's CPU operations for LoRA, which give base rows an adapter")


def _install_in_server(answering: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Let the OpenAI-compatible server name an adapter's own fault as such, where this vLLM has that server."""
    try:
        from vllm.entrypoints.openai.models.serving import OpenAIServingModels
    except ImportError:
        return
    OpenAIServingModels.load_lora_adapter = answering(OpenAIServingModels.load_lora_adapter)
