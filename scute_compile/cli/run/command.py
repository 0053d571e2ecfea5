"""The command `scute run`."""

from __future__ import annotations

from typing import Annotated

import typer

from scute_compile.cli.console import consoles, print_json
from scute_compile.cli.options import Json


def run_command(
    *,
    base: Annotated[str, typer.Option("--base", help="The base model: a folder or a Hub id.")],
    adapter: Annotated[
        list[str] | None, typer.Option(metavar="NAME=ARTIFACT", help="An adapter to serve. Repeatable.")
    ] = None,
    prompt: Annotated[
        list[str] | None, typer.Option(metavar="NAME:TEXT", help="A prompt, `:TEXT` for the base alone. Repeatable.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="The largest number of tokens per prompt.")] = 64,
    as_json: Json = False,
) -> None:
    """Continue prompts in one batch, each with its adapter, and stream the tokens."""
    from scute_compile.cli.run.rendering import render, streaming
    from scute_compile.cli.run.report import run_prompts
    from scute_compile.cli.run.request import parse_request

    console = consoles()[0]
    request = parse_request(adapter or (), prompt or ())
    with streaming(console, request.prompts, live=console.is_terminal and not as_json) as show:
        report = run_prompts(base, request, max_new_tokens=max_new_tokens, on_token=show)
    if as_json:
        print_json(report.to_json())
    elif not console.is_terminal:
        render(report, console)
