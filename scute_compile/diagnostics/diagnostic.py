"""Diagnostics: what a user reads when something is wrong or worth knowing.

Every failure that reaches a user is a `Diagnostic`: a stable code, where it is, what was found, what was expected and
what to do next. `Findings` gathers them, so that one run names every fault and not the first alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NoReturn

from scute_compile.diagnostics.codes import Code


class Severity(StrEnum):
    """How much a diagnostic weighs."""

    ERROR = "error"
    """The adapter is refused."""
    NOTE = "note"
    """The adapter is exact; the user should know this all the same."""


def printable(text: object) -> str:
    r"""Return `text` with control characters escaped, so that a name from a file can't drive a terminal.

    >>> printable("a\x1b[31m")
    'a\\x1b[31m'
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in str(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnostic:
    """One finding, worded as found / expected / next."""

    code: Code
    where: str
    """The site, key or file that it is about."""
    found: str
    expected: str
    next: str
    severity: Severity = Severity.ERROR

    def __post_init__(self) -> None:
        for name in ("where", "found", "expected", "next"):
            object.__setattr__(self, name, printable(getattr(self, name)))

    def to_json(self) -> dict[str, str]:
        """Return the diagnostic as plain JSON values."""
        return {
            "code": self.code.name,
            "title": self.code.title,
            "severity": self.severity.value,
            "where": self.where,
            "found": self.found,
            "expected": self.expected,
            "next": self.next,
        }

    def __str__(self) -> str:
        lines = [f"{self.severity}[{self.code.name}]: {self.code.title}"]
        for label in ("where", "found", "expected", "next"):
            value = getattr(self, label)
            lines += [f"  {label:<9} {value}"] if value else []
        return "\n".join(lines)


class ScuteError(Exception):
    """Carries the diagnostics that stopped the work; at least one is an error."""

    def __init__(self, diagnostics: Iterable[Diagnostic]) -> None:
        self.diagnostics = tuple(diagnostics)
        super().__init__("\n".join(str(d) for d in self.diagnostics))


def fail(code: Code, *, where: str, found: str, expected: str, next: str) -> NoReturn:  # noqa: A002 - the field's name
    """Raise one error at once: for faults after which nothing else can be said."""
    raise ScuteError([Diagnostic(code=code, where=where, found=found, expected=expected, next=next)])


@dataclass(slots=True)
class Findings:
    """Gathers diagnostics while a stage looks at everything it can."""

    diagnostics: list[Diagnostic] = field(default_factory=list)

    def error(self, code: Code, *, where: str, found: str, expected: str, next: str) -> None:  # noqa: A002 - the field's name
        """Record an error and go on."""
        self._add(Diagnostic(code=code, where=where, found=found, expected=expected, next=next))

    def note(self, code: Code, *, where: str, found: str, expected: str = "", next: str = "") -> None:  # noqa: A002 - the field's name
        """Record something worth knowing about an adapter that is exact all the same."""
        self._add(Diagnostic(code=code, where=where, found=found, expected=expected, next=next, severity=Severity.NOTE))

    def _add(self, diagnostic: Diagnostic) -> None:
        if diagnostic not in self.diagnostics:
            self.diagnostics.append(diagnostic)

    @property
    def errors(self) -> tuple[Diagnostic, ...]:
        """The errors alone."""
        return tuple(d for d in self.diagnostics if d.severity is Severity.ERROR)

    @property
    def notes(self) -> tuple[Diagnostic, ...]:
        """The notes alone."""
        return tuple(d for d in self.diagnostics if d.severity is Severity.NOTE)

    def raise_if_errors(self) -> None:
        """Raise everything gathered when at least one is an error."""
        if self.errors:
            raise ScuteError(self.diagnostics)

    def __iter__(self) -> Iterator[Diagnostic]:
        return iter(self.diagnostics)
