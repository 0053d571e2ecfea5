"""The demo's models: a tiny random Llama, one adapter per method as PEFT saves it, and their log-probabilities.

Learned values are drawn far from the identity, so that a slot that is dropped, scaled or cut wrongly changes the
output. This is the only module of the command line that imports torch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers
from peft import AdaLoraConfig, IA3Config, LoraConfig, OFTConfig, PeftModel, VeraConfig, get_peft_model

from scute_compile.formats.artifact import Artifact
from scute_compile.runtime_min.base_model import load_model
from scute_compile.runtime_min.oracle.adapted_model import AdaptedModel

VOCABULARY = 128
EVERY_SITE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

CONFIGS: Mapping[str, Callable[[], object]] = {
    "lora": lambda: LoraConfig(r=8, lora_alpha=12, target_modules=list(EVERY_SITE), task_type="CAUSAL_LM"),
    "dora": lambda: LoraConfig(
        r=4, lora_alpha=6, use_dora=True, target_modules=list(EVERY_SITE), task_type="CAUSAL_LM"
    ),
    "ia3": lambda: IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"
    ),
    "vera": lambda: VeraConfig(r=16, target_modules=["v_proj", "down_proj"], task_type="CAUSAL_LM"),
    "oft": lambda: OFTConfig(oft_block_size=8, target_modules=list(EVERY_SITE), task_type="CAUSAL_LM"),
    "adalora": lambda: AdaLoraConfig(
        init_r=6, target_r=3, lora_alpha=18, total_step=10, target_modules=list(EVERY_SITE), task_type="CAUSAL_LM"
    ),
}
"""Adapter name, which is its method's -> PEFT's configuration."""


def write_base(folder: Path) -> None:
    """Write a Llama with two layers, four heads and two key-value heads, in several files."""
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    model = transformers.LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = noise * (2.0 / parameter.shape[-1]) ** 0.5 if parameter.ndim > 1 else 1 + 0.2 * noise
    with _quiet():
        model.save_pretrained(folder, max_shard_size="100KB")


def write_adapter(name: str, base: Path, folder: Path) -> None:
    """Write the adapter `name` of `CONFIGS`. Its configuration names `base`."""
    with _quiet():
        model = get_peft_model(load_model(base), CONFIGS[name]())
        generator = torch.Generator().manual_seed(1 + list(CONFIGS).index(name))
        for key, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.data = _drawn(key, parameter.data, generator)
        model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)


def _drawn(key: str, initial: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(initial.shape, generator=generator)
    if "magnitude" in key:
        return initial * (1 + 0.3 * noise)
    if "ia3_l" in key:
        return 1 + 0.3 * noise
    if "vera_lambda" in key or "lora_E" in key:
        return 0.5 + 0.3 * noise
    return 0.2 * noise


def random_tokens(rows: int, length: int) -> torch.Tensor:
    """Return token ids `(rows, length)`, equal in every run."""
    return torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(7))


def peft_logprobs(base: Path, adapter: Path, ids: torch.Tensor) -> torch.Tensor:
    """Return PEFT's log-probabilities `(rows, length, vocabulary)` of a saved adapter."""
    with _quiet():
        model: torch.nn.Module = PeftModel.from_pretrained(load_model(base), str(adapter)).eval()
    return logprobs(model, ids)


def logprobs(model: Callable[..., object], ids: torch.Tensor, **options: object) -> torch.Tensor:
    """Return a model's log-probabilities in float32, `(rows, length, vocabulary)`."""
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids, **options).logits  # type: ignore[attr-defined] # a model's output
    return torch.log_softmax(logits.float(), -1)


def compared(
    base: Path,
    adapters: Mapping[str, Path],
    artifacts: Mapping[str, Artifact],
    names: Sequence[str | None],
    *,
    length: int,
) -> tuple[tuple[float, float], ...]:
    """Run one batch with an adapter per row, and each row alone in PEFT.

    Args:
        base: The folder of the base.
        adapters: PEFT folders by name.
        artifacts: The adapters' artifacts by name.
        names: The adapter of each row; None for the base alone.
        length: Tokens per row.

    Returns:
        For each row the mean absolute error of the log-probabilities against PEFT, and the mean absolute change from
        the base to PEFT's adapted model.
    """
    ids = random_tokens(len(names), length)
    model = load_model(base)
    unadapted = logprobs(model, ids)
    with AdaptedModel(model, artifacts) as adapted:
        batch = logprobs(adapted, ids, adapter_names=names)
    distances = []
    for row, name in enumerate(names):
        expected = peft_logprobs(base, adapters[name], ids[row : row + 1])[0] if name else unadapted[row]
        distances.append((_mean_distance(batch[row], expected), _mean_distance(expected, unadapted[row])))
    return tuple(distances)


def _mean_distance(first: torch.Tensor, second: torch.Tensor) -> float:
    return (first - second).abs().mean().item()


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress PEFT's warnings and transformers' progress bars, and restore the state of the random generator."""
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            torch.manual_seed(0)  # VeRA and OFT draw saved values when they are constructed
            yield
    finally:
        if bars:
            logging.enable_progress_bar()
