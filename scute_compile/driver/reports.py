"""The reports of `compile` and `check`, and the JSON envelope of every report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from scute_compile.diagnostics import Diagnostic, ScuteError, Severity

if TYPE_CHECKING:
    from scute_compile.pipeline import Planned

SCHEMA_VERSION = "1.0"
"""Version of the JSON that commands print."""


def envelope(command: str, **fields: object) -> dict[str, object]:
    """Return a command's JSON answer: the schema version, the command, and its fields."""
    return {"schema_version": SCHEMA_VERSION, "command": command, **fields}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result for one adapter or artifact of a call."""

    path: str
    """The path or Hub id, as given."""
    name: str
    """The artifact's name; for an adapter its folder's name, unless another was given."""
    method: str = ""
    """The PEFT method, such as `dora`; empty when the adapter was refused before it was known."""
    sites: int | None = None
    """The number of adapted layers; None when the adapter was refused."""
    findings: tuple[Diagnostic, ...] = ()
    artifact: str | None = None
    """The compiled artifact's folder; None from `check`, and for refused adapters."""

    @property
    def outcome(self) -> Literal["exact", "noted", "refused"]:
        """`refused`, `noted` (exact, with findings that inform) or `exact`."""
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
            **({} if self.sites is None else {"sites": self.sites}),
            "findings": [finding.to_json() for finding in self.findings],
        }


def outcome_of(planned: Planned) -> Outcome:
    """Return the outcome of an adapter that was planned and not packed."""
    program = planned.program
    return Outcome(
        path=planned.source,
        name=planned.name,
        method=program.method.value if program else "",
        sites=len(program.sites) if program else None,
        findings=planned.findings,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """The outcomes of `check`, in the order of the paths."""

    adapters: tuple[Outcome, ...]

    @property
    def refused(self) -> bool:
        """Whether at least one adapter or artifact was refused."""
        return any(item.outcome == "refused" for item in self.adapters)

    def raise_if_refused(self) -> None:
        """Raise the findings of every refused adapter.

        Raises:
            ScuteError: when at least one was refused.
        """
        findings = [finding for item in self.adapters if item.outcome == "refused" for finding in item.findings]
        if findings:
            raise ScuteError(findings)

    def to_json(self) -> dict[str, object]:
        """Return the report as plain JSON values."""
        return envelope("check", adapters=[item.to_json() for item in self.adapters])


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileReport(CheckReport):
    """The outcomes of `compile`, in the order of the adapters."""

    store: Path
    """The folder that artifacts and shared factors were written to."""

    def to_json(self) -> dict[str, object]:
        """Return the report as plain JSON values."""
        return envelope("compile", store=str(self.store), adapters=[item.to_json() for item in self.adapters])
