"""Matches module paths as PEFT does (`tuners/tuners_utils.py`, `utils/other.py`), in bounded time and memory."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

from scute_compile.diagnostics import Code, fail
from scute_compile.passes.parse.automaton import Budget, UnsupportedPatternError, compiled

Value = TypeVar("Value")

MOST_EXPRESSIONS = 500
"""Patterns that are no plain names, in one field of a configuration."""
_PLAIN = re.compile(r"[A-Za-z0-9_.]+")


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


class Patterns(Generic[Value]):
    """The entries of `rank_pattern` or `alpha_pattern`, by the paths that they match.

    Patterns of letters, digits, underscores and dots are looked up, so that one for each module costs no more than the
    modules; other patterns are matched one after the other.
    """

    def __init__(self, patterns: Mapping[str, Value], *, where: str) -> None:
        self._patterns, self._where = patterns, where
        self._found: dict[str, tuple[tuple[str, Value], ...]] = {}
        self._plain: dict[int, dict[tuple[int, ...], dict[str, int]]] = {}
        """Length -> positions of dots, each of which matches any character -> pattern -> its position."""
        self._others: dict[str, int] = {}
        for position, key in enumerate(patterns):
            if _PLAIN.fullmatch(key):
                dots = tuple(place for place, character in enumerate(key) if character == ".")
                self._plain.setdefault(len(key), {}).setdefault(dots, {})[key] = position
            else:
                self._others[key] = position
        if len(self._others) > MOST_EXPRESSIONS:
            fail(
                Code.SC112,
                where=where,
                found=f"{len(self._others)} patterns that are not plain names",
                expected=f"at most {MOST_EXPRESSIONS}",
            )

    def matching(self, path: str) -> tuple[tuple[str, Value], ...]:
        """Return the entries whose key matches the end of `path` at a dot, in file order; PEFT takes the first.

        Raises:
            ScuteError: as `full_match`.
        """
        if path not in self._found:
            plain = "\n" not in path  # which a dot doesn't match
            matched = dict(self._looked_up(path)) if plain else {}
            others = self._others if plain else {key: position for position, key in enumerate(self._patterns)}
            for key, position in others.items():
                if full_match(rf"(.*\.)?({key})", path, where=self._where):
                    matched[position] = key
            self._found[path] = tuple((key, self._patterns[key]) for _, key in sorted(matched.items()))
        return self._found[path]

    def _looked_up(self, path: str) -> Iterator[tuple[int, str]]:
        for end in endings(path):
            for dots, keys in self._plain.get(len(end), {}).items():
                masked = list(end)
                for place in dots:
                    masked[place] = "."
                if (position := keys.get(key := "".join(masked))) is not None:
                    yield position, key


def endings(path: str) -> Iterator[str]:
    """Yield `path`, and its ends after each dot.

    >>> list(endings("layers.0.q_proj"))
    ['layers.0.q_proj', '0.q_proj', 'q_proj']
    """
    yield path
    while "." in path:
        path = path.partition(".")[2]
        yield path


def layer_number(path: str, layers_pattern: Sequence[str]) -> int | None:
    """Return the number of the layer that holds `path`: its first numbered segment, or the one after a named segment.

    Raises:
        ScuteError: as `full_match`; also SC209 for a pattern with groups, or one that several numbers follow.

    >>> layer_number("model.layers.3.self_attn.q_proj", ()), layer_number("model.h.3.mlp", ("layers",))
    (3, None)
    """
    if len(layers_pattern) > MOST_EXPRESSIONS:
        found = f"{len(layers_pattern)} patterns"
        fail(Code.SC112, where="layers_pattern", found=found, expected=f"at most {MOST_EXPRESSIONS}")
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
