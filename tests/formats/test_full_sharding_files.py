"""Fully sharded artifacts, written by hand: readers compute the formula or refuse them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scute_compile.base.cuts import cut_term, shares
from scute_compile.diagnostics import ScuteError
from scute_compile.formats.artifact import Artifact, open_artifact
from scute_compile.ir.expressions import width
from scute_compile.ir.linear import Split
from scute_compile.ir.target import LoraSharding
from scute_compile.runtime_min.base_model import load_model
from scute_compile.runtime_min.model import rank_part
from scute_compile.runtime_min.model.served_model import ServedModel
from scute_compile.runtime_min.pool.directory import DirectoryEntry
from scute_compile.runtime_min.pool.fully_sharded import check_exchanges
from scute_compile.runtime_min.pool.reading import read_adapter
from scute_compile.runtime_min.ranks.exchange import TermExchange
from scute_compile.runtime_min.ranks.group import RankGroup
from tests.base.test_cuts import heads, layer
from tests.runtime_min.oracle.test_adapted_model import CLOSE, by_hand, drawn, logits, lora
from tests.runtime_min.pool.test_reading import sites_of
from tests.support.artifacts import Written, write_artifact
from tests.support.bases import load_base
from tests.support.commands import compiled
from tests.support.rank_processes import Answer, on_ranks

Pair = Callable[[str, str], tuple[Path, Path]]


@given(st.integers(0, 300), st.integers(1, 12))
def test_shares_divide_in_order_and_differ_by_one_at_most(size: int, tp: int) -> None:
    found = shares(size, tp)
    assert len(found) == tp
    assert [index for start, stop in found for index in range(start, stop)] == list(range(size))
    widths = [stop - start for start, stop in found]
    assert max(widths) - min(widths) <= 1
    assert widths == sorted(widths, reverse=True)


def test_a_term_is_cut_along_the_axis_that_is_whole_on_its_site() -> None:
    column, row = layer(Split.COLUMN, heads("q", 4, 2)), layer(Split.ROW, heads("in", 4, 2), other=10)
    assert (cut_term(column, 5, 2).rows, cut_term(column, 5, 2).columns) == (((0, 3), (3, 5)), None)
    assert (cut_term(row, 5, 2).rows, cut_term(row, 5, 2).columns) == (None, ((0, 5), (5, 10)))
    for whole in (cut_term(column, 5, 1), cut_term(layer(Split.REPLICATED, heads("q", 4, 2)), 5, 2)):
        assert (whole.rows, whole.columns) == (None, None)


def column_site(tp: int) -> Written:
    """Return a column-parallel site with every vector and a term of rank 5, which neither 2 nor 4 ranks divide."""
    return replace(lora(0), rows=list(map(list, shares(5, tp))))


def shared_site(tp: int) -> Written:
    """Return a site whose factors are windows of wider shared factors."""
    slots = {
        "A0": drawn(3, 80, seed=12),
        "B0": drawn(3, 24, seed=13),
        "d0": 1 + drawn(3, seed=14),
        "e0": drawn(16, seed=15),
    }
    outputs = [[[8 * (2 * rank // tp), 8 * (2 * rank // tp) + 8]] for rank in range(tp)]
    return Written(
        name="model.layers.1.self_attn.v_proj",
        in_features=64,
        out_features=16,
        slots=slots,
        shared=frozenset({"A0", "B0"}),
        outputs=outputs,
        rows=list(map(list, shares(3, tp))),
    )


def row_site(tp: int, *, shared: bool) -> Written:
    """Return a rotated, scaled and shifted site and a term with d and e, whose outputs are cut unevenly."""
    slots = {
        "dR": drawn(160, seed=21),
        "ds": drawn(64, seed=23),
        "b": drawn(64, seed=24),
        "A0": drawn(4, 160, seed=25),
        "B0": drawn(4, 70 if shared else 64, seed=26),
        "d0": 1 + drawn(4, seed=27),
        "e0": 1 + drawn(64, seed=28),
    }
    edges = [0, 10, *[30 + rank for rank in range(tp - 2)], 64]
    return Written(
        name=f"model.layers.{int(shared)}.mlp.down_proj",
        in_features=160,
        out_features=64,
        slots=slots,
        split="row",
        shared=frozenset({"A0", "B0"}) if shared else frozenset(),
        columns=[[edges[i], edges[i + 1]] for i in range(tp)],
    )


def sites(tp: int) -> list[Written]:
    return [column_site(tp), shared_site(tp), row_site(tp, shared=False), row_site(tp, shared=True)]


@pytest.mark.parametrize("tp", [2, 4])
def test_every_slot_is_computed_as_the_formula_says(
    tp: int, base_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    model = load_base("llama", base_folder("llama"))
    artifact = write_artifact(tmp_path, sites(tp), tp=tp)
    expected = by_hand(model, sites(tp))
    assert (logits(model, {"one": artifact}, ["one"] * 4) - expected).abs().max() < CLOSE
    moved = write_artifact(
        tmp_path,
        [replace(site, slots={**site.slots, "d0": site.slots["d0"].flip(0)}) for site in sites(tp)],
        name="other",
        tp=tp,
    )
    assert (logits(model, {"one": moved}, ["one"] * 4) - expected).abs().max() > 100 * CLOSE


def _set(index: int, field: str, value: object) -> Callable[[dict[str, Any]], None]:
    def change(manifest: dict[str, Any]) -> None:
        manifest["sites"][index]["terms"][0][field] = value

    return change


FAULTS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "a row that no rank holds": (_set(0, "rows", [[0, 3], [3, 4]]), "don't divide 5"),
    "a row that two ranks hold": (_set(0, "rows", [[0, 3], [2, 5]]), "don't divide 5"),
    "rows in another order": (_set(0, "rows", [[3, 5], [0, 3]]), "don't divide 5"),
    "an interval backwards": (_set(0, "rows", [[0, 6], [6, 5]]), "don't divide 5"),
    "too few ranks": (_set(0, "rows", [[0, 5]]), "1 cuts for 2 ranks"),
    "rows on a row site": (_set(2, "rows", [[0, 2], [2, 4]]), "row site never are"),
    "columns on a column site": (_set(0, "columns", [[0, 32], [32, 64]]), "column site never are"),
    "outputs that no rank holds": (_set(2, "columns", [[0, 10], [11, 64]]), "don't divide 64"),
    "a term that isn't divided": (_set(0, "rows", None), "lora_sharding full"),
    "the other layout's name": (lambda manifest: manifest.update(lora_sharding="default"), "lora_sharding default"),
    "no layout's name": (lambda manifest: manifest.pop("lora_sharding"), "lora_sharding: field required"),
    "an unknown layout": (lambda manifest: manifest.update(lora_sharding="half"), "lora_sharding"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_cuts_that_do_not_divide_a_term_are_refused(fault: str, tmp_path: Path) -> None:
    change, message = FAULTS[fault]
    with pytest.raises(ScuteError, match=message) as refused:
        open_artifact(write_artifact(tmp_path, sites(2), tp=2, change=change))
    assert refused.value.diagnostics[0].code.name == "SC601"


def test_files_of_the_other_layout_are_refused(tmp_path: Path) -> None:
    """The files have the default layout, the manifest states the fully sharded one."""
    whole = [replace(site, rows=None, columns=None) for site in sites(2)]

    def claim(manifest: dict[str, Any]) -> None:
        manifest["lora_sharding"] = "full"
        for record, site in zip(manifest["sites"], sites(2), strict=True):
            record["terms"][0] |= {"rows": site.rows} if site.rows else {"columns": site.columns}

    with pytest.raises(ScuteError, match="SC605"):
        open_artifact(write_artifact(tmp_path, whole, tp=2, change=claim))


def test_pools_refuse_artifacts_of_the_other_layout(pair: Pair, tmp_path: Path) -> None:
    adapter, base = pair("lora", "llama")
    options = ("--tp", 2, "--lora-sharding", "full", "--dtype", "float32")
    artifact = open_artifact(compiled(adapter, base, tmp_path / "store", *options))
    with pytest.raises(ScuteError, match="SC812") as refused:
        read_adapter(artifact, sites_of(artifact), torch.float32, tp=2)
    assert "compile the adapter again with --lora-sharding default" in str(refused.value)
    other = open_artifact(compiled(adapter, base, tmp_path / "default", "--tp", 2, "--dtype", "float32"))
    with pytest.raises(ScuteError, match="SC812") as refused:
        read_adapter(other, sites_of(other), torch.float32, tp=2, sharding=LoraSharding.FULL)
    assert "compile the adapter again with --lora-sharding full" in str(refused.value)
    with pytest.raises(ScuteError, match="SC801"):
        ServedModel(load_base("llama", base), max_adapters=1, pool_bytes="1MiB").load_adapter(
            artifact, adapter_name="one"
        )


@pytest.mark.parametrize(
    ("site", "exchange"),
    [
        ("model.layers.0.self_attn.q_proj", None),
        ("model.layers.0.self_attn.q_proj", TermExchange(ranks=RankGroup(), part=(0, 32))),
        ("model.layers.0.mlp.down_proj", None),
        ("model.layers.0.mlp.down_proj", TermExchange(ranks=RankGroup())),
        ("model.layers.0.mlp.down_proj", TermExchange(ranks=RankGroup(), part=(0, 10))),
    ],
)
def test_terms_that_ranks_would_combine_differently_are_refused(
    site: str, exchange: TermExchange | None, pair: Pair, tmp_path: Path
) -> None:
    adapter, base = pair("lora", "llama")
    manifest = open_artifact(compiled(adapter, base, tmp_path, "--tp", 2, "--lora-sharding", "full")).manifest
    exchanges: dict[str, TermExchange | None] = {
        record.name: TermExchange(ranks=RankGroup(), part=(32, 64) if record.split is Split.ROW else None)
        for record in manifest.sites
    }
    check_exchanges("one", manifest, 1, exchanges)
    with pytest.raises(ScuteError, match="SC812") as refused:
        check_exchanges("one", manifest, 1, {**exchanges, site: exchange})
    assert refused.value.diagnostics[0].where == f"one: {site}"


def refusals(base: Path, artifacts: Mapping[str, Path]) -> Answer:
    """Return the codes with which a rank without exchanges refuses fully sharded artifacts."""
    with patch.object(rank_part, "exchanges_of", return_value={}):
        served = ServedModel.for_rank(load_model(base), lora_sharding="full", max_adapters=1, pool_bytes="1MiB")
    found: Answer = {}
    for name, artifact in artifacts.items():
        with pytest.raises(ScuteError) as refused:
            served.load_adapter(artifact, adapter_name="one")
        found[name] = torch.tensor(int(refused.value.diagnostics[0].code.name[2:]))
    return found


def test_a_model_without_exchanges_refuses_fully_sharded_terms(pair: Pair, tmp_path: Path) -> None:
    adapter, base = pair("lora", "llama")
    options = {"full": (2, "full"), "four": (4, "full"), "default": (2, "default")}
    artifacts = {
        name: compiled(adapter, base, tmp_path / name, "--tp", tp, "--lora-sharding", layout, "--dtype", "float32")
        for name, (tp, layout) in options.items()
    }
    for rank in on_ranks(2, refusals, base, artifacts):
        assert {name: int(code) for name, code in rank.items()} == {"full": 812, "four": 801, "default": 812}


def test_an_unknown_layout_is_refused(base_folder: Callable[[str], Path]) -> None:
    model = load_base("llama", base_folder("llama"))
    with pytest.raises(ScuteError, match="'default' or 'full'") as refused:
        ServedModel.for_rank(model, lora_sharding="half")
    assert refused.value.diagnostics[0].code.name == "SC703"
    ServedModel.for_rank(model, pool_bytes="1MiB", shared_bytes=0).remove()


def test_pools_serve_adapters_without_terms_in_either_layout(pair: Pair, tmp_path: Path) -> None:
    """Without low-rank terms both layouts are equal."""
    adapter, base = pair("ia3", "llama")
    artifact = open_artifact(compiled(adapter, base, tmp_path / "store", "--tp", 2, "--lora-sharding", "full"))
    assert read_adapter(artifact, sites_of(artifact), torch.float32, tp=2, convert=True).payload > 0


def entries_of(artifact: Artifact, rank: int) -> list[DirectoryEntry]:
    """Return the entries of a rank's directory: a row-parallel layer has one for each of its parts."""
    found = []
    for record in artifact.manifest.sites:
        inputs, outputs = width(record.inputs[rank]), width(record.outputs[rank])
        held = next((term.columns[rank] for term in record.terms if term.columns is not None), None)
        for part in TermExchange(ranks=RankGroup(), part=held).parts(outputs):
            shape = outputs if part is None else part[1] - part[0]
            found.append(
                DirectoryEntry(name=record.name, in_features=inputs, out_features=shape, gemm=record.gemm, part=part)
            )
    return found


@pytest.mark.parametrize("recipe", ["lora", "vera"])
def test_ranks_hold_nothing_twice(recipe: str, pair: Pair, tmp_path: Path) -> None:
    """The packed adapters of all ranks together are as large as one copy of the factors that the sites use."""
    adapter, base = pair(recipe, "llama")
    options = ("--tp", 2, "--dtype", "float32", "--lora-sharding", "full")
    artifact = open_artifact(compiled(adapter, base, tmp_path / "store", *options))
    packed_adapters = [
        read_adapter(artifact, entries_of(artifact, rank), torch.float32, tp=2, rank=rank, sharding=LoraSharding.FULL)
        for rank in range(2)
    ]
    private, shared = (
        sum(packed.payload for packed in packed_adapters),
        sum(f.payload for packed in packed_adapters for f in packed.factors),
    )
    terms = [(site, term) for site in artifact.manifest.sites for term in site.terms]
    if recipe == "lora":
        assert (private, shared) == (
            sum(4 * term.rank * (site.in_features + site.out_features) for site, term in terms),
            0,
        )
        return
    windows = {(term.rank, site.in_features, site.out_features) for site, term in terms}  # equal sites share a window
    assert shared == sum(4 * rank * (inputs + outputs) for rank, inputs, outputs in windows)
    # of the vectors, d of row-parallel sites is on every rank
    copies = {Split.COLUMN: 1, Split.ROW: 2}
    assert private == sum(4 * (site.out_features + term.rank * copies[site.split]) for site, term in terms)
