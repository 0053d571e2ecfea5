"""Served models on several ranks, as processes: each row of one mixed batch matches PEFT, in both layouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from scute_compile.diagnostics import ScuteError
from scute_compile.formats.artifact import open_artifact
from scute_compile.runtime_min.base_model import load_model
from scute_compile.runtime_min.model.rank_part import RankPart
from scute_compile.runtime_min.model.served_model import ServedModel
from scute_compile.runtime_min.ranks.cut import cut_layers
from scute_compile.runtime_min.ranks.group import Purpose, RankGroup
from tests.support.artifact_files import rank_file
from tests.support.bases import load_base
from tests.support.commands import compiled
from tests.support.rank_processes import Answer, on_ranks
from tests.support.served import Compiled, Pair, ids_of, logits_of, logprobs, peft_model, relative_error

FLOAT32 = 5e-5
"""Two rounded matrix products against one, through two layers: about 100 units in the last place of the effect."""
LAYOUTS = ("default", "full")
RECIPES = ("lora-patterns", "dora", "rsdora-patterns", "dora-rank-1", "ia3-inputs", "vera", "oft", "adalora")
CONV1D = ("lora", "dora", "ia3-inputs", "vera", "lora-base-bias")

Stores = Mapping[str, Path]
"""A store per layout."""


def stores_of(pair: Pair, recipes: Sequence[str], base: str, tp: int, folder: Path) -> Stores:
    """Compile adapters for both layouts."""
    for layout in LAYOUTS:
        for recipe in recipes:
            adapter, where = pair(recipe, base)
            compiled(adapter, where, folder / layout, *options_of(tp, layout))
    return {layout: folder / layout for layout in LAYOUTS}


def options_of(tp: int, layout: str) -> tuple[object, ...]:
    """Return options of `scute compile`."""
    return ("--tp", tp, "--dtype", "float32", "--lora-sharding", layout)


def for_rank(model: torch.nn.Module, layout: str, max_adapters: int = 2) -> ServedModel:
    """Return a tiny base on this rank, with room for all adapters of a test."""
    return ServedModel.for_rank(
        model,
        lora_sharding=layout,
        max_adapters=max_adapters,
        pool_bytes="8MiB",
        shared_bytes="512KiB",
        max_num_batched_tokens=512,
    )


def answers(base: Path, stores: Stores, recipes: Sequence[str], ids: torch.Tensor) -> Answer:
    """Serve one batch in both layouts, with a different adapter in every row and the base in the last row."""
    found: Answer = {}
    for layout, store in stores.items():
        served = for_rank(load_model(base), layout, max_adapters=len(recipes))
        for recipe in recipes:
            served.load_adapter(store / recipe, adapter_name=recipe)
        # adapter indices then differ between ranks, as after evictions
        served.pool.ensure(recipes[::-1] if served.ranks.rank else recipes)
        served.ranks.traffic.reset()
        found[layout] = torch.log_softmax(logits_of(served, ids, [*recipes, None]), -1)
        found[f"{layout} sent"] = torch.tensor([served.ranks.traffic.sent[purpose] for purpose in Purpose])
        served.remove()
        found[f"{layout} removed"] = logprobs(served.model, ids)
    return found


@pytest.mark.parametrize(
    ("base", "tp", "recipes"),
    [
        ("qwen2", 2, RECIPES),
        ("qwen2", 4, RECIPES[:4]),
        ("llama-nine", 3, RECIPES),
        ("phi3", 2, RECIPES[1:]),
        ("gpt2", 2, CONV1D),
        ("llama", 4, ("lora",)),  # alone: at row-parallel layers only the outputs that a rank expands to are touched
    ],
)
def test_processes_match_peft_in_both_layouts(
    base: str, tp: int, recipes: tuple[str, ...], pair: Pair, tmp_path: Path
) -> None:
    stores = stores_of(pair, recipes, base, tp, tmp_path)
    where, ids = pair(recipes[0], base)[1], ids_of(len(recipes) + 1, 6)
    ranks = on_ranks(tp, answers, where, stores, recipes, ids)
    plain = logprobs(load_base(base, where), ids)
    for layout in LAYOUTS:
        assert all(torch.equal(rank[layout], ranks[0][layout]) for rank in ranks), "every rank has the whole answer"
        computed = ranks[0][layout]
        assert (computed[-1] - plain[-1]).abs().max() < 1e-4, "the base's row"
        assert (ranks[0][f"{layout} removed"] - plain).abs().max() < 1e-4, "the ranks still share the base"
        for row, recipe in enumerate(recipes):
            chosen = Compiled(adapter=pair(recipe, base)[0], base=where, artifact=stores["full"] / recipe)
            expected = logprobs(peft_model(base, chosen), ids[row : row + 1])[0]
            assert relative_error(computed[row], expected, plain[row]) < FLOAT32, (layout, recipe)
    sent = {layout: dict(zip(Purpose, ranks[0][f"{layout} sent"].tolist(), strict=True)) for layout in LAYOUTS}
    assert sent["default"][Purpose.ADAPTERS] == 0
    assert sent["full"][Purpose.ADAPTERS] > 0
    assert sent["default"][Purpose.BASE] == sent["full"][Purpose.BASE] > 0


def half_loaded(base: Path, stores: Mapping[str, Sequence[Path]], ids: torch.Tensor) -> Answer:
    """Load from a different store on each rank, one of which is refused; then load from one store, and serve."""
    found: Answer = {}
    for layout in LAYOUTS:
        served, refusal = for_rank(load_model(base), layout), ""
        try:
            served.load_adapter(stores[layout][served.ranks.rank], adapter_name="lora")
        except ScuteError as error:
            refusal = f"{error.diagnostics[0].code.name} {error}"
        served.load_adapter(stores[layout][0], adapter_name="lora")
        found[layout] = logits_of(served, ids, ["lora", None])
        found[f"{layout} refusal"] = torch.tensor(list(refusal.encode()), dtype=torch.uint8)
    return found


def refusal_of(rank: Answer, layout: str) -> str:
    """Return the text of what a rank raised."""
    return bytes(rank[f"{layout} refusal"].tolist()).decode()


def test_no_rank_loads_an_adapter_that_one_rank_refuses(pair: Pair, tmp_path: Path) -> None:
    """Otherwise the other ranks would wait forever in the next step."""
    stores = {}
    adapter, where = pair("lora", "llama")
    for layout in LAYOUTS:
        good, bad = (
            compiled(adapter, where, tmp_path / layout / name, *options_of(2, layout)) for name in ("good", "bad")
        )
        rank_file(bad, 1).write_bytes(b"")
        stores[layout] = (good, bad)
    ranks = on_ranks(2, half_loaded, where, stores, ids_of(2, 4))
    for layout in LAYOUTS:
        refusals = [refusal_of(rank, layout) for rank in ranks]
        assert refusals[0].startswith("SC815"), layout
        assert "see the error of rank 1" in refusals[0], layout
        assert refusals[1].startswith("SC6"), layout
        first, second = (rank[layout] for rank in ranks)
        assert torch.equal(first, second), layout
        assert not torch.equal(first[0], first[1]), layout


def test_ranks_that_read_different_artifacts_load_no_adapter(pair: Pair, tmp_path: Path) -> None:
    """Two hosts may hold different compiles under one path: each would serve its part of another adapter."""
    where = pair("lora", "llama")[1]
    stores = {
        layout: [
            compiled(pair(recipe, "llama")[0], where, tmp_path / layout / recipe, *options_of(2, layout))
            for recipe in ("lora", "rslora")
        ]
        for layout in LAYOUTS
    }
    ranks = on_ranks(2, half_loaded, where, stores, ids_of(2, 4))
    for layout in LAYOUTS:
        for rank in ranks:
            assert refusal_of(rank, layout).startswith("SC815"), layout
            assert "another artifact on ranks [1] than on rank 0" in refusal_of(rank, layout), layout
        assert torch.equal(ranks[0][layout], ranks[1][layout]), layout


def attention_traffic(base: Path, artifact: Path, ids: torch.Tensor) -> Answer:
    """Return the bytes that each rank sends in one step of a LoRA on attention."""
    served = for_rank(load_model(base), "full")
    served.load_adapter(artifact, adapter_name="one")
    served.ranks.traffic.reset()
    logits_of(served, ids, ["one"] * len(ids))
    sent = served.ranks.traffic.sent
    return {"base": torch.tensor(sent[Purpose.BASE]), "adapters": torch.tensor(sent[Purpose.ADAPTERS])}


def test_a_lora_on_attention_adds_five_halves_of_its_rank_over_the_width(
    base_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """Three all-gathers of r cost 3/2 all-reduces of r; with one all-reduce of r: 5 r / 2 h of the base's."""
    from tests.support.adapters import lora, write_config
    from tests.support.bases import BASES

    base, rank, width = base_folder("llama"), 4, 64
    config = lora(target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])(BASES["llama"].sites)
    write_config(config, "llama", base, tmp_path / "attention")
    artifact = compiled(tmp_path / "attention", base, tmp_path / "store", "--tp", 2, "--lora-sharding", "full")
    for sent in on_ranks(2, attention_traffic, base, artifact, ids_of(3, 5)):
        of_attention = sent["base"] / 2  # the other half is the feed-forward part's
        assert sent["adapters"] / of_attention == pytest.approx(5 * rank / (2 * width), rel=1e-6)


@pytest.fixture
def alone(base_folder: Callable[[str], Path]) -> ServedModel:
    """One rank, without a process group."""
    return for_rank(load_base("llama", base_folder("llama")), "full")


def test_one_rank_needs_no_process_group(alone: ServedModel, pair: Pair, tmp_path: Path) -> None:
    adapter, where = pair("dora", "llama")
    artifact = compiled(adapter, where, tmp_path / "store", *options_of(1, "full"))
    ids = ids_of(2, 6)
    chosen = Compiled(adapter=adapter, base=where, artifact=artifact)
    plain, expected = (logprobs(model, ids) for model in (load_base("llama", where), peft_model("llama", chosen)))
    alone.load_adapter(artifact, adapter_name="one")
    computed = torch.log_softmax(logits_of(alone, ids, ["one", None]), -1)
    assert torch.equal(computed[1], plain[1])
    assert relative_error(computed[0], expected[0], plain[0]) < FLOAT32
    assert (alone.ranks.size, alone.ranks.rank) == (1, 0)
    alone.delete_adapter("one")
    with pytest.raises(ScuteError, match="SC802"):
        logits_of(alone, ids, ["one", None])


def test_artifacts_that_do_not_fit_are_refused(alone: ServedModel, pair: Pair, tmp_path: Path) -> None:
    adapter, where = pair("lora", "llama")
    alone.load_adapter(compiled(adapter, where, tmp_path / "one", *options_of(1, "full")), adapter_name="one")
    with pytest.raises(ScuteError, match="3 adapter names for 4 rows"):
        logits_of(alone, ids_of(4, 5), ["one", None, None])
    with pytest.raises(ScuteError, match="SC806"):
        alone.load_adapter(tmp_path / "one" / "lora", adapter_name="one")
    for layout in LAYOUTS:
        with pytest.raises(ScuteError, match="SC801"):
            alone.load_adapter(compiled(adapter, where, tmp_path / layout, *options_of(2, layout)), adapter_name="two")
    for other in ("gpt2", "llama-wide"):
        artifact = compiled(*pair("lora", other), tmp_path / other, *options_of(1, "full"))
        with pytest.raises(ScuteError, match="SC402"):
            alone.load_adapter(artifact, adapter_name="three")


def test_an_artifact_whose_cuts_differ_from_the_model_is_refused(pair: Pair, tmp_path: Path) -> None:
    """Equal shapes are not enough: ranks would apply an adapter to other columns than it was trained for."""
    adapter, where = pair("lora", "llama")
    artifact = open_artifact(compiled(adapter, where, tmp_path, *options_of(2, "default")))
    ranks = RankGroup()
    ranks.size = 2
    cuts = cut_layers(load_base("llama", where), ranks)
    paths = {site: site for site in artifact.sites}
    RankPart(ranks=ranks, cuts=cuts).check(artifact, "one", paths)
    site = "model.layers.0.self_attn.q_proj"
    swapped = {**cuts, site: replace(cuts[site], outputs=cuts[site].outputs[::-1])}
    with pytest.raises(ScuteError, match="as this model is cut") as refused:
        RankPart(ranks=ranks, cuts=swapped).check(artifact, "one", paths)
    assert refused.value.diagnostics[0].code.name == "SC402"
    assert refused.value.diagnostics[0].where == f"one: {site}"
