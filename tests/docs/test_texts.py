"""The codes, files, commands, settings and messages that texts name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scute_compile.diagnostics import Code
from scute_compile.diagnostics.codes_page import FAMILIES, page
from scute_compile.passes.parse.checkpoint import FRONT_ENDS
from tests.docs.generated import ROOMS, command_options
from tests.docs.pages import ROOT, TEXTS
from tests.docs.test_pages import name_of

SERVING = "docs/how-to/serve-with-vllm.md"
FOLDERS = (*ROOMS, "tests", "docs", "examples", "benchmarks", r"\.github", r"\.ci")


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def rows(text: str, title: str) -> list[str]:
    """Return the rows of the table below the line `title`."""
    table = text.split(f"\n{title}\n", 1)[1].split("\n\n", 1)[0]
    return table.splitlines()[1:]


def test_the_page_of_codes_is_current() -> None:
    """Otherwise: `python -m scute_compile.diagnostics.codes_page > docs/errors.md`."""
    assert read("docs/errors.md") == page()


def test_every_code_is_on_the_page_once_and_in_a_family() -> None:
    text = page()
    for code in Code:
        assert text.count(f"### {code.name}: {code.title}\n") == 1
        assert code.name[:3] in FAMILIES
    assert len({code.title for code in Code}) == len(Code)


def test_the_page_of_methods_has_a_row_for_every_front_end() -> None:
    table = rows(read("docs/reference/methods.md"), "| method | slots | supported | refused |")
    named = {row.split("|")[1].strip().upper() for row in table}
    assert named == {front_end.peft_type for front_end in FRONT_ENDS} | {"DORA"}


def test_the_front_end_page_explains_every_field() -> None:
    from scute_compile.passes.parse.front_end import FrontEnd

    text = read("docs/contributing/writing-a-front-end.md")
    explained = {row.split("`")[1] for row in rows(text, "| field | meaning |")}
    assert explained == set(FrontEnd.__dataclass_fields__)


def test_the_serving_page_has_every_setting_of_the_plugin() -> None:
    explained = [row.split("`")[1] for row in rows(read(SERVING), "| variable | default | meaning |")]
    assert len(explained) == len(set(explained))
    assert set(explained) == set(re.findall(r"`(SCUTE_VLLM_\w+)`", read("runtime_vllm/options.py")))


def test_the_serving_page_quotes_messages_of_the_code() -> None:
    source = "".join(
        path.read_text(encoding="utf-8")
        for room in ("runtime_vllm", "runtime_min", "formats", "scute_compile")
        for path in sorted((ROOT / room).rglob("*.py"))
    )
    quoted = [
        text
        for row in rows(read(SERVING), "| refused | code | text |")
        for text in re.findall(r"`([^`]+)`", row.split("|")[3])
    ]
    assert len(quoted) >= 19
    assert [text for text in quoted if text not in source] == []


def test_every_command_takes_json() -> None:
    assert all("--json" in options for options in command_options().values())


@pytest.mark.parametrize("path", TEXTS, ids=name_of)
def test_links_and_named_files_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (path.parent / target).exists(), target
    for named in re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w/.-]*)[^`]*`", text):
        assert list(ROOT.glob(f"{named}*")) if named.endswith("_") else (ROOT / named).exists(), named


@pytest.mark.parametrize("path", TEXTS, ids=name_of)
def test_named_codes_and_commands_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert set(re.findall(r"\bSC\d{3}\b", text)) <= {code.name for code in Code}
    assert set(re.findall(r"`scute ([a-z][a-z-]+)", text)) <= set(command_options())
