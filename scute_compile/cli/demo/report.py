"""`scute demo`: the whole way on an embedded example, from PEFT's files to one mixed batch that equals PEFT."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from scute_compile.cli.explain.report import ExplainReport, explain_artifact
from scute_compile.cli.outcomes import envelope
from scute_compile.cli.verify.report import RELATIVE
from scute_compile.diagnostics import Code, ScuteError, fail
from scute_compile.ir.dtypes import DType
from scute_compile.ir.program import Action
from scute_compile.ir.target import Target

if TYPE_CHECKING:
    import torch
    from rich.console import Console
    from rich.table import Table

    from scute_compile.formats.artifact import Artifact

TP = 2
LENGTH = 16
"""Tokens per row."""
BASE = "base"
SHOWN = (("dora", "*.layers.0.*q_proj"), ("vera", "*.layers.0.*v_proj"))
"""Of which adapters and sites the folds are explained: slots beside owned factors, and slots beside shared ones."""
ACCURACY = RELATIVE[DType.FLOAT32]


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoRow:
    """One row of the batch: its adapter, and how far it is from PEFT."""

    row: int
    adapter: str
    """`base` for the row without one."""
    merged: str
    """Slots that were merged, with the number of sites."""
    live: str
    """Slots that are computed at every step."""
    error: float
    """Mean absolute difference of the log-probabilities from PEFT's."""
    effect: float
    """Mean absolute change of the log-probabilities from the base to PEFT's adapted model."""

    @property
    def relative_error(self) -> float | None:
        """Error over effect; None for the base's row, which has no effect."""
        return self.error / self.effect if self.effect else None

    @property
    def passed(self) -> bool:
        """Whether the row equals PEFT up to float32 rounding, the base's row to the bit."""
        if self.adapter == BASE:
            return self.error == 0
        return self.relative_error is not None and self.relative_error <= ACCURACY


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoReport:
    """What the demo did and found."""

    rows: tuple[DemoRow, ...]
    explained: tuple[ExplainReport, ...]
    folder: str | None
    """Where everything was kept."""

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

    def render(self, console: Console) -> None:
        """Print the folds, the table of rows and the verdict."""
        for report in self.explained:
            report.render(console)
            console.print()
        console.print(_table(self.rows))
        if self.passed:
            console.print(
                f"[green]every row equals PEFT[/] (allowed: relative {ACCURACY:g}; base row equal to the bit)"
            )
        else:
            wrong = ", ".join(row.adapter for row in self.rows if not row.passed)
            console.print(f"[red]not equal to PEFT:[/] {wrong}")
        kept = f"kept in {self.folder}" if self.folder else "keep the files with `scute demo -o DIR`"
        example = f"scute explain-folds {self.folder or 'DIR'}/store/oft"
        console.print(f"{kept}; then try `{example}`", markup=False, highlight=False, soft_wrap=True)


def _table(rows: Sequence[DemoRow]) -> Table:
    from rich.table import Table

    title = f"one batch of {len(rows)} rows, tp {TP}, against PEFT (log-probabilities, float32)"
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("row", justify="right")
    for name in ("adapter", "merged", "live"):
        table.add_column(name)
    for name in ("error", "effect", "relative"):
        table.add_column(name, justify="right")
    for row in rows:
        relative = "-" if row.relative_error is None else f"{row.relative_error:.1e}"
        style = "" if row.passed else "red"
        effect = f"{row.effect:.3f}" if row.effect else "-"
        table.add_row(
            str(row.row), row.adapter, row.merged, row.live, f"{row.error:.1e}", effect, relative, style=style
        )
    return table


def demo(out: Path | None, *, quiet: bool) -> DemoReport:
    """Make a base and adapters with PEFT, compile them in one call, run one mixed batch and compare it with PEFT.

    Args:
        out: a new or empty folder that everything is kept in; None: a temporary one, removed in the end.
        quiet: whether to keep the steps off standard error.

    Raises:
        ScuteError: SC701 without torch, transformers and peft; SC703 when `out` holds files already.
    """
    _check_packages()
    say: Callable[[str], object] = (lambda _: None) if quiet else (lambda text: sys.stderr.write(f"{text}\n"))
    with _folder(out) as folder:
        from scute_compile.cli.demo.models import CONFIGS, write_adapter, write_base

        say("making a tiny Llama, and adapters of all methods with PEFT ...")
        base, adapters = folder / "base", {name: folder / "adapters" / name for name in CONFIGS}
        write_base(base)
        for name, path in adapters.items():
            write_adapter(name, base, path)
        say(f"compiling {len(adapters)} adapters in one call for {TP} ranks ...")
        artifacts = _compiled(adapters.values(), base, folder / "store", quiet=quiet)
        say("running one batch with another adapter in every row, and each row in PEFT ...")
        rows = _compared(base, adapters, artifacts)
        explained = tuple(explain_artifact(artifacts[name], glob) for name, glob in SHOWN)
        return DemoReport(rows=rows, explained=explained, folder=str(out) if out else None)


def _check_packages() -> None:
    try:
        import peft
        import torch
        import transformers
    except ModuleNotFoundError as error:
        fail(
            Code.SC701,
            where="demo",
            found=f"no module named {error.name!r}",
            expected="torch, transformers and peft",
            next="`pip install torch peft`; check, inspect, explain-folds and cost work without",
        )
    del peft, torch, transformers


@contextmanager
def _folder(out: Path | None) -> Iterator[Path]:
    if out is None:
        with TemporaryDirectory(prefix="scute-demo-") as temporary:
            yield Path(temporary)
        return
    try:
        out.mkdir(parents=True, exist_ok=True)
        held = next(out.iterdir(), None)
    except OSError as error:
        fail(
            Code.SC109,
            where=str(out),
            found=error.strerror or str(error),
            expected="a folder that can be written",
            next="choose another folder",
        )
    if held is not None:
        fail(
            Code.SC703,
            where="--out",
            found=f"`{out}` holds `{held.name}` already",
            expected="a new or empty folder",
            next="choose another folder",
        )
    yield out


def _compiled(adapters: Iterable[Path], base: Path, store: Path, *, quiet: bool) -> dict[str, Artifact]:
    from scute_compile.driver.commands import compile_adapters
    from scute_compile.formats.artifact import open_artifact

    target = Target(tp=TP, dtype=DType.FLOAT32)
    outcomes = compile_adapters([str(path) for path in adapters], str(base), target, store, quiet=quiet)
    refused = [finding for item in outcomes if item.outcome == "refused" for finding in item.findings]
    if refused:
        raise ScuteError(refused)
    return {item.name: open_artifact(item.artifact) for item in outcomes if item.artifact}


def _compared(base: Path, adapters: dict[str, Path], artifacts: dict[str, Artifact]) -> tuple[DemoRow, ...]:
    """Run the mixed batch once, and every row alone in PEFT."""
    from scute_compile.cli.demo.models import logprobs, peft_logprobs, random_tokens
    from scute_compile.runtime_min.base_model import load_model
    from scute_compile.runtime_min.oracle.adapted_model import AdaptedModel

    names: tuple[str | None, ...] = (*list(adapters)[:3], None, *list(adapters)[3:])
    ids = random_tokens(len(names), LENGTH)
    model = load_model(base)
    plain = logprobs(model, ids)
    with AdaptedModel(model, artifacts) as adapted:
        ours = logprobs(adapted, ids, adapter_names=names)
    rows = []
    for row, name in enumerate(names):
        theirs = peft_logprobs(base, adapters[name], ids[row : row + 1])[0] if name else plain[row]
        rows.append(
            DemoRow(
                row=row,
                adapter=name or BASE,
                merged=_slots(artifacts[name], Action.MERGED) if name else "",
                live=_slots(artifacts[name], Action.LIVE) if name else "",
                error=_mean_distance(ours[row], theirs),
                effect=_mean_distance(theirs, plain[row]),
            )
        )
    return tuple(rows)


def _mean_distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return (one - other).abs().mean().item()


def _slots(artifact: Artifact, action: Action) -> str:
    """Return which slots met `action`, and at how many sites: `c x14, e x14`."""
    slots = Counter(str(note["slot"]) for note in artifact.manifest.notes if note["action"] == action.value)
    return ", ".join(f"{slot} x{count}" for slot, count in sorted(slots.items()))
