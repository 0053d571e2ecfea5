"""Checks adapters by planning them, and artifacts by opening them. Writes nothing and reads no base weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from scute_compile.diagnostics import as_scute_error
from scute_compile.driver.artifact_checks import Requested, other_base, other_target
from scute_compile.driver.bases import OpenBase
from scute_compile.driver.planning import Bases, plan_adapter
from scute_compile.driver.reports import CheckReport, Outcome, outcome_of
from scute_compile.formats.artifact import is_artifact, open_artifact


def check_paths(sources: Sequence[str], *, base: str | None, requested: Requested) -> CheckReport:
    """Plan adapters, and open artifacts with every check that a reader makes.

    Args:
        sources: PEFT folders, Hub ids and artifacts.
        base: The base of all of them; None: the base that each adapter's configuration names, and none for artifacts.
        requested: What to plan adapters for, and what artifacts must have been compiled for.

    Raises:
        ScuteError: SC4xx when the base can't be opened and it was given, or the call has one path.
    """
    bases = Bases(given=base, weights=False)
    target, alone = requested.target, len(sources) == 1
    return CheckReport(
        adapters=tuple(
            _check_artifact(source, bases.open_given(), requested)
            if is_artifact(source)
            else outcome_of(plan_adapter(source, bases, target, alone=alone)[0])
            for source in sources
        )
    )


def _check_artifact(source: str, base: OpenBase | None, requested: Requested) -> Outcome:
    try:
        artifact = open_artifact(source)
    except Exception as error:  # noqa: BLE001 - the fault of one artifact must not end the checks of others
        return Outcome(path=source, name=Path(source).name, findings=as_scute_error(error).diagnostics)
    manifest = artifact.manifest
    return Outcome(
        path=source,
        name=manifest.name,
        method=manifest.method.value,
        sites=len(manifest.sites),
        findings=(other_base(artifact, base) if base else ()) + other_target(artifact, requested),
    )
