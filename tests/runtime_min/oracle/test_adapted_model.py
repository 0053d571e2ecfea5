"""A model adapted by artifacts: the formula at every slot, mixed batches, simulated ranks and refusals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from scute_compile.diagnostics import ScuteError
from scute_compile.runtime_min.oracle.adapted_model import AdaptedModel
from tests.support.artifacts import Ranges, Written, write_artifact
from tests.support.bases import load_base

IDS = torch.randint(0, 128, (4, 9), generator=torch.Generator().manual_seed(3))
# Logits of these models are below 20, after a few hundred float32 additions per layer.
CLOSE = 20 * 512 * 2.0**-24


def drawn(*shape: int, seed: int, scale: float = 0.3) -> torch.Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def lora(layer: int) -> Written:
    """Return a column-parallel site with LoRA and every vector slot."""
    slots = {
        "ds": drawn(64, seed=1),
        "b": drawn(64, seed=2),
        "A0": drawn(5, 64, seed=3),
        "B0": drawn(5, 64, seed=4),
        "d0": 1 + drawn(5, seed=5),
        "e0": 1 + drawn(64, seed=6),
    }
    return Written(name=f"model.layers.{layer}.self_attn.q_proj", in_features=64, out_features=64, slots=slots)


def values(layer: int) -> Written:
    """Return a site with two value heads of width 8, and shared factors."""
    slots = {"ds": drawn(16, seed=11), "A0": drawn(3, 80, seed=12), "B0": drawn(3, 24, seed=13)}
    return Written(
        name=f"model.layers.{layer}.self_attn.v_proj",
        in_features=64,
        out_features=16,
        slots=slots,
        shared=frozenset({"A0", "B0"}),
    )


def rotated(layer: int, kind: str) -> Written:
    """Return a row-parallel site with a rotation, a scale, a shift and LoRA."""
    delta = drawn(20, 8, 8, seed=21) if kind == "blocks" else drawn(160, seed=22)
    slots = {"dR": delta, "ds": drawn(64, seed=23), "b": drawn(64, seed=24)}
    slots |= {"A0": drawn(4, 160, seed=25), "B0": drawn(4, 64, seed=26), "e0": 1 + drawn(64, seed=27)}
    return Written(
        name=f"model.layers.{layer}.mlp.down_proj", in_features=160, out_features=64, slots=slots, split="row"
    )


SITES = (lora(0), values(0), rotated(0, "blocks"), rotated(1, "diagonal"), values(1))


@pytest.fixture
def model(base_folder: Callable[[str], Path]) -> torch.nn.Module:
    return load_base("llama", base_folder("llama"))


def logits(model: torch.nn.Module, artifacts: dict[str, Path], ids: Sequence[str | None]) -> torch.Tensor:
    with torch.no_grad(), AdaptedModel(model, artifacts) as adapted:
        out: torch.Tensor = adapted.forward(input_ids=IDS[: len(ids)], adapter_names=ids).logits  # type: ignore[attr-defined] # the model's
        return out


def as_matrix(delta: torch.Tensor) -> torch.Tensor:
    """Return `R - I` as a matrix."""
    if delta.ndim == 1:
        return torch.diag(delta)
    matrix: torch.Tensor = torch.block_diag(*delta)  # type: ignore[no-untyped-call] # PyTorch does not annotate it
    return matrix


def by_hand(model: torch.nn.Module, sites: Sequence[Written]) -> torch.Tensor:
    """Return logits with every site computed by the formula from its layer's weight; these layers have no bias."""

    def hook(site: Written) -> Callable[..., torch.Tensor]:
        ones = torch.ones(1)

        def run(layer: torch.nn.Module, args: tuple[torch.Tensor], _: torch.Tensor) -> torch.Tensor:
            x, slots, weight = args[0], site.slots, layer.weight
            assert isinstance(weight, torch.Tensor)
            delta = slots.get("dR", torch.zeros(site.in_features))
            whole = as_matrix(delta)
            y = (x + x @ whole) @ weight.T
            out = y * (1 + slots.get("ds", 0 * ones)) + slots.get("b", 0 * ones)
            if "A0" in slots:
                a, b = slots["A0"][:, : site.in_features], slots["B0"][:, : site.out_features]
                out = out + (((x @ a.T) * slots.get("d0", ones)) @ b) * slots.get("e0", ones)
            return out

        return run

    handles = [model.get_submodule(site.name).register_forward_hook(hook(site)) for site in sites]
    with torch.no_grad():
        out: torch.Tensor = model(input_ids=IDS).logits
    for handle in handles:
        handle.remove()
    return out


def test_an_artifact_computes_the_formula(model: torch.nn.Module, tmp_path: Path) -> None:
    artifact = write_artifact(tmp_path, SITES)
    expected = by_hand(model, SITES)
    assert (logits(model, {"one": artifact}, ["one"] * 4) - expected).abs().max() < CLOSE
    assert (logits(model, {"one": artifact}, [None] * 4) - expected).abs().max() > 0.1


@pytest.mark.parametrize(
    ("number", "slot"), [(n, slot) for n, site in enumerate(SITES) for slot in site.slots if slot not in ("A0", "B0")]
)
def test_dropping_any_slot_changes_the_logits(model: torch.nn.Module, tmp_path: Path, number: int, slot: str) -> None:
    sites = list(SITES)
    sites[number] = replace(sites[number], slots={k: v for k, v in sites[number].slots.items() if k != slot})
    kept = logits(model, {"one": write_artifact(tmp_path, SITES, name="kept")}, ["one"])
    dropped = logits(model, {"one": write_artifact(tmp_path, sites, name="dropped")}, ["one"])
    assert (kept - dropped).abs().max() > 100 * CLOSE


def test_base_rows_of_a_mixed_batch_are_bit_equal_to_the_base(model: torch.nn.Module, tmp_path: Path) -> None:
    artifacts = {"one": write_artifact(tmp_path, SITES, name="one")}
    plain = logits(model, artifacts, [None] * 4)
    mixed = logits(model, artifacts, [None, "one", None, "one"])
    with torch.no_grad():
        assert torch.equal(model(input_ids=IDS).logits, plain)
    assert torch.equal(mixed[[0, 2]], plain[[0, 2]])
    assert (mixed[[1, 3]] - plain[[1, 3]]).abs().max() > 0.1


def test_rows_of_a_mixed_batch_equal_those_of_each_adapter_alone(model: torch.nn.Module, tmp_path: Path) -> None:
    artifacts = {
        "one": write_artifact(tmp_path, SITES[:2], name="one"),
        "two": write_artifact(tmp_path, SITES[1:], name="two"),
    }
    mixed = logits(model, artifacts, ["two", "one", None, "two"])
    for row, adapter in enumerate(("two", "one", None, "two")):
        alone = logits(model, artifacts, [adapter] * 4)
        assert (mixed[row] - alone[row]).abs().max() < CLOSE


def test_simulated_ranks_equal_one_rank(model: torch.nn.Module, tmp_path: Path) -> None:
    whole = logits(model, {"one": write_artifact(tmp_path, SITES, name="one")}, ["one"] * 4)
    for tp in (2, 4):
        cut = [replace(site, outputs=copies(tp)) if "v_proj" in site.name else site for site in SITES]
        artifact = write_artifact(tmp_path, cut, name=f"tp{tp}", tp=tp)
        assert (logits(model, {"one": artifact}, ["one"] * 4) - whole).abs().max() < CLOSE


def copies(tp: int) -> list[Ranges]:
    """Return the outputs of two key and value heads on `tp` ranks."""
    return [[[8 * (2 * rank // tp), 8 * (2 * rank // tp) + 8]] for rank in range(tp)]


def test_unequal_copies_on_ranks_are_refused(model: torch.nn.Module, tmp_path: Path) -> None:
    site = Written(
        name="model.layers.0.self_attn.v_proj",
        in_features=64,
        out_features=16,
        slots={"ds": drawn(32, seed=1)},
        outputs=[[[0, 16]], [[16, 32]]],
    )

    def claim_copies(manifest: dict[str, object]) -> None:
        manifest["sites"][0]["outputs"] = [[[0, 16]], [[0, 16]]]  # type: ignore[index] # JSON

    artifact = write_artifact(tmp_path, [site], tp=2, change=claim_copies)
    with pytest.raises(ScuteError, match="different values on ranks 0 and 1"):
        AdaptedModel(model, {"one": artifact})


def test_the_bias_of_a_row_parallel_layer_is_added_once(base_folder: Callable[[str], Path], tmp_path: Path) -> None:
    model = load_base("gpt2", base_folder("gpt2"))
    site = Written(
        name="h.1.mlp.c_proj",  # a Conv1D, named without the model's root
        in_features=256,
        out_features=64,
        slots={"dR": drawn(256, seed=1), "ds": drawn(64, seed=2), "b": drawn(64, seed=3)},
        split="row",
    )
    one, two = (write_artifact(tmp_path, [site], name=f"tp{tp}", tp=tp) for tp in (1, 2))
    whole = logits(model, {"one": one}, ["one"] * 4)
    layer = model.get_submodule("transformer.h.1.mlp.c_proj")
    slots = site.slots

    def by_formula(_: torch.nn.Module, args: tuple[torch.Tensor], __: torch.Tensor) -> torch.Tensor:
        weight, bias = layer.weight, layer.bias
        assert isinstance(weight, torch.Tensor)
        assert isinstance(bias, torch.Tensor)
        return ((args[0] * (1 + slots["dR"])) @ weight + bias) * (1 + slots["ds"]) + slots["b"]

    handle = layer.register_forward_hook(by_formula)
    with torch.no_grad():
        expected = model(input_ids=IDS).logits
    handle.remove()
    assert (whole - expected).abs().max() < CLOSE
    assert (logits(model, {"one": two}, ["one"] * 4) - whole).abs().max() < CLOSE


def test_an_unknown_adapter_name_is_named_in_the_error(model: torch.nn.Module, tmp_path: Path) -> None:
    artifact = write_artifact(tmp_path, SITES)
    with pytest.raises(ScuteError, match="`two`"):
        logits(model, {"one": artifact}, ["two"])


def test_one_adapter_name_per_row_is_required(model: torch.nn.Module, tmp_path: Path) -> None:
    with (
        pytest.raises(ScuteError, match="3 adapter names for 4 rows"),
        AdaptedModel(model, {"one": write_artifact(tmp_path, SITES)}) as adapted,
    ):
        adapted.forward(input_ids=IDS, adapter_names=["one"] * 3)


def test_sites_that_are_not_layers_of_the_model_are_refused(model: torch.nn.Module, tmp_path: Path) -> None:
    other = write_artifact(tmp_path, [replace(lora(0), name="model.layers.9.self_attn.q_proj")], name="name")
    wide = write_artifact(tmp_path, [replace(values(0), name="model.layers.0.self_attn.q_proj")], name="shape")
    for artifact in (other, wide):
        with pytest.raises(ScuteError, match="SC402"):
            AdaptedModel(model, {"one": artifact})


def test_remove_restores_the_model(model: torch.nn.Module, tmp_path: Path) -> None:
    with torch.no_grad():
        before = model(input_ids=IDS).logits
        adapted = AdaptedModel(model, {"one": write_artifact(tmp_path, SITES)})
        adapted.remove()
        with adapted.using(["one"] * 4):
            assert torch.equal(model(input_ids=IDS).logits, before)
