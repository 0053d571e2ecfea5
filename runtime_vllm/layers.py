"""vLLM's adapted linear layers with the runtime instead of vLLM's LoRA kernels.

Each class keeps vLLM's code around the product (collectives, biases) and replaces only the product, by one opaque
operator: `torch.compile` and CUDA graphs see the same call whatever adapters a step has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.lora.layers import (
    ColumnParallelLinearWithLoRA,
    MergedColumnParallelLinearWithLoRA,
    MergedQKVParallelLinearWithLoRA,
    QKVParallelLinearWithLoRA,
    ReplicatedLinearWithLoRA,
    RowParallelLinearWithLoRA,
)
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)

from scute_compile.runtime_min.step import op as ops
from scute_compile.runtime_min.step.arguments import Gemm, PoolTensors
from scute_compile.runtime_vllm.graph_kinds import captures_plain

if TYPE_CHECKING:
    from scute_compile.runtime_vllm.engine_steps import EngineSteps

MAX_SLICES = 3
"""Largest number of slices of one GEMM that the kernels support."""
PLAIN_FORWARD = (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
"""Classes whose product is that of their quantization method; for a subclass that overrides `forward`, the whole
`forward` is called."""


NAMES: list[str] = []
"""Names of layers in the forward contexts of this process's engines; a layer's position identifies it."""

torch.library.define("scute::engine_linear", "(Tensor x, Tensor? bias, Tensor layer, int outputs) -> Tensor")


@torch.library.impl("scute::engine_linear", "default")
def engine_linear(x: torch.Tensor, bias: torch.Tensor | None, layer: torch.Tensor, outputs: int) -> torch.Tensor:
    """Return the output `(..., N)` of an engine's layer, each row with its adapter's slots.

    Args:
        x: Inputs `(..., K)`.
        bias: `(N,)`, or None where this rank adds none.
        layer: `(1,)` int64 on the CPU: the position of the layer's name in `NAMES`. It is a tensor because a compiler
            treats tensors as inputs, and so compiles one piece of code for all blocks of a model.
        outputs: N of this rank.
    """
    del outputs
    module: AdaptedLinear = get_forward_context().no_compile_layers[NAMES[int(layer)]]
    return module.adapted(x, bias)


@torch.library.register_fake("scute::engine_linear")  # type: ignore[untyped-decorator] # PyTorch does not annotate it
def _(x: torch.Tensor, bias: torch.Tensor | None, layer: torch.Tensor, outputs: int) -> torch.Tensor:
    del bias, layer
    return x.new_empty((*x.shape[:-1], outputs))


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """The steps and the sites of a layer, set once the pool exists."""

    steps: EngineSteps
    gemm: Gemm


class AdaptedLinear:
    """The code that all of vLLM's linear layers share; precedes vLLM's class in the method resolution order."""

    stock_kernels = False
    """Whether vLLM's buffers and kernels serve plain LoRA, beside the runtime; one setting per process."""
    attachment: Attachment | None = None
    base_layer: Any
    device: torch.device
    n_slices: int

    def __init__(self, base_layer: torch.nn.Module) -> None:
        super().__init__(base_layer)  # type: ignore[call-arg] # vLLM's class, next in the MRO
        self.scute_name = f"{self.base_layer.prefix}.scute"
        layers = get_current_vllm_config().compilation_config.static_forward_context
        if self.scute_name in layers:
            raise ValueError(f"two layers are named {self.scute_name}")
        layers[self.scute_name] = self
        if self.scute_name not in NAMES:
            NAMES.append(self.scute_name)
        self.scute_position = torch.tensor([NAMES.index(self.scute_name)], device="cpu")

    @property
    def widths(self) -> tuple[int, ...]:
        """Output columns of each slice on this rank."""
        slices: tuple[int, ...] = getattr(self, "output_slices", ())
        return slices if len(slices) == self.n_slices else (int(self.output_size),)  # type: ignore[attr-defined] # vLLM's

    @property
    def quantized(self) -> bool:
        """Whether the base's weights are quantized; a quantized product would round delta rows."""
        return not isinstance(self.base_layer.quant_method, UnquantizedLinearMethod)

    @property
    def bias_apart(self) -> bool:
        """Whether the base's bias is added outside the layer, after `s` was applied to its output."""
        return bool(self.base_layer.skip_bias_add) and self.base_layer.bias is not None

    @property
    def own_forward(self) -> bool:
        """Whether the base's class overrides vLLM's forward, so that the whole forward must be called."""
        return type(self.base_layer).forward not in [layer.forward for layer in PLAIN_FORWARD]

    def create_lora_weights(self, max_loras: int, lora_config: Any, model_config: Any = None) -> None:
        """Allocate vLLM's buffers if its kernels are used; otherwise tensors of their shapes on the meta device."""
        real_device = self.device
        if not self.stock_kernels:
            self.device = torch.device("meta")
        super().create_lora_weights(max_loras, lora_config, model_config)  # type: ignore[misc] # likewise
        self.device = real_device

    def reset_lora(self, index: int) -> None:
        """Clear an adapter index of vLLM's buffers."""
        if self.stock_kernels:
            super().reset_lora(index)  # type: ignore[misc] # likewise

    def set_lora(self, index: int, lora_a: Any, lora_b: Any) -> None:
        """Fill an adapter index of vLLM's buffers."""
        if self.stock_kernels:
            super().set_lora(index, lora_a, lora_b)  # type: ignore[misc] # likewise

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return the layer's output on this rank, before any collective."""
        y: torch.Tensor = torch.ops.scute.engine_linear(x, bias, self.scute_position, sum(self.widths))
        if self.stock_kernels:
            y = self._apply_lora_to_output(x, y)  # type: ignore[attr-defined] # vLLM's
        return y

    def adapted(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return the output; runs inside the operator: once per step, or once per captured graph."""
        flat = x.reshape(-1, x.shape[-1])

        def multiply(rows: torch.Tensor, *, biased: bool) -> torch.Tensor:
            return self._product(rows.to(x.dtype), bias if biased else None)

        attachment = self.attachment
        captured = flat.is_cuda and torch.cuda.is_current_stream_capturing()
        rehearsed = flat.is_cuda and not captured and attachment is not None and attachment.steps.rehearses(len(flat))
        if attachment is None or not (attachment.steps.adapted or rehearsed):
            y = multiply(flat, biased=True)
            return y.reshape(*x.shape[:-1], y.shape[-1])
        steps, gemm = attachment.steps, attachment.gemm
        pool = PoolTensors.of(steps.pool.memory)
        if flat.is_cuda:
            from scute_compile.runtime_min.step import launch

            if rehearsed:
                buffers, variants = steps.rehearsal(len(flat))
            else:
                plain = captured and captures_plain(get_forward_context(), steps.max_adapters)
                buffers, features = steps.arguments_for(len(flat), fixed=captured, plain=plain)
                variants = (features,)
            late = None if self.own_forward else bias
            for features in variants:
                y = launch.adapted_output(flat.contiguous(), multiply, late, pool, buffers, gemm, features)
        else:
            buffers, _ = steps.arguments_for(len(flat), fixed=False)
            y = ops.adapted_output(flat, multiply, pool, buffers, gemm)
        return y.reshape(*x.shape[:-1], y.shape[-1])

    def _product(self, rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        y: torch.Tensor
        if self.own_forward:
            out = self.base_layer(rows)
            y = out[0] if isinstance(out, tuple) else out
        else:
            y = self.base_layer.quant_method.apply(self.base_layer, rows, bias)
        return y


class _Replacing(AdaptedLinear):
    """Replaces the layers that vLLM's class takes, within the kernels' limits."""

    @classmethod
    def can_replace_layer(
        cls, source_layer: Any, lora_config: Any, packed_modules_list: list[str], model_config: Any = None
    ) -> bool:
        """Return whether this class replaces a layer; vLLM calls it."""
        taken = super().can_replace_layer(  # type: ignore[misc] # likewise
            source_layer=source_layer,
            lora_config=lora_config,
            packed_modules_list=packed_modules_list,
            model_config=model_config,
        )
        return bool(taken) and len(packed_modules_list) <= MAX_SLICES


class AdaptedColumnParallel(_Replacing, ColumnParallelLinearWithLoRA):
    """One column-parallel layer, or a merged one with one adapter."""


class AdaptedMergedColumn(_Replacing, MergedColumnParallelLinearWithLoRA):
    """Gate and up, each with its own adapter."""


class AdaptedQKV(_Replacing, QKVParallelLinearWithLoRA):
    """A fused qkv with one adapter for all of it."""


class AdaptedMergedQKV(_Replacing, MergedQKVParallelLinearWithLoRA):
    """A fused qkv with an adapter for each of q, k and v."""


class AdaptedRowParallel(_Replacing, RowParallelLinearWithLoRA):
    """A row-parallel layer: s and terms apply to the partial sum, b on one rank."""


class AdaptedReplicated(_Replacing, ReplicatedLinearWithLoRA):
    """A layer that is whole on every rank."""


ADAPTED = (
    AdaptedColumnParallel,
    AdaptedMergedColumn,
    AdaptedQKV,
    AdaptedMergedQKV,
    AdaptedRowParallel,
    AdaptedReplicated,
)
