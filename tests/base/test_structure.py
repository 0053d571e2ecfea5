"""The structure that is derived from names and shapes is that of the model that transformers builds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType

import pytest
import torch
import transformers
from transformers.pytorch_utils import Conv1D

from scute_compile.base.cuts import cut, possible_degrees
from scute_compile.base.heads import is_output_head
from scute_compile.base.structure import ModelStructure, build_structure
from scute_compile.ir.expressions import Ref, Source
from scute_compile.ir.linear import Linear, Part, Product, Split
from tests.support.bases import BASES

TEXT = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "phi3", "gpt2", "gpt_neox", "mixtral")


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A model of transformers, and the structure that is derived from its names and shapes."""

    model: torch.nn.Module
    config: Mapping[str, object]
    tensors: Mapping[str, Ref]
    structure: ModelStructure


@cache
def built(name: str) -> Built:
    """Build a small model on the meta device; only names and shapes are needed."""
    config = BASES[name].config()
    kind = transformers.AutoModelForImageTextToText if BASES[name].multimodal else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = kind.from_config(config)
    tensors = {k: Ref(Source.BASE, k, tuple(t.shape), "F32") for k, t in model.state_dict().items()}
    content = config.to_dict()  # type: ignore[attr-defined] # a configuration of transformers, which is not typed
    return Built(model=model, config=content, tensors=tensors, structure=build_structure(content, tensors))


def rebuilt(
    name: str,
    *,
    plus: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    fields: Mapping[str, object] = MappingProxyType({}),
) -> ModelStructure:
    """Return the structure of a base whose tensors or fields were changed."""
    tensors = dict(built(name).tensors) | {key: Ref(Source.BASE, key, shape, "F32") for key, shape in plus.items()}
    return build_structure({**built(name).config, **fields}, tensors)


def of_layer(structure: ModelStructure, end: str) -> Linear:
    """Return the module of the first layer whose path has this ending."""
    return next(linear for name, linear in structure.linears.items() if ".0." in name and name.endswith(end))


@pytest.mark.parametrize("name", [*TEXT, "vision-language"])
def test_linears_are_the_models_linear_layers_without_its_heads(name: str) -> None:
    expected = {}
    for path, module in built(name).model.named_modules():
        if is_output_head(path):
            continue
        if isinstance(module, torch.nn.Linear):
            expected[path] = (module.in_features, module.out_features, module.bias is not None, False)
        elif isinstance(module, Conv1D):
            expected[path] = (module.nx, module.nf, module.bias is not None, True)
    found = built(name).structure.linears
    assert {p: (x.in_features, x.out_features, x.bias is not None, x.transposed) for p, x in found.items()} == expected
    for path, linear in found.items():
        assert linear.weight.key == f"{path}.weight"
        assert linear.bias is None or linear.bias.key == f"{path}.bias"


@pytest.mark.parametrize("name", [*TEXT, "vision-language"])
def test_embeddings_and_heads_are_listed_apart(name: str) -> None:
    expected = {
        path
        for path, module in built(name).model.named_modules()
        if isinstance(module, torch.nn.Embedding) or is_output_head(path)
    }
    assert built(name).structure.embeddings == expected


@pytest.mark.parametrize("name", TEXT)
def test_every_layer_of_a_known_architecture_has_a_split_whose_parts_fill_the_axis(name: str) -> None:
    structure = built(name).structure
    assert structure.tp_source == ("table" if name in {"gpt2", "gpt_neox", "phi3"} else "transformers plan")
    for linear in structure.linears.values():
        assert linear.split in {Split.COLUMN, Split.ROW}, linear.name
        axis = linear.out_features if linear.split is Split.COLUMN else linear.in_features
        assert sum(part.size for part in linear.parts) == axis
    assert possible_degrees(structure.linears.values())[:3] in {(1, 2, 4), (1, 2, 4, 8)}


def test_the_text_model_inside_a_multimodal_one_is_known_and_the_tower_is_not() -> None:
    structure = built("vision-language").structure
    for name, linear in structure.linears.items():
        assert (linear.split is Split.UNKNOWN) == ("language_model" not in name), name
    assert of_layer(structure, "language_model.layers.0.self_attn.k_proj").parts == (
        Part(name="k", size=32, unit=16, replicable=True),
    )


@pytest.mark.parametrize("name", TEXT)
def test_head_counts_are_the_models(name: str) -> None:
    config = BASES[name].config()
    heads = config.num_attention_heads  # type: ignore[attr-defined] # each family has its own
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    for linear in built(name).structure.linears.values():
        for part in linear.parts:
            if part.name in {"q", "qkv"}:
                assert part.size // part.unit == heads
            if part.name in {"k", "v"}:
                assert part.replicable
                assert part.size // part.unit == kv_heads
        if linear.name.endswith(("self_attn.o_proj", "attn.c_proj", "attention.dense")):
            assert linear.parts[0].size // linear.parts[0].unit == heads


def test_fused_layers_have_parts() -> None:
    phi3, gpt2, neox = (built(name).structure for name in ("phi3", "gpt2", "gpt_neox"))
    assert [(p.name, p.size, p.unit) for p in of_layer(phi3, "qkv_proj").parts] == [
        ("q", 64, 16),
        ("k", 32, 16),
        ("v", 32, 16),
    ]
    assert [(p.name, p.size, p.unit) for p in of_layer(phi3, "gate_up_proj").parts] == [
        ("gate", 160, 1),
        ("up", 160, 1),
    ]
    assert [(p.name, p.size, p.unit) for p in of_layer(gpt2, "c_attn").parts] == [
        ("q", 64, 16),
        ("k", 64, 16),
        ("v", 64, 16),
    ]
    assert of_layer(neox, "query_key_value").parts == (Part(name="qkv", size=192, unit=48),)


def test_a_rank_of_a_fused_qkv_computes_whole_heads() -> None:
    """The cut of GPT-NeoX's and Phi-3's fused projections agrees with the slices in their code."""
    rows = torch.arange(192)
    neox = of_layer(built("gpt_neox").structure, "query_key_value")
    of_head = rows.view(4, 48)  # modeling_gpt_neox: view(..., heads, 3 * head_dim)
    assert [list(range(*r)) for (r,) in cut(neox, 2).outputs] == [h.flatten().tolist() for h in of_head.chunk(2)]
    phi3 = of_layer(built("phi3").structure, "qkv_proj")
    q, k, v = rows[:64].view(4, 16), rows[64:96].view(2, 16), rows[96:128].view(2, 16)  # modeling_phi3: three slices
    for rank, ranges in enumerate(cut(phi3, 2).outputs):
        expected = torch.cat([x.chunk(2)[rank].flatten() for x in (q, k, v)])
        assert [i for r in ranges for i in range(*r)] == expected.tolist()


def test_siblings_share_a_fused_site() -> None:
    llama = built("llama").structure
    prefix = "model.layers.0."
    assert {of_layer(llama, f"{n}_proj").gemm for n in "qkv"} == {f"{prefix}self_attn.qkv_proj"}
    assert {of_layer(llama, n).gemm for n in ("gate_proj", "up_proj")} == {f"{prefix}mlp.gate_up_proj"}
    assert of_layer(llama, "down_proj").gemm == f"{prefix}mlp.down_proj"
    assert of_layer(built("phi3").structure, "qkv_proj").gemm == f"{prefix}self_attn.qkv_proj"


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "gemma2"])
def test_down_reads_the_product_of_gate_and_up(name: str) -> None:
    assert of_layer(built(name).structure, "down_proj").input_product == Product(site="model.layers.0.mlp.up_proj")


def test_a_fused_gate_up_gives_the_products_second_part_and_plain_mlps_have_none() -> None:
    assert of_layer(built("phi3").structure, "down_proj").input_product == Product(
        site="model.layers.0.mlp.gate_up_proj", part=1
    )
    assert of_layer(built("gpt2").structure, "mlp.c_proj").input_product is None
    assert of_layer(built("gpt_neox").structure, "dense_4h_to_h").input_product is None


def test_no_product_is_assumed_where_the_block_has_other_tensors_or_up_is_clamped() -> None:
    norm = rebuilt("llama", plus={"model.layers.0.mlp.ffn_sub_norm.weight": (160,)})
    assert of_layer(norm, "down_proj").input_product is None
    assert norm.linears["model.layers.1.mlp.down_proj"].input_product is not None
    assert of_layer(rebuilt("llama", fields={"swiglu_limit": 7.0}), "down_proj").input_product is None
    assert of_layer(rebuilt("llama", fields={"model_type": "glm5_next_text"}), "down_proj").input_product is None


def test_layers_of_an_unknown_architecture_are_linears_without_a_split() -> None:
    structure = rebuilt("llama", fields={"model_type": "not_a_model"})
    assert structure.linears.keys() == built("llama").structure.linears.keys()
    assert {linear.split for linear in structure.linears.values()} == {Split.UNKNOWN}
    assert structure.tp_source == ""
    assert of_layer(structure, "down_proj").input_product is None


@pytest.mark.parametrize("fields", [{"head_dim": 4}, {"num_attention_heads": 7}, {"num_attention_heads": [8, 8]}])
def test_heads_that_contradict_the_shapes_leave_the_attention_unknown(fields: dict[str, object]) -> None:
    structure = rebuilt("llama", fields=fields)
    for name, linear in structure.linears.items():
        assert (linear.split is Split.UNKNOWN) == ("self_attn" in name), name


def test_a_gate_packed_beside_q_leaves_that_layer_s_attention_unknown() -> None:
    doubled = rebuilt("llama", fields={"head_dim": None}, plus={"model.layers.0.self_attn.q_proj.weight": (128, 64)})
    assert of_layer(doubled, "q_proj").split is Split.UNKNOWN
    assert of_layer(doubled, "o_proj").split is Split.UNKNOWN
    assert doubled.linears["model.layers.1.self_attn.q_proj"].split is Split.COLUMN


def test_a_tower_that_the_configuration_does_not_name_is_unknown() -> None:
    """Its layers have the names of the text model's layers, but another width."""
    path = "model.vpm.layers.0.mlp.up_proj"
    assert rebuilt("llama", plus={f"{path}.weight": (96, 48)}).linears[path].split is Split.UNKNOWN


def test_experts_and_their_router_are_not_linears() -> None:
    names = built("mixtral").structure.linears
    assert names
    assert all("self_attn" in name for name in names)
    old = "model.layers.0.block_sparse_moe"
    structure = rebuilt("llama", plus={f"{old}.experts.0.w1.weight": (160, 64), f"{old}.gate.weight": (4, 64)})
    assert structure.linears.keys() == built("llama").structure.linears.keys()


def test_linears_are_in_natural_order() -> None:
    extra = {f"model.layers.{n}.mlp.up_proj.weight": (160, 64) for n in (10, 2, 9)}
    layers = [int(name.split(".")[2]) for name in rebuilt("llama", plus=extra).linears]
    assert layers == sorted(layers)


def test_the_dtype_is_that_of_most_entries_or_of_the_configuration() -> None:
    tensors = {k: replace(r, dtype="BF16" if len(r.dims) == 2 else "F32") for k, r in built("llama").tensors.items()}
    assert build_structure(built("llama").config, tensors).dtype == "bfloat16"
    assert build_structure({"model_type": "llama", "torch_dtype": "float16"}, {}).dtype == "float16"
    assert build_structure({"model_type": "x", "text_config": {"dtype": "bfloat16"}}, {}).dtype == "bfloat16"


def test_a_field_that_the_configuration_leaves_out_takes_its_default() -> None:
    config = {k: v for k, v in built("qwen3").config.items() if k != "num_attention_heads"}
    unknown = build_structure(config, built("qwen3").tensors)  # Qwen3's default is 32 heads, and this model has 4
    assert of_layer(unknown, "q_proj").split is Split.UNKNOWN


def test_identity_fields_are_those_of_the_text_model() -> None:
    assert built("gpt2").structure.parameters == {
        "model_type": "gpt2",
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "vocab_size": 128,
    }
    parameters = built("vision-language").structure.parameters
    assert parameters["model_type"] == "mistral3"
    assert parameters["hidden_size"] == 64
