"""The documentation says what the code says: its tables are compared with the code, its links with the tree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scute_compile.diagnostics import Code
from scute_compile.diagnostics.codes_page import FAMILIES, page
from scute_compile.ir.spec import SPEC
from scute_compile.passes.parse.checkpoint import FRONT_ENDS
from scute_compile.passes.rewrites import TERM_REWRITES
from tests.docs.readme import ROOT

PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))


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


def test_the_fold_table_is_the_codes() -> None:
    assert rows(read("docs/design.md"), "| row | slot | algebra |") == [
        f"| `{row.name}` | {row.slot} | `{row.algebra}` |" for row in TERM_REWRITES
    ]


def test_the_invariants_are_the_specs() -> None:
    assert rows(read("docs/design.md"), "| invariant | from | to | says |") == [
        f"| `{invariant.__name__}` | {first} | {last} | {invariant.__doc__} |" for first, last, invariant in SPEC
    ]


def test_the_readme_has_a_row_for_every_method_that_is_served() -> None:
    named = {
        row.split("|")[1].strip().upper()
        for row in rows(read("README.md"), "| method | slots | served | refused by name |")
    }
    assert named == {front_end.peft_type for front_end in FRONT_ENDS} | {"DORA"}


def test_the_front_end_page_explains_every_field() -> None:
    from scute_compile.passes.parse.front_end import FrontEnd

    explained = {row.split("`")[1] for row in rows(read("docs/writing-a-front-end.md"), "| field | what it says |")}
    assert explained == set(FrontEnd.__dataclass_fields__)


def test_the_serving_page_has_every_setting_of_the_plugin() -> None:
    explained = [row.split("`")[1] for row in rows(read("docs/serving.md"), "| variable | default | meaning |")]
    assert len(explained) == len(set(explained))
    assert set(explained) == set(re.findall(r"`(SCUTE_VLLM_\w+)`", read("runtime_vllm/options.py")))


def test_the_serving_page_quotes_what_is_said() -> None:
    source = "".join(
        path.read_text(encoding="utf-8")
        for room in ("runtime_vllm", "runtime_min", "formats", "scute_compile")
        for path in sorted((ROOT / room).glob("*.py"))
    )
    quoted = [
        text
        for row in rows(read("docs/serving.md"), "| refused | code | text |")
        for text in re.findall(r"`([^`]+)`", row.split("|")[3])
    ]
    assert len(quoted) >= 19
    assert [text for text in quoted if text not in source] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_and_named_files_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (path.parent / target).exists(), target
    for named in re.findall(
        r"`((?:scute_compile|passes|formats|runtime_min|runtime_vllm|tests|docs|examples|benchmarks)/[\w/.-]*)`", text
    ):
        assert (ROOT / named).exists(), named


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_codes_that_pages_name_exist(path: Path) -> None:
    named = set(re.findall(r"\bSC\d{3}\b", path.read_text(encoding="utf-8")))
    assert named <= {code.name for code in Code}
