"""What became of each adapter of a call: as JSON, and as lines for a person."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scute_compile.diagnostics import Diagnostic, Severity

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA_VERSION = "1.0"
SHOWN = 3
"""How many findings of one code are printed; JSON has all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One adapter or artifact of a call."""

    path: str
    name: str
    method: str = ""
    findings: tuple[Diagnostic, ...] = ()
    artifact: str | None = None
    details: tuple[tuple[str, object], ...] = ()
    """Further fields for JSON."""

    @property
    def outcome(self) -> str:
        """`refused`, `noted` (exact, with something to know) or `exact`."""
        if any(finding.severity is Severity.ERROR for finding in self.findings):
            return "refused"
        return "noted" if self.findings else "exact"

    def to_json(self) -> dict[str, object]:
        """Return the outcome as plain JSON values."""
        return {
            "path": self.path,
            "name": self.name,
            "method": self.method,
            "outcome": self.outcome,
            "artifact": self.artifact,
            **dict(self.details),
            "findings": [finding.to_json() for finding in self.findings],
        }


def envelope(command: str, **fields: object) -> dict[str, object]:
    """Return a command's JSON answer: the schema's version, the command, and its fields."""
    return {"schema_version": SCHEMA_VERSION, "command": command, **fields}


def lines(findings: Sequence[Diagnostic], adapter: str = "") -> Iterator[str]:
    """Yield findings as text; of many with one code the first few and a count.

    Args:
        findings: Of one adapter.
        adapter: Its path, where a call has several: each finding then says whose it is.
    """
    for code in dict.fromkeys(finding.code for finding in findings):
        same = [finding for finding in findings if finding.code is code]
        yield from (_told(finding, adapter) for finding in same[:SHOWN])
        if len(same) > SHOWN:
            yield f"  ... and {len(same) - SHOWN} more {code.name}; --json lists all"


def _told(finding: Diagnostic, adapter: str) -> str:
    from scute_compile.diagnostics import printable

    title, *fields = str(finding).split("\n")
    return "\n".join([title, *([f"  adapter   {printable(adapter)}"] if adapter else []), *fields])


def render(outcomes: Sequence[Outcome], results: Console, problems: Console) -> None:
    """Print one line per adapter to `results`, and findings to `problems`."""
    for item in outcomes:
        for line in lines(item.findings, item.path if len(outcomes) > 1 else ""):
            problems.print(line, markup=False, highlight=False, soft_wrap=True)
        mark = {"refused": "[red]refused[/]", "noted": "[yellow]exact, with notes[/]", "exact": "[green]exact[/]"}
        where = f" -> {item.artifact}" if item.artifact else ""
        results.print(f"{_plain(item.name)}: {mark[item.outcome]}{_described(item)}{_plain(where)}", soft_wrap=True)


def _described(item: Outcome) -> str:
    words = [word for word in (item.method, *(f"{value} {key}" for key, value in item.details)) if word]
    return f" ({', '.join(words)})" if words and item.outcome != "refused" else ""


def _plain(text: str) -> str:
    from rich.markup import escape

    from scute_compile.diagnostics import printable

    return escape(printable(text))
