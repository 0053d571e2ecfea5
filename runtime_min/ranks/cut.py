"""One rank's part of a transformers model's linear layers, cut by the same ranges as the compiler cuts adapters.

Between the layers of one block activations stay cut, as engines keep them, where that is known to work; elsewhere each
layer takes and gives whole activations, so that any architecture runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from scute_compile.base.cuts import cut
from scute_compile.base.structure import ModelStructure, build_structure
from scute_compile.ir.expressions import Ranges, Ref, Source
from scute_compile.ir.linear import Linear, Split
from scute_compile.runtime_min.layers import linear_layers
from scute_compile.runtime_min.reference import take

LOCAL_HEADS = frozenset({"llama", "mistral", "qwen2", "qwen3", "gemma2"})
"""Architectures whose attention runs on whatever heads the projections give it. Others get whole activations."""
_INPUTS: Mapping[str, tuple[tuple[str, ...], ...]] = MappingProxyType(
    {"o_proj": (("q_proj", "k_proj", "v_proj"),), "down_proj": (("gate_proj", "up_proj"), ("gate_up_proj",))}
)
"""Row-parallel layers by name, and the column-parallel ones of the same block that lead to them alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCut:
    """How the ranks share one layer, as one of them sees it."""

    split: Split
    """`REPLICATED` where this rank computes the layer whole: also with one rank, and where nobody knows a cut."""
    inputs: tuple[Ranges, ...]
    """Of every rank."""
    outputs: tuple[Ranges, ...]
    out_features: int
    """Of the whole layer."""
    arrives_cut: bool
    """Row-parallel: whether the input is this rank's part already."""
    leaves_cut: bool
    """Column-parallel: whether the next layer wants this rank's part alone."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CutLayer:
    """One rank's part of a layer."""

    cut: LayerCut
    weight: torch.Tensor
    """`(out, in)` of the rank."""
    bias: torch.Tensor | None
    """`(out,)`, on ranks that add it: one of a row-parallel layer's, all of the others'."""


def structure_of(model: torch.nn.Module) -> ModelStructure:
    """Return the structure of a loaded transformers model: what `open_model` gives for its folder."""
    names = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
    tensors = {
        name: Ref(Source.BASE, name, tuple(value.shape), names.get(value.dtype, "F32"))
        for name, value in model.named_parameters()
    }
    config: Any = model.config
    return build_structure(config.to_dict(), tensors)


def cut_layers(model: torch.nn.Module, rank: int, size: int) -> Mapping[str, CutLayer]:
    """Return this rank's part of every linear layer but embeddings and output heads; the model stays as it is.

    Args:
        model: The whole model.
        rank: Which rank this is.
        size: Number of ranks.

    Raises:
        ScuteError: SC501 when a layer doesn't divide over the ranks.
    """
    structure, plain = structure_of(model), linear_layers(model)
    linears = {name: linear for name, linear in structure.linears.items() if name in plain}
    local = _local(structure.model_type, linears)
    return {name: _cut_layer(plain[name], linear, rank, size, local=name in local) for name, linear in linears.items()}


def put_layers(model: torch.nn.Module, cuts: Mapping[str, CutLayer], layers: Mapping[str, torch.nn.Module]) -> None:
    """Put `layers` in the places of the model's own, for good, and let its attention count this rank's heads."""
    for name, layer in layers.items():
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, layer)
    for name, held in cuts.items():
        parent, _, last = name.rpartition(".")
        if last == "q_proj" and held.cut.leaves_cut:
            attention: Any = model.get_submodule(parent)
            attention.num_key_value_groups = len(held.weight) // len(cuts[f"{parent}.k_proj"].weight)


def join_outputs(every: torch.Tensor, cut: LayerCut) -> torch.Tensor:
    """Return `(..., out)` of the whole layer from all ranks' parts, `(ranks, ..., out of the rank)`.

    Where several ranks hold copies, the first one's are taken.
    """
    out = every.new_empty((*every.shape[1:-1], cut.out_features))
    for part, ranges in reversed(list(zip(every, cut.outputs, strict=True))):
        position = 0
        for start, stop in ranges:
            out[..., start:stop] = part[..., position : position + stop - start]
            position += stop - start
    return out


def _cut_layer(plain: torch.nn.Module, linear: Linear, rank: int, size: int, *, local: bool) -> CutLayer:
    whole = size > 1 and linear.split is Split.UNKNOWN
    split = Split.REPLICATED if whole or size == 1 else linear.split
    held = cut(linear, 1 if whole else size)
    inputs, outputs = (axis * size if whole else axis for axis in (held.inputs, held.outputs))
    weight, bias = plain.weight, plain.bias
    assert isinstance(weight, torch.Tensor)  # noqa: S101 - narrows the type of a module's attribute
    assert bias is None or isinstance(bias, torch.Tensor)  # noqa: S101 - likewise
    weight_NK = weight.detach() if isinstance(plain, torch.nn.Linear) else weight.detach().T
    part = take(take(weight_NK, 0, outputs[rank]), 1, inputs[rank])
    if part.numel() < weight_NK.numel():
        part = part.clone(memory_format=torch.contiguous_format)  # so that the whole can be freed
    adds = bias is not None and (split is not Split.ROW or rank == 0)
    local = local and split in {Split.ROW, Split.COLUMN}
    layer_cut = LayerCut(
        split=split,
        inputs=inputs,
        outputs=outputs,
        out_features=linear.out_features,
        arrives_cut=local,
        leaves_cut=local,
    )
    bias_N = take(bias.detach(), 0, outputs[rank]).clone() if adds and bias is not None else None
    return CutLayer(cut=layer_cut, weight=part, bias=bias_N)


def _local(model_type: str, linears: Mapping[str, Linear]) -> frozenset[str]:
    """Return the layers between which activations stay cut: column layers whose outputs only their row layer reads."""
    found: set[str] = set()
    for name, linear in linears.items():
        parent, _, last = name.rpartition(".")
        if linear.split is not Split.ROW or (last == "o_proj" and model_type not in LOCAL_HEADS):
            continue
        for group in _INPUTS.get(last, ()):
            members = [f"{parent}.{member}" for member in group]
            if all(member in linears and linears[member].split is Split.COLUMN for member in members):
                found |= {name, *members}
    return frozenset(found)
