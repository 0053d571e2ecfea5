"""Matches module paths as PEFT does (`tuners/tuners_utils.py`, `utils/other.py`), with a time limit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import regex

from scute_compile.diagnostics import Code, fail

SECONDS = 0.5
"""The time limit of one pattern on one module path; ordinary patterns take microseconds."""

Value = TypeVar("Value")

NESTED_REPEAT = regex.compile(r"\((?:[^()\\]|\\.)*[*+](?:[^()\\]|\\.)*\)(?:[*+]|\{\d*,\d*\})")
"""A repeat inside a repeated group, which backtracks exponentially in the engine that PEFT uses."""


def full_match(pattern: str, path: str, *, where: str) -> bool:
    """Return whether `pattern` matches all of `path`.

    Args:
        pattern: a regular expression of a configuration.
        path: a module path.
        where: the configuration's field, for messages.

    Raises:
        ScuteError: SC205 when the pattern is not a regular expression, SC209 when it takes too long.
    """
    if NESTED_REPEAT.search(pattern):
        fail(
            Code.SC209,
            where=where,
            found=f"`{pattern}` repeats a group that contains a repeat: matching may take exponential time",
            expected="a pattern that ends on every module path",
        )
    with _faults_named(pattern, path, where):
        return regex.fullmatch(pattern, path, timeout=SECONDS) is not None


@contextmanager
def _faults_named(pattern: str, path: str, where: str) -> Iterator[None]:
    try:
        yield
    except TimeoutError:
        fail(
            Code.SC209,
            where=where,
            found=f"`{pattern}` took more than {SECONDS} s on `{path}`",
            expected="a pattern that ends on every module path",
        )
    except regex.error as error:
        fail(
            Code.SC205,
            where=where,
            found=f"`{pattern}`: {error}",
            expected="a regular expression",
            next="correct the pattern in adapter_config.json",
        )


def matching(patterns: Mapping[str, Value], path: str, *, where: str) -> tuple[tuple[str, Value], ...]:
    """Return the entries whose key matches the end of `path` at a dot, in file order; PEFT takes the first."""
    return tuple((key, value) for key, value in patterns.items() if full_match(rf"(.*\.)?({key})", path, where=where))


def ends_with(path: str, name: str) -> bool:
    """Return whether `name` is `path`, or its end after a dot.

    >>> ends_with("layers.0.q_proj", "q_proj"), ends_with("layers.0.q_proj", "proj")
    (True, False)
    """
    return path == name or path.endswith(f".{name}")


def layer_number(path: str, layers_pattern: Sequence[str]) -> int | None:
    """Return the number of the layer that contains `path`: its first numbered segment, or the first after a pattern."""
    for pattern in layers_pattern or (r"[^.]*",):
        with _faults_named(pattern, path, "layers_pattern"):
            found = regex.match(rf".*?\.{pattern}\.(\d+)\.", path, timeout=SECONDS)
            if found and str(found.group(1)).isdecimal():  # the pattern may contain a group, which then comes first
                return int(found.group(1))
    return None
