"""The command `scute explain-folds`."""

from __future__ import annotations

from typing import Annotated

import typer

import scute_compile as scute
from scute_compile.cli.console import consoles, print_json
from scute_compile.cli.options import Base, Json, OnePath, RequestedRanks, RequestedSharding


def explain_command(
    path: OnePath,
    *,
    base: Base = None,
    tp: RequestedRanks = None,
    lora_sharding: RequestedSharding = None,
    site: Annotated[str | None, typer.Option(metavar="GLOB", help="Only sites whose name matches.")] = None,
    tenants: Annotated[
        int | None, typer.Option(min=1, help="As for compile. Default: 16; for an artifact any.")
    ] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="As for compile. Default: 16; for an artifact any.")] = None,
    as_json: Json = False,
) -> None:
    """Explain every slot: its neighbours and their owners, whether it was merged, why, and its route."""
    from scute_compile.cli.explain.rendering import render

    report = scute.explain(
        path, base=base, tp=tp, lora_sharding=lora_sharding, site=site, tenants=tenants, tokens=tokens
    )
    if as_json:
        print_json(report.to_json())
    else:
        render(report, consoles()[0])
