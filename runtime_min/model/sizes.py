"""Sizes of memory as callers write them: a number of bytes, or text such as `128MiB`."""

from __future__ import annotations

import re
from fractions import Fraction

from scute_compile.diagnostics import Code, fail

UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_SIZE = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,9})?) ?(KiB|MiB|GiB)")


def bytes_of(size: int | str, *, name: str, least: int) -> int:
    """Return a size in bytes.

    Args:
        size: A number of bytes, or a decimal number with one of `UNITS`.
        name: The argument that holds it, for the message.
        least: The smallest size that is accepted, in bytes.

    Raises:
        ScuteError: SC703 for any other value, and for a size below `least`.

    >>> bytes_of("1.5MiB", name="pool_bytes", least=1)
    1572864
    """
    if isinstance(size, str) and (match := _SIZE.fullmatch(size)):
        found = int(Fraction(match[1]) * UNITS[match[2]])
    else:
        found = size if isinstance(size, int) and not isinstance(size, bool) else -1
    if found < least:
        fail(
            Code.SC703,
            where=name,
            found=f"{size!r:.40}",
            expected=f"at least {least}: a number of bytes, or text in KiB, MiB or GiB such as `8MiB`",
            next="choose another size",
        )
    return found
