"""Pages show the current output of their examples. SCUTE_UPDATE_GOLDEN=1 rewrites the pages; read the difference."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.docs.generated import PARTS
from tests.docs.pages import (
    FENCE,
    GENERATED,
    PAGES,
    ROOT,
    WIDTH,
    PageRun,
    commands,
    masked,
    run_commands,
    with_generated,
)

UPDATE = bool(os.environ.get("SCUTE_UPDATE_GOLDEN"))


def runs_something(path: Path) -> bool:
    text = path.read_text(encoding="utf-8")
    return any(match["kind"] == "python" for match in FENCE.finditer(text)) or any(
        command.runs_here for command in commands(text)
    )


WITH_EXAMPLES = [path for path in PAGES if runs_something(path)]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def compare(path: Path, write: Callable[[str], str]) -> None:
    """Assert that `write` doesn't change a page, or with SCUTE_UPDATE_GOLDEN=1 update the page."""
    before = path.read_text(encoding="utf-8")
    now = write(before)
    if UPDATE:
        path.write_text(now, encoding="utf-8")
    else:
        assert masked(now) == masked(before)


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=name_of)
def test_examples_of_a_page_do_what_it_shows(path: Path, example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    run = PageRun(folder=example)
    compare(path, lambda text: run_commands(text, run))
    run.run_program()


@pytest.mark.parametrize(
    "path", [path for path in PAGES if GENERATED.search(path.read_text(encoding="utf-8"))], ids=name_of
)
def test_generated_parts_of_a_page_are_current(path: Path) -> None:
    compare(path, lambda text: with_generated(text, PARTS))


def test_every_generated_part_is_on_a_page() -> None:
    assert {match["name"] for path in PAGES for match in GENERATED.finditer(path.read_text(encoding="utf-8"))} == set(
        PARTS
    )


def test_examples_are_found() -> None:
    """A page whose fences aren't recognised would pass unseen."""
    assert len(WITH_EXAMPLES) >= 7
    assert sum(command.runs_here for path in PAGES for command in commands(path.read_text(encoding="utf-8"))) >= 15


def test_the_map_has_a_line_for_every_file() -> None:
    lines = (ROOT / "docs" / "map.md").read_text(encoding="utf-8")
    assert "`pipeline.py`" in lines
    assert re.search(r"^\| `[\w.]+` \| +\|$", lines, re.MULTILINE) is None, "a file without a docstring"
