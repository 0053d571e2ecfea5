"""Shows the progress of `scute compile` on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LABELS = {"base": "reading base weights", "adapters": "packing adapters"}
"""Kind of work -> the bar's label."""


@contextmanager
def progress_bars(*, hidden: bool) -> Iterator[Callable[[str, int, int], None] | None]:
    """Give a function for `scute.compile(progress=...)` that draws bars on standard error, or None off a terminal.

    Args:
        hidden: Whether to draw no bars on a terminal either.
    """
    if hidden or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f}%"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def advance(work: str, done: int, total: int) -> None:
            if work not in tasks:
                tasks[work] = bars.add_task(LABELS[work])
            bars.update(tasks[work], completed=done, total=total)

        yield advance
