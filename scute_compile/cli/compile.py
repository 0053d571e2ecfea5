"""`scute compile`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import scute_compile as scute
from scute_compile.cli.console import consoles, print_json
from scute_compile.cli.options import Adapters, Base, Json, Ranks, Sharding, dtype_of
from scute_compile.ir.target import LoraSharding, Target, Workload


def compile_command(
    adapters: Adapters,
    *,
    base: Base = None,
    tp: Ranks = 1,
    lora_sharding: Sharding = LoraSharding.DEFAULT,
    out: Annotated[Path, typer.Option("--out", "-o", help="The store for artifacts.")] = Path("scute-store"),
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    name: Annotated[str, typer.Option(help="The artifact's name. Default: the adapter folder's.")] = "",
    tenants: Annotated[int, typer.Option(min=1, help="Distinct adapters in a decode step, for routes.")] = 16,
    tokens: Annotated[int, typer.Option(min=1, help="Rows in a decode step, for routes.")] = 16,
    as_json: Json = False,
) -> None:
    """Compile adapters into a store. Several in one call read the base once."""
    from scute_compile.cli.outcomes import render
    from scute_compile.cli.progress import progress_bars

    workload = Workload(tenants=tenants, tokens=tokens)
    target = Target(tp=tp, dtype=dtype_of(dtype), workload=workload, lora_sharding=lora_sharding)
    with progress_bars(hidden=as_json) as progress:
        report = scute.compile(adapters, base=base, target=target, store=out, name=name, progress=progress)
    if as_json:
        print_json(report.to_json())
    else:
        render(report, *consoles())
    raise typer.Exit(int(report.refused))
