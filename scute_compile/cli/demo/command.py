"""The command `scute demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from scute_compile.cli.console import consoles, print_json
from scute_compile.cli.options import Json


def demo_command(
    *,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="A folder to keep the files in.")] = None,
    as_json: Json = False,
) -> None:
    """Make a tiny Llama and an adapter of every method, compile them at tp 2, and compare one batch with PEFT."""
    from scute_compile.cli.demo.rendering import render
    from scute_compile.cli.demo.report import demo

    report = demo(out, quiet=as_json)
    if as_json:
        print_json(report.to_json())
    else:
        render(report, consoles()[0])
    raise typer.Exit(int(not report.passed))
