"""A base of seventy billion parameters that takes no disk: real headers, and files whose contents are holes."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, INNER, LAYERS, VOCABULARY, KEYS = 8192, 28672, 80, 128256, 1024
SHAPES = {
    "input_layernorm": (HIDDEN,),
    "mlp.down_proj": (HIDDEN, INNER),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "post_attention_layernorm": (HIDDEN,),
    "self_attn.k_proj": (KEYS, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.v_proj": (KEYS, HIDDEN),
}


def _file(path: Path, tensors: dict[str, tuple[int, ...]]) -> int:
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
    """Write a Llama of 80 layers with the shapes of the 70B model, one file per 4 layers."""
    folder.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": 64,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": VOCABULARY,
    }
    (folder / "config.json").write_text(json.dumps(config))
    groups: list[dict[str, tuple[int, ...]]] = [
        {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)},
        {"lm_head.weight": (VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,)},
    ]
    groups += [
        {
            f"model.layers.{layer}.{name}.weight": shape
            for layer in range(first, first + 4)
            for name, shape in SHAPES.items()
        }
        for first in range(0, LAYERS, 4)
    ]
    names: dict[str, str] = {}
    total = 0
    for number, tensors in enumerate(groups):
        file = f"model-{number + 1:05d}-of-{len(groups):05d}.safetensors"
        total += _file(folder / file, tensors)
        names |= dict.fromkeys(tensors, file)
    index = {"metadata": {"total_size": total}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_large_adapter(folder: Path, *, dora: bool) -> None:
    """Write an adapter on q, v and down of every layer, small in rank, as PEFT lays it out."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(1)
    tensors: dict[str, torch.Tensor] = {}
    targets = ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
    for layer in range(LAYERS):
        for target in targets:
            outputs, inputs = SHAPES[target]
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
