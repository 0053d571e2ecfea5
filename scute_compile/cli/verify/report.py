"""What `scute verify` prints, and when it calls an artifact right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from scute_compile.cli.outcomes import SCHEMA_VERSION
from scute_compile.diagnostics import Code, Diagnostic, ScuteError, fail
from scute_compile.driver.artifact_checks import other_sources
from scute_compile.ir.dtypes import DType

if TYPE_CHECKING:
    from rich.console import Console

    from scute_compile.driver.bases import OpenBase
    from scute_compile.formats.artifact import Artifact
    from scute_compile.runtime_min.oracle.verification import Verification

RELATIVE = {DType.FLOAT32: 5e-5, DType.BFLOAT16: 2.5e-2, DType.FLOAT16: 4e-3}
"""Largest error relative to the adapter's own effect: many times one rounding of the artifact's dtype."""
NOISE = 64 * 2.0**-24
"""What float32 arithmetic alone leaves in a log-probability of ordinary size; it matters for tiny effects only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """A comparison and its verdict."""

    artifact: str
    result: Verification
    notes: tuple[Diagnostic, ...] = ()
    """What is worth knowing whatever the verdict: files of the adapter that changed since compiling."""

    @property
    def allowed(self) -> float:
        """The largest mean absolute error that passes."""
        effect = self.result.mean_abs_adapter_effect or 0.0
        return RELATIVE[DType(self.result.dtype)] * effect + NOISE

    @property
    def passed(self) -> bool:
        """Whether the artifact equals PEFT up to its dtype's rounding."""
        error = self.result.mean_abs_logprob_error
        return self.result.comparable and error is not None and error <= self.allowed

    @property
    def problem(self) -> Diagnostic | None:
        """Why it didn't pass."""
        if self.passed:
            return None
        if not self.result.comparable:
            return self.result.reason
        return Diagnostic(
            code=Code.SC704,
            where=self.artifact,
            found=f"mean error {self.result.mean_abs_logprob_error:.3g} of an effect of "
            f"{self.result.mean_abs_adapter_effect:.3g}",
            expected=f"at most {self.allowed:.3g}",
            next="compile again; if it persists, report it" if not self.notes else self.notes[0].next,
        )

    def to_json(self) -> dict[str, object]:
        """Return the comparison as plain JSON values."""
        head = {"schema_version": SCHEMA_VERSION, "command": "verify", "artifact": self.artifact, "passed": self.passed}
        findings = [one.to_json() for one in (*self.notes, self.problem) if one]
        return {**head, **self.result.to_json(), "allowed_mean_error": self.allowed, "findings": findings}

    def render(self, results: Console, problems: Console) -> None:
        """Print the figures, and the verdict."""
        from rich.table import Table

        table = Table(show_header=False, box=None, pad_edge=False)
        table.add_column()
        table.add_column(justify="right")
        rows = ("max_abs_logprob_error", "mean_abs_logprob_error", "mean_abs_adapter_effect", "relative_error")
        for name in rows:
            value = getattr(self.result, name)
            table.add_row(name, "-" if value is None else f"{value:.3e}")
        results.print(
            f"{self.artifact}: {self.result.dtype}, tp {self.result.tp}, {self.result.tokens} tokens", markup=False
        )
        results.print(table)
        for note in self.notes:
            problems.print(str(note), markup=False, highlight=False, soft_wrap=True)
        if self.problem:
            problems.print(str(self.problem), markup=False, highlight=False, soft_wrap=True)
        else:
            results.print(f"[green]equal to PEFT[/] (mean error at most {self.allowed:.3g})")


def verify(artifact: Artifact, adapter: str, base: OpenBase, tokens: int) -> VerifyReport:
    """Run the comparison.

    Args:
        artifact: an opened artifact, known to belong to the base.
        adapter: the PEFT folder it was compiled from, or a Hub id.
        base: the base with weights.
        tokens: how many tokens to compare on.
    """
    from scute_compile.formats.peft_folder import open_adapter

    try:
        from scute_compile.runtime_min.oracle.verification import verify as compare
    except ModuleNotFoundError as error:
        fail(
            Code.SC701,
            where="verify",
            found=f"no module named {error.name!r}",
            expected="torch, transformers and peft",
            next="`pip install torch peft`, or verify on another machine",
        )
    if base.checkpoint.path is None:
        raise AssertionError(base.checkpoint.source)
    source = open_adapter(adapter)
    notes = other_sources(artifact, source)
    try:
        result = compare(artifact, source, base.checkpoint.path, tokens=tokens, base_dtype=base.structure.dtype)
    except ScuteError as error:
        raise ScuteError([*notes, *error.diagnostics]) from None
    return VerifyReport(artifact=artifact.manifest.name, result=result, notes=notes)
