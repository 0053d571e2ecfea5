"""Renders the report of `scute verify`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scute_compile.cli.console import print_line

if TYPE_CHECKING:
    from rich.console import Console

    from scute_compile.cli.verify.report import VerifyReport

MEASURES = ("max_abs_logprob_error", "mean_abs_logprob_error", "mean_abs_adapter_effect", "relative_error")


def render(report: VerifyReport, results: Console, problems: Console) -> None:
    """Print the errors and the verdict to `results`, and notes and the reason of a failure to `problems`."""
    from rich.table import Table

    result = report.result
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column()
    table.add_column(justify="right")
    for name in MEASURES:
        value = getattr(result, name)
        table.add_row(name, "-" if value is None else f"{value:.3e}")
    print_line(results, f"{report.artifact}: {result.dtype}, tp {result.tp}, {result.tokens} tokens")
    results.print(table)
    for note in report.notes:
        print_line(problems, str(note))
    if report.problem:
        print_line(problems, str(report.problem))
    else:
        print_line(results, ("equal to PEFT", "green"), f" (mean error at most {report.allowed:.3g})")
