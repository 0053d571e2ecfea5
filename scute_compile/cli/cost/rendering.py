"""Renders the report of `scute cost` as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scute_compile.cli.console import literal
from scute_compile.cli.sizes import readable

if TYPE_CHECKING:
    from rich.console import Console

    from scute_compile.cli.cost.report import CostReport


def render(report: CostReport, console: Console) -> None:
    """Print the table of pools."""
    from rich.table import Table

    work = report.workload
    table = Table(
        title=literal(f"{report.shape.name}, {report.dtype}: one step of {work.tenants} tenants, {work.tokens} tokens"),
        caption=f"{work.bandwidth / 1e9:,.0f} GB/s, {work.launch * 1e6:g} us a launch; times add to the base's",
    )
    table.add_column("pool")
    for heading in ("adapters", "activations", "launches", "memory ms", "predicted ms"):
        table.add_column(heading, justify="right")
    base_ms = f"{report.base_ms:.3f}"
    table.add_row("base GEMMs alone", readable(report.base_bytes), "", "", base_ms, base_ms)
    table.add_section()
    for row in report.rows:
        table.add_row(
            row.pool,
            readable(row.adapter_bytes),
            readable(row.activation_bytes),
            str(row.launches),
            f"{row.memory_ms:.3f}",
            f"{row.predicted_ms:.3f}",
        )
    console.print(table)
