"""Matches module paths as PEFT does (`tuners/tuners_utils.py`, `utils/other.py`), in bounded time and memory."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

from scute_compile.diagnostics import Code, fail
from scute_compile.passes.parse.automaton import Budget, UnsupportedPatternError, compiled

Value = TypeVar("Value")


def full_match(pattern: str, path: str, *, where: str) -> bool:
    """Return whether `pattern` matches all of `path`, as `re.fullmatch` does.

    Args:
        pattern: A regular expression of Python's `re`.
        path: A module path.
        where: The configuration field that holds the pattern, for messages.

    Raises:
        ScuteError: SC205 for an invalid regular expression, SC209 for one that can't be matched in bounded time.
    """
    with _faults_named(pattern, where):
        return compiled(pattern).fullmatch(path)


@contextmanager
def _faults_named(pattern: str, where: str) -> Iterator[None]:
    shown = pattern if len(pattern) <= 120 else f"{pattern[:117]}..."
    try:
        yield
    except UnsupportedPatternError as error:
        fail(
            Code.SC209,
            where=where,
            found=f"`{shown}`: {error}",
            expected="a pattern that is matched in bounded time and memory",
        )
    except re.error as error:
        fail(
            Code.SC205,
            where=where,
            found=f"`{shown}`: {error}",
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
    """Return the number of the layer that holds `path`: its first numbered segment, or the one after a named segment.

    Raises:
        ScuteError: as `full_match`; also SC209 for a pattern with groups, or one that several numbers follow.

    >>> layer_number("model.layers.3.self_attn.q_proj", ()), layer_number("model.h.3.mlp", ("layers",))
    (3, None)
    """
    for pattern in layers_pattern or (r"[^.]*",):
        with _faults_named(pattern, "layers_pattern"):
            numbers = _numbers_after(pattern, path)
            if len(numbers) > 1:
                raise UnsupportedPatternError(f"several layer numbers follow it in `{path}`")
            if numbers:
                return numbers.pop()
    return None


def _numbers_after(pattern: str, path: str) -> set[int]:
    r"""Return what `re.match(r".*?\.PATTERN\.(\d+)\.", path)` may capture, at the first place where it matches."""
    automaton, budget = compiled(pattern), Budget()
    if automaton.groups:
        raise UnsupportedPatternError("it has a group, which PEFT would take for the layer's number")
    if "|" in _outside_groups(pattern):
        raise UnsupportedPatternError("it has alternatives, which would split the expression that PEFT puts it into")
    for dot in (position for position, character in enumerate(path) if character == "."):
        tails = (path[end:] for end in automaton.ends(path, dot + 1, budget))
        found = (re.match(r"\.(\d+)\.", tail) for tail in tails)
        if numbers := {int(match.group(1)) for match in found if match}:
            return numbers
    return set()


def _outside_groups(pattern: str) -> str:
    r"""Return the text outside groups, sets and escapes.

    >>> _outside_groups(r"a|(?:b|c)[|]\|")
    'a|'
    """
    left = re.sub(r"\\.|\[\^?\]?[^\]]*\]", "", pattern, flags=re.DOTALL)
    while (shorter := re.sub(r"\([^()]*\)", "", left)) != left:
        left = shorter
    return left
