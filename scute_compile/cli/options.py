"""Arguments and options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

from scute_compile.diagnostics import Code, fail
from scute_compile.ir.dtypes import DType
from scute_compile.ir.target import LoraSharding

Adapters = Annotated[list[str], typer.Argument(metavar="ADAPTER...", help="PEFT folders or Hub ids.")]
Paths = Annotated[list[str], typer.Argument(metavar="PATH...", help="PEFT folders, Hub ids or artifacts.")]
OnePath = Annotated[str, typer.Argument(metavar="PATH", help="A PEFT folder, a Hub id or an artifact.")]
Base = Annotated[
    str | None,
    typer.Option("--base", help="The base model: a folder or a Hub id. Default: the base that the adapter names."),
]
Ranks = Annotated[int, typer.Option("--tp", min=1, max=1024, help="Tensor-parallel ranks.")]
Sharding = Annotated[
    LoraSharding,
    typer.Option("--lora-sharding", help="Layout of A and B over the ranks; full: each rank holds a part of both."),
]
RequestedRanks = Annotated[
    int | None,
    typer.Option("--tp", min=1, max=1024, help="Tensor-parallel ranks. Default: 1; for an artifact any."),
]
RequestedSharding = Annotated[
    LoraSharding | None,
    typer.Option("--lora-sharding", help="As for compile. Default: default; for an artifact any."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


def dtype_of(text: str) -> DType | None:
    """Return the dtype of `--dtype`; None for `auto`.

    Raises:
        ScuteError: SC703 for another name.
    """
    if text == "auto":
        return None
    if text not in set(DType):
        fail(
            Code.SC703,
            where="--dtype",
            found=text,
            expected="auto, float32, bfloat16 or float16",
            next="see --help",
        )
    return DType(text)
