"""vLLM's types as far as the plugin uses them; vLLM is not installed where the plugin is type-checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, Protocol

import torch


class LoRARequest(Protocol):
    """`vllm.lora.request.LoRARequest`: the adapter that a request names."""

    lora_name: str
    lora_int_id: int
    lora_path: str
    load_inplace: bool


class LayerWeights(Protocol):
    """`vllm.lora.lora_weights.LoRALayerWeights`: LoRA of one layer, or of one slice of a fused layer."""

    lora_a: torch.Tensor
    """`(r, in)`."""
    lora_b: torch.Tensor
    """`(out, r)`, unscaled."""
    scaling: float


class LoRAModel(Protocol):
    """`vllm.lora.lora_model.LoRAModel`: a loaded adapter. The plugin attaches a `Loaded` to it."""

    id: int
    loras: MutableMapping[str, LayerWeights]
    scute: Any


class LoRAConfig(Protocol):
    """`vllm.config.LoRAConfig`."""

    max_loras: int
    max_cpu_loras: int
    max_lora_rank: int
    lora_dtype: Any
    fully_sharded_loras: bool


class LoRAMapping(Protocol):
    """`vllm.lora.layers.LoRAMapping`: the adapters of one step."""

    index_mapping: Sequence[int]
    """The adapter of each token by its id; 0 for the base."""


class WorkerManager(Protocol):
    """`vllm.lora.worker_manager.LRUCacheWorkerLoRAManager`: loads adapters in a worker."""

    lora_config: LoRAConfig
    _adapter_manager: Any


class Request(Protocol):
    """`vllm.v1.request.Request`: a request in the engine's core."""

    request_id: str
    client_index: int
    lora_request: LoRARequest | None


class Scheduler(Protocol):
    """`vllm.v1.core.sched.scheduler.Scheduler`."""

    requests: Mapping[str, Request]
    """Requests that are admitted and not finished, by id."""


class Executor(Protocol):
    """`vllm.v1.executor.Executor`: runs methods on every worker."""

    def collective_rpc(self, method: str | Callable[..., Any], *, args: tuple[Any, ...] = ()) -> list[Any]:
        """Return every worker's answer."""


class EngineCore(Protocol):
    """`vllm.v1.engine.core.EngineCore`: schedules requests and runs steps."""

    model_executor: Executor
    scheduler: Scheduler
    vllm_config: Any

    def add_lora(self, lora_request: LoRARequest, /) -> bool:
        """Load an adapter on every worker."""

    def remove_lora(self, lora_id: int, /) -> bool:
        """Remove an adapter from every worker."""
