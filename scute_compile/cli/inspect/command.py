"""The command `scute inspect`."""

from __future__ import annotations

from typing import Annotated

import typer

import scute_compile as scute
from scute_compile.cli.console import consoles, print_json
from scute_compile.cli.options import Json, OnePath, RequestedRanks, RequestedSharding


def inspect_command(
    path: OnePath,
    *,
    base: Annotated[
        str | None, typer.Option(help="The base model. Default: none; then there are no cuts and no routes.")
    ] = None,
    tp: RequestedRanks = None,
    lora_sharding: RequestedSharding = None,
    as_json: Json = False,
) -> None:
    """Show an adapter's or an artifact's method, sites, ranks, slots, owners and bytes."""
    from scute_compile.cli.inspect.rendering import render

    report = scute.inspect(path, base=base, tp=tp, lora_sharding=lora_sharding)
    if as_json:
        print_json(report.to_json())
    else:
        render(report, consoles()[0])
