"""Adapters as PEFT saves them: one recipe per method and option, with learned values far from the identity."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import AdaLoraConfig, IA3Config, LoraConfig, OFTConfig, VeraConfig, get_peft_model

from tests.support.bases import BASES, Sites, load_base, made_once, write_base

RANK = 4
TASK = "CAUSAL_LM"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A PEFT configuration for an architecture's sites."""

    config: Callable[[Sites], object]
    method: str
    """The method's name in artifacts."""


def lora(**options: object) -> Callable[[Sites], object]:
    """LoRA on every site unless `target_modules` says otherwise."""

    def config(sites: Sites) -> object:
        chosen = {"r": RANK, "lora_alpha": 6, "target_modules": list(sites.every), "task_type": TASK, **options}
        return LoraConfig(**{**chosen, "fan_in_fan_out": sites.conv1d})

    return config


def ia3(inputs: Callable[[Sites], tuple[str, ...]], outputs: Callable[[Sites], tuple[str, ...]]) -> Recipe:
    """IA3 that scales the inputs of some sites and the outputs of others."""
    return Recipe(
        method="ia3",
        config=lambda sites: IA3Config(
            target_modules=[*inputs(sites), *outputs(sites)],
            feedforward_modules=list(inputs(sites)),
            fan_in_fan_out=sites.conv1d,
            task_type=TASK,
        ),
    )


def vera(**options: object) -> Recipe:
    """VeRA on the values and the last layer of the MLP: two shapes with one shared pair."""
    return Recipe(
        method="vera",
        config=lambda sites: VeraConfig(
            **{
                "r": 16,
                "target_modules": [*sites.values, sites.down],
                "fan_in_fan_out": sites.conv1d,
                "task_type": TASK,
                **options,
            }
        ),
    )


def oft(**options: object) -> Recipe:
    """OFT in blocks of 8 on every site."""
    return Recipe(
        method="oft",
        config=lambda sites: OFTConfig(
            **{"oft_block_size": 8, "target_modules": list(sites.every), "task_type": TASK, **options}
        ),
    )


def adalora(sites: Sites) -> object:
    """AdaLoRA whose `r` and final rank differ from the trained rank."""
    return AdaLoraConfig(
        init_r=6,
        target_r=3,
        lora_alpha=18,
        total_step=10,
        target_modules=list(sites.every),
        fan_in_fan_out=sites.conv1d,
        task_type=TASK,
    )


RECIPES: Mapping[str, Recipe] = {
    "lora": Recipe(config=lora(), method="lora"),
    "rslora": Recipe(config=lora(use_rslora=True, r=9, lora_alpha=3), method="lora"),
    "lora-patterns": Recipe(
        config=lambda sites: lora(
            rank_pattern={sites.values[0]: 7, rf"layers\.0\..*{sites.attention_out}": 2},
            alpha_pattern={sites.down: 20},
        )(sites),
        method="lora",
    ),
    "lora-bias-on-b": Recipe(config=lora(lora_bias=True), method="lora"),
    "lora-base-bias": Recipe(config=lora(bias="lora_only"), method="lora"),
    "lora-one-layer": Recipe(config=lora(layers_to_transform=[1]), method="lora"),
    "lora-regex": Recipe(
        config=lora(target_modules=r".*layers\.0\.(self_attn\.[qv]_proj|mlp\.down_proj)", lora_alpha=16), method="lora"
    ),
    "lora-all-linear": Recipe(config=lora(target_modules="all-linear"), method="lora"),
    "dora": Recipe(config=lora(use_dora=True), method="dora"),
    "rsdora-patterns": Recipe(
        config=lambda sites: lora(use_dora=True, use_rslora=True, rank_pattern={sites.down: 3})(sites), method="dora"
    ),
    "dora-rank-1": Recipe(config=lora(use_dora=True, r=1), method="dora"),
    "ia3": ia3(lambda sites: (sites.down,), lambda sites: sites.values),
    "ia3-inputs": ia3(
        lambda sites: (sites.attention_out, sites.feedforward[0], sites.down), lambda sites: sites.values
    ),
    "vera": vera(),
    "vera-regenerated": vera(save_projection=False, projection_prng_key=11),
    "oft": oft(),
    "oft-series-3": oft(num_cayley_neumann_terms=3),
    "oft-exact": oft(use_cayley_neumann=False),
    "oft-shared": oft(block_share=True, use_cayley_neumann=False),
    "oft-constrained": oft(coft=True, eps=2.0, use_cayley_neumann=False),
    "adalora": Recipe(config=adalora, method="adalora"),
}


def _drawn(name: str, parameter: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(parameter.shape, generator=generator)
    if "magnitude" in name:
        return parameter * (1 + 0.3 * noise)
    if "ia3_l" in name:
        return 1 + 0.3 * noise
    if "vera_lambda" in name:
        return 0.5 * noise
    if "lora_E" in name:
        return 0.5 + 0.3 * noise
    return 0.2 * noise


def draw(model: torch.nn.Module, seed: int) -> None:
    """Draw every learned value of a PEFT model: magnitudes and vectors around 1, factors around 0."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.data = _drawn(name, parameter.data, generator)


def write_config(config: object, base: str, base_folder: Path, folder: Path, *, seed: int = 5) -> None:
    """Save an adapter of this configuration, drawn from `seed`, as PEFT saves it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT warns of options that the tests choose deliberately
        model = get_peft_model(load_base(base, base_folder), config)
        draw(model, seed)
        model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)


def adapter(recipe: str, base: str, bases: Path, adapters: Path) -> Path:
    """Return the adapter of a recipe on a base, written once under `adapters`."""
    base_folder = made_once(bases / base, lambda folder: write_base(base, folder))
    config = RECIPES[recipe].config(BASES[base].sites)
    return made_once(
        adapters / base / recipe, lambda folder: write_config(config, base, base_folder, folder, seed=len(recipe))
    )
