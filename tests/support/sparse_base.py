"""Bases of real models' shapes: their configurations, and a 70B base of sparse files that takes no disk space."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from scute_compile.base.shapes import SHAPES, ModelShape
from tests.support.drawn_adapters import sites_of

LARGE, VOCABULARY = SHAPES["llama-3.1-70b"], 128256


def llama_config(shape: ModelShape, *, head_dim: int, vocabulary: int, **fields: object) -> dict[str, object]:
    """Return the config.json of a Llama of a shape; `fields` are added, or override."""
    hidden = shape.projection("q_proj").inputs
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "head_dim": head_dim,
        "hidden_size": hidden,
        "intermediate_size": shape.projection("down_proj").inputs,
        "num_attention_heads": hidden // head_dim,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.projection("k_proj").outputs // head_dim,
        "dtype": "bfloat16",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "vocab_size": vocabulary,
        **fields,
    }


def layer_weights(shape: ModelShape) -> Mapping[str, tuple[int, int]]:
    """Return `(outputs, inputs)` of the projections of a layer by path in the layer, in alphabetical order."""
    sites = sorted(sites_of(replace(shape, layers=1)), key=lambda site: site.name)
    return {site.name.removeprefix("model.layers.0."): (site.out_features, site.in_features) for site in sites}


def write_sparse_file(path: Path, tensors: dict[str, tuple[int, ...]]) -> int:
    """Write a safetensors file of bfloat16 tensors with a real header and holes as content; return their size."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in tensors.items():
        size = 2 * (shape[0] if len(shape) == 1 else shape[0] * shape[1])
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + offset)
    return offset


def write_sparse_base(folder: Path) -> None:
    """Write a Llama of the 70B shape, one sparse file per 4 layers."""
    folder.mkdir(parents=True)
    hidden = LARGE.projection("q_proj").inputs
    config = llama_config(LARGE, head_dim=128, vocabulary=VOCABULARY)
    in_layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        **layer_weights(LARGE),
    }
    (folder / "config.json").write_text(json.dumps(config))
    groups: list[dict[str, tuple[int, ...]]] = [
        {"model.embed_tokens.weight": (VOCABULARY, hidden)},
        {"lm_head.weight": (VOCABULARY, hidden), "model.norm.weight": (hidden,)},
    ]
    groups += [
        {
            f"model.layers.{layer}.{name}.weight": shape
            for layer in range(first, first + 4)
            for name, shape in sorted(in_layer.items())
        }
        for first in range(0, LARGE.layers, 4)
    ]
    names: dict[str, str] = {}
    total = 0
    for number, tensors in enumerate(groups):
        file = f"model-{number + 1:05d}-of-{len(groups):05d}.safetensors"
        total += write_sparse_file(folder / file, tensors)
        names |= dict.fromkeys(tensors, file)
    index = {"metadata": {"total_size": total}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_large_adapter(folder: Path, *, dora: bool) -> None:
    """Write a PEFT folder of LoRA or DoRA of rank 2 on q, v and down of every layer."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(1)
    tensors: dict[str, torch.Tensor] = {}
    weights, targets = layer_weights(LARGE), ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
    for layer in range(LARGE.layers):
        for target in targets:
            outputs, inputs = weights[target]
            stem = f"base_model.model.model.layers.{layer}.{target}.lora_"
            tensors[stem + "A.weight"] = torch.randn(2, inputs, generator=generator).bfloat16()
            tensors[stem + "B.weight"] = torch.randn(outputs, 2, generator=generator).bfloat16()
            if dora:
                tensors[stem + "magnitude_vector"] = 1 + torch.rand(outputs, generator=generator).bfloat16()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "someone/llama-70b",
        "r": 2,
        "lora_alpha": 4,
        "use_dora": dora,
        "bias": "none",
        "target_modules": [target.rsplit(".", 1)[1] for target in targets],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
