"""The report of `scute verify`, and the errors that it allows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from scute_compile.diagnostics import Code, Diagnostic, ScuteError
from scute_compile.driver.artifact_checks import other_base, other_sources
from scute_compile.driver.packages import needs
from scute_compile.driver.planning import Bases
from scute_compile.driver.reports import envelope
from scute_compile.formats.artifact import open_artifact
from scute_compile.formats.peft_folder import open_adapter
from scute_compile.ir.dtypes import DType

if TYPE_CHECKING:
    from scute_compile.runtime_min.oracle.verification import Verification

RELATIVE = {DType.FLOAT32: 5e-5, DType.BFLOAT16: 2.5e-2, DType.FLOAT16: 4e-3}
"""The largest mean error that passes, relative to the adapter's effect: many times one rounding of the dtype."""
NOISE = 64 * 2.0**-24
"""The error of float32 arithmetic in a log-probability of ordinary size. It matters only for tiny effects."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """The comparison of an artifact with PEFT."""

    artifact: str
    """The artifact's name."""
    result: Verification
    """Errors of the log-probabilities beside the adapter's effect."""
    notes: tuple[Diagnostic, ...] = ()
    """SC609 when files of the adapter changed since it was compiled."""

    @property
    def allowed(self) -> float:
        """The largest mean absolute error of a log-probability that passes."""
        effect = self.result.mean_abs_adapter_effect or 0.0
        return RELATIVE[DType(self.result.dtype)] * effect + NOISE

    @property
    def passed(self) -> bool:
        """Whether the artifact equals PEFT up to its dtype's rounding."""
        error = self.result.mean_abs_logprob_error
        return self.result.comparable and error is not None and error <= self.allowed

    @property
    def problem(self) -> Diagnostic | None:
        """The reason that it didn't pass: SC704, or SC702 when PEFT is not comparable; None when it passed."""
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
        findings = [finding.to_json() for finding in (*self.notes, self.problem) if finding]
        return {
            **envelope("verify", artifact=self.artifact, passed=self.passed),
            **self.result.to_json(),
            "allowed_mean_error": self.allowed,
            "findings": findings,
        }


def verify_artifact(source: str, *, adapter: str, base: str | None, tokens: int) -> VerifyReport:
    """Compare an artifact with PEFT.

    Args:
        source: The artifact's folder.
        adapter: The PEFT folder or Hub id that it was compiled from.
        base: The base with weights, a folder or a Hub id; None: the base that the adapter names.
        tokens: The least number of tokens to compare.

    Raises:
        ScuteError: faults of the artifact (SC6xx), the adapter (SC1xx, SC2xx) or the base (SC4xx), SC608 when the
            artifact is for another base, SC701 without torch, transformers and peft.
    """
    artifact = open_artifact(source)
    opened = open_adapter(adapter)
    model = Bases(given=base, weights=True).open_for(opened, adapter)
    if mismatch := other_base(artifact, model):
        raise ScuteError(mismatch)
    with needs("torch, transformers and peft", command="verify"):
        from scute_compile.runtime_min.oracle.verification import verify as compare
    if model.checkpoint.path is None:
        raise AssertionError(model.checkpoint.source)
    notes = other_sources(artifact, opened)
    try:
        result = compare(artifact, opened, model.checkpoint.path, tokens=tokens, base_dtype=model.structure.dtype)
    except ScuteError as error:
        raise ScuteError([*notes, *error.diagnostics]) from None
    return VerifyReport(artifact=artifact.manifest.name, result=result, notes=notes)
