"""Diagnostics: the messages that users see.

Every failure that reaches a user is a `Diagnostic`: a stable code, the place, what was found, what was expected and
what to do next. `Findings` collects them, so that one run reports every fault and not only the first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from os import environ
from typing import NoReturn

from scute_compile.diagnostics.codes import Code

LISTED = 100
"""Diagnostics of one code and severity that are listed one by one."""
LONGEST_TEXT = 4000
"""Characters of a diagnostic's text that are kept; names in files can be longer."""
LONGEST_REASON = 300
"""Characters of an exception's message that a finding repeats."""


class Severity(StrEnum):
    """Whether a diagnostic refuses the adapter."""

    ERROR = "error"
    """The adapter is refused."""
    NOTE = "note"
    """The adapter is exact; the finding is informative."""


def printable(text: object) -> str:
    r"""Return `text` with control characters escaped, so that a name from a file can't drive a terminal.

    >>> printable("a\x1b[31m")
    'a\\x1b[31m'
    """
    plain = str(text)
    if plain.isprintable():
        return plain
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in plain)


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnostic:
    """One finding: a place, what was found there, what was expected, and the next step."""

    code: Code
    where: str
    """The site, key or file that the finding is about."""
    found: str
    expected: str
    next: str = ""
    """What to do about it; when empty, the code's default."""
    severity: Severity = Severity.ERROR

    def __post_init__(self) -> None:
        object.__setattr__(self, "next", self.next or self.code.next)
        for name in ("where", "found", "expected", "next"):
            object.__setattr__(self, name, printable(getattr(self, name)[:LONGEST_TEXT]))

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
    """Carries the diagnostics that ended the work; at least one is an error."""

    def __init__(self, diagnostics: Iterable[Diagnostic]) -> None:
        self.diagnostics = tuple(diagnostics)
        super().__init__("\n".join(str(d) for d in self.diagnostics))


def fail(code: Code, *, where: str, found: str, expected: str, next: str = "") -> NoReturn:  # noqa: A002 - the field's name
    """Raise one error immediately, for faults after which nothing further can be checked.

    Args:
        code: The kind of fault.
        where: The site, key or file.
        found: What is there.
        expected: What should be there.
        next: What to do about it; by default the code's next step.

    Raises:
        ScuteError: always.
    """
    raise ScuteError([Diagnostic(code=code, where=where, found=found, expected=expected, next=next)])


def as_scute_error(error: Exception) -> ScuteError:
    """Return an exception as diagnostics: any but `ScuteError` is a fault of Scute itself (SC705).

    Raises:
        Exception: the fault itself, when the environment variable SCUTE_DEBUG is set.
    """
    if isinstance(error, ScuteError):
        return error
    if environ.get("SCUTE_DEBUG"):
        raise error
    found = Diagnostic(
        code=Code.SC705,
        where=type(error).__name__,
        found=str(error)[:LONGEST_REASON] or "no message",
        expected="no exception",
        next="report it, with the input that causes it",
    )
    return ScuteError([found])


@dataclass(slots=True)
class Findings:
    """Collects diagnostics while a pass checks everything it can. Diagnostics are appended and never removed.

    Of one code and severity the first `LISTED` are kept, and the others are counted in one more diagnostic. Iterating
    gives both.
    """

    diagnostics: list[Diagnostic] = field(default_factory=list)
    """Those that are kept."""
    _seen: set[Diagnostic] = field(default_factory=set)
    _counts: Counter[tuple[Code, Severity]] = field(default_factory=Counter)
    _indexed: int = 0
    """How many of `diagnostics` are in `_seen` and `_counts`."""

    def error(self, code: Code, *, where: str, found: str, expected: str, next: str = "") -> None:  # noqa: A002 - the field's name
        """Record an error."""
        self.add(Diagnostic(code=code, where=where, found=found, expected=expected, next=next))

    def note(self, code: Code, *, where: str, found: str, expected: str = "", next: str = "") -> None:  # noqa: A002 - the field's name
        """Record a note about an adapter that is exact."""
        self.add(Diagnostic(code=code, where=where, found=found, expected=expected, next=next, severity=Severity.NOTE))

    def add(self, diagnostic: Diagnostic) -> None:
        """Record a diagnostic, unless an equal one is recorded."""
        for kept in self.diagnostics[self._indexed :]:  # from the constructor, or appended to the list
            self._count(kept)
        if diagnostic not in self._seen:
            self._count(diagnostic)
            if self._counts[diagnostic.code, diagnostic.severity] <= LISTED:
                self.diagnostics.append(diagnostic)
        self._indexed = len(self.diagnostics)

    def _count(self, diagnostic: Diagnostic) -> None:
        self._seen.add(diagnostic)
        self._counts[diagnostic.code, diagnostic.severity] += 1

    @property
    def errors(self) -> tuple[Diagnostic, ...]:
        """The errors."""
        return tuple(d for d in self if d.severity is Severity.ERROR)

    @property
    def notes(self) -> tuple[Diagnostic, ...]:
        """The notes."""
        return tuple(d for d in self if d.severity is Severity.NOTE)

    def raise_if_errors(self) -> None:
        """Raise a `ScuteError` with every recorded diagnostic when at least one is an error."""
        if self.errors:
            raise ScuteError(self)

    def __iter__(self) -> Iterator[Diagnostic]:
        yield from self.diagnostics
        for (code, severity), count in self._counts.items():
            if count > LISTED:
                yield Diagnostic(
                    code=code,
                    where=f"{count - LISTED} further places",
                    found=f"{count} findings of this code, of which {LISTED} are listed",
                    expected="as for those that are listed",
                    next="correct those that are listed, and run the command again",
                    severity=severity,
                )
