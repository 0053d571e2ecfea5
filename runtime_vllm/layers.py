"""vLLM's adapted linear layers with the runtime in the place of vLLM's own LoRA kernels.

Each class keeps what vLLM's does around the product (gathers, reductions, biases) and replaces the product alone. It
goes through one opaque operator, so `torch.compile` and CUDA graphs see the same call whatever adapters a step has.
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

MOST_SLICES = 3
"""Of one GEMM, in the kernels."""
PLAIN_FORWARD = (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
"""Classes whose own product is that of their quantization method; a subclass with another forward is called whole."""


NAMES: list[str] = []
"""Names of layers in the forward contexts of this process's engines; layers are told apart by their places in it."""

torch.library.define("scute::engine_linear", "(Tensor x, Tensor? bias, Tensor layer, int outputs) -> Tensor")


@torch.library.impl("scute::engine_linear", "default")
def engine_linear(x: torch.Tensor, bias: torch.Tensor | None, layer: torch.Tensor, outputs: int) -> torch.Tensor:
    """Return the output `(..., N)` of an engine's layer, each row with its adapter's slots.

    Args:
        x: Inputs `(..., K)`.
        bias: `(N,)`, or None where this rank adds none.
        layer: `(1,)` int64 on the CPU: the place of the layer's name in `NAMES`. A tensor, since a compiler takes that
            as an input: the same code then serves all blocks of a model, where names in it would make each its own.
        outputs: N of this rank.
    """
    del outputs
    found: AdaptedLinear = get_forward_context().no_compile_layers[NAMES[int(layer)]]
    return found.adapted(x, bias)


@torch.library.register_fake("scute::engine_linear")  # type: ignore[untyped-decorator] # torch leaves it unannotated
def _(x: torch.Tensor, bias: torch.Tensor | None, layer: torch.Tensor, outputs: int) -> torch.Tensor:
    del bias, layer
    return x.new_empty((*x.shape[:-1], outputs))


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """What a layer reads at each step, once the pool exists."""

    steps: EngineSteps
    gemm: Gemm


class AdaptedLinear:
    """What is the same for all of vLLM's linear layers; stands before vLLM's class in the order of methods."""

    stock_kernels = False
    """Whether vLLM's buffers and kernels serve plain LoRA, beside the runtime. One setting for the process."""
    attachment: Attachment | None = None
    base_layer: Any
    device: torch.device
    n_slices: int

    def __init__(self, base_layer: torch.nn.Module) -> None:
        super().__init__(base_layer)  # type: ignore[call-arg] # vLLM's class, next in the order of methods
        self.scute_name = f"{self.base_layer.prefix}.scute"
        layers = get_current_vllm_config().compilation_config.static_forward_context
        if self.scute_name in layers:
            raise ValueError(f"two layers are named {self.scute_name}")
        layers[self.scute_name] = self
        if self.scute_name not in NAMES:
            NAMES.append(self.scute_name)
        self.scute_place = torch.tensor([NAMES.index(self.scute_name)], device="cpu")

    @property
    def widths(self) -> tuple[int, ...]:
        """Output columns of each slice on this rank."""
        slices: tuple[int, ...] = getattr(self, "output_slices", ())
        return slices if len(slices) == self.n_slices else (int(self.output_size),)  # type: ignore[attr-defined] # vLLM's

    @property
    def quantized(self) -> bool:
        """Whether the base's weights are: their product can't be taken of delta rows without rounding those."""
        return not isinstance(self.base_layer.quant_method, UnquantizedLinearMethod)

    @property
    def bias_apart(self) -> bool:
        """Whether the base's bias is added outside, after the layer's output has gone through `s`."""
        return bool(self.base_layer.skip_bias_add) and self.base_layer.bias is not None

    @property
    def own_forward(self) -> bool:
        """Whether the base's class computes in its own way, so that it must be called whole."""
        return type(self.base_layer).forward not in [one.forward for one in PLAIN_FORWARD]

    def create_lora_weights(self, max_loras: int, lora_config: Any, model_config: Any = None) -> None:
        """Make vLLM's buffers where they are used; else tensors that have their shapes and no memory."""
        real = self.device
        if not self.stock_kernels:
            self.device = torch.device("meta")
        super().create_lora_weights(max_loras, lora_config, model_config)  # type: ignore[misc] # vLLM's class, next in order
        self.device = real

    def reset_lora(self, index: int) -> None:
        """Empty a slot of vLLM's buffers."""
        if self.stock_kernels:
            super().reset_lora(index)  # type: ignore[misc] # likewise

    def set_lora(self, index: int, lora_a: Any, lora_b: Any) -> None:
        """Fill a slot of vLLM's buffers."""
        if self.stock_kernels:
            super().set_lora(index, lora_a, lora_b)  # type: ignore[misc] # likewise

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return the layer's output on this rank, before any gather or reduction."""
        y: torch.Tensor = torch.ops.scute.engine_linear(x, bias, self.scute_place, sum(self.widths))
        if self.stock_kernels:
            y = self._apply_lora_to_output(x, y)  # type: ignore[attr-defined] # vLLM's
        return y

    def adapted(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Compute the output; runs in the operator, so once per step, or once per captured graph."""
        flat = x.reshape(-1, x.shape[-1])

        def multiply(rows: torch.Tensor, *, biased: bool) -> torch.Tensor:
            return self._product(rows.to(x.dtype), bias if biased else None)

        held = self.attachment
        captured = flat.is_cuda and torch.cuda.is_current_stream_capturing()
        rehearsed = flat.is_cuda and not captured and held is not None and held.steps.rehearses(len(flat))
        if held is None or not (held.steps.adapted or rehearsed):
            y = multiply(flat, biased=True)
        elif flat.is_cuda:
            from scute_compile.runtime_min.step import launch

            if rehearsed:
                buffers, variants = held.steps.rehearsal(len(flat))
            else:
                plain = captured and captures_plain(get_forward_context(), held.steps.max_adapters)
                buffers, features = held.steps.arguments_for(len(flat), fixed=captured, plain=plain)
                variants = (features,)
            pool = PoolTensors.of(held.steps.pool.memory)
            late = None if self.own_forward else bias
            for features in variants:
                y = launch.adapted_output(flat.contiguous(), multiply, late, pool, buffers, held.gemm, features)
        else:
            buffers, _ = held.steps.arguments_for(len(flat), fixed=False)
            y = ops.adapted_output(flat, multiply, PoolTensors.of(held.steps.pool.memory), buffers, held.gemm)
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
    """Says which of vLLM's layers are replaced: those that vLLM's class would take, within the kernels' limits."""

    @classmethod
    def can_replace_layer(
        cls, source_layer: Any, lora_config: Any, packed_modules_list: list[str], model_config: Any = None
    ) -> bool:
        """Answer vLLM's question."""
        takes = super().can_replace_layer(  # type: ignore[misc] # vLLM's class, next in order
            source_layer=source_layer,
            lora_config=lora_config,
            packed_modules_list=packed_modules_list,
            model_config=model_config,
        )
        return bool(takes) and len(packed_modules_list) <= MOST_SLICES


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
    """A layer that every rank holds whole."""


ADAPTED = (
    AdaptedColumnParallel,
    AdaptedMergedColumn,
    AdaptedQKV,
    AdaptedMergedQKV,
    AdaptedRowParallel,
    AdaptedReplicated,
)
