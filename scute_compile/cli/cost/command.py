"""The command `scute cost`."""

from __future__ import annotations

from typing import Annotated

import typer

from scute_compile.cli.console import consoles, print_json
from scute_compile.cli.options import Json, dtype_of
from scute_compile.ir.dtypes import DType
from scute_compile.ir.target import Workload


def cost_command(
    *,
    model: Annotated[str, typer.Option(help="A model's name, folder or Hub id.")] = "llama-3.1-8b",
    tenants: Annotated[int, typer.Option(min=1, help="Distinct adapters in a decode step.")] = 16,
    tokens: Annotated[int | None, typer.Option(min=1, help="Rows in the step. Default: one per tenant.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16; auto is float16.")] = "float16",
    rank: Annotated[int, typer.Option(help="Rank of LoRA, DoRA and AdaLoRA.")] = 16,
    vera_rank: Annotated[int, typer.Option(help="Rank of VeRA's shared pair.")] = 256,
    oft_block: Annotated[int, typer.Option(help="OFT's block size.")] = 32,
    bandwidth: Annotated[float, typer.Option(help="Memory bandwidth in GB/s.")] = 3600.0,
    launch: Annotated[float, typer.Option(help="Cost of one kernel launch in microseconds.")] = 0.5,
    as_json: Json = False,
) -> None:
    """Predict bytes and milliseconds per decode step for each method and a mixed pool."""
    from scute_compile.cli.cost.rendering import render
    from scute_compile.cli.cost.report import Sizes, cost_of_model

    workload = Workload(tenants=tenants, tokens=tokens or tenants, bandwidth=bandwidth * 1e9, launch=launch * 1e-6)
    sizes = Sizes(rank=rank, vera_rank=vera_rank, oft_block=oft_block)
    report = cost_of_model(model, workload=workload, dtype=dtype_of(dtype) or DType.FLOAT16, sizes=sizes)
    if as_json:
        print_json(report.to_json())
    else:
        render(report, consoles()[0])
