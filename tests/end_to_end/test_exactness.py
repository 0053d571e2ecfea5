"""Compiled adapters compute what PEFT computes: every method, architecture and number of ranks, in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.adapters import RECIPES
from tests.support.bases import BASES
from tests.support.commands import compiled, scute, verified

FLOAT32 = 5e-5
"""Two rounded matrix products in place of one, through two layers: about 100 units in the last place of the effect."""
BFLOAT16 = 2.5e-2
"""Factors rounded to 8 bits: 2^-8 per value at most, a few per cent of the effect after two layers."""

METHODS = ("lora", "dora", "ia3", "vera", "oft", "adalora")
OPTIONS = tuple(name for name in RECIPES if name not in METHODS)
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "phi3", "gpt2", "gpt_neox")
BIASED = ("qwen2", "gpt2", "gpt_neox", "opt")

Pair = Callable[[str, str], tuple[Path, Path]]


def _served(base: str, recipe: str) -> bool:
    """Return whether PEFT has the method for the base. It has no OFT for weights that are stored `(in, out)`."""
    return not (BASES[base].sites.conv1d and recipe.startswith("oft"))


def _assert_equals_peft(artifact: Path, adapter: Path, base: Path, tolerance: float) -> None:
    figures = verified(artifact, adapter, base)
    assert figures["comparable"]
    assert figures["mean_abs_adapter_effect"] >= 0.1
    assert figures["max_abs_logprob_error"] >= figures["mean_abs_logprob_error"]
    assert figures["relative_error"] <= tolerance


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    ("base", "recipe"), [(base, recipe) for base in ARCHITECTURES for recipe in METHODS if _served(base, recipe)]
)
def test_every_method_is_exact_on_every_architecture(
    base: str, recipe: str, tp: int, pair: Pair, tmp_path: Path
) -> None:
    adapter, where = pair(recipe, base)
    artifact = compiled(adapter, where, tmp_path / "store", "--tp", tp, "--dtype", "float32")
    _assert_equals_peft(artifact, adapter, where, FLOAT32)


@pytest.mark.parametrize("recipe", OPTIONS)
@pytest.mark.parametrize("tp", [1, 2])
def test_every_option_of_a_method_is_exact(recipe: str, tp: int, pair: Pair, tmp_path: Path) -> None:
    adapter, where = pair(recipe, "qwen2")
    artifact = compiled(adapter, where, tmp_path / "store", "--tp", tp, "--dtype", "float32")
    _assert_equals_peft(artifact, adapter, where, FLOAT32)


@pytest.mark.parametrize("base", BIASED)
@pytest.mark.parametrize("recipe", ["lora-base-bias", "lora-bias-on-b", "ia3-inputs"])
def test_biases_of_the_base_are_replaced_scaled_or_kept_by_method(
    base: str, recipe: str, pair: Pair, tmp_path: Path
) -> None:
    adapter, where = pair(recipe, base)
    artifact = compiled(adapter, where, tmp_path / "store", "--dtype", "float32")
    _assert_equals_peft(artifact, adapter, where, FLOAT32)


@pytest.mark.parametrize("recipe", METHODS)
@pytest.mark.parametrize(("base", "tp"), [("llama-nine", 3), ("llama", 4), ("llama", 8)])
def test_every_method_is_exact_on_three_four_and_eight_ranks(
    base: str, tp: int, recipe: str, pair: Pair, tmp_path: Path
) -> None:
    if recipe == "oft" and tp == 8:
        pytest.skip("160 inputs of down_proj are 20 per rank, which cuts a block of 8: refused, see the next test")
    adapter, where = pair(recipe, base)
    artifact = compiled(adapter, where, tmp_path / "store", "--tp", tp, "--dtype", "float32")
    _assert_equals_peft(artifact, adapter, where, FLOAT32)


def test_blocks_across_the_cut_of_eight_ranks_are_refused(pair: Pair, tmp_path: Path) -> None:
    adapter, base = pair("oft", "llama")
    asked = ("compile", adapter, "--base", base, "--tp", 8, "-o", tmp_path / "store", "--json")
    ran = scute(*asked)
    assert ran.code == 1
    codes = {finding["code"]: finding for finding in ran.adapter["findings"]}
    assert "down_proj" in codes["SC502"]["where"]


@pytest.mark.parametrize("recipe", METHODS)
def test_methods_are_exact_on_a_model_without_a_plan_for_ranks(recipe: str, pair: Pair, tmp_path: Path) -> None:
    adapter, where = pair(recipe, "opt")
    artifact = compiled(adapter, where, tmp_path / "store", "--dtype", "float32")
    _assert_equals_peft(artifact, adapter, where, FLOAT32)


@pytest.mark.parametrize("recipe", ["lora", "dora", "oft", "vera", "vera-regenerated"])
def test_methods_are_exact_on_a_base_in_bfloat16(recipe: str, pair: Pair, tmp_path: Path) -> None:
    """Regenerated projections pass through the base's dtype, as they did when the adapter was trained."""
    adapter, where = pair(recipe, "llama-bf16")
    artifact = compiled(adapter, where, tmp_path / "store", "--tp", 2, "--dtype", "float32")
    _assert_equals_peft(artifact, adapter, where, FLOAT32)


@pytest.mark.parametrize("recipe", METHODS)
@pytest.mark.parametrize("base", ["llama", "qwen2"])
def test_artifacts_in_bfloat16_are_exact_up_to_their_rounding(
    base: str, recipe: str, pair: Pair, tmp_path: Path
) -> None:
    adapter, where = pair(recipe, base)
    artifact = compiled(adapter, where, tmp_path / "store", "--tp", 2, "--dtype", "bfloat16")
    _assert_equals_peft(artifact, adapter, where, BFLOAT16)


@pytest.mark.parametrize("base", ["llama-tied", "mixtral"])
def test_attention_of_tied_and_of_mixture_models_is_exact(base: str, pair: Pair, tmp_path: Path) -> None:
    adapter, where = pair("dora", base)
    artifact = compiled(adapter, where, tmp_path / "store", "--dtype", "float32")
    _assert_equals_peft(artifact, adapter, where, FLOAT32)
