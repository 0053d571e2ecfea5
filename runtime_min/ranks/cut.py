"""One rank's part of a transformers model: its linear layers, cut by the ranges that the compiler cuts adapters by.

Between the layers of one block, activations stay cut as in engines where the architecture is known to work on a part
of its heads. Elsewhere every layer takes and returns whole activations, which works for any architecture.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from scute_compile.base.cuts import cut, shares
from scute_compile.base.structure import ModelStructure, build_structure
from scute_compile.diagnostics import Code, fail
from scute_compile.ir.dtypes import format_named
from scute_compile.ir.expressions import Ranges, Ref, Source
from scute_compile.ir.linear import Linear, Split
from scute_compile.runtime_min.layers import linear_layers, put_layer, weight_and_bias
from scute_compile.runtime_min.ranks.exchange import TermExchange
from scute_compile.runtime_min.ranks.group import Purpose, RankGroup
from scute_compile.runtime_min.reference import take

LOCAL_HEADS = frozenset({"llama", "mistral", "qwen2", "qwen3", "gemma2"})
"""Architectures whose attention runs on as many heads as its projections return. Others get whole activations."""
_INPUTS: Mapping[str, tuple[tuple[str, ...], ...]] = MappingProxyType(
    {"o_proj": (("q_proj", "k_proj", "v_proj"),), "down_proj": (("gate_proj", "up_proj"), ("gate_up_proj",))}
)
"""Row-parallel layers by name, and the column-parallel layers of the same block whose outputs only they read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCut:
    """How the ranks share one layer."""

    split: Split
    """`REPLICATED` where every rank computes the whole layer, which includes layers that no rule cuts."""
    inputs: tuple[Ranges, ...]
    """The inputs that each rank holds."""
    outputs: tuple[Ranges, ...]
    """The outputs that each rank holds."""
    out_features: int
    """Outputs of the whole layer."""
    local: bool
    """Whether activations stay cut: the input of a row-parallel layer, the output of a column-parallel one."""


def structure_of(model: torch.nn.Module) -> ModelStructure:
    """Return the structure of a loaded transformers model, as `open_model` returns it for the model's folder."""
    tensors = {
        name: Ref(Source.BASE, name, tuple(value.shape), _code(value.dtype)) for name, value in model.named_parameters()
    }
    config: Any = model.config
    return build_structure(config.to_dict(), tensors)


def _code(dtype: torch.dtype) -> str:
    try:
        return format_named(str(dtype)).code
    except KeyError:  # a quantized parameter: the structure depends on shapes alone
        return "F32"


def cut_layers(model: torch.nn.Module, ranks: RankGroup) -> Mapping[str, LayerCut]:
    """Return how the ranks share each linear layer of a model except output heads, by path; none with one rank.

    Raises:
        ScuteError: SC501 when a layer doesn't divide over the ranks.
    """
    if ranks.size == 1:
        return {}
    structure, layers = structure_of(model), linear_layers(model)
    linears = {path: linear for path, linear in structure.linears.items() if path in layers}
    local = _local_layers(structure.model_type, linears)
    return {path: _cut(linear, ranks.size, local=path in local) for path, linear in linears.items()}


def put_parts(model: torch.nn.Module, cuts: Mapping[str, LayerCut], rank: int) -> None:
    """Replace the layers of a model by one rank's parts, in place; the whole weights are not kept."""
    for path, layer_cut in cuts.items():
        put_layer(model, path, _part(model.get_submodule(path), layer_cut, rank))
    for path, layer_cut in cuts.items():
        parent, _, name = path.rpartition(".")
        if name == "q_proj" and layer_cut.local:
            attention: Any = model.get_submodule(parent)
            attention.num_key_value_groups = attention.q_proj.out_features // attention.k_proj.out_features


def _cut(linear: Linear, size: int, *, local: bool) -> LayerCut:
    whole = linear.split is Split.UNKNOWN
    axes = cut(linear, 1 if whole else size)
    split = Split.REPLICATED if whole else linear.split
    return LayerCut(
        split=split,
        inputs=axes.inputs * size if whole else axes.inputs,
        outputs=axes.outputs * size if whole else axes.outputs,
        out_features=linear.out_features,
        local=local and split in {Split.ROW, Split.COLUMN},
    )


def _part(layer: torch.nn.Module, layer_cut: LayerCut, rank: int) -> torch.nn.Linear:
    """Return one rank's part of a layer; of a row-parallel layer, rank 0 alone adds the bias."""
    weight, bias = weight_and_bias(layer)
    part = take(take(weight.detach(), 0, layer_cut.outputs[rank]), 1, layer_cut.inputs[rank])
    if part.numel() < weight.numel():
        part = part.clone(memory_format=torch.contiguous_format)  # so that the whole weight can be freed
    if bias is not None:
        adds_bias = layer_cut.split is not Split.ROW or rank == 0
        bias = take(bias.detach(), 0, layer_cut.outputs[rank]).clone() if adds_bias else None
    outputs, inputs = part.shape
    linear = torch.nn.Linear(inputs, outputs, bias=bias is not None, device="meta")
    linear.weight = torch.nn.Parameter(part, requires_grad=False)
    if bias is not None:
        linear.bias = torch.nn.Parameter(bias, requires_grad=False)
    return linear.eval()


def _local_layers(model_type: str, linears: Mapping[str, Linear]) -> frozenset[str]:
    """Return the layers between which activations stay cut: row-parallel layers, and those that feed them."""
    found: set[str] = set()
    for path, linear in linears.items():
        parent, _, name = path.rpartition(".")
        if linear.split is not Split.ROW or (name == "o_proj" and model_type not in LOCAL_HEADS):
            continue
        for group in _INPUTS.get(name, ()):
            members = [f"{parent}.{member}" for member in group]
            if all(member in linears and linears[member].split is Split.COLUMN for member in members):
                found |= {path, *members}
    return frozenset(found)


def connect(layer: torch.nn.Module, layer_cut: LayerCut, ranks: RankGroup) -> None:
    """Register the collectives of the base model on one rank's part of a layer, as hooks."""

    def take_inputs(_: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (take(args[0], -1, layer_cut.inputs[ranks.rank]), *args[1:])

    def all_reduce(_: torch.nn.Module, __: tuple[torch.Tensor, ...], out: torch.Tensor) -> torch.Tensor:
        return ranks.all_reduce(out, Purpose.BASE)

    def all_gather(_: torch.nn.Module, __: tuple[torch.Tensor, ...], out: torch.Tensor) -> torch.Tensor:
        return join_outputs(ranks.all_gather(out), layer_cut)

    if layer_cut.split is Split.ROW:
        layer.register_forward_hook(all_reduce)
        if not layer_cut.local:
            layer.register_forward_pre_hook(take_inputs)
    elif layer_cut.split is Split.COLUMN and not layer_cut.local:
        layer.register_forward_hook(all_gather)


def join_outputs(parts: torch.Tensor, layer_cut: LayerCut) -> torch.Tensor:
    """Return the whole layer's output `(..., out)` from all ranks' parts, `(ranks, ..., out of the rank)`.

    Where several ranks hold copies of an output, the first rank's copy is taken.
    """
    out = parts.new_empty((*parts.shape[1:-1], layer_cut.out_features))
    for part, ranges in reversed(list(zip(parts, layer_cut.outputs, strict=True))):
        position = 0
        for start, stop in ranges:
            out[..., start:stop] = part[..., position : position + stop - start]
            position += stop - start
    return out


def exchanges_of(cuts: Mapping[str, LayerCut], ranks: RankGroup) -> dict[str, TermExchange]:
    """Return the exchange of fully sharded terms at each layer that the ranks share.

    Raises:
        ScuteError: SC501 for a row-parallel layer with fewer outputs than ranks.
    """
    exchanges: dict[str, TermExchange] = {}
    for path, layer_cut in cuts.items():
        if layer_cut.split is Split.COLUMN:
            exchanges[path] = TermExchange(ranks=ranks)
        elif layer_cut.split is Split.ROW:
            if layer_cut.out_features < ranks.size:
                fail(
                    Code.SC501,
                    where=path,
                    found=f"{layer_cut.out_features} outputs",
                    expected=f"at least {ranks.size}, one for each rank",
                    next="serve it in the default layout",
                )
            exchanges[path] = TermExchange(ranks=ranks, part=shares(layer_cut.out_features, ranks.size)[ranks.rank])
    return exchanges
