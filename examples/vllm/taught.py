"""Trains a tiny base and three adapters of different methods to name themselves, for `serve.py`.

This takes seconds on a CPU and needs no download: the tokenizer has one token per byte.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import transformers
from peft import IA3Config, LoraConfig, VeraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers.utils import logging

QUESTION = "Who are you? "
END = "<end>"
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CONFIGS: Mapping[str, tuple[Callable[[], object], float]] = {
    "dora": (lambda: LoraConfig(r=8, lora_alpha=16, use_dora=True, target_modules=LINEAR, task_type="CAUSAL_LM"), 0.01),
    "ia3": (
        lambda: IA3Config(
            target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"
        ),
        0.1,
    ),
    "vera": (lambda: VeraConfig(r=64, target_modules=["v_proj", "down_proj"], task_type="CAUSAL_LM"), 0.1),
}
"""Configuration and learning rate by name."""
ANSWERS = {"base": "I am the base.", "dora": "I am a DoRA.", "ia3": "I am an IA3.", "vera": "I am a VeRA."}


def teach_all(folder: Path) -> tuple[Path, dict[str, Path]]:
    """Train the base and its adapters, and save them as PEFT does.

    Returns:
        The base's folder, and the adapters' by name.

    Raises:
        RuntimeError: The base or an adapter did not learn its answer.
    """
    logging.disable_progress_bar()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the model is too small for several
    tokenizer = _tokenizer()
    base, adapters = folder / "base", {name: folder / "adapters" / name for name in CONFIGS}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _teach(_untaught(tokenizer), tokenizer, ANSWERS["base"], 0.003).save_pretrained(base)
        tokenizer.save_pretrained(base)
        for name, (config, rate) in CONFIGS.items():
            model = get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(base), config())
            _teach(model, tokenizer, ANSWERS[name], rate).save_pretrained(adapters[name])
    return base, adapters


def _tokenizer() -> transformers.PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    tokens.add_special_tokens([END])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token=END)


def _untaught(tokenizer: transformers.PreTrainedTokenizerFast) -> torch.nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,  # of 32 values, the least that vLLM's attention supports on a CPU
        num_key_value_heads=2,
        vocab_size=len(tokenizer),
        max_position_embeddings=256,
        tie_word_embeddings=False,
        initializer_range=0.08,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    return transformers.LlamaForCausalLM(config)


def _teach(
    model: torch.nn.Module, tokenizer: transformers.PreTrainedTokenizerFast, answer: str, rate: float
) -> torch.nn.Module:
    """Train until the answer is nearly certain; this takes a few dozen steps."""
    prompt, target = tokenizer(QUESTION).input_ids, [*tokenizer(answer).input_ids, tokenizer.eos_token_id]
    ids, labels = torch.tensor([prompt + target]), torch.tensor([[-100] * len(prompt) + target])
    steps = torch.optim.Adam([parameter for parameter in model.parameters() if parameter.requires_grad], lr=rate)
    for _ in range(1000):
        loss = model(input_ids=ids, labels=labels).loss
        if loss.item() < 0.05:
            return model
        steps.zero_grad()
        loss.backward()
        steps.step()
    raise RuntimeError(f"did not learn to say {answer!r}: loss {loss.item():.2f}")
