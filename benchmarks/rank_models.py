"""The models of `two_ranks.py`: a random Llama of given shapes, adapters of all five methods, and their artifacts.

All are real files: transformers saves the base, PEFT saves the adapters, the compiler writes artifacts.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import IA3Config, LoraConfig, OFTConfig, PeftModel, VeraConfig, get_peft_model

import scute_compile as scute
from scute_compile.ir.dtypes import DType, torch_dtype
from scute_compile.ir.target import LoraSharding, Target
from scute_compile.runtime_min.base_model import load_model

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EVERY = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
NINE = ("lora-a", "lora-b", "dora", "rsdora", "ia3", "vera-a", "vera-b", "oft-a", "oft-b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """Shapes of the base and its adapters; by default Llama-3.1-8B's with fewer layers and a small vocabulary."""

    hidden: int = 4096
    inner: int = 14336
    heads: int = 32
    kv_heads: int = 8
    layers: int = 2
    vocabulary: int = 4096
    dtype: str = "bfloat16"
    rank: int = 16
    vera_rank: int = 256
    block: int = 32


def tiny(ranks: int) -> Shapes:
    """Return shapes for a CPU that divide over `ranks`."""
    return Shapes(
        hidden=32 * ranks,
        inner=80 * ranks,
        heads=2 * ranks,
        kv_heads=ranks,
        vocabulary=128,
        dtype="float32",
        rank=4,
        vera_rank=16,
        block=8,
    )


def write_base(shapes: Shapes, folder: Path) -> None:
    """Write the base with weights scaled so that activations keep their size, and norms away from one."""
    config = transformers.LlamaConfig(
        hidden_size=shapes.hidden,
        intermediate_size=shapes.inner,
        num_attention_heads=shapes.heads,
        num_key_value_heads=shapes.kv_heads,
        num_hidden_layers=shapes.layers,
        vocab_size=shapes.vocabulary,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    with _quiet(), torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    model = model.to(torch_dtype(shapes.dtype)).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        drawn = noise * (2.0 / parameter.shape[-1]) ** 0.5 if parameter.ndim > 1 else 1 + 0.2 * noise
        parameter.data.copy_(drawn)
    with _quiet():
        model.save_pretrained(folder)


def _configs(shapes: Shapes) -> Mapping[str, Callable[[], object]]:
    def lora(**options: object) -> Callable[[], object]:
        return lambda: LoraConfig(**{"r": shapes.rank, "target_modules": EVERY, "task_type": "CAUSAL_LM", **options})

    def vera(*targets: str) -> Callable[[], object]:
        return lambda: VeraConfig(
            r=shapes.vera_rank, target_modules=list(targets), projection_prng_key=3, task_type="CAUSAL_LM"
        )

    def oft(block: int) -> Callable[[], object]:
        return lambda: OFTConfig(oft_block_size=block, target_modules=EVERY, task_type="CAUSAL_LM")

    return {
        "lora-a": lora(lora_alpha=2 * shapes.rank),
        "lora-b": lora(r=shapes.rank // 2 + 1, lora_alpha=shapes.rank),  # a rank that two ranks don't divide
        "dora": lora(lora_alpha=shapes.rank, use_dora=True),
        "rsdora": lora(use_dora=True, use_rslora=True, lora_alpha=4, target_modules=ATTENTION),
        "ia3": lambda: IA3Config(
            target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"
        ),
        "vera-a": vera("q_proj", "v_proj", "down_proj"),
        "vera-b": vera("q_proj", "v_proj", "down_proj"),
        "oft-a": oft(shapes.block),
        "oft-b": oft(shapes.block // 2),
        "attention": lora(lora_alpha=shapes.rank, target_modules=ATTENTION),
    }


def write_adapters(shapes: Shapes, base: Path, folder: Path) -> None:
    """Write every adapter as PEFT saves it, with values drawn away from the identity."""
    for number, (name, config) in enumerate(_configs(shapes).items()):
        with _quiet():
            model = get_peft_model(load_model(base), config())
            generator = torch.Generator().manual_seed(100 + number)
            for key, parameter in model.named_parameters():
                if parameter.requires_grad:
                    parameter.data = _drawn(key, parameter.data, generator)
            model.save_pretrained(folder / name)
        del model
        gc.collect()


def _drawn(key: str, initial: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(initial.shape, generator=generator)
    if "magnitude" in key:
        return initial * (1 + 0.1 * noise)
    if "ia3_l" in key:
        return 1 + 0.1 * noise
    if "vera_lambda" in key:
        return 0.3 * noise
    if "oft" in key:
        return 0.05 * noise
    return 0.4 * noise * initial.shape[-1] ** -0.5


def compile_all(base: Path, adapters: Path, store: Path, *, tp: int, sharding: LoraSharding, dtype: str) -> None:
    """Compile every adapter into a store.

    Raises:
        ScuteError: when an adapter is refused.
    """
    sources = sorted(str(path) for path in adapters.iterdir())
    target = Target(tp=tp, dtype=DType(dtype), lora_sharding=sharding)
    scute.compile(sources, base=base, target=target, store=store).raise_if_refused()


def peft_logprobs(
    base: Path, adapter: Path | None, ids: torch.Tensor, device: torch.device, *, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return log-probabilities `(rows, tokens, vocabulary)` of a model in `dtype`; of the base without an adapter."""
    with _quiet():
        model: Any = load_model(base, dtype)
        if adapter is not None:
            model = PeftModel.from_pretrained(model, str(adapter), autocast_adapter_dtype=False)
        model = model.eval().to(device, dtype)
    with torch.no_grad():
        logits = model(input_ids=ids.to(device)).logits
    found = torch.log_softmax(logits.float(), -1).cpu()
    del model
    gc.collect()
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the libraries' warnings and progress bars."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
