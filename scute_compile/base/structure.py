"""Derives a base's linear layers, and how ranks cut them, from its configuration and its checkpoint's names and shapes.

Sizes come from shapes. The configuration gives only what shapes can't: the number of heads. A cut that neither the
table of architectures nor the plans of transformers give stays unknown, and is refused at more than one rank.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from scute_compile.base.architectures import CLAMPED_UP, Packing, Row, plan_row, row_for
from scute_compile.base.heads import is_embedding, is_output_head
from scute_compile.base.scopes import Config, Scope, identity, model_type_of, scope_of, text_scope
from scute_compile.ir.dtypes import DType
from scute_compile.ir.expressions import Ref
from scute_compile.ir.linear import Linear, Part, Product, Split

TABLE = "table"
PLAN = "transformers plan"

_ATTENTION_INPUTS = ("q_proj", "q_b_proj", "qkv_proj", "query_key_value", "c_attn")
_ATTENTION_OUTPUTS = ("o_proj", "c_proj", "dense")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStructure:
    """Names and shapes of a base model."""

    model_type: str
    linears: Mapping[str, Linear]
    """By module path, in the order of the checkpoint's names."""
    tensors: Mapping[str, Ref]
    """Every tensor of the checkpoint by key."""
    embeddings: frozenset[str] = frozenset()
    """Module paths of embeddings and output heads: in the checkpoint, but not sites."""
    dtype: DType = DType.FLOAT32
    """The dtype in which most of the base is stored."""
    tp_source: str = ""
    """The source of its cuts: `transformers plan`, `table`, both, or nothing."""
    parameters: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))
    """The configuration fields that matter for identity (hidden size, heads, ...)."""


def build_structure(config: Mapping[str, object], tensors: Mapping[str, Ref]) -> ModelStructure:
    """Return the linear layers of a base.

    Args:
        config: The content of its config.json; nested for multimodal models.
        tensors: Every tensor of the checkpoint by key: shapes as stored, no weights.
    """
    keys = sorted(tensors)
    weights = {key.removesuffix(".weight"): ref for key, ref in tensors.items() if _is_matrix(key, ref)}
    embeddings = frozenset(path for path in weights if is_output_head(path) or is_embedding(path))
    paths = [p for p in weights if p not in embeddings and not _is_norm(p) and not _is_of_experts(p, keys)]
    scopes = {path: scope_of(config, path) for path in sorted(paths, key=_natural)}
    rows = {path: _row(scope.model_type, path) for path, scope in scopes.items()}
    linears = {path: _bare(path, tensors, rows[path].row) for path in scopes}
    for path, scope in scopes.items():
        linears[path] = _divided(linears[path], rows[path].row, scope, linears)
    for path, scope in scopes.items():
        linears[path] = replace(linears[path], input_product=_input_product(linears[path], scope, linears, keys))
    return ModelStructure(
        model_type=model_type_of(config),
        linears=MappingProxyType(linears),
        tensors=MappingProxyType(dict(tensors)),
        embeddings=embeddings,
        dtype=_dtype(config, tensors.values()),
        tp_source=", ".join(sorted({found.source for found in rows.values() if found.row})),
        parameters=identity(config),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sourced:
    row: Row | None
    source: str


def _row(model_type: str, path: str) -> _Sourced:
    if (row := row_for(model_type, path)) is not None:
        return _Sourced(row=row, source=TABLE)
    return _Sourced(row=plan_row(model_type, path), source=PLAN)


def _is_matrix(key: str, ref: Ref) -> bool:
    return key.endswith(".weight") and len(ref.dims) == 2 and 0 not in ref.dims


def _is_norm(path: str) -> bool:
    name = path.rpartition(".")[2]
    return "norm" in name or re.fullmatch(r"ln(_\w+)?", name) is not None


def _is_of_experts(path: str, keys: Sequence[str]) -> bool:
    """Return whether a layer is part of an expert or routes to experts; engines compute both in one kernel."""
    parent, _, name = path.rpartition(".")
    router = name in {"gate", "router"} and bool(_below(keys, f"{parent}.experts."))
    return ".experts." in f".{path}." or router


def _below(keys: Sequence[str], prefix: str) -> Sequence[str]:
    """Return the keys that start with `prefix`, of sorted keys."""
    return keys[bisect_left(keys, prefix) : bisect_left(keys, prefix + "\U0010ffff")]


def _natural(path: str) -> tuple[tuple[int, int | str], ...]:
    """Order `layers.2` before `layers.10`."""
    return tuple((0, int(s)) if s.isdecimal() else (1, s) for s in path.split("."))


def _bare(path: str, tensors: Mapping[str, Ref], row: Row | None) -> Linear:
    weight = tensors[f"{path}.weight"]
    transposed = row is not None and row.transposed
    rows, columns = weight.dims
    inputs, outputs = (rows, columns) if transposed else (columns, rows)
    bias = tensors.get(f"{path}.bias")
    return Linear(
        name=path,
        in_features=inputs,
        out_features=outputs,
        weight=weight,
        transposed=transposed,
        bias=bias if bias is not None and bias.dims == (outputs,) else None,
        gemm=_gemm(path, tensors),
    )


def _gemm(path: str, tensors: Mapping[str, Ref]) -> str:
    parent, dot, name = path.rpartition(".")
    for fused, names in (("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj"))):
        if name in names and all(f"{parent}{dot}{other}.weight" in tensors for other in names):
            return f"{parent}{dot}{fused}"
    return path


def _divided(linear: Linear, row: Row | None, scope: Scope, linears: Mapping[str, Linear]) -> Linear:
    if row is None or row.split is Split.UNKNOWN:
        return linear
    if row.split is Split.REPLICATED:
        return replace(linear, split=Split.REPLICATED)
    if not _reads_or_writes_hidden(linear, row, scope):
        return linear
    parts = _parts(linear, row, _Attention.around(linear.name, scope, linears))
    return replace(linear, split=row.split, parts=parts) if parts else linear


def _reads_or_writes_hidden(linear: Linear, row: Row, scope: Scope) -> bool:
    """Return whether the axis that isn't cut has the model's width.

    Otherwise the layer belongs to another model than the plan: a tower that the configuration doesn't name.
    """
    hidden = scope.number("hidden_size")
    whole = linear.in_features if row.split is Split.COLUMN else linear.out_features
    return hidden is None or whole == hidden or linear.name.endswith("_b_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attention:
    """The head counts of an attention block; None where shapes and configuration don't agree on them."""

    heads: int | None = None
    kv_heads: int | None = None
    width: int = 0
    """All query heads together: what the output projection reads."""

    @staticmethod
    def around(path: str, scope: Scope, linears: Mapping[str, Linear]) -> _Attention | None:
        """Return the block that holds the module, or None when it isn't in one."""
        parent, dot, _ = path.rpartition(".")

        def sibling(*names: str) -> Linear | None:
            return next((linears[f"{parent}{dot}{n}"] for n in names if f"{parent}{dot}{n}" in linears), None)

        if sibling(*_ATTENTION_INPUTS) is None:
            return None
        heads = scope.number("num_attention_heads")
        q, k, o = sibling("q_proj"), sibling("k_proj"), sibling(*_ATTENTION_OUTPUTS)
        if heads is None or (q is not None and not _plain_heads(q, o, heads, scope)):
            return _Attention()
        kv_heads = None if q is None or k is None else _quotient(k.out_features, q.out_features // heads)
        return _Attention(heads=heads, kv_heads=kv_heads, width=o.in_features if o is not None else 0)


def _plain_heads(q: Linear, o: Linear | None, heads: int, scope: Scope) -> bool:
    """Return whether q consists of `heads` heads and nothing else; some models pack an output gate with each head."""
    if _quotient(q.out_features, heads) is None:
        return False
    if "kv_lora_rank" in scope.config:
        return True  # latent attention: its heads have other widths on the way in and out, and `head_dim` is neither
    if (head_dim := scope.number("head_dim")) is not None:
        return q.out_features == heads * head_dim
    return o is None or q.out_features == o.in_features


def _parts(linear: Linear, row: Row, attention: _Attention | None) -> tuple[Part, ...]:
    """Return the parts of the split axis, or nothing when its heads are unknown."""
    size = linear.out_features if row.split is Split.COLUMN else linear.in_features
    name = _part_name(linear, row)
    if row.packing is Packing.GATE_UP:
        half = _quotient(size, 2)
        return (Part(name="gate", size=half), Part(name="up", size=half)) if half else ()
    if attention is None:
        return (Part(name=name, size=size),) if row.packing is Packing.PLAIN else ()
    if attention.heads is None:
        return ()
    if row.packing is Packing.QKV:
        return _qkv_parts(linear, attention)
    if row.packing is Packing.KV_HEADS:
        unit = _quotient(size, attention.kv_heads or 0)
        return (Part(name=name, size=size, unit=unit, replicable=True),) if unit else ()
    # Other layers of an attention block that a plan cuts (an output gate, a per-head factor) follow the query heads.
    unit = _quotient(size, attention.heads)
    return (Part(name=name, size=size, unit=unit),) if unit else ()


def _part_name(linear: Linear, row: Row) -> str:
    if row.packing is Packing.QKV_PER_HEAD:
        return "qkv"
    if row.split is Split.ROW:
        return "in"
    name = linear.name.rpartition(".")[2].removesuffix("_proj")
    return name if name in {"q", "k", "v", "gate", "up"} else "out"


def _quotient(total: int, count: int) -> int | None:
    """Return total / count when it is a whole number above zero."""
    return total // count if count > 0 and total >= count and total % count == 0 else None


def _qkv_parts(linear: Linear, attention: _Attention) -> tuple[Part, ...]:
    """Return q, k and v of a fused projection; q is as wide as what the output projection reads."""
    head_dim = _quotient(attention.width, attention.heads or 0)
    size = _quotient(linear.out_features - attention.width, 2)
    if head_dim is None or size is None or size % head_dim:
        return ()
    return (
        Part(name="q", size=attention.width, unit=head_dim),
        Part(name="k", size=size, unit=head_dim, replicable=True),
        Part(name="v", size=size, unit=head_dim, replicable=True),
    )


def _input_product(linear: Linear, scope: Scope, linears: Mapping[str, Linear], keys: Sequence[str]) -> Product | None:
    """Return the plain factor of `down(act(gate) * up)`.

    Names alone don't prove the product. It is assumed only where the table or a plan divides the layers (the code of
    these architectures was read), the block has no other tensors (BitNet has a norm between product and `down_proj`),
    and neither the architecture nor a field of the configuration clamps `up` first.
    """
    parent, dot, name = linear.name.rpartition(".")
    if name != "down_proj" or scope.model_type in CLAMPED_UP or scope.clamps:
        return None
    gate, up, fused = (linears.get(f"{parent}{dot}{n}") for n in ("gate_proj", "up_proj", "gate_up_proj"))
    others: tuple[Linear, ...]
    if fused is not None and gate is None and up is None and len(fused.parts) == 2:
        product, others = Product(site=fused.name, part=1), (fused,)
        width = fused.parts[1].size
    elif gate is not None and up is not None and fused is None:
        product, others = Product(site=up.name), (gate, up)
        width = up.out_features
    else:
        return None
    known = all(layer.split is not Split.UNKNOWN for layer in (linear, *others))
    expected = {f"{layer.name}.{kind}" for layer in (linear, *others) for kind in ("weight", "bias")}
    alone = all(key in expected for key in _below(keys, f"{parent}{dot}"))
    return product if known and alone and width == linear.in_features else None


def _dtype(config: Config, refs: Iterable[Ref]) -> DType:
    """Return the dtype of most entries, or the configuration's dtype when there are no tensors."""
    by_code = {dtype.code: dtype for dtype in DType}
    entries: Counter[DType] = Counter()
    for ref in refs:
        if ref.dtype in by_code:
            entries[by_code[ref.dtype]] += math.prod(ref.dims)
    if entries:
        return entries.most_common(1)[0][0]
    return _config_dtype(config) or DType.FLOAT32


def _config_dtype(config: Config) -> DType | None:
    """Return the dtype that a configuration names, in its present field or its older one."""
    for holder in (config, text_scope(config).config):
        for name in (holder.get("dtype"), holder.get("torch_dtype")):
            if isinstance(name, str) and name in tuple(DType):
                return DType(name)
    return None
