"""`scute demo`: every row equals PEFT, and failures are named."""

from __future__ import annotations

import builtins
import io
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from scute_compile.cli.demo.rendering import render
from scute_compile.cli.demo.report import ACCURACY, DemoReport, DemoRow, demo
from scute_compile.diagnostics import Code, ScuteError
from tests.support.commands import Ran, scute

METHODS = ("lora", "dora", "ia3", "vera", "oft", "adalora")
EFFECT = 0.1
"""The least mean change of the log-probabilities. Below it agreement would prove nothing."""


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ran, Path]:
    folder = tmp_path_factory.mktemp("demo") / "kept"
    return scute("demo", "--json", "-o", folder), folder


def test_every_row_of_one_mixed_batch_equals_peft(kept: tuple[Ran, Path]) -> None:
    ran, _ = kept
    assert (ran.code, ran.answer["command"], ran.answer["passed"]) == (0, "demo", True)
    rows: Sequence[Mapping[str, Any]] = ran.answer["rows"]
    assert {row["adapter"] for row in rows} == {*METHODS, "base"}
    for row in rows:
        if row["adapter"] == "base":
            assert row["error"] == 0
            continue
        assert row["effect"] >= EFFECT, row
        assert row["relative_error"] <= ACCURACY, row


def test_slots_are_merged_beside_owned_factors_and_live_beside_others(kept: tuple[Ran, Path]) -> None:
    slots = {row["adapter"]: (row["merged"], row["live"]) for row in kept[0].answer["rows"]}
    assert slots == {
        "lora": ("c x14", ""),
        "dora": ("c x14, e x14", "s x14"),
        "ia3": ("", "s x6"),
        "base": ("", ""),
        "vera": ("", "d x4, e x4"),
        "oft": ("", "R x14"),
        "adalora": ("c x14, d x14", ""),
    }


def test_kept_files_can_be_used_by_the_other_commands(kept: tuple[Ran, Path]) -> None:
    _, folder = kept
    assert len(list((folder / "base").glob("*.safetensors"))) > 1
    for method in METHODS:
        assert len(list((folder / "store" / method).glob("rank-*.safetensors"))) == 2
    checked = scute("check", *(folder / "adapters" / method for method in METHODS), "--json")
    assert [item["outcome"] for item in checked.answer["adapters"]] == ["exact"] * len(METHODS)


def test_a_folder_with_files_is_refused_and_unchanged(kept: tuple[Ran, Path]) -> None:
    _, folder = kept
    before = sorted(folder.rglob("*"))
    ran = scute("demo", "-o", folder)
    assert ran.code == 2
    assert "SC703" in ran.err
    assert sorted(folder.rglob("*")) == before


def test_a_file_in_place_of_the_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ran = scute("demo", "-o", tmp_path / "file")
    assert (ran.code, "SC109" in ran.err) == (1, True)
    assert "File exists" in ran.err
    assert "Errno" not in ran.err


def row(**changes: object) -> DemoRow:
    made = DemoRow(row=0, adapter="dora", merged="c x2", live="s x2", error=1e-6, effect=1.0)
    return replace(made, **changes)  # type: ignore[arg-type] # tests pass one field at a time


@pytest.mark.parametrize(
    "wrong", [row(error=1e-4), row(effect=0.0), row(adapter="base", error=1e-9, effect=0.0)], ids=repr
)
def test_a_row_that_differs_is_named(wrong: DemoRow) -> None:
    report = DemoReport(rows=(row(adapter="lora"), wrong), explained=(), folder=None)
    out = io.StringIO()
    render(report, Console(file=out, width=100))
    assert not report.passed
    assert f"not equal to PEFT: {wrong.adapter}" in out.getvalue()


@pytest.mark.parametrize("package", ["torch", "peft", "transformers"])
def test_a_missing_package_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a light install: one package is hidden from the import statement."""
    monkeypatch.delitem(sys.modules, "scute_compile.cli.demo.models", raising=False)
    real = builtins.__import__

    def hiding(name: str, *rest: object) -> object:
        if name == package:
            raise ModuleNotFoundError(name=package)
        return real(name, *rest)  # type: ignore[arg-type] # passed on unchanged

    monkeypatch.setattr(builtins, "__import__", hiding)
    with pytest.raises(ScuteError) as caught:
        demo(None, quiet=True)
    assert caught.value.diagnostics[0].code is Code.SC701
    assert package in caught.value.diagnostics[0].found
