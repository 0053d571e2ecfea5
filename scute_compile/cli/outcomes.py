"""Renders the outcomes of `compile` and `check`: findings on standard error, a line per adapter on standard output."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from scute_compile.cli.console import print_line
from scute_compile.diagnostics import Diagnostic, printable

if TYPE_CHECKING:
    from rich.console import Console

    from scute_compile.driver.reports import CheckReport, Outcome

SHOWN = 3
"""How many findings of one code are printed; JSON has all."""
MARKS = {"refused": ("refused", "red"), "noted": ("exact, with notes", "yellow"), "exact": ("exact", "green")}
"""Outcome -> its text and style."""


def render(report: CheckReport, results: Console, problems: Console) -> None:
    """Print one line per adapter to `results`, and the findings to `problems`."""
    for item in report.adapters:
        for line in lines(item.findings, item.path if len(report.adapters) > 1 else ""):
            print_line(problems, line)
        artifact = f" -> {item.artifact}" if item.artifact else ""
        print_line(results, f"{item.name}: ", MARKS[item.outcome], _description(item), artifact)


def lines(findings: Sequence[Diagnostic], adapter: str = "") -> Iterator[str]:
    """Yield findings as text; of several findings of one code the first few and a count.

    Args:
        findings: The findings of one adapter.
        adapter: The adapter's path, for a call with several; each finding then names it.
    """
    for code in dict.fromkeys(finding.code for finding in findings):
        same = [finding for finding in findings if finding.code is code]
        yield from (_with_adapter(finding, adapter) for finding in same[:SHOWN])
        if len(same) > SHOWN:
            yield f"  ... and {len(same) - SHOWN} more {code.name}; --json lists all"


def _with_adapter(finding: Diagnostic, adapter: str) -> str:
    title, *fields = str(finding).split("\n")
    return "\n".join([title, *([f"  adapter   {printable(adapter)}"] if adapter else []), *fields])


def _description(item: Outcome) -> str:
    words = [word for word in (item.method, "" if item.sites is None else f"{item.sites} sites") if word]
    return f" ({', '.join(words)})" if words and item.outcome != "refused" else ""
