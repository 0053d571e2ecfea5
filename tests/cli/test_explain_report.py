"""`explain-folds` shows every note, and groups layers with equal notes."""

from __future__ import annotations

import io
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from scute_compile.cli.explain.rendering import render
from scute_compile.cli.explain.report import ExplainReport, explain, notes_of
from scute_compile.diagnostics import Code, ScuteError
from scute_compile.ir.method import Method
from scute_compile.ir.program import Action, Program, Route
from scute_compile.pack.manifest_records import note_record
from tests.support.programs import METHODS, dora, oft

GOLDEN = Path(__file__).parent / "golden"


def explained(program: Program, glob: str | None = None) -> ExplainReport:
    sites = [site.name for site in program.sites]
    return explain(program.notes, glob, name="made", method=program.method, sites=sites)


def shown(report: ExplainReport, width: int = 100) -> str:
    out = io.StringIO()
    render(report, Console(file=out, width=width, force_terminal=False))
    return "".join(line.rstrip() + "\n" for line in out.getvalue().splitlines())


@pytest.mark.parametrize("method", METHODS)
def test_the_rendering_is_the_golden_text(method: str) -> None:
    """Set SCUTE_UPDATE_GOLDEN=1 to rewrite the texts, and read the difference before committing it."""
    text, path = shown(explained(METHODS[method]())), GOLDEN / f"explain_{method}.txt"
    if os.environ.get("SCUTE_UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("method", METHODS)
def test_grouping_loses_no_note_and_joins_equal_layers(method: str) -> None:
    program = METHODS[method]()
    report = explained(program)
    assert Counter(note for group in report.groups for note in group.items) == Counter(program.notes)
    distinct = {(note.site.split(".", 3)[3], note.slot, note.action) for note in program.notes}
    assert len(report.groups) == len(distinct)


def test_more_layers_need_no_more_lines() -> None:
    assert len(shown(explained(dora(range(32)))).splitlines()) == len(shown(explained(dora(range(2)))).splitlines())


def test_a_layer_that_differs_has_a_separate_group() -> None:
    program = dora(range(4))
    odd = replace(program.notes[0], why="for another reason")
    report = explain((odd, *program.notes[1:]), None, name="made", method=program.method)
    labels = [group.label for group in report.groups if group.items[0].slot == odd.slot and "q_proj" in group.pattern]
    assert labels == ["model.layers.0.self_attn.q_proj", "model.layers.1-3.self_attn.q_proj"]


def test_slots_come_in_the_order_of_the_normal_form() -> None:
    groups = explained(dora(), "*q_proj").groups
    assert [(group.items[0].slot, group.items[0].action) for group in groups] == [
        ("s", Action.PLANNED),
        ("s", Action.LIVE),
        ("e", Action.MERGED),
        ("c", Action.MERGED),
    ]


def test_ratios_are_to_the_chosen_route_even_when_another_is_cheaper() -> None:
    report = explained(oft(), "*layers.0*q_proj")
    (note,) = report.notes
    costs = dict(note.candidates)
    assert note.route is Route.DELTA_ROWS
    cheaper = min(costs.values())
    assert cheaper < costs[Route.DELTA_ROWS]
    assert f"({cheaper / costs[Route.DELTA_ROWS]:.3g}x)" in shown(report)


def test_a_glob_keeps_only_its_sites() -> None:
    report = explained(dora(range(4)), "*layers.[13].*o_proj")
    assert {note.site for note in report.notes} == {f"model.layers.{n}.self_attn.o_proj" for n in (1, 3)}
    assert "model.layers.1,3.self_attn.o_proj  x2" in shown(report)


def test_a_glob_without_a_match_names_sites() -> None:
    with pytest.raises(ScuteError) as caught:
        explained(dora(), "q_proj")
    (finding,) = caught.value.diagnostics
    assert finding.code is Code.SC703
    assert "`q_proj` matches none of 8 sites" in finding.found
    assert "model.layers.0.self_attn.q_proj" in finding.expected


def test_a_site_without_notes_is_shown() -> None:
    report = explain((), "*.up", name="made", method=Method.LORA, sites=["h.0.up", "h.1.up", "h.0.down"])
    assert report.silent == ("h.0.up", "h.1.up")
    assert "h.0-1.up  x2" in shown(report)


@pytest.mark.parametrize("method", METHODS)
def test_recorded_notes_equal_the_originals(method: str) -> None:
    notes = METHODS[method]().notes
    assert notes_of([note_record(note) for note in notes], "made") == notes


@pytest.mark.parametrize(
    ("field", "wrong"), [("action", "guessed"), ("candidates", [["in the expand", "many"]]), ("site", None)]
)
def test_a_malformed_note_is_refused(field: str, wrong: object) -> None:
    record = {**note_record(dora().notes[0]), field: wrong}
    with pytest.raises(ScuteError) as caught:
        notes_of([record], "made")
    assert caught.value.diagnostics[0].code is Code.SC601
    assert field in caught.value.diagnostics[0].found


def test_json_has_every_note_and_the_groups() -> None:
    program = dora()
    answer = explained(program).to_json()
    assert (answer["schema_version"], answer["command"]) == ("1.0", "explain-folds")
    assert answer["notes"] == [note_record(note) for note in program.notes]
    groups = answer["groups"]
    assert isinstance(groups, list)
    assert sum(group["count"] for group in groups) == len(program.notes)


def test_a_name_from_a_file_cannot_drive_the_terminal() -> None:
    note = replace(dora().notes[0], site="h.0.\x1b[31mup", why="[bold]\x1b[2J")
    text = shown(explain((note,), None, name="made", method=Method.LORA))
    assert "\x1b" not in text
    assert "[bold]" in text
