"""The table of architectures, and the interpretation of transformers' tensor-parallel plans.

The table has a row where transformers has no plan for a layer, or where its plan differs from what an engine with
Megatron's layout holds. All other layers are read from the plan.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from types import MappingProxyType

from scute_compile.base.transformers_plan import tp_plan
from scute_compile.ir.linear import Split


class Packing(StrEnum):
    """The entries of a layer's split axis."""

    PLAIN = "entries of one kind"
    HEADS = "query heads"
    KV_HEADS = "key or value heads"
    QKV = "q|k|v"
    """All of q, then all of k, then all of v."""
    QKV_PER_HEAD = "q,k,v of each head"
    """Interleaved: the three parts of a head are adjacent."""
    GATE_UP = "gate|up"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """How one kind of layer is stored and divided."""

    pattern: str
    """The end of the module path; `*` matches a number."""
    split: Split
    packing: Packing = Packing.PLAIN
    transposed: bool = False
    """Conv1D: the weight is `(in, out)`."""


def _conv1d(pattern: str, split: Split, packing: Packing = Packing.PLAIN) -> Row:
    return Row(pattern=pattern, split=split, packing=packing, transposed=True)


_GATE_UP = Row(pattern="layers.*.mlp.gate_up_proj", split=Split.COLUMN, packing=Packing.GATE_UP)

# Their plans all-gather the output of fused projections, because their code slices it; an engine cuts each part
# instead.
_PHI3 = (
    Row(pattern="layers.*.self_attn.qkv_proj", split=Split.COLUMN, packing=Packing.QKV),
    Row(pattern="layers.*.self_attn.o_proj", split=Split.ROW, packing=Packing.HEADS),
    _GATE_UP,
    Row(pattern="layers.*.mlp.down_proj", split=Split.ROW),
)
_GLM = (_GATE_UP, Row(pattern="layers.*.mlp.down_proj", split=Split.ROW))

ROWS: Mapping[str, tuple[Row, ...]] = MappingProxyType(
    {
        # All layers are Conv1D, and there is no plan. Cross-attention packs k|v and is left unknown.
        "gpt2": (
            _conv1d("h.*.attn.c_attn", Split.COLUMN, Packing.QKV),
            _conv1d("h.*.attn.c_proj", Split.ROW, Packing.HEADS),
            _conv1d("h.*.mlp.c_fc", Split.COLUMN),
            _conv1d("h.*.mlp.c_proj", Split.ROW),
            _conv1d("h.*.crossattention.q_attn", Split.UNKNOWN),
            _conv1d("h.*.crossattention.c_attn", Split.UNKNOWN),
            _conv1d("h.*.crossattention.c_proj", Split.UNKNOWN),
        ),
        # The plan gives the column split, but not that q, k and v are interleaved per head.
        "gpt_neox": (
            Row(pattern="layers.*.attention.query_key_value", split=Split.COLUMN, packing=Packing.QKV_PER_HEAD),
            Row(pattern="layers.*.attention.dense", split=Split.ROW, packing=Packing.HEADS),
            Row(pattern="layers.*.mlp.dense_h_to_4h", split=Split.COLUMN),
            Row(pattern="layers.*.mlp.dense_4h_to_h", split=Split.ROW),
        ),
        "phi3": _PHI3,
        "phi4_multimodal": _PHI3,
        "glm": _GLM,
        "glm4": _GLM,
        "glm4v_text": _GLM,
        "glm_image_text": _GLM,
        "glm_ocr_text": _GLM,
    }
)
"""By model type. A row takes precedence over the plan."""

WORDS: Mapping[str, Split] = MappingProxyType(
    {
        "colwise": Split.COLUMN,
        "rowwise": Split.ROW,
        # These also move activations; the weights are cut in the same way.
        "colwise_gather_output": Split.COLUMN,
        "colwise_rep": Split.COLUMN,
        "rowwise_split_input": Split.ROW,
        "rowwise_rep": Split.ROW,
        "replicate": Split.REPLICATED,
        "replicated_with_grad_allreduce": Split.REPLICATED,
        "mla_kv_a_proj": Split.REPLICATED,
    }
)
"""A plan's word -> the split. Other words (packed, grouped, experts, embeddings) describe no linear site."""

PACKINGS: Mapping[str, Packing] = MappingProxyType(
    {
        "q_proj": Packing.HEADS,
        "k_proj": Packing.KV_HEADS,
        "v_proj": Packing.KV_HEADS,
        "o_proj": Packing.HEADS,
        "q_b_proj": Packing.HEADS,
        "kv_b_proj": Packing.HEADS,
        "gate_proj": Packing.PLAIN,
        "up_proj": Packing.PLAIN,
        "down_proj": Packing.PLAIN,
    }
)
"""By the last part of a layer's path, for layers that a plan divides."""

# Layers that pack several projections: a plan doesn't give their order, so they need a row of the table. CodeGen's
# `qkv_proj`, for example, consists of q, v, k repeated four times.
_PACKED = re.compile(r"qkv\w*|\w*_qkv\w*|query_key_value|c_attn|Wqkv|W_pack|gate_up_proj|in_proj\w*|index_qk_proj")

# `down(act(gate) * up)` holds in transformers wherever a plan divides the three layers, except for these architectures:
# they clamp or rescale `up` before the product (`modeling_*.py`, release 5.24), so a factor does not commute with it.
CLAMPED_UP = frozenset({"deepseek_v4", "dory", "glm5_next_text", "glm5_next_vision", "gpt_oss", "step3p5"})


def row_for(model_type: str, path: str) -> Row | None:
    """Return the table's row for a module, or None."""
    return next((row for row in ROWS.get(model_type, ()) if ends_with(path, row.pattern)), None)


def plan_row(model_type: str, path: str) -> Row | None:
    """Return the row for a module that follows from transformers' plan, or None."""
    for pattern, word in (tp_plan(model_type) or {}).items():
        if word in WORDS and ends_with(path, pattern):
            return _read(pattern, word, path.rpartition(".")[2])
    return None


def _read(pattern: str, word: str, name: str) -> Row | None:
    if _PACKED.fullmatch(name):
        return None
    # A plan all-gathers the output of other layers (a recurrent mixer's input, a projector) because their code can't
    # use a shard; what an engine holds of them is not known.
    if word not in {"colwise", "rowwise"} and WORDS[word] is not Split.REPLICATED and name not in PACKINGS:
        return None
    return Row(pattern=pattern, split=WORDS[word], packing=PACKINGS.get(name, Packing.PLAIN))


def ends_with(path: str, pattern: str) -> bool:
    """Return whether a module path ends with a pattern, at a dot.

    >>> ends_with("model.layers.3.self_attn.q_proj", "layers.*.self_attn.q_proj")
    True
    >>> ends_with("model.layers.3.cross_self_attn.q_proj", "self_attn.q_proj")
    False
    """
    return _compiled(pattern).search(path) is not None


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(r"(?:^|\.)" + re.escape(pattern).replace(r"\*", r"\d+") + "$")
