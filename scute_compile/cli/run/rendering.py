"""Renders the continuations of `scute run`: at the end, or on a terminal as the tokens arrive."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from scute_compile.cli.console import literal, print_line
from scute_compile.cli.run.request import Prompt
from scute_compile.diagnostics import printable

if TYPE_CHECKING:
    from rich.console import Console

    from scute_compile.cli.run.report import RunReport


def render(report: RunReport, console: Console) -> None:
    """Print one block per prompt."""
    for answer in report.answers:
        print_line(console, block(answer.prompt.name, answer.text))


def block(name: str, text: str) -> str:
    r"""Return a continuation as `name> text`, with control characters escaped and later lines indented.

    >>> block("dora", "one\ntwo\x1b[31m")
    'dora> one\n      two\\x1b[31m'
    """
    label = f"{printable(name)}> "
    return label + ("\n" + " " * len(label)).join(map(printable, text.split("\n")))


@contextmanager
def streaming(console: Console, prompts: Sequence[Prompt], *, live: bool) -> Iterator[Callable[[Sequence[str]], None]]:
    """Give a function that shows the text of every row so far, redrawn in place. It does nothing unless `live`.

    Args:
        console: Where to draw.
        prompts: The rows of the batch.
        live: Whether the console is a terminal with no other output.
    """
    if not live:
        yield lambda _: None
        return
    from rich.live import Live

    with Live(console=console, refresh_per_second=12, vertical_overflow="visible") as screen:

        def show(texts: Sequence[str]) -> None:
            rows = [block(prompt.name, text) for prompt, text in zip(prompts, texts, strict=True)]
            screen.update(literal("\n".join(rows)))

        yield show
