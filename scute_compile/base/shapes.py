"""Shapes of models: the linear projections of their layers, from a table of names or from a base."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from scute_compile.base.structure import ModelStructure
from scute_compile.diagnostics import Code, fail

# PEFT's default targets of IA3: the outputs of keys and values, and the input of the MLP's last layer.
_IA3_OUTPUTS = frozenset({"k_proj", "v_proj", "qkv_proj", "c_attn", "query_key_value"})
_IA3_INPUTS = frozenset({"down_proj", "mlp.c_proj", "dense_4h_to_h"})
_GATED = frozenset({"up_proj", "gate_up_proj"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """One linear projection of a layer."""

    name: str
    """Its path inside the layer, or the last part of it: `q_proj`, `mlp.c_proj`."""
    inputs: int
    outputs: int
    gemm: str
    """The fused site: equal for projections that an engine multiplies in one GEMM."""

    def called(self, names: Iterable[str]) -> bool:
        """Whether the path ends with one of `names`."""
        return any(self.name == name or self.name.endswith(f".{name}") for name in names)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The linear projections of a model: `layers` equal layers."""

    name: str
    layers: int
    projections: tuple[Projection, ...]
    """Of one layer."""

    def projection(self, name: str) -> Projection:
        """Return the projection of a layer whose path ends with `name`."""
        return next(p for p in self.projections if p.called([name]))

    @property
    def inputs(self) -> int:
        """Input features of all sites together."""
        return self.layers * sum(p.inputs for p in self.projections)

    @property
    def outputs(self) -> int:
        """Output features of all sites together."""
        return self.layers * sum(p.outputs for p in self.projections)

    @property
    def weights(self) -> int:
        """Weights of all sites together."""
        return self.layers * sum(p.inputs * p.outputs for p in self.projections)

    @property
    def gemms(self) -> tuple[str, ...]:
        """Names of one layer's fused sites."""
        return tuple(dict.fromkeys(p.gemm for p in self.projections))

    @property
    def ia3_vectors(self) -> tuple[tuple[str, int], ...]:
        """Fused site and length of each IA3 vector of one layer.

        The MLP's vector scales the input of its last layer; in a gated MLP it is placed on the outputs of `up_proj`,
        which has as many.
        """
        gated = next((p.gemm for p in self.projections if p.called(_GATED)), None)
        outputs = [(p.gemm, p.outputs) for p in self.projections if p.called(_IA3_OUTPUTS)]
        inputs = [(gated or p.gemm, p.inputs) for p in self.projections if p.called(_IA3_INPUTS)]
        return (*outputs, *inputs)


def gated_shape(name: str, *, layers: int, hidden: int, kv: int, mlp: int) -> ModelShape:
    """Return the shape of a Llama-like model.

    Args:
        name: Its name in messages.
        layers: Number of layers.
        hidden: Width of the model, and of all query heads together.
        kv: Width of all key heads together, and of all value heads.
        mlp: Width of the gated MLP.
    """
    rows = (
        ("q_proj", hidden, hidden, "qkv"),
        ("k_proj", hidden, kv, "qkv"),
        ("v_proj", hidden, kv, "qkv"),
        ("o_proj", hidden, hidden, "o"),
        ("gate_proj", hidden, mlp, "gate_up"),
        ("up_proj", hidden, mlp, "gate_up"),
        ("down_proj", mlp, hidden, "down"),
    )
    projections = tuple(Projection(name=n, inputs=i, outputs=o, gemm=g) for n, i, o, g in rows)
    return ModelShape(name=name, layers=layers, projections=projections)


SHAPES: Mapping[str, ModelShape] = {
    shape.name: shape
    for shape in (
        gated_shape("llama-3.1-8b", layers=32, hidden=4096, kv=1024, mlp=14336),
        gated_shape("llama-3.1-70b", layers=80, hidden=8192, kv=1024, mlp=28672),
        gated_shape("llama-3.2-1b", layers=16, hidden=2048, kv=512, mlp=8192),
        gated_shape("qwen2.5-7b", layers=28, hidden=3584, kv=512, mlp=18944),
        gated_shape("smollm2-135m", layers=30, hidden=576, kv=192, mlp=1536),
    )
}
"""Known shapes by lower-case name."""


def named_shape(name: str) -> ModelShape:
    """Return a shape of the table by its name, ignoring case.

    Raises:
        ScuteError: SC703 when the table has no such name.
    """
    shape = SHAPES.get(name.lower())
    if shape is None:
        fail(
            Code.SC703,
            where="--model",
            found=f"`{name}`",
            expected=f"one of {', '.join(SHAPES)}, or a folder with a config.json",
            next="name one of these, or give the path of a base model",
        )
    return shape


def shape_of(structure: ModelStructure) -> ModelShape:
    """Return the shape of a base model. If its layers differ, the shape has one layer with all projections.

    Raises:
        ScuteError: SC405 when the base has no linear layers.
    """
    layers: dict[str, list[Projection]] = defaultdict(list)
    everything: list[Projection] = []
    for name, linear in structure.linears.items():
        if name in structure.embeddings:
            continue
        gemm = linear.fused_site
        layer, path = _split_layer(name)
        everything.append(Projection(name=name, inputs=linear.in_features, outputs=linear.out_features, gemm=gemm))
        inner = gemm.removeprefix(f"{layer}.")
        layers[layer].append(Projection(name=path, inputs=linear.in_features, outputs=linear.out_features, gemm=inner))
    if not everything:
        fail(
            Code.SC405,
            where=structure.model_type,
            found="0 linear layers",
            expected="at least 1",
            next="name a base model whose layers are linear projections",
        )
    distinct = {tuple(sorted(projections, key=lambda p: p.name)) for projections in layers.values()}
    if len(distinct) == 1:
        return ModelShape(name=structure.model_type, layers=len(layers), projections=tuple(layers.popitem()[1]))
    return ModelShape(name=structure.model_type, layers=1, projections=tuple(everything))


def _split_layer(name: str) -> tuple[str, str]:
    found = re.match(r"(?P<layer>.*?\.?\d+)\.(?P<path>.+)", name)
    return (found["layer"], found["path"]) if found else ("", name)
