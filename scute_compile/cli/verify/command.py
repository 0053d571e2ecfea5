"""The command `scute verify`."""

from __future__ import annotations

from typing import Annotated

import typer

import scute_compile as scute
from scute_compile.cli.console import consoles, print_json
from scute_compile.cli.options import Base, Json


def verify_command(
    artifact: Annotated[str, typer.Argument(metavar="ARTIFACT", help="An artifact's folder.")],
    *,
    adapter: Annotated[str, typer.Option("--adapter", help="The PEFT folder that it was compiled from.")],
    base: Base = None,
    tokens: Annotated[int, typer.Option(min=1, help="The number of tokens to compare.")] = 64,
    as_json: Json = False,
) -> None:
    """Run an artifact and PEFT in float32 on the same tokens, and compare log-probabilities."""
    from scute_compile.cli.verify.rendering import render

    report = scute.verify(artifact, adapter=adapter, base=base, tokens=tokens)
    if as_json:
        print_json(report.to_json())
    else:
        render(report, *consoles())
    raise typer.Exit(int(not report.passed))
