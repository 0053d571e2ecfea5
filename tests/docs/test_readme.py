"""The README: its length, its set-up commands and its picture."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tomllib
from html import unescape
from pathlib import Path

import pytest
from rich.console import Console

from scute_compile.cli.demo.rendering import render
from scute_compile.cli.demo.report import DemoReport, demo
from tests.docs.pages import README, ROOT, WIDTH, commands, masked
from tests.docs.test_pages import UPDATE
from tests.support.commands import scute_process

PICTURE = ROOT / "docs" / "demo.svg"
LONGEST = 150
"""Lines."""
FONT = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
SHOWN = ("compile", "check", "inspect", "explain-folds", "verify")
"""The commands with an example."""


def readme() -> str:
    return README.read_text(encoding="utf-8")


def picture(report: DemoReport) -> str:
    """Return what the demo prints as a picture that fetches nothing."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    render(report, console)
    return FONT.sub("", console.export_svg(title="scute demo", unique_id="demo"))


def words(svg: str) -> str:
    """Return a picture's text, a line per piece."""
    pieces = re.findall(r"<text[^>]*>(.*?)</text>", svg, re.DOTALL)
    return masked("\n".join(unescape(piece).replace("\xa0", " ") for piece in pieces))


def test_the_readme_is_short() -> None:
    assert len(readme().splitlines()) <= LONGEST


def test_the_readme_has_an_example_of_each_main_command() -> None:
    run = [command for command in commands(readme()) if command.runs_here]
    assert {command.line.split()[1] for command in run} == set(SHOWN)
    assert all(command.output for command in run)


def test_the_picture_shows_what_the_demo_prints(tmp_path: Path) -> None:
    report = demo(tmp_path / "example", quiet=True)
    svg = picture(DemoReport(rows=report.rows, explained=report.explained, folder=None))
    if UPDATE and words(svg) != words(PICTURE.read_text(encoding="utf-8")):
        PICTURE.write_text(svg, encoding="utf-8")
    assert words(svg) == words(PICTURE.read_text(encoding="utf-8"))
    assert "every row equals PEFT" in words(svg)
    assert "url(" not in svg.replace("url(#", "")


def test_the_setup_commands_are_what_the_checks_run() -> None:
    main_job, tests = [command.line for command in commands(readme()) if not command.runs_here]
    venv, activate, install, run = tests.split(" && ")
    assert (venv, activate) == ("python3 -m venv .venv", ". .venv/bin/activate")
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert install in script
    assert run in script
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert main_job == f"{venv} && {activate} && {install.replace('[test]', '[compile]')} && scute demo"
    assert main_job in (ROOT / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8")


def test_every_extra_that_is_named_exists() -> None:
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    named = {name for text in re.findall(r"\.\[([\w,]+)\]", readme()) for name in text.split(",")}
    assert named
    assert named <= extras


def test_the_mixed_batch_example_serves_every_adapter_of_the_demo(example: Path) -> None:
    done = _example("mixed_batch.py", "example", cwd=example)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert {line[0] for line in lines} == {"base", "lora", "dora", "ia3", "vera", "oft", "adalora"}
    assert len({line[-1] for line in lines}) > 1


def test_the_changing_batch_example_serves_both_requests(example: Path) -> None:
    text = (ROOT / "examples" / "changing_batch.py").read_text(encoding="utf-8")
    compile_it, run_it = (line.split() for line in text.splitlines()[3:5])
    assert scute_process(*compile_it[1:], cwd=example).code == 0
    done = _example("changing_batch.py", *run_it[2:], cwd=example)
    assert done.returncode == 0, done.stderr
    lines = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
    assert [name for name, _ in lines].count("dora") == 8
    assert [name for name, _ in lines].count("vera") == 4
    assert lines[2][0] == "dora"
    assert {name for name, _ in lines[3:9]} == {"dora", "vera"}


@pytest.mark.parametrize("name", ["mixed_batch.py", "changing_batch.py"])
def test_an_example_without_its_arguments_says_how_it_is_called(name: str, tmp_path: Path) -> None:
    done = _example(name, cwd=tmp_path)
    assert done.returncode == 1
    assert f"python examples/{name} " in done.stderr
    assert "Traceback" not in done.stderr


def _example(name: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "examples" / name), *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=120)
