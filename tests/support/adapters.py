"""Adapters as PEFT saves them: recipes by method and option, and random learned values away from the identity."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from peft import AdaLoraConfig, IA3Config, LoraConfig, OFTConfig, VeraConfig, get_peft_model

from tests.support.bases import BASES, Sites, load_base, made_once, write_base

RANK = 4
TASK = "CAUSAL_LM"
Config: TypeAlias = Callable[[Sites], object]
"""Makes a PEFT configuration for the sites of an architecture."""
Draw: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Returns a learned value, given its initial value and standard normal noise of the same shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A PEFT configuration and the name of its method in artifacts."""

    config: Config
    method: str


def lora(**options: object) -> Config:
    """Configure LoRA on every site; `options` override the defaults."""

    def config(sites: Sites) -> object:
        chosen = {"r": RANK, "lora_alpha": 6, "target_modules": list(sites.every), "task_type": TASK, **options}
        return LoraConfig(**{**chosen, "fan_in_fan_out": sites.conv1d})

    return config


def ia3(inputs: Callable[[Sites], tuple[str, ...]], outputs: Callable[[Sites], tuple[str, ...]]) -> Recipe:
    """Configure IA3 that scales the inputs of some sites and the outputs of other sites."""
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
    """Configure VeRA on the values and the MLP's last layer, with one shared pair; `options` override the defaults."""
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
    """Configure OFT in blocks of 8 on every site; `options` override the defaults."""
    return Recipe(
        method="oft",
        config=lambda sites: OFTConfig(
            **{"oft_block_size": 8, "target_modules": list(sites.every), "task_type": TASK, **options}
        ),
    )


def adalora(**options: object) -> Config:
    """Configure AdaLoRA on every site, with different `init_r` and `target_r`; `options` override the defaults."""

    def config(sites: Sites) -> object:
        chosen = {"init_r": 6, "target_r": 3, "lora_alpha": 18, "total_step": 10, "task_type": TASK, **options}
        return AdaLoraConfig(**{"target_modules": list(sites.every), **chosen, "fan_in_fan_out": sites.conv1d})

    return config


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
    "adalora": Recipe(config=adalora(), method="adalora"),
}


def normal(deviation: float, *, mean: float = 0.0) -> Draw:
    """Draw normal values around a mean."""
    return lambda _, noise: mean + deviation * noise


def relative(deviation: float) -> Draw:
    """Draw the initial value times `1 + deviation * noise`."""
    return lambda initial, noise: initial * (1 + deviation * noise)


def scaled_by_inputs(deviation: float) -> Draw:
    """Draw normal values of the standard deviation `deviation / sqrt(inputs)`, for shape `(outputs, inputs)`."""
    return lambda initial, noise: deviation * noise / initial.shape[-1] ** 0.5


LARGE_DRAWS: Mapping[str, Draw] = {
    "magnitude": relative(0.3),
    "ia3_l": normal(0.3, mean=1),
    "vera_lambda": normal(0.5),
    "lora_E": normal(0.3, mean=0.5),
    "": normal(0.2),
}
"""Draws by a part of the parameter's name, for tiny bases: each slot changes the logits visibly."""
SMALL_DRAWS: Mapping[str, Draw] = {
    "magnitude": relative(0.1),
    "ia3_l": normal(0.2, mean=1),
    "vera_lambda": normal(0.3),
    "lora_E": normal(0.3, mean=1),
    "lora_A": scaled_by_inputs(1),
    "oft_R": normal(0.02),
    "": normal(0.05),
}
"""Draws for real bases, small enough that the logits stay those of a language model."""


def draw(model: torch.nn.Module, seed: int, draws: Mapping[str, Draw] = LARGE_DRAWS) -> None:
    """Draw every trainable parameter of a PEFT model.

    Args:
        model: The PEFT model, changed in place.
        seed: The seed of the noise.
        draws: Draws by a part of the parameter's name; the first match is used, and `""` matches all names.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            noise = torch.randn(parameter.shape, generator=generator)
            matching = next(each for part, each in draws.items() if part in name)
            parameter.data = matching(parameter.data, noise)


def write_config(config: object, base: str, base_folder: Path, folder: Path, *, seed: int = 5) -> None:
    """Save an adapter of a configuration as PEFT saves it, with values drawn from `seed`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT warns about options that tests choose on purpose
        model = get_peft_model(load_base(base, base_folder), config)
        draw(model, seed)
        model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)


def adapter(recipe: str, base: str, bases: Path, adapters: Path) -> Path:
    """Return the folder of a recipe's adapter on a base, written once under `adapters`."""
    base_folder = made_once(bases / base, lambda folder: write_base(base, folder))
    config = RECIPES[recipe].config(BASES[base].sites)
    return made_once(
        adapters / base / recipe, lambda folder: write_config(config, base, base_folder, folder, seed=len(recipe))
    )
