"""`inspect`: bytes, slots and owners of an adapter or an artifact, per site and rank."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
from rich.console import Console

from scute_compile.cli.inspect.rendering import render
from scute_compile.cli.inspect.report import InspectReport, inspect_artifact, inspect_program
from scute_compile.cli.sizes import readable
from scute_compile.driver.bases import open_model
from scute_compile.formats.artifact import open_artifact
from scute_compile.formats.safetensors import read_header
from scute_compile.ir.dtypes import DType
from scute_compile.ir.program import Owner, Program, Stage
from scute_compile.ir.target import Target
from scute_compile.pipeline import Planned, plan
from tests.support.commands import compiled
from tests.support.programs import METHODS, dora, ia3, oft, vera

Pair = Callable[..., tuple[Path, Path]]


def inspected(program: Program) -> InspectReport:
    return inspect_program(
        Planned(source="made", name="made", adapter=None, scan=None, program=program, findings=program.findings)
    )


def shown(report: InspectReport, width: int = 100) -> str:
    out = io.StringIO()
    render(report, Console(file=out, width=width, force_terminal=False))
    return out.getvalue()


@pytest.mark.parametrize("method", METHODS)
def test_grouping_loses_no_site(method: str) -> None:
    report = inspected(METHODS[method]())
    assert sum(group.size for group in report.groups) == len(report.sites)
    assert {site.name for group in report.groups for site in group.items} == {site.name for site in report.sites}
    assert all(group.label in shown(report) for group in report.groups)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("width", [80, 100])
def test_no_column_is_lost_to_a_long_name(method: str, width: int) -> None:
    program = METHODS[method]()
    sites = (replace(s, linear=replace(s.linear, name=f"language_model.encoder.{s.name}")) for s in program.sites)
    table = shown(inspected(replace(program, sites=tuple(sites))), width).split("\n\n")[1]
    head, first = table.splitlines()[1:3]
    assert head.split() == ["site", "x", "in", "out", "rank", "slots", "float32", "bfloat16"]
    site = inspected(program).groups[0].items[0]
    assert first.split()[-4:] == [word for _, (held,) in site.bytes for word in readable(held).split()]


def test_dora_bytes_are_those_of_its_slots() -> None:
    """Per site: s 64, A 8 x 64, B 8 x 64; on two ranks s and B are cut on q_proj, and only A on o_proj."""
    q, o, *_ = inspected(dora(tp=2)).sites
    assert dict(q.bytes)[DType.BFLOAT16] == (2 * (32 + 8 * 64 + 8 * 32),) * 2
    assert dict(o.bytes)[DType.FLOAT32] == (4 * (64 + 8 * 32 + 8 * 64),) * 2


def test_rank_bytes_are_the_sums_over_sites() -> None:
    report = inspected(dora(range(4), tp=2))
    for dtype, ranks in report.rank_bytes:
        assert ranks == tuple(sum(dict(site.bytes)[dtype][rank] for site in report.sites) for rank in range(2))


def test_shared_factors_are_counted_once_and_not_in_the_ranks() -> None:
    report = inspected(vera((0, 1, 3)))
    assert [(factor.name, factor.rank, factor.features, factor.sites) for factor in report.shared] == [
        ("vera_A", 16, 96, 6),
        ("vera_B", 16, 96, 6),
    ]
    assert dict(report.rank_bytes)[DType.FLOAT32] == (4 * 3 * (16 + 64 + 16 + 32),)
    owners = {(slot.slot, slot.owner, slot.shared) for site in report.sites for slot in site.slots}
    assert ("A", Owner.SHARED, "vera_A") in owners
    assert ("d", Owner.ADAPTER, None) in owners


def test_a_moved_vector_is_shown_where_it_is_computed() -> None:
    slots = {site.name.split(".")[-1]: [(x.slot, x.route) for x in site.slots] for site in inspected(ia3()).sites}
    assert slots == {"k_proj": [("s", "in the expand")], "up_proj": [("s", "in the expand")]}


def test_a_rotation_is_described_by_its_blocks() -> None:
    q, v, *_ = inspected(oft()).sites
    assert (q.rotation, v.rotation) == ("8 blocks of 8", "one block of 8, repeated")
    assert dict(q.bytes)[DType.FLOAT32] == (4 * 8 * 8 * 8,)
    assert dict(v.bytes)[DType.FLOAT32] == (4 * 8 * 8,)


def test_a_layer_of_another_size_has_a_separate_group() -> None:
    program = dora(range(3))
    site = program.sites[0]
    wider = replace(site, terms=site.terms * 2)
    report = inspected(replace(program, sites=(wider, *program.sites[1:])))
    assert [(group.label, group.items[0].ranks) for group in report.groups if "q_proj" in group.label] == [
        ("model.layers.0.self_attn.q_proj", (8, 8)),
        ("model.layers.1-2.self_attn.q_proj", (8,)),
    ]
    assert [slot.slot for slot in report.sites[0].slots] == ["s", "A.0", "B.0", "A.1", "B.1"]


def test_without_a_base_sizes_follow_from_the_adapters_tensors() -> None:
    program = dora(range(2))
    alone = tuple(replace(site, cut=None, routes=()) for site in program.sites)
    report = inspected(replace(program, stage=Stage.FOLDED, sites=alone))
    assert not report.planned_for_base
    assert report.rank_bytes == inspected(program).rank_bytes


def test_unknown_sizes_are_question_marks() -> None:
    program = vera((0, 1))
    sites = []
    for site in program.sites:
        (term,) = site.terms
        unknown = replace(site.linear, in_features=0, out_features=0)
        sites.append(replace(site, linear=unknown, cut=None, routes=(), terms=(replace(term, e=None, d=None),)))
    report = inspected(replace(program, stage=Stage.FOLDED, sites=tuple(sites)))
    assert [(site.in_features, site.out_features) for site in report.sites] == [(0, 0)] * 4
    assert "?" in shown(report)


@pytest.mark.parametrize("recipe", ["dora", "vera", "oft"])
def test_the_bytes_of_an_artifact_are_those_of_its_files(recipe: str, pair: Pair, tmp_path: Path) -> None:
    adapter, base = pair(recipe, "llama")
    artifact = open_artifact(compiled(adapter, base, tmp_path / "store", "--tp", 2))
    report = inspect_artifact(artifact)
    ((_, ranks),) = report.rank_bytes
    for rank in range(2):
        entries = read_header(artifact.rank_path(rank)).values()
        assert ranks[rank] == sum(entry.nbytes for entry in entries)
        assert report.files[rank].bytes == artifact.rank_path(rank).stat().st_size
    for factor in report.shared:
        ((_, held),) = factor.bytes
        assert held == sum(entry.nbytes for entry in read_header(artifact.factor_path(factor.name)).values())


@pytest.mark.parametrize("recipe", ["lora", "dora", "ia3", "vera", "oft", "adalora"])
def test_the_plan_predicts_the_artifact(recipe: str, pair: Pair, tmp_path: Path) -> None:
    adapter, base = pair(recipe, "llama")
    artifact = inspect_artifact(open_artifact(compiled(adapter, base, tmp_path / "store", "--tp", 2)))
    planned = inspect_program(plan(str(adapter), open_model(str(base), weights=False), Target(tp=2)))
    assert artifact.dtype is not None
    assert dict(planned.rank_bytes)[artifact.dtype] == dict(artifact.rank_bytes)[artifact.dtype]
    assert [(x.name, x.ranks, [(s.slot, s.owner, s.route) for s in x.slots]) for x in planned.sites] == [
        (x.name, x.ranks, [(s.slot, s.owner, s.route) for s in x.slots]) for x in artifact.sites
    ]


def test_json_lists_every_site_with_bytes_per_rank() -> None:
    answer = inspected(oft(tp=2)).to_json()
    assert (answer["schema_version"], answer["command"], answer["kind"]) == ("1.0", "inspect", "adapter")
    sites = answer["sites"]
    assert isinstance(sites, list)
    assert [site["name"] for site in sites] == [site.name for site in oft().sites]
    assert sites[0]["bytes_per_rank"]["bfloat16"] == [2 * prod((8, 8, 8))] * 2
