"""Renders the report of `scute demo`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from scute_compile.cli.console import print_line
from scute_compile.cli.demo.report import ACCURACY, TP, DemoReport, DemoRow
from scute_compile.cli.explain.rendering import render as render_explained

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def render(report: DemoReport, console: Console) -> None:
    """Print the folds, the table of rows and the verdict."""
    for explained in report.explained:
        render_explained(explained, console)
        console.print()
    console.print(_table(report.rows))
    if report.passed:
        allowed = f" (allowed: relative {ACCURACY:g}; base row equal to the bit)"
        print_line(console, ("every row equals PEFT", "green"), allowed)
    else:
        wrong = ", ".join(row.adapter for row in report.rows if not row.passed)
        print_line(console, ("not equal to PEFT:", "red"), f" {wrong}")
    kept = f"kept in {report.folder}" if report.folder else "keep the files with `scute demo -o DIR`"
    print_line(console, f"{kept}; then try `scute explain-folds {report.folder or 'DIR'}/store/oft`")


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
