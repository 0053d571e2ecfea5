"""Ranks as processes answer what PEFT answers, in both layouts, row by row of one mixed batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from scute_compile.diagnostics import ScuteError
from scute_compile.formats.artifact import open_artifact
from scute_compile.ir.linear import Split
from scute_compile.ir.target import LoraSharding
from scute_compile.runtime_min.base_model import load_model
from scute_compile.runtime_min.model.ranks import serve_rank
from scute_compile.runtime_min.model.served_model import ServedModel
from scute_compile.runtime_min.ranks.cut import structure_of
from scute_compile.runtime_min.ranks.distributed_layers import RankModel
from scute_compile.runtime_min.ranks.group import Purpose, RankGroup
from scute_compile.runtime_min.ranks.load_time_norms import shard_scale
from scute_compile.runtime_min.reference import take
from tests.support.artifact_files import manifest_of, rank_file
from tests.support.bases import load_base
from tests.support.commands import compiled
from tests.support.rank_processes import Answer, on_ranks
from tests.support.served import Compiled, ids_of, logprobs, peft_model, relative_error

FLOAT32 = 5e-5
"""Two rounded matrix products against one, through two layers: about 100 units in the last place of the effect."""
LAYOUTS = ("default", "full")
EVERY = ("lora-patterns", "dora", "rsdora-patterns", "dora-rank-1", "ia3-inputs", "vera", "oft", "adalora")
CONV1D = ("lora", "dora", "ia3-inputs", "vera", "lora-base-bias")

Pair = Callable[[str, str], tuple[Path, Path]]
Stores = Mapping[str, Path]
"""A store per layout."""


def stores_of(pair: Pair, recipes: Sequence[str], base: str, tp: int, folder: Path) -> Stores:
    """Compile adapters for both layouts."""
    for layout in LAYOUTS:
        for recipe in recipes:
            adapter, where = pair(recipe, base)
            options = ("--tp", tp, "--dtype", "float32", "--lora-sharding", layout)
            compiled(adapter, where, folder / layout, *options)
    return {layout: folder / layout for layout in LAYOUTS}


def answers(base: Path, stores: Stores, recipes: Sequence[str], ids: torch.Tensor) -> Answer:
    """One batch with another adapter in every row and the base in the last, in both layouts; runs on every rank."""
    model = RankModel(load_model(base))
    found: Answer = {}
    for layout, store in stores.items():
        for recipe in recipes:
            model.load(f"{layout} {recipe}", store / recipe)
        model.traffic.reset()
        rows = [*(f"{layout} {recipe}" for recipe in recipes), None]
        found[layout] = torch.log_softmax(model(input_ids=ids, adapter_names=rows).logits, -1)
        sent = model.traffic.sent
        found[f"{layout} sent"] = torch.tensor([sent[purpose] for purpose in Purpose])
    mixed = [f"{LAYOUTS[row % 2]} {recipe}" for row, recipe in enumerate(recipes)]
    found["mixed"] = torch.log_softmax(model(input_ids=ids, adapter_names=[*mixed, None]).logits, -1)
    for layout, store in stores.items():
        found |= pooled(base, store, recipes, ids, layout)
    return found


def pooled(base: Path, store: Path, recipes: Sequence[str], ids: torch.Tensor, layout: str) -> Answer:
    """The same batch through the pool and the custom op."""
    served, ranks = serve_rank(
        load_model(base),
        lora_sharding=layout,
        max_adapters=len(recipes),
        num_pages=4096,
        shared_pages=256,
        max_num_batched_tokens=512,
    )
    for recipe in recipes:
        served.load_adapter(recipe, store / recipe)
    # slots differ from rank to rank, as they do after evictions where one rank holds more than another
    served.pool.ensure(recipes[::-1] if ranks.rank else recipes)
    out = served(ids, adapter_names=[*recipes, None])
    sent = torch.tensor([ranks.traffic.sent[purpose] for purpose in Purpose])
    return {f"{layout} pool": torch.log_softmax(out.logits, -1), f"{layout} pool sent": sent}


@pytest.mark.parametrize(
    ("base", "tp", "recipes"),
    [
        ("qwen2", 2, EVERY),
        ("qwen2", 4, EVERY[:4]),
        ("llama-nine", 3, EVERY),
        ("phi3", 2, EVERY[1:]),
        ("gpt2", 2, CONV1D),
        ("llama", 4, ("lora",)),  # alone: of a row-parallel layer it touches what a rank expands to, and no more
    ],
)
def test_processes_answer_what_peft_answers_in_both_layouts(
    base: str, tp: int, recipes: tuple[str, ...], pair: Pair, tmp_path: Path
) -> None:
    stores = stores_of(pair, recipes, base, tp, tmp_path)
    where, ids = pair(recipes[0], base)[1], ids_of(len(recipes) + 1, 6)
    ranks = on_ranks(tp, answers, where, stores, recipes, ids)
    plain = logprobs(load_base(base, where), ids)
    pools = [f"{layout} pool" for layout in LAYOUTS]
    for layout in (*LAYOUTS, "mixed", *pools):
        assert all(torch.equal(rank[layout], ranks[0][layout]) for rank in ranks), "every rank has the whole answer"
        ours = ranks[0][layout]
        assert (ours[-1] - plain[-1]).abs().max() < 1e-4, "the base's row"
        for row, recipe in enumerate(recipes):
            chosen = Compiled(adapter=pair(recipe, base)[0], base=where, artifact=stores["full"] / recipe)
            theirs = logprobs(peft_model(base, chosen), ids[row : row + 1])[0]
            assert relative_error(ours[row], theirs, plain[row]) < FLOAT32, (layout, recipe)
    sent = {
        layout: dict(zip(Purpose, ranks[0][f"{layout} sent"].tolist(), strict=True)) for layout in (*LAYOUTS, *pools)
    }
    for kind in ("", " pool"):
        assert sent[f"default{kind}"][Purpose.ADAPTERS] == 0
        assert sent[f"full{kind}"][Purpose.ADAPTERS] > 0
        assert sent[f"default{kind}"][Purpose.BASE] == sent[f"full{kind}"][Purpose.BASE] > 0


KINDS = (("pool", "default"), ("pool", "full"), ("model", "full"))


def half_loaded(base: Path, stores: Mapping[str, Sequence[Path]], ids: torch.Tensor) -> Answer:
    """Each rank loads from a store of its own, of which one is not the other's; then both serve what they have."""
    ranks, found = RankGroup(), Answer()
    for kind, layout in KINDS:
        model: ServedModel | RankModel
        if kind == "pool":
            model, _ = serve_rank(
                load_model(base),
                max_adapters=2,
                num_pages=1024,
                shared_pages=256,
                max_num_batched_tokens=64,
                lora_sharding=LoraSharding(layout),
            )
        else:
            model = RankModel(load_model(base))
        said = ""
        try:
            model.load("lora", stores[layout][ranks.rank])
        except ScuteError as error:
            said = f"{error.diagnostics[0].code.name} {error}"
        model.load("lora", stores[layout][0])
        rows = ["lora", None]
        out = (
            model(ids, adapter_names=rows)
            if isinstance(model, ServedModel)
            else model(input_ids=ids, adapter_names=rows)
        )
        found[f"{kind} {layout}"] = out.logits
        found[f"{kind} {layout} said"] = torch.tensor(list(said.encode()), dtype=torch.uint8)
    return found


def said_by(rank: Answer, kind: tuple[str, str]) -> str:
    """What a rank refused with."""
    return bytes(rank[" ".join((*kind, "said"))].tolist()).decode()


def test_what_one_rank_refuses_no_rank_loads(pair: Pair, tmp_path: Path) -> None:
    """The others would wait in the next step for ever."""
    stores = {}
    for layout in LAYOUTS:
        adapter, where = pair("lora", "llama")
        options = ("--tp", 2, "--dtype", "float32", "--lora-sharding", layout)
        good, bad = (compiled(adapter, where, tmp_path / layout / name, *options) for name in ("good", "bad"))
        rank_file(bad, 1).write_bytes(b"")
        stores[layout] = (good, bad)
    ranks = on_ranks(2, half_loaded, where, stores, ids_of(2, 4))
    for kind in KINDS:
        said = [said_by(rank, kind) for rank in ranks]
        assert said[0].startswith("SC815"), kind
        assert "see what rank 1 says" in said[0], kind
        assert said[1].startswith("SC6"), kind
        first, second = (rank[" ".join(kind)] for rank in ranks)
        assert torch.equal(first, second), kind
        assert not torch.equal(first[0], first[1]), kind


def test_ranks_that_read_different_artifacts_load_none(pair: Pair, tmp_path: Path) -> None:
    """Two hosts may hold different compiles under one path: both would be served in part."""
    where = pair("lora", "llama")[1]
    stores = {
        layout: [
            compiled(
                pair(recipe, "llama")[0],
                where,
                tmp_path / layout / recipe,
                "--tp",
                2,
                "--dtype",
                "float32",
                "--lora-sharding",
                layout,
            )
            for recipe in ("lora", "rslora")
        ]
        for layout in LAYOUTS
    }
    ranks = on_ranks(2, half_loaded, where, stores, ids_of(2, 4))
    for kind in KINDS:
        for rank in ranks:
            assert said_by(rank, kind).startswith("SC815"), kind
            assert "another artifact on ranks [1] than on rank 0" in said_by(rank, kind), kind
        assert torch.equal(ranks[0][" ".join(kind)], ranks[1][" ".join(kind)]), kind


def attention_traffic(base: Path, artifact: Path, ids: torch.Tensor) -> Answer:
    """Bytes that each rank sends in one step of a LoRA on attention."""
    model = RankModel(load_model(base))
    model.load("one", artifact)
    model.traffic.reset()
    model(input_ids=ids, adapter_names=["one"] * len(ids))
    sent = model.traffic.sent
    return {"base": torch.tensor(sent[Purpose.BASE]), "adapters": torch.tensor(sent[Purpose.ADAPTERS])}


def test_a_lora_on_attention_adds_five_halves_of_its_rank_over_the_width(
    base_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """Three gathers of r against half of an all-reduce of h, and one all-reduce of r: 5 r / 2 h of attention's own."""
    from tests.support.adapters import lora, write_config
    from tests.support.bases import BASES

    base, rank, width = base_folder("llama"), 4, 64
    config = lora(target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])(BASES["llama"].sites)
    write_config(config, "llama", base, tmp_path / "attention")
    artifact = compiled(tmp_path / "attention", base, tmp_path / "store", "--tp", 2, "--lora-sharding", "full")
    for sent in on_ranks(2, attention_traffic, base, artifact, ids_of(3, 5)):
        of_attention = sent["base"] / 2  # the other half is the feed-forward part's
        assert sent["adapters"] / of_attention == pytest.approx(5 * rank / (2 * width), rel=1e-6)


def scales(base: Path, adapter: Path, artifact: Path, c: float) -> Answer:
    """DoRA's s of every site from this rank's own shards, and from its file of the artifact."""
    ranks, model = RankGroup(), load_model(base)
    tensors = load_file(adapter / "adapter_model.safetensors")
    file = load_file(artifact / manifest_of(artifact)["ranks"][ranks.rank]["file"])
    found: Answer = {}
    linears = structure_of(model).linears
    for record in open_artifact(artifact).manifest.sites:
        inputs, outputs = record.inputs[ranks.rank], record.outputs[ranks.rank]
        weight = model.get_parameter(f"{record.name}.weight").detach()
        weight = weight.T if linears[record.name].transposed else weight
        a, b = (tensors[f"base_model.model.{record.name}.lora_{letter}.weight"] for letter in "AB")
        magnitude = tensors[f"base_model.model.{record.name}.lora_magnitude_vector"].flatten()
        found[f"computed {record.name}"] = shard_scale(
            take(take(weight, 0, outputs), 1, inputs),
            take(a, 1, inputs),
            take(b, 0, outputs).T,
            c,
            take(magnitude, 0, outputs),
            split=record.split,
            ranks=ranks,
        )
        found[f"compiled {record.name}"] = file[f"{record.name}.ds"].double()
        found[f"row {record.name}"] = torch.tensor(record.split is Split.ROW)
    return found


@pytest.mark.parametrize(("base", "tp"), [("llama-bf16", 2), ("gpt2", 2), ("llama-nine", 3)])
def test_scales_from_the_shards_that_ranks_hold_are_the_compiled_ones(
    base: str, tp: int, pair: Pair, tmp_path: Path
) -> None:
    adapter, where = pair("dora", base)
    artifact = compiled(adapter, where, tmp_path / "store", "--tp", tp, "--dtype", "float32")
    ranks = on_ranks(tp, scales, where, adapter, artifact, 6 / 4)
    rows = 0
    for found in ranks:
        for name, computed in found.items():
            if name.startswith("computed "):
                site = name.removeprefix("computed ")
                stored = found[f"compiled {site}"]  # s - 1, rounded to float32: coarse beside an s near zero
                allowed = 1e-6 * computed.abs() + 2.0**-24 * stored.abs()
                assert ((computed - 1 - stored).abs() <= allowed).all(), site
                rows += bool(found[f"row {site}"])
    assert rows == 4 * tp, "two row-parallel sites in each of two layers"
    row = next(name.removeprefix("row ") for name, split in ranks[0].items() if name.startswith("row ") and bool(split))
    assert all(torch.equal(rank[f"computed {row}"], ranks[0][f"computed {row}"]) for rank in ranks)


@pytest.fixture
def model(base_folder: Callable[[str], Path]) -> RankModel:
    """One rank, without a process group."""
    return RankModel(load_base("llama", base_folder("llama")))


def test_one_rank_needs_no_process_group(model: RankModel, pair: Pair, tmp_path: Path) -> None:
    adapter, where = pair("dora", "llama")
    artifact = compiled(adapter, where, tmp_path / "store", "--dtype", "float32", "--lora-sharding", "full")
    ids = ids_of(2, 6)
    plain, theirs = (
        logprobs(chosen, ids)
        for chosen in (
            load_base("llama", where),
            peft_model("llama", Compiled(adapter=adapter, base=where, artifact=artifact)),
        )
    )
    model.load("one", artifact)
    ours = torch.log_softmax(model(input_ids=ids, adapter_names=["one", None]).logits, -1)
    assert torch.equal(ours[1], plain[1])
    assert relative_error(ours[0], theirs[0], plain[0]) < FLOAT32
    model.unload("one")
    with pytest.raises(ScuteError, match="SC802"):
        model(input_ids=ids, adapter_names=["one", None])


def test_artifacts_that_do_not_fit_are_refused(model: RankModel, pair: Pair, tmp_path: Path) -> None:
    adapter, where = pair("lora", "llama")
    model.load("one", compiled(adapter, where, tmp_path / "one"))
    with pytest.raises(ScuteError, match="3 adapter ids for 4 rows"):
        model(input_ids=ids_of(4, 5), adapter_names=["one", None, None])
    with pytest.raises(ScuteError, match="SC806"):
        model.load("one", tmp_path / "one" / "lora")
    with pytest.raises(ScuteError, match="SC801"):
        model.load("two", compiled(adapter, where, tmp_path / "two", "--tp", 2, "--lora-sharding", "full"))
    for other in ("gpt2", "llama-wide"):
        with pytest.raises(ScuteError, match="SC402"):
            model.load("three", compiled(*pair("lora", other), tmp_path / other))
