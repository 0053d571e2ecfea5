"""Tiny random base models, written as `save_pretrained` writes real ones.

Norms and biases are drawn far from their initial values, and matrices have the scale `sqrt(2 / in)`, so that a slot
that is dropped, scaled or cut wrongly changes the output. Half of the folders are split into shards with an index.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
GATED = ("gate_proj", "up_proj", "down_proj")
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
FOUR_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
SHARD = "100KB"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sites:
    """Suffixes of an architecture's linear layers, by their use in tests."""

    attention: tuple[str, ...] = ATTENTION
    feedforward: tuple[str, ...] = GATED
    values: tuple[str, ...] = ("k_proj", "v_proj")
    """The layers whose outputs IA3 scales."""
    down: str = "down_proj"
    """The layer whose inputs IA3 scales."""
    conv1d: bool = False
    """Whether weights are stored `(in, out)`."""
    attention_out: str = "o_proj"

    @property
    def every(self) -> tuple[str, ...]:
        """All of them."""
        return self.attention + self.feedforward


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """The recipe of a tiny base."""

    config: Callable[[], object]
    sites: Sites = field(default_factory=Sites)
    sharded: bool = False
    dtype: torch.dtype = torch.float32
    multimodal: bool = False


def _vision_language() -> object:
    text = {"model_type": "mistral", "head_dim": 16, **SMALL, **FOUR_HEADS}
    vision = {
        "model_type": "pixtral",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    return transformers.Mistral3Config(
        text_config=text, vision_config=vision, image_token_index=5, vision_feature_layer=-1, spatial_merge_size=1
    )


def _llama(**changes: object) -> Callable[[], object]:
    return lambda: transformers.LlamaConfig(
        **{**SMALL, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": None, **changes}
    )


PHI3 = Sites(
    attention=("qkv_proj", "o_proj"), feedforward=("gate_up_proj", "down_proj"), values=("qkv_proj",), down="down_proj"
)
GPT2 = Sites(
    attention=("attn.c_attn", "attn.c_proj"),
    feedforward=("mlp.c_fc", "mlp.c_proj"),
    values=("c_attn",),
    down="mlp.c_proj",
    conv1d=True,
    attention_out="attn.c_proj",
)
NEOX = Sites(
    attention=("query_key_value", "attention.dense"),
    feedforward=("dense_h_to_4h", "dense_4h_to_h"),
    values=("query_key_value",),
    down="dense_4h_to_h",
    attention_out="attention.dense",
)
OPT = Sites(
    attention=("q_proj", "k_proj", "v_proj", "out_proj"),
    feedforward=("fc1", "fc2"),
    values=("q_proj", "k_proj"),
    down="fc2",
    attention_out="out_proj",
)

BASES: Mapping[str, Base] = {
    "llama": Base(config=_llama(), sharded=True),
    "llama-tied": Base(config=_llama(num_attention_heads=4, tie_word_embeddings=True)),
    "llama-square": Base(config=_llama(num_attention_heads=4, num_key_value_heads=4, intermediate_size=64)),
    "llama-wide": Base(config=_llama(num_attention_heads=4, hidden_size=96), sharded=True),
    "llama-nine": Base(
        config=_llama(num_attention_heads=9, num_key_value_heads=3, hidden_size=72, intermediate_size=144),
        sharded=True,
    ),
    "llama-heads-of-32": Base(  # the smallest heads that every attention back end supports
        config=_llama(num_attention_heads=4, head_dim=32), sharded=True
    ),
    "qwen2-heads-of-32": Base(
        config=lambda: transformers.Qwen2Config(**{**SMALL, "hidden_size": 128}, **FOUR_HEADS), sharded=True
    ),
    "llama-bf16": Base(config=_llama(), sharded=True, dtype=torch.bfloat16),
    "mistral": Base(config=lambda: transformers.MistralConfig(**SMALL, **FOUR_HEADS, head_dim=16), sharded=True),
    "qwen2": Base(config=lambda: transformers.Qwen2Config(**SMALL, **FOUR_HEADS), sharded=True),
    "qwen3": Base(config=lambda: transformers.Qwen3Config(**SMALL, **FOUR_HEADS, head_dim=16)),
    "gemma2": Base(
        config=lambda: transformers.Gemma2Config(
            **{**SMALL, "tie_word_embeddings": True}, **FOUR_HEADS, head_dim=16, query_pre_attn_scalar=16
        ),
        sharded=True,
    ),
    "phi3": Base(
        config=lambda: transformers.Phi3Config(**SMALL, **FOUR_HEADS, pad_token_id=0, bos_token_id=1, eos_token_id=2),
        sites=PHI3,
        sharded=True,
    ),
    "gpt2": Base(
        config=lambda: transformers.GPT2Config(
            n_embd=64, n_layer=2, n_head=4, vocab_size=128, n_positions=64, bos_token_id=1, eos_token_id=2
        ),
        sites=GPT2,
        sharded=True,
    ),
    "gpt_neox": Base(
        config=lambda: transformers.GPTNeoXConfig(**SMALL, num_attention_heads=4, use_parallel_residual=True),
        sites=NEOX,
    ),
    "opt": Base(
        config=lambda: transformers.OPTConfig(
            hidden_size=64,
            ffn_dim=160,
            num_hidden_layers=2,
            num_attention_heads=4,
            vocab_size=128,
            max_position_embeddings=64,
            word_embed_proj_dim=64,
        ),
        sites=OPT,
    ),
    "mixtral": Base(
        config=lambda: transformers.MixtralConfig(**SMALL, **FOUR_HEADS, num_local_experts=4, num_experts_per_tok=2),
        sites=Sites(feedforward=()),
    ),
    "vision-language": Base(config=_vision_language, multimodal=True),
    "mistral-text": Base(config=lambda: transformers.MistralConfig(**SMALL, **FOUR_HEADS, head_dim=16)),
    "mistral-window": Base(
        config=lambda: transformers.MistralConfig(**SMALL, **FOUR_HEADS, head_dim=16, sliding_window=8)
    ),
}


def _draw(model: torch.nn.Module, *, conv1d: bool, generator: torch.Generator) -> None:
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim < 2:
            parameter.data = parameter.data + 0.2 * noise
            continue
        stored_by_input = conv1d and ".h." in name
        fan_in = parameter.shape[0] if stored_by_input else parameter.shape[-1]
        parameter.data = noise * (2.0 / fan_in) ** 0.5


def write_base(name: str, folder: Path) -> None:
    """Write the base `name` of `BASES` as a model folder."""
    made = BASES[name]
    kind = transformers.AutoModelForImageTextToText if made.multimodal else transformers.AutoModelForCausalLM
    model = kind.from_config(made.config())
    generator = torch.Generator().manual_seed(1 + list(BASES).index(name))
    _draw(model, conv1d=made.sites.conv1d, generator=generator)
    if made.sharded:
        model.to(made.dtype).save_pretrained(folder, max_shard_size=SHARD)
    else:
        model.to(made.dtype).save_pretrained(folder)


def load_base(name: str, folder: Path) -> torch.nn.Module:
    """Load a written base in float32."""
    kind = transformers.AutoModelForImageTextToText if BASES[name].multimodal else transformers.AutoModelForCausalLM
    model: torch.nn.Module = kind.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def made_once(target: Path, write: Callable[[Path], None]) -> Path:
    """Return `target`, which the first process writes while others wait."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_name(f".{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            unfinished = target.with_name(f".{target.name}.unfinished")
            write(unfinished)
            unfinished.rename(target)
    return target
