"""`scute check`."""

from __future__ import annotations

import typer

import scute_compile as scute
from scute_compile.cli.console import consoles, print_json
from scute_compile.cli.options import Base, Json, Paths, RequestedRanks, RequestedSharding


def check_command(
    paths: Paths,
    *,
    base: Base = None,
    tp: RequestedRanks = None,
    lora_sharding: RequestedSharding = None,
    as_json: Json = False,
) -> None:
    """Check whether adapters would compile and be exact. Reads no base weights."""
    from scute_compile.cli.outcomes import render

    report = scute.check(paths, base=base, tp=tp, lora_sharding=lora_sharding)
    if as_json:
        print_json(report.to_json())
    else:
        render(report, *consoles())
    raise typer.Exit(int(report.refused))
