"""Writes reports to standard output and problems to standard error, as text or as JSON."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from scute_compile.diagnostics import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text


def consoles() -> tuple[Console, Console]:
    """Return consoles on standard output and on standard error.

    Neither of them replaces `:smile:` in a name by an emoji, or colours numbers in it.
    """
    from rich.console import Console

    results, problems = (Console(file=stream, emoji=False, highlight=False) for stream in (sys.stdout, sys.stderr))
    return results, problems


def print_json(value: object) -> None:
    """Write JSON to standard output."""
    sys.stdout.write(json.dumps(value, indent=1) + "\n")


def print_line(console: Console, *parts: str | tuple[str, str]) -> None:
    """Print a line of literal text: without markup, emoji and wrapping, with control characters escaped.

    Args:
        console: Where to print.
        parts: Texts, or pairs of a text and its style.
    """
    console.print(literal(*parts), soft_wrap=True)


def literal(*parts: str | tuple[str, str]) -> Text:
    """Return literal text for a line or a table's cell: no markup, no emoji, control characters escaped.

    Args:
        parts: Texts, or pairs of a text and its style. Line breaks are kept.
    """
    from rich.text import Text

    pieces = [(part, "") if isinstance(part, str) else part for part in parts]
    style = pieces[0][1] if len(pieces) == 1 else ""  # the style of a whole cell covers its padding
    text = Text(style=style)
    for content, piece_style in pieces:
        text.append("\n".join(map(printable, content.split("\n"))), None if style else piece_style)
    return text
