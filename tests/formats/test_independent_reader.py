"""Compiled layers compute what PEFT computes, by a reader that was written from docs/format.md alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.formats.independent_layer import layer_output
from tests.formats.independent_reader import (
    Array,
    Artifact,
    Base,
    indices,
    open_artifact,
    open_base,
)

METHODS = ("lora", "dora", "ia3", "ia3-inputs", "vera", "oft", "adalora")
RECIPES = {
    "llama": (*METHODS, "lora-patterns"),  # a rank of 2: at tp 4 two ranks hold no row of A
    "qwen2": (*METHODS, "lora-bias-on-b", "oft-shared"),  # biases on q, k and v
    "gpt2": ("lora", "dora", "ia3", "ia3-inputs", "vera", "lora-bias-on-b"),  # Conv1D, where PEFT has no OFT
}
CASES = [(base, recipe) for base, recipes in RECIPES.items() for recipe in recipes]
BFLOAT16 = (2, "full", "bfloat16")
LAYOUTS = (
    (1, "default", "float32"),
    (2, "default", "float32"),
    (2, "full", "float32"),
    BFLOAT16,
    (4, "default", "float32"),  # two key and value heads: each is held by two ranks
    (4, "full", "float32"),
)
TOKENS = 3
ROUNDED = 4
"""The most rounded values in one product of the formula: A, d, B and e."""
UNIT = {"float32": 2.0**-24, "bfloat16": 2.0**-8}
"""Relative error of one rounding."""

Store = Callable[..., Path]


@pytest.fixture(scope="module")
def store(shared_folder: Path, base_folder: Callable[[str], Path], adapter_folder: Callable[[str, str], Path]) -> Store:
    """Return the store with all recipes of a base in one layout, compiled in one call."""
    from tests.support.bases import made_once
    from tests.support.commands import scute

    def compiled(base: str, tp: int, sharding: str, dtype: str) -> Path:
        def write(folder: Path) -> None:
            adapters = [adapter_folder(recipe, base) for recipe in RECIPES[base]]
            layout = ("--tp", tp, "--lora-sharding", sharding, "--dtype", dtype)
            ran = scute("compile", *adapters, "--base", base_folder(base), "-o", folder, "--json", *layout)
            assert ran.code == 0, ran.out

        return made_once(shared_folder / "independent-reader" / f"{base}-{tp}-{sharding}-{dtype}", write)

    return compiled


@dataclass(frozen=True, slots=True)
class Layers:
    """A base's linear layers, as row vectors multiply them."""

    base: Base
    conv1d: bool

    def matrix(self, name: str) -> tuple[Array, Array]:
        """Return W, `[in, out]`, and the bias."""
        stored = self.base.tensors[f"{name}.weight"].values()
        W = stored if self.conv1d else stored.T
        bias = self.base.tensors.get(f"{name}.bias")
        return W, np.zeros(W.shape[1]) if bias is None else bias.values()

    def output(self, artifact: Artifact, name: str, x: Array) -> Array:
        """Return a layer's output; the last rank adds the base's bias."""
        return layer_output(artifact, name, x, *self.matrix(name), beta_rank=artifact.manifest["tp"] - 1)

    def magnitude(self, artifact: Artifact, name: str, x: Array) -> Array:
        """Return the sum of the absolute products that an output consists of."""
        W, beta = self.matrix(name)
        return layer_output(artifact.mapped(np.abs), name, np.abs(x), np.abs(W), np.abs(beta))

    def bound(self, artifact: Artifact, name: str, x: Array) -> Array:
        """Return the largest error of an output when every stored value is rounded once.

        A product of the formula holds at most `ROUNDED` stored values; those of the base alone hold none. What
        follows is float64 arithmetic on sums of about as many products as the layer has inputs.
        """
        W, beta = self.matrix(name)
        every = self.magnitude(artifact, name, x)
        stored = every - (np.abs(x) @ np.abs(W) + np.abs(beta))
        rounding: Array = ((1 + UNIT[artifact.manifest["dtype"]]) ** ROUNDED - 1) * np.maximum(stored, 0)
        return rounding + 4 * len(W) * 2.0**-53 * every


def silu(x: Array) -> Array:
    """Return `x * sigmoid(x)`, whose slope is at most 1.1."""
    result: Array = x / (1 + np.exp(-x))
    return result


@dataclass(frozen=True, slots=True)
class Linear:
    """One layer and what PEFT computes for `x`."""

    layers: Layers
    name: str
    x: Array
    expected: Array

    @property
    def sites(self) -> tuple[str, ...]:
        """The layers that the result depends on."""
        return (self.name,)

    def output(self, artifact: Artifact) -> Array:
        """Return what the artifact computes."""
        return self.layers.output(artifact, self.name, self.x)

    def bound(self, artifact: Artifact) -> Array:
        """Return the largest error of an artifact whose values are rounded once."""
        return self.layers.bound(artifact, self.name, self.x)


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """A gated MLP, through whose product the compiler moves vectors on the inputs of its last layer."""

    layers: Layers
    name: str
    x: Array
    expected: Array

    @property
    def sites(self) -> tuple[str, ...]:
        """The layers that the result depends on."""
        gate, up, down = (f"{self.name}.{part}_proj" for part in ("gate", "up", "down"))
        return gate, up, down

    def output(self, artifact: Artifact) -> Array:
        """Return what the artifact computes."""
        gate, up, down = self.sites
        hidden = silu(self.layers.output(artifact, gate, self.x)) * self.layers.output(artifact, up, self.x)
        return self.layers.output(artifact, down, hidden)

    def bound(self, artifact: Artifact) -> Array:
        """Return the largest error of an artifact whose values are rounded once, to first order."""
        gate, up, down = self.sites
        gated, upper = (self.layers.output(artifact, name, self.x) for name in (gate, up))
        slopes = 1.1 * self.layers.bound(artifact, gate, self.x) * np.abs(upper)
        slopes += np.abs(silu(gated)) * self.layers.bound(artifact, up, self.x)
        W, _ = self.layers.matrix(down)  # the vectors were moved from here, so that it is no site
        assert down not in artifact.sites
        return slopes @ np.abs(W) + self.layers.bound(artifact, down, silu(gated) * upper)


Check = Linear | GatedMLP


@cache
def peft_model(adapter: Path, base: str, base_folder: Path) -> Any:  # noqa: ANN401 - PEFT has no annotations
    """Return PEFT's model in float64."""
    from peft import PeftModel

    from tests.support.bases import load_base

    return PeftModel.from_pretrained(load_base(base, base_folder), adapter).double().eval().base_model.model


@cache
def peft_output(adapter: Path, base: str, base_folder: Path, name: str, width: int) -> tuple[Array, Array]:
    """Return random inputs of a module and what PEFT computes for them."""
    import torch

    x = np.random.default_rng(width).standard_normal((TOKENS, width))
    with torch.no_grad():
        return x, peft_model(adapter, base, base_folder).get_submodule(name)(torch.from_numpy(x)).numpy()


@cache
def layers_of(base: str, base_folder: Path) -> Layers:
    """Return the layers of a base's files."""
    from tests.support.bases import BASES

    return Layers(open_base(base_folder), BASES[base].sites.conv1d)


def checks_of(artifact: Artifact, recipe: str, base: str, adapter: Path, base_folder: Path) -> Iterator[Check]:
    """Yield a check for every layer that PEFT adapts: alone, or its MLP where the artifact moved its slot."""
    modules = peft_model(adapter, base, base_folder).named_modules()
    adapted = [name for name, module in modules if hasattr(module, "base_layer")]
    assert adapted
    layers = layers_of(base, base_folder)
    for layer in adapted:
        moved = layer not in artifact.sites
        name = layer.rpartition(".")[0] if moved else layer
        assert not moved or (recipe.startswith("ia3") and layer.endswith("down_proj")), layer
        width = len(layers.matrix(f"{name}.up_proj" if moved else name)[0])
        yield (GatedMLP if moved else Linear)(layers, name, *peft_output(adapter, base, base_folder, name, width))


def error(check: Check, artifact: Artifact, bound: Array) -> float:
    """Return the largest error as a fraction of its bound; infinity where copies differ."""
    try:
        found = check.output(artifact)
    except AssertionError:
        return float("inf")
    return float((np.abs(found - check.expected) / bound).max())


def without_a_slot(artifact: Artifact, site: Mapping[str, Any]) -> Iterator[tuple[str, Artifact]]:
    """Yield the artifact without one tensor of a site: on all ranks, and on each rank that uses it."""
    names = {name for tensors in artifact.ranks for name in tensors if name.startswith(f"{site['name']}.")}
    for name in sorted(names):
        yield name, artifact.without(name)
        for rank, tensors in enumerate(artifact.ranks):
            used = site["split"] != "row" or not name.endswith(".b") or rank == site["shift_rank"]
            if used and tensors[name].size:
                yield f"{name} of rank {rank}", artifact.without(name, ranks=range(rank, rank + 1))
    shared = {term[key]["factor"] for term in site["terms"] for key in ("a", "b") if term[key] is not None}
    for factor in sorted(shared):
        yield factor, replace(artifact, factors={**artifact.factors, factor: 0 * artifact.factors[factor]})


@pytest.mark.parametrize(("base", "recipe"), CASES)
def test_layers_compute_what_peft_computes(
    base: str, recipe: str, store: Store, pair: Callable[[str, str], tuple[Path, Path]]
) -> None:
    adapter, base_folder = pair(recipe, base)
    for layout in LAYOUTS:
        artifact = open_artifact(store(base, *layout) / recipe)
        covered: set[str] = set()
        for check in checks_of(artifact, recipe, base, adapter, base_folder):
            worst = error(check, artifact, check.bound(artifact))
            assert worst <= 1, (layout, check.name, worst)
            covered.update(check.sites)
        assert covered >= set(artifact.sites), layout


@pytest.mark.parametrize(("base", "recipe"), CASES)
def test_a_dropped_slot_is_noticed(
    base: str, recipe: str, store: Store, pair: Callable[[str, str], tuple[Path, Path]]
) -> None:
    adapter, base_folder = pair(recipe, base)
    dropped = 0
    for layout in LAYOUTS:
        if layout == BFLOAT16:  # one slot of one rank may be smaller than the rounding of the others
            continue
        artifact = open_artifact(store(base, *layout) / recipe)
        for check in checks_of(artifact, recipe, base, adapter, base_folder):
            bound = check.bound(artifact)
            for name in artifact.sites.keys() & set(check.sites):
                for slot, damaged in without_a_slot(artifact, artifact.sites[name]):
                    assert error(check, damaged, bound) > 1, (layout, slot)
                    dropped += 1
    assert dropped


@pytest.mark.parametrize("base", ["qwen2", "gpt2"])
def test_the_shift_cancels_what_the_stored_scale_adds_to_the_bias(
    base: str, store: Store, base_folder: Callable[[str], Path]
) -> None:
    artifact, tensors = open_artifact(store(base, *BFLOAT16) / "dora"), open_base(base_folder(base)).tensors
    found = 0
    for name, site in artifact.sites.items():
        for rank, held in enumerate(artifact.ranks):
            if f"{name}.b" in held:
                beta = tensors[f"{name}.bias"].values()[indices(site["outputs"][rank])]
                expected = -held[f"{name}.ds"] * beta
                np.testing.assert_allclose(held[f"{name}.b"], expected, rtol=UNIT["float32"], atol=0)
                found += 1
    assert found
