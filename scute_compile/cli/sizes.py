"""Writes counts, of bytes or of things, as text."""

from __future__ import annotations


def readable(count: int) -> str:
    """Return a byte count with four digits and a decimal unit.

    >>> readable(1342177280)
    '1.342 GB'
    >>> readable(812)
    '812 B'
    """
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:#.4g} {unit}".replace(". ", " ")
    return f"{count} B"


def counted(count: int, noun: str) -> str:
    """Return a count with its noun, in the plural unless the count is 1.

    >>> counted(1, "site"), counted(0, "site")
    ('1 site', '0 sites')
    """
    return f"{count} {noun}{'' if count == 1 else 's'}"
