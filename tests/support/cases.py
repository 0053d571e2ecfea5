"""Adapters as they arrive from users, intact and damaged, each with its expected outcome.

Outcomes: `exact` compiles and equals PEFT; `noted` does so and has notes; `refused` writes nothing and names the fault.
A group in `words` matches when one of its spellings is in the findings, in lower case.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path

import torch
from peft import IA3Config, LoraConfig, OFTConfig, VeraConfig
from safetensors import safe_open

from tests.support import damage
from tests.support.bases import ATTENTION, GATED
from tests.support.damage import ROOT, added, changed, configured, renamed

TASK = "CAUSAL_LM"


class Outcome(StrEnum):
    """The three outcomes of `check` and `compile`."""

    EXACT = "exact"
    NOTED = "noted"
    REFUSED = "refused"


class Oracle(StrEnum):
    """The reference of a compiled case."""

    PEFT = "PEFT, on the adapter as it is"
    UNCHANGED = "the artifact of the adapter before it was changed, because PEFT can't load this one"
    SEPARATE_TEST = "a separate test"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An adapter, the changes that made it, and its expected outcome."""

    name: str
    outcome: Outcome
    config: Callable[[], object]
    base: str = "llama"
    trained_on: str = ""
    """The base of the training run, when it is not the base that it is compiled for."""
    edit: Callable[[damage.Saved], None] | None = None
    spoil: Callable[[Path], None] | None = None
    words: tuple[str | tuple[str, ...], ...] = ()
    sites_named: int = 0
    """The least number of different sites that the findings name."""
    tp: tuple[int, ...] = (1,)
    oracle: Oracle = Oracle.PEFT


def lora(**options: object) -> Callable[[], object]:
    """Configure LoRA of rank 8 on all sites of a Llama."""
    chosen = {"r": 8, "lora_alpha": 16, "target_modules": [*ATTENTION, *GATED], "task_type": TASK, **options}
    return partial(LoraConfig, **chosen)


def _some_head() -> torch.Tensor:
    return torch.randn(128, 64, generator=torch.Generator().manual_seed(9))


def base_tensor(folder: Path, key: str) -> torch.Tensor:
    """Read a tensor from any file of a base folder."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            if key in opened.keys():  # noqa: SIM118 - the reader is no mapping
                tensor: torch.Tensor = opened.get_tensor(key)
                return tensor
    raise AssertionError(key)


ENDLESS = "([a-z0-9_.]+)*!"
E, N, R = Outcome.EXACT, Outcome.NOTED, Outcome.REFUSED

NAMES = (
    Case(
        name="keys keep the wrapper of torch.compile",
        outcome=N,
        config=lora(),
        edit=renamed("^", "_orig_mod."),
        words=("_orig_mod",),
        oracle=Oracle.UNCHANGED,
    ),
    Case(
        name="the prefix appears twice",
        outcome=N,
        config=lora(),
        edit=renamed("^", ROOT),
        words=("base_model.model",),
        oracle=Oracle.UNCHANGED,
    ),
    Case(
        name="text keys on a multimodal base",
        outcome=N,
        config=lora(),
        base="vision-language",
        trained_on="mistral-text",
        words=("language_model",),
        oracle=Oracle.UNCHANGED,
    ),
    Case(
        name="every layer has another name",
        outcome=R,
        config=lora(),
        edit=renamed(r"\.layers\.", ".blocks."),
        words=("blocks", "layers"),
    ),
    Case(
        name="one layer has another name",
        outcome=R,
        config=lora(),
        edit=renamed(r"\.layers\.1\.", ".layers.7."),
        words=("layers.7",),
    ),
    Case(
        name="a dense head that no field announces",
        outcome=R,
        config=lora(),
        edit=added(ROOT + "lm_head.weight", _some_head),
        words=("lm_head.weight",),
    ),
    Case(
        name="a replaced head",
        outcome=R,
        config=lora(modules_to_save=["lm_head"]),
        words=("lm_head", ("modules_to_save", "replace")),
    ),
    Case(
        name="an unchanged copy of the head",
        outcome=N,
        config=lora(),
        # The fixture replaces the empty tensor with the base's.
        edit=added(ROOT + "lm_head.base_layer.weight", lambda: torch.empty(0)),
        words=("lm_head", ("identical", "equal", "copy")),
    ),
)

SCALES = (
    Case(name="rsLoRA of rank 16", outcome=E, config=lora(r=16, use_rslora=True)),
    Case(
        name="rsLoRA with patterns",
        outcome=E,
        config=lora(use_rslora=True, rank_pattern={"q_proj": 4}, alpha_pattern={"down_proj": 64}),
        tp=(1, 2),
    ),
    Case(
        name="an alpha pattern that matches nothing",
        outcome=N,
        config=lora(),
        edit=configured(alpha_pattern={"^q_proj$": 100}),
        words=("alpha_pattern", "^q_proj$"),
    ),
    Case(
        name="a rank that no pattern explains",
        outcome=R,
        config=lora(),
        edit=damage.one_site_of_rank(4),
        words=("8", "4", "layers.0.self_attn.q_proj"),
    ),
    Case(
        name="a trained adapter with alpha zero",
        outcome=R,
        config=lora(),
        edit=configured(lora_alpha=0),
        words=("lora_alpha", "scale"),
    ),
    Case(
        name="a scale of one hundred",
        outcome=E,
        config=lora(r=4, lora_alpha=400, target_modules=["q_proj", "v_proj"]),
    ),
    Case(
        name="a bias on B",
        outcome=E,
        base="qwen2",
        config=lora(lora_bias=True, target_modules=["q_proj", "v_proj"]),
        tp=(1, 2),
    ),
    Case(name="a trained bias of the base", outcome=E, base="qwen2", config=lora(bias="lora_only"), tp=(1, 2)),
)

RANKS = (
    Case(name="fewer key and value heads than ranks", outcome=E, config=lora(), tp=(1, 2, 4, 8)),
    Case(
        name="DoRA on fused projections",
        outcome=E,
        base="phi3",
        config=lora(use_dora=True, target_modules=["qkv_proj", "gate_up_proj", "o_proj", "down_proj"]),
        tp=(1, 2),
    ),
    Case(name="heads that three ranks can't share", outcome=R, config=lora(), tp=(3,), words=("8", "3", "heads")),
    Case(
        name="DoRA on sites that are cut by input",
        outcome=E,
        config=lora(use_dora=True, target_modules=["o_proj", "down_proj"]),
        tp=(1, 2, 4),
    ),
    Case(
        name="a rotation block across a cut",
        outcome=R,
        config=partial(OFTConfig, oft_block_size=32, target_modules=["o_proj"], task_type=TASK),
        tp=(4,),
        words=("32", "16", "o_proj"),
    ),
)

MAGNITUDES = (
    Case(name="DoRA beside base biases", outcome=E, base="qwen2", config=lora(use_dora=True), tp=(1, 2)),
    Case(
        name="DoRA on square weights stored by input",
        outcome=E,
        base="gpt2",
        config=lora(r=4, use_dora=True, fan_in_fan_out=True, target_modules=["c_attn", "c_proj", "c_fc"]),
    ),
    Case(
        name="magnitudes spelt as in raw state dicts",
        outcome=E,
        config=lora(use_dora=True),
        edit=renamed("magnitude_vector$", "magnitude_vector.weight"),
    ),
    Case(
        name="one layer lacks its magnitudes",
        outcome=R,
        config=lora(use_dora=True),
        edit=damage.removed(r"layers\.1\..*magnitude"),
        words=("magnitude", "layers.1"),
    ),
    Case(
        name="magnitudes that the configuration denies",
        outcome=R,
        config=lora(use_dora=True),
        edit=configured(use_dora=False),
        words=("magnitude", "use_dora"),
    ),
    Case(
        name="magnitudes in both spellings",
        outcome=R,
        config=lora(use_dora=True),
        edit=damage.magnitudes_in_both_spellings,
        words=("lora_magnitude_vector.weight", ("twice", "both", "two keys")),
    ),
    Case(
        name="DoRA of another base",
        outcome=R,
        trained_on="llama-wide",
        config=lora(use_dora=True),
        words=("96", "64"),
        sites_named=3,
    ),
)

VECTORS = (
    Case(
        name="IA3 beside biases",
        outcome=E,
        base="qwen2",
        config=partial(
            IA3Config,
            target_modules=["k_proj", "v_proj", "down_proj"],
            feedforward_modules=["down_proj"],
            task_type=TASK,
        ),
        tp=(1, 2),
    ),
    Case(
        name="IA3 on a plain feed-forward part",
        outcome=E,
        base="gpt2",
        config=partial(
            IA3Config,
            target_modules=["c_attn", "mlp.c_proj"],
            feedforward_modules=["mlp.c_proj"],
            fan_in_fan_out=True,
            task_type=TASK,
        ),
    ),
    Case(
        name="IA3 on inputs that sites share",
        outcome=E,
        config=partial(
            IA3Config,
            target_modules=["q_proj", "o_proj", "gate_proj", "down_proj"],
            feedforward_modules=["q_proj", "o_proj", "gate_proj"],
            task_type=TASK,
        ),
        tp=(1, 2),
    ),
    Case(
        name="an infinite IA3 vector",
        outcome=R,
        base="qwen2",
        config=partial(IA3Config, target_modules=["k_proj"], feedforward_modules=[], task_type=TASK),
        edit=changed(r"layers\.0", damage.first_set_to(float("inf"))),
        words=(("not finite", "infinit"), "layers.0.self_attn.k_proj"),
    ),
    Case(
        name="VeRA without its projections",
        outcome=N,
        config=partial(
            VeraConfig, r=16, target_modules=["q_proj", "v_proj", "down_proj"], save_projection=False, task_type=TASK
        ),
        words=("regenerated", "key"),
    ),
    Case(
        name="VeRA whose projections are sliced",
        outcome=E,
        config=partial(VeraConfig, r=16, target_modules=["q_proj", "v_proj", "down_proj"], task_type=TASK),
        tp=(1, 2),
    ),
)
