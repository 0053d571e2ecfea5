"""Lists every attribute of vLLM that the plugin replaces or relies on, and installs the replacements from that list.

Rows are strings, so the list can be read, and checked against a vLLM, before anything that needs vLLM is imported.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

logger = logging.getLogger("vllm.scute")

WORKER = "vllm.lora.worker_manager"
MANAGER = "vllm.lora.model_manager:LRUCacheLoRAModelManager"
LINEAR = "vllm.lora.layers.base_linear:BaseLinearLayerWithLoRA"
LOGITS = "vllm.lora.utils:LogitsProcessorWithLoRA"
CORE = "vllm.v1.engine.core:EngineCore"
ENGINE = "vllm.v1.engine.llm_engine:LLMEngine"
CPU_OPS = "vllm.lora.ops.torch_ops.lora_ops"
PLUGIN = "scute_compile.runtime_vllm"

SERVER_STATUS = "status 400 for a refused adapter"
LOGITS_SKIPPED = "steps that skip the head's LoRA while no adapter has any"
BASE_ROWS = "the guard of base rows in vLLM's CPU kernels"
PLAIN_GRAPHS = "graphs for plain steps alone; plain LoRA runs in the graphs for all adapters"
DISPATCHER = "vllm.v1.cudagraph_dispatcher:CudagraphDispatcher"


@dataclass(frozen=True, slots=True)
class Hook:
    """One attribute of vLLM."""

    owner: str
    """`module`, or `module:Class`."""
    name: str
    parameters: tuple[str, ...] | None = None
    """Names of its parameters, `*` for any others; None for an attribute that is not a function, or whose arguments
    are passed through."""
    replacement: str | None = None
    """`module:function` that returns the replacement of the original; None for an attribute that is called or
    overridden in a subclass."""
    feature: str | None = None
    """The feature that is left out when vLLM lacks one of its rows; None for a row that the installation needs."""

    def fault(self) -> str | None:
        """Return how the installed vLLM differs from this row; None where it has the attribute as expected."""
        where = f"{self.owner.rpartition(':')[2]}.{self.name}"
        try:
            found = getattr(resolve_name(self.owner), self.name)
        except (ImportError, AttributeError):
            return f"no {where}"
        if self.parameters is None:
            return None
        parameters = tuple(inspect.signature(found).parameters)
        if parameters == self.parameters or ("*" in self.parameters and {*self.parameters} <= {"*", *parameters}):
            return None
        return f"{where} takes ({', '.join(parameters)}), expected ({', '.join(self.parameters)})"


HOOKS: tuple[Hook, ...] = (
    # Loading and storing adapters, in each worker.
    Hook(f"{WORKER}:LRUCacheWorkerLoRAManager", "_manager_cls", None, f"{PLUGIN}.adapter_manager:manager_class"),
    Hook(f"{WORKER}:WorkerLoRAManager", "_load_adapter", ("self", "lora_request"), f"{PLUGIN}.loading:load_adapter"),
    Hook(
        f"{WORKER}:LRUCacheWorkerLoRAManager",
        "_apply_adapters",
        ("self", "lora_requests"),
        f"{PLUGIN}.loading:apply_in_order",
    ),
    Hook(MANAGER, "activate_adapter", ("self", "lora_id")),
    Hook(MANAGER, "deactivate_adapter", ("self", "adapter_id")),
    Hook(MANAGER, "_deactivate_adapter", ("self", "lora_id")),
    Hook(MANAGER, "remove_adapter", ("self", "adapter_id")),
    Hook(MANAGER, "remove_all_adapters", ("self",)),
    Hook(MANAGER, "set_adapter_mapping", ("self", "mapping")),
    Hook(MANAGER, "_set_adapter_mapping", ("self", "mapping")),
    Hook(MANAGER, "_create_merged_loras_inplace", ("self", "lora_model")),
    # Layers.
    Hook("vllm.lora.utils", "_all_lora_classes", None, f"{PLUGIN}.adapter_manager:with_adapted_layers"),
    Hook(LINEAR, "create_lora_weights", ("self", "max_loras", "lora_config", "model_config")),
    Hook(LINEAR, "set_lora", ("self", "index", "lora_a", "lora_b")),
    Hook(LINEAR, "reset_lora", ("self", "index")),
    Hook(LINEAR, "apply", ("self", "x", "bias")),
    # Admission of requests and the prefix cache, in the engine's core.
    Hook(
        "vllm.v1.core.kv_cache_utils",
        "_gen_lora_extra_hash_keys",
        ("request",),
        f"{PLUGIN}.engine_requests:hash_keys",
    ),
    Hook(CORE, "add_lora", ("self", "lora_request"), f"{PLUGIN}.engine_requests:core_add_lora"),
    Hook(CORE, "remove_lora", ("self", "lora_id"), f"{PLUGIN}.engine_requests:core_remove_lora"),
    Hook(CORE, "add_request", ("self", "request", "request_wave"), f"{PLUGIN}.engine_requests:core_add_request"),
    Hook(
        "vllm.v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin",
        "add_lora",
        ("self", "lora_request"),
        f"{PLUGIN}.engine_requests:worker_add_lora",
    ),
    Hook("vllm.v1.executor:Executor", "collective_rpc"),
    Hook(ENGINE, "add_request", None, f"{PLUGIN}.engine_requests:engine_add_request"),
    Hook(ENGINE, "abort_request", ("self", "request_ids", "internal")),
    # The OpenAI-compatible server.
    Hook(
        "vllm.entrypoints.openai.models.serving:OpenAIServingModels",
        "load_lora_adapter",
        ("self", "request", "base_model_name"),
        f"{PLUGIN}.engine_requests:server_load_lora_adapter",
        feature=SERVER_STATUS,
    ),
    # The head's own LoRA, which stays with vLLM.
    Hook("vllm.lora.utils", "LogitsProcessorWithLoRA", None, f"{PLUGIN}.logits:adapted", feature=LOGITS_SKIPPED),
    Hook(
        LOGITS,
        "create_lora_weights",
        ("self", "max_loras", "lora_config", "model_config"),
        feature=LOGITS_SKIPPED,
    ),
    Hook(LOGITS, "set_lora", ("self", "index", "lora_a", "lora_b"), feature=LOGITS_SKIPPED),
    Hook(LOGITS, "reset_lora", ("self", "index"), feature=LOGITS_SKIPPED),
    Hook(LOGITS, "set_mapping", ("self", "punica_wrapper"), feature=LOGITS_SKIPPED),
    # vLLM's own CPU kernels, which up to 0.32 give base rows the last adapter.
    Hook(CPU_OPS, "bgmv_shrink", None, f"{PLUGIN}.cpu_guard:without_base_rows", feature=BASE_ROWS),
    Hook(CPU_OPS, "bgmv_expand", None, f"{PLUGIN}.cpu_guard:without_base_rows", feature=BASE_ROWS),
    Hook(CPU_OPS, "bgmv_expand_slice", None, f"{PLUGIN}.cpu_guard:without_base_rows", feature=BASE_ROWS),
)
"""Installed when vLLM loads its plugins."""

GRAPH_HOOKS: tuple[Hook, ...] = (
    Hook(DISPATCHER, "_get_lora_cases", ("self",), f"{PLUGIN}.graph_kinds:lora_cases", feature=PLAIN_GRAPHS),
    Hook(DISPATCHER, "get_capture_descs", ("self",), f"{PLUGIN}.graph_kinds:capturing", feature=PLAIN_GRAPHS),
    Hook(DISPATCHER, "dispatch", ("*", "num_active_loras"), f"{PLUGIN}.graph_kinds:dispatching", feature=PLAIN_GRAPHS),
    Hook(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner",
        "execute_model",
        None,
        f"{PLUGIN}.graph_kinds:executing",
        feature=PLAIN_GRAPHS,
    ),
)
"""Installed in a worker when it builds a model with adapters, since the class that runs steps is loaded by then."""


def install(hooks: Sequence[Hook] = HOOKS) -> tuple[str, ...]:
    """Check all rows, then replace what they name.

    A feature is left out as a whole when one of its rows differs.

    Returns:
        How this vLLM differs from the rows without a feature, one text per row. If there is any, nothing is replaced.
    """
    faults = {hook: fault for hook in hooks if (fault := hook.fault()) is not None}
    required = tuple(fault for hook, fault in faults.items() if hook.feature is None)
    if required:
        return required
    for feature in dict.fromkeys(hook.feature for hook in faults):
        texts = "; ".join(fault for hook, fault in faults.items() if hook.feature == feature)
        logger.info("scute: this vLLM lacks the hooks for %s (%s)", feature, texts)
    left_out = {hook.feature for hook in faults}
    replacements = []
    for hook in hooks:
        if hook.replacement is not None and hook.feature not in left_out:
            owner = resolve_name(hook.owner)
            original = getattr(owner, hook.name)
            replacements.append((owner, hook.name, original, resolve_name(hook.replacement)(original)))
    for owner, name, original, replacement in replacements:
        _replace(owner, name, original, replacement)
    return ()


def _replace(owner: Any, name: str, original: Any, replacement: Any) -> None:
    """Set an attribute; a function of a module also where other modules of vLLM imported it by name."""
    setattr(owner, name, replacement)
    if not (isinstance(owner, ModuleType) and inspect.isfunction(original)):
        return
    for module in [module for where, module in sys.modules.items() if where.startswith("vllm.")]:
        if vars(module).get(name) is original:
            setattr(module, name, replacement)
