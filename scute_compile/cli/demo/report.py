"""The report of `scute demo`: an embedded example, compiled, run as one mixed batch, and compared with PEFT."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import scute_compile as scute
from scute_compile.cli.explain.report import ExplainReport, explain_artifact
from scute_compile.cli.verify.report import RELATIVE
from scute_compile.diagnostics import Code, fail
from scute_compile.driver.packages import needs
from scute_compile.driver.reports import envelope
from scute_compile.formats.artifact import Artifact, open_artifact
from scute_compile.ir.dtypes import DType
from scute_compile.ir.program import Action
from scute_compile.ir.target import Target

TP = 2
LENGTH = 16
"""Tokens per row."""
BASE = "base"
SHOWN = (("dora", "*.layers.0.*q_proj"), ("vera", "*.layers.0.*v_proj"))
"""The adapters and sites whose folds are shown: slots beside owned factors, and slots beside shared ones."""
ACCURACY = RELATIVE[DType.FLOAT32]


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoRow:
    """One row of the batch: its adapter, and its error against PEFT."""

    row: int
    adapter: str
    """`base` for the row without one."""
    merged: str
    """The merged slots, with their numbers of sites: `c x14, e x14`."""
    live: str
    """The slots that are computed at every step, likewise."""
    error: float
    """Mean absolute difference of the log-probabilities from PEFT's."""
    effect: float
    """Mean absolute change of the log-probabilities from the base to PEFT's adapted model."""

    @property
    def relative_error(self) -> float | None:
        """The error over the effect; None for the base's row, which has no effect."""
        return self.error / self.effect if self.effect else None

    @property
    def passed(self) -> bool:
        """Whether the row equals PEFT up to float32 rounding. The base's row must be equal to the bit."""
        if self.adapter == BASE:
            return self.error == 0
        return self.relative_error is not None and self.relative_error <= ACCURACY


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoReport:
    """The rows of the batch, and the explained folds."""

    rows: tuple[DemoRow, ...]
    explained: tuple[ExplainReport, ...]
    folder: str | None
    """The folder that holds the files; None when they were removed."""

    @property
    def passed(self) -> bool:
        """Whether every row passed."""
        return all(row.passed for row in self.rows)

    def to_json(self) -> dict[str, object]:
        """Return the report as plain JSON values."""
        rows = [{**asdict(row), "relative_error": row.relative_error, "passed": row.passed} for row in self.rows]
        return envelope(
            "demo",
            passed=self.passed,
            tp=TP,
            tokens=LENGTH * len(self.rows),
            allowed_relative_error=ACCURACY,
            folder=self.folder,
            rows=rows,
            explained=[report.to_json() for report in self.explained],
        )


def demo(out: Path | None, *, quiet: bool) -> DemoReport:
    """Write a base and adapters with PEFT, compile them in one call, run one mixed batch, and compare it with PEFT.

    Args:
        out: A new or empty folder for the files; None: a temporary folder, which is removed.
        quiet: Whether to leave out the steps on standard error.

    Raises:
        ScuteError: SC701 without torch, transformers and peft, SC703 when `out` holds files, SC109 when it can't be
            written.
    """
    with needs("torch, transformers and peft", command="demo"):
        from scute_compile.cli.demo.models import CONFIGS, write_adapter, write_base

    announce: Callable[[str], object] = (lambda _: None) if quiet else (lambda text: sys.stderr.write(f"{text}\n"))
    with _folder(out) as folder:
        announce("making a tiny Llama, and adapters of all methods with PEFT ...")
        base, adapters = folder / "base", {name: folder / "adapters" / name for name in CONFIGS}
        write_base(base)
        for name, path in adapters.items():
            write_adapter(name, base, path)
        announce(f"compiling {len(adapters)} adapters in one call for {TP} ranks ...")
        artifacts = _compiled(adapters.values(), base, folder / "store")
        announce("running one batch with another adapter in every row, and each row in PEFT ...")
        rows = _compared(base, adapters, artifacts)
        explained = tuple(explain_artifact(artifacts[name], glob) for name, glob in SHOWN)
        return DemoReport(rows=rows, explained=explained, folder=str(out) if out else None)


@contextmanager
def _folder(out: Path | None) -> Iterator[Path]:
    """Give a folder that is new or empty; a temporary one for None."""
    if out is None:
        with TemporaryDirectory(prefix="scute-demo-") as temporary:
            yield Path(temporary)
        return
    try:
        out.mkdir(parents=True, exist_ok=True)
        entry = next(out.iterdir(), None)
    except OSError as error:
        fail(
            Code.SC109,
            where=str(out),
            found=error.strerror or str(error),
            expected="a folder that can be written",
            next="choose another folder",
        )
    if entry is not None:
        fail(
            Code.SC703,
            where="--out",
            found=f"`{out}` holds `{entry.name}`",
            expected="a new or empty folder",
            next="choose another folder",
        )
    yield out


def _compiled(adapters: Iterable[Path], base: Path, store: Path) -> dict[str, Artifact]:
    report = scute.compile(adapters, base=base, target=Target(tp=TP, dtype=DType.FLOAT32), store=store)
    report.raise_if_refused()
    return {item.name: open_artifact(item.artifact) for item in report.adapters if item.artifact}


def _compared(base: Path, adapters: dict[str, Path], artifacts: dict[str, Artifact]) -> tuple[DemoRow, ...]:
    """Run the mixed batch once, and every row alone in PEFT."""
    from scute_compile.cli.demo.models import compared

    names: tuple[str | None, ...] = (*list(adapters)[:3], None, *list(adapters)[3:])
    return tuple(
        DemoRow(
            row=row,
            adapter=name or BASE,
            merged=_slots(artifacts[name], Action.MERGED) if name else "",
            live=_slots(artifacts[name], Action.LIVE) if name else "",
            error=error,
            effect=effect,
        )
        for row, (name, (error, effect)) in enumerate(
            zip(names, compared(base, adapters, artifacts, names, length=LENGTH), strict=True)
        )
    )


def _slots(artifact: Artifact, action: Action) -> str:
    """Return the slots with a note of this action, and their numbers of sites: `c x14, e x14`."""
    slots = Counter(str(note["slot"]) for note in artifact.manifest.notes if note["action"] == action.value)
    return ", ".join(f"{slot} x{count}" for slot, count in sorted(slots.items()))
