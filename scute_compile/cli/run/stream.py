"""How a terminal shows tokens as they come: one block per prompt, redrawn in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from scute_compile.cli.run.request import BASE, shown

if TYPE_CHECKING:
    from rich.console import Console


@contextmanager
def streaming(console: Console, prompts: Sequence[str], *, live: bool) -> Iterator[Callable[[Sequence[str]], None]]:
    """Give a function that takes the text of every row so far; it does nothing unless `live`.

    Args:
        console: Where the blocks go.
        prompts: As the command line has them, `NAME:TEXT`.
        live: Whether the console is a terminal that nothing else is written to.
    """
    if not live:
        yield lambda _: None
        return
    from rich.live import Live
    from rich.text import Text

    names = [prompt.partition(":")[0] or BASE for prompt in prompts]

    with Live(console=console, refresh_per_second=12, vertical_overflow="visible") as screen:

        def say(texts: Sequence[str]) -> None:
            rows = [shown(name, text) for name, text in zip(names, texts, strict=True)]
            screen.update(Text("\n".join(rows)))

        yield say
