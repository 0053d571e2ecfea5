"""A transformers model on several processes, one rank each, with an adapter per batch row: both layouts of terms.

Each process loads the whole base, keeps its rank's part of every linear layer that ranks share, and its own file of
each artifact. Processes meet through `torch.distributed`: gloo on CPUs, NCCL on GPUs; the tensors say which. One rank
is the plain case: no process group is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from scute_compile.codes import Code
from scute_compile.cuts import cut
from scute_compile.diagnostics import fail
from scute_compile.expressions import Ref, Source
from scute_compile.formats.artifact import Artifact, open_artifact
from scute_compile.formats.manifest import SiteRecord
from scute_compile.model import Linear, ModelStructure, Split
from scute_compile.rooting import Unrooted, reroot
from scute_compile.runtime_min.adapted_model import linear_layers
from scute_compile.runtime_min.rank_group import RankGroup, Traffic
from scute_compile.runtime_min.rank_linear import LayerCut, RankLinear, RankStep
from scute_compile.runtime_min.site_slots import load_rank_sites, take
from scute_compile.structure import build_structure

LOCAL_HEADS = frozenset({"llama", "mistral", "qwen2", "qwen3", "gemma2"})
"""Architectures whose attention runs on whatever heads the projections give it. Others get whole activations."""
_INPUTS: Mapping[str, tuple[tuple[str, ...], ...]] = MappingProxyType(
    {"o_proj": (("q_proj", "k_proj", "v_proj"),), "down_proj": (("gate_proj", "up_proj"), ("gate_up_proj",))}
)
"""Row-parallel layers by name, and the column-parallel ones of the same block that lead to them alone."""


class RankModel:
    """One rank of a model that serves an adapter per batch row; all ranks make the same calls in the same order.

    The model's layers are cut in place and for good.

    Args:
        model: A transformers model, the same on every rank.
        group: The ranks' process group; None: the default one, or none for one rank.
        reduce_dtype: In which row-parallel layers add up partial sums. None: float32 or wider, one rounding at the end;
            the model's own dtype halves the bytes, as engines do, and rounds each rank's part.

    Raises:
        ScuteError: SC501 when a layer doesn't divide over the ranks.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        group: dist.ProcessGroup | None = None,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        self.model = model
        self.ranks = RankGroup(group)
        self._step = RankStep()
        self._factors: dict[str, torch.Tensor] = {}
        self._device = next(model.parameters()).device
        self._loaded: set[str] = set()
        self.layers = _cut_layers(model, self.ranks, self._step, reduce_dtype)

    @property
    def traffic(self) -> Traffic:
        """Bytes that this rank has sent."""
        return self.ranks.traffic

    def load(self, name: str, source: Artifact | Path | str) -> None:
        """Add an adapter from this rank's file of an artifact, of either layout.

        Raises:
            ScuteError: SC806 (the name is taken), SC801 (another number of ranks), SC402 (sites that aren't layers of
                this model, or are cut otherwise), and an artifact's own faults (SC6xx).
        """
        artifact = source if isinstance(source, Artifact) else open_artifact(source)
        if name in self._loaded:
            fail(Code.SC806, where=name, found="an adapter of that name", expected="a new name",
                 next="unload it first, or load this one under another name")  # fmt: skip
        if artifact.manifest.tp != self.ranks.size:
            fail(Code.SC801, where=name, found=f"an artifact for tp {artifact.manifest.tp}",
                 expected=f"tp {self.ranks.size}, on which this model runs",
                 next=f"compile the adapter again with --tp {self.ranks.size}")  # fmt: skip
        found = _layers_of(artifact, self.layers)
        for site, layer in found.items():
            _check_cut(artifact.sites[site], self.layers[layer], name)
        for site, held in load_rank_sites(artifact, self.ranks.rank, self._factors, self._device).items():
            self.layers[found[site]].sites[name] = held
        self._loaded.add(name)

    def unload(self, name: str) -> None:
        """Forget an adapter. Raises SC802 when it isn't loaded."""
        self._check_known([name])
        for layer in self.layers.values():
            layer.sites.pop(name, None)
        self._loaded.remove(name)

    def forward(self, *args: object, adapter_ids: Sequence[str | None], **options: object) -> Any:  # noqa: ANN401 - the model's own output
        """Run the model with one adapter id, or None for the base alone, per row of the batch."""
        with self.using(adapter_ids):
            return self.model(*args, **options)

    __call__ = forward

    @contextmanager
    def using(self, adapter_ids: Sequence[str | None]) -> Iterator[None]:
        """Set the adapters of the batch rows for every call of the model inside the block. Raises SC802."""
        self._check_known([name for name in adapter_ids if name is not None])
        self._step.set(adapter_ids)
        try:
            with torch.no_grad():
                yield
        finally:
            self._step.set(())

    def _check_known(self, names: Sequence[str]) -> None:
        if unknown := sorted(set(names) - self._loaded):
            fail(Code.SC802, where="adapter_ids", found=", ".join(f"`{name}`" for name in unknown),
                 expected=f"{len(self._loaded)} loaded adapters, or None for the base",
                 next="load the adapter on every rank first")  # fmt: skip


def structure_of(model: torch.nn.Module) -> ModelStructure:
    """Return the structure of a loaded transformers model: what `open_model` gives for its folder."""
    names = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
    tensors = {
        name: Ref(Source.BASE, name, tuple(value.shape), names.get(value.dtype, "F32"))
        for name, value in model.named_parameters()
    }
    config: Any = model.config
    return build_structure(config.to_dict(), tensors)


def _cut_layers(
    model: torch.nn.Module, ranks: RankGroup, step: RankStep, reduce_dtype: torch.dtype | None
) -> Mapping[str, RankLinear]:
    structure, plain = structure_of(model), linear_layers(model)
    linears = {name: linear for name, linear in structure.linears.items() if name in plain}
    local = _local(structure.model_type, linears)
    layers = {}
    for name, linear in linears.items():
        layers[name] = _cut_layer(plain[name], linear, ranks, step, local=name in local, reduce_dtype=reduce_dtype)
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, layers[name])
    for name in linears:
        parent, _, last = name.rpartition(".")
        if last == "q_proj" and name in local:  # its heads are grouped by the key and value heads of this rank
            held = [layers[f"{parent}.{x}"].weight.shape[0] for x in ("q_proj", "k_proj")]
            attention: Any = model.get_submodule(parent)
            attention.num_key_value_groups = held[0] // held[1]
    return layers


def _cut_layer(
    plain: torch.nn.Module, linear: Linear, ranks: RankGroup, step: RankStep, *, local: bool,
    reduce_dtype: torch.dtype | None,
) -> RankLinear:  # fmt: skip
    whole = ranks.size > 1 and linear.split is Split.UNKNOWN
    split = Split.REPLICATED if whole or ranks.size == 1 else linear.split
    held = cut(linear, 1 if whole else ranks.size)
    inputs, outputs = (axis * ranks.size if whole else axis for axis in (held.inputs, held.outputs))
    weight, bias = plain.weight, plain.bias
    assert isinstance(weight, torch.Tensor)  # noqa: S101 - narrows the type of a module's attribute
    assert bias is None or isinstance(bias, torch.Tensor)  # noqa: S101 - likewise
    weight_NK = weight.detach() if isinstance(plain, torch.nn.Linear) else weight.detach().T
    part = take(take(weight_NK, 0, outputs[ranks.rank]), 1, inputs[ranks.rank])
    if part.numel() < weight_NK.numel():
        part = part.clone(memory_format=torch.contiguous_format)  # so that the whole can be freed
    adds = bias is not None and (split is not Split.ROW or ranks.rank == 0)
    layer_cut = LayerCut(
        split=split, inputs=inputs, outputs=outputs, out_features=linear.out_features, arrives_cut=local,
        leaves_cut=local,
    )  # fmt: skip
    bias_N = take(bias.detach(), 0, outputs[ranks.rank]).clone() if adds and bias is not None else None
    return RankLinear(part, bias_N, layer_cut, ranks, step, reduce_dtype=reduce_dtype)


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


def _layers_of(artifact: Artifact, layers: Mapping[str, RankLinear]) -> Mapping[str, str]:
    found = reroot(artifact.sites, layers)
    if isinstance(found, Unrooted):
        fail(Code.SC402, where=artifact.manifest.name,
             found=f"sites such as `{next(iter(artifact.sites))}`; {found.reason}",
             expected="the linear layers of this model, such as " + ", ".join(f"`{name}`" for name in list(layers)[:3]),
             next="load the model that the artifact was compiled for")  # fmt: skip
    return found.mapping


def _check_cut(record: SiteRecord, layer: RankLinear, adapter: str) -> None:
    """Refuse a site that the compiler cut otherwise than this model is cut: another base, or another plan."""
    ours, theirs = (layer.cut.inputs, layer.cut.outputs), (record.inputs, record.outputs)
    if ours != theirs:
        fail(Code.SC402, where=f"{adapter}: {record.name}",
             found=f"ranks that hold inputs {theirs[0]} and outputs {theirs[1]}",
             expected=f"inputs {ours[0]} and outputs {ours[1]}, as this model is cut",
             next="load the model that the artifact was compiled for, or compile the adapter again")  # fmt: skip
