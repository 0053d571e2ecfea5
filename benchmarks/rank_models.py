"""The models of `two_ranks.py`: a random Llama of a given shape, adapters of all five methods, and their artifacts.

transformers saves the base, PEFT saves the adapters, and the compiler writes the artifacts. This module has no command.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import PeftModel, get_peft_model

import scute_compile as scute
from scute_compile.base.shapes import SHAPES, ModelShape, gated_shape
from scute_compile.ir.dtypes import DType, torch_dtype
from scute_compile.ir.target import LoraSharding, Target
from scute_compile.runtime_min.base_model import load_model
from tests.support.adapters import RECIPES, Config, draw, lora, normal, oft, relative, scaled_by_inputs, vera
from tests.support.bases import ATTENTION, Sites

TWO_LAYERS = replace(SHAPES["llama-3.1-8b"], layers=2)
NINE = ("lora-a", "lora-b", "dora", "rsdora", "ia3", "vera-a", "vera-b", "oft-a", "oft-b")
"""Adapters of the mixed batch. `attention`, LoRA on attention alone, is written beside them."""
DRAWS = {
    "magnitude": relative(0.1),
    "ia3_l": normal(0.1, mean=1),
    "vera_lambda": normal(0.3),
    "oft_R": normal(0.05),
    "": scaled_by_inputs(0.4),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Sizes of the base and its adapters; by default Llama-3.1-8B with fewer layers and a small vocabulary."""

    shape: ModelShape = TWO_LAYERS
    head_dim: int = 128
    vocabulary: int = 4096
    dtype: str = "bfloat16"
    rank: int = 16
    """Of LoRA and DoRA."""
    vera_rank: int = 256
    block: int = 32
    """Width of OFT's blocks."""

    @property
    def hidden(self) -> int:
        """The model's width."""
        return self.shape.projection("q_proj").inputs

    def to_json(self) -> Mapping[str, object]:
        """Return all sizes as plain values."""
        return {
            "hidden": self.hidden,
            "inner": self.shape.projection("down_proj").inputs,
            "heads": self.hidden // self.head_dim,
            "kv_heads": self.shape.projection("k_proj").outputs // self.head_dim,
            "layers": self.shape.layers,
            "vocabulary": self.vocabulary,
            "dtype": self.dtype,
            "rank": self.rank,
            "vera_rank": self.vera_rank,
            "block": self.block,
        }


def tiny(ranks: int) -> Setup:
    """Return sizes for a CPU that `ranks` divides."""
    return Setup(
        shape=gated_shape("tiny", layers=2, hidden=32 * ranks, kv=16 * ranks, mlp=80 * ranks),
        head_dim=16,
        vocabulary=128,
        dtype="float32",
        rank=4,
        vera_rank=16,
        block=8,
    )


def write_base(setup: Setup, folder: Path) -> None:
    """Write the base: weights scaled so that activations keep their size, norms drawn around 1."""
    sizes: Any = setup.to_json()
    config = transformers.LlamaConfig(
        hidden_size=sizes["hidden"],
        intermediate_size=sizes["inner"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["kv_heads"],
        num_hidden_layers=sizes["layers"],
        vocab_size=sizes["vocabulary"],
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    with _quiet(), torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    model = model.to(torch_dtype(setup.dtype)).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        drawn = noise * (2.0 / parameter.shape[-1]) ** 0.5 if parameter.ndim > 1 else 1 + 0.2 * noise
        parameter.data.copy_(drawn)
    with _quiet():
        model.save_pretrained(folder)


def _configs(setup: Setup) -> Mapping[str, Config]:
    vera_config = vera(
        r=setup.vera_rank, target_modules=["q_proj", "v_proj", "down_proj"], projection_prng_key=3
    ).config
    return {
        "lora-a": lora(r=setup.rank, lora_alpha=2 * setup.rank),
        "lora-b": lora(r=setup.rank // 2 + 1, lora_alpha=setup.rank),  # two ranks do not divide this rank
        "dora": lora(r=setup.rank, lora_alpha=setup.rank, use_dora=True),
        "rsdora": lora(r=setup.rank, lora_alpha=4, use_dora=True, use_rslora=True, target_modules=list(ATTENTION)),
        "ia3": RECIPES["ia3"].config,
        "vera-a": vera_config,
        "vera-b": vera_config,
        "oft-a": oft(oft_block_size=setup.block).config,
        "oft-b": oft(oft_block_size=setup.block // 2).config,
        "attention": lora(r=setup.rank, lora_alpha=setup.rank, target_modules=list(ATTENTION)),
    }


def write_adapters(setup: Setup, base: Path, folder: Path) -> None:
    """Write every adapter as PEFT saves it, with learned values drawn away from the identity."""
    for number, (name, config) in enumerate(_configs(setup).items()):
        with _quiet():
            model = get_peft_model(load_model(base), config(Sites()))
            draw(model, 100 + number, DRAWS)
            model.save_pretrained(folder / name)
        del model
        gc.collect()


def compile_all(base: Path, adapters: Path, store: Path, *, tp: int, sharding: LoraSharding, dtype: str) -> None:
    """Compile every adapter into a store.

    Raises:
        ScuteError: An adapter is refused.
    """
    sources = sorted(str(path) for path in adapters.iterdir())
    target = Target(tp=tp, dtype=DType(dtype), lora_sharding=sharding)
    scute.compile(sources, base=base, target=target, store=store).raise_if_refused()


def peft_logprobs(
    base: Path, adapter: Path | None, ids: torch.Tensor, device: torch.device, *, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return PEFT's log-probabilities `(rows, tokens, vocabulary)`, computed in `dtype`.

    Args:
        base: The base's folder.
        adapter: The adapter's folder; None: the base alone.
        ids: Tokens `(rows, tokens)`.
        device: Where to compute.
        dtype: Dtype of weights and activations.
    """
    with _quiet():
        model: Any = load_model(base, dtype)
        if adapter is not None:
            model = PeftModel.from_pretrained(model, str(adapter), autocast_adapter_dtype=False)
        model = model.eval().to(device, dtype)
    with torch.no_grad():
        logits = model(input_ids=ids.to(device)).logits
    logprobs = torch.log_softmax(logits.float(), -1).cpu()
    del model
    gc.collect()
    return logprobs


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the libraries' warnings and progress bars."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
