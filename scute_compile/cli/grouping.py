"""Names that differ in their layer's number alone, said once: `model.layers.0-31.self_attn.q_proj`."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

Numbers = tuple[int, ...]
"""The numbers of one name, from left to right: the layer's, and an expert's after it."""
Axes = tuple[Numbers, ...]
"""Per place, the ascending numbers that occur there: stands for every combination of them."""

MOST_PLACES = 8
"""Numbers of one name that are told apart; further ones count as words."""

_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")
_WORD = re.compile(r"[\w.{}-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Group(Generic[T]):
    """Items whose names differ in numbers alone."""

    pattern: str
    """The name with `{}` in place of each number."""
    axes: Axes
    items: tuple[T, ...]
    """In ascending order of their numbers; never empty."""

    @property
    def label(self) -> str:
        """The name with all numbers in their place: `model.layers.0-3,7.mlp.up_proj`."""
        return self.pattern.format(*map(ranges, self.axes))

    @property
    def size(self) -> int:
        """How many names the label stands for."""
        return sum(1 for _ in itertools.product(*self.axes))


def pattern(name: str) -> tuple[str, Numbers]:
    """Return a name with `{}` in place of each number between its dots, and these numbers.

    Braces of the name itself are doubled, so `text.format(*numbers)` gives the name back.

    >>> pattern("model.layers.12.self_attn.q_proj")
    ('model.layers.{}.self_attn.q_proj', (12,))
    >>> pattern("lm_head")
    ('lm_head', ())
    """
    parts: list[str] = []
    numbers: list[int] = []
    for part in name.split("."):
        if len(numbers) < MOST_PLACES and _NUMBER.fullmatch(part):
            numbers.append(int(part))
            parts.append("{}")
        else:
            parts.append(part.replace("{", "{{").replace("}", "}}"))
    return ".".join(parts), tuple(numbers)


def ranges(numbers: Iterable[int]) -> str:
    """Return numbers as prose lists them, runs as ranges.

    >>> ranges([3, 0, 1, 2])
    '0-3'
    >>> ranges([0, 1, 5, 7, 8, 9])
    '0-1,5,7-9'
    >>> ranges([4])
    '4'
    """
    runs: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][1] == number - 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def by_layers(
    items: Iterable[T], name: Callable[[T], str], key: Callable[[T], Hashable] = lambda _: None
) -> tuple[Group[T], ...]:
    """Group items of equal key whose names differ in numbers alone; every item is in exactly one group.

    Args:
        items: anything; in the order in which their groups shall appear.
        name: gives an item's name.
        key: what must be equal inside a group, the names' numbers aside.
    """
    found: dict[tuple[str, Hashable], dict[Numbers, list[T]]] = defaultdict(lambda: defaultdict(list))
    for item in items:
        text, numbers = pattern(name(item))
        found[text, key(item)][numbers].append(item)
    return tuple(
        Group(
            pattern=text,
            axes=axes,
            items=tuple(item for numbers in itertools.product(*axes) for item in members[numbers]),
        )
        for (text, _), members in found.items()
        for axes in _boxes(members)
    )


def grouped(names: Iterable[str]) -> tuple[Group[str], ...]:
    """Group names that differ in numbers alone.

    >>> [group.label for group in grouped(["h.0.up", "h.1.up", "h.0.down", "h.2.down", "head"])]
    ['h.0-1.up', 'h.0,2.down', 'head']
    >>> [group.label for group in grouped(["h.0.e.0", "h.0.e.1", "h.1.e.0", "h.1.e.1", "h.2.e.5"])]
    ['h.0-1.e.0-1', 'h.2.e.5']
    """
    return by_layers(names, name=lambda text: text)


def relabelled(text: str, numbers: Numbers, labels: Sequence[str]) -> str:
    """Return `text` with labels in place of the numbers of every module path in it that has exactly `numbers`.

    >>> relabelled("computed as s of h.3.up: 2 x 3 in 3 tiles", (3,), ["0-31"])
    'computed as s of h.0-31.up: 2 x 3 in 3 tiles'
    """

    def said(match: re.Match[str]) -> str:
        found, own = pattern(match.group())
        named = own == numbers and any(character.isalpha() for character in match.group())
        return found.format(*labels) if named else match.group()

    return _WORD.sub(said, text) if numbers else text


def _boxes(numbers: Collection[Numbers]) -> Iterator[Axes]:
    """Split a set of number tuples into full products, the leading places as wide as possible."""
    rests: dict[int, dict[Numbers, None]] = defaultdict(dict)
    for first, *rest in (entry for entry in numbers if entry):
        rests[first][tuple(rest)] = None
    if not rests:
        yield ()
        return
    equal: dict[frozenset[Numbers], list[int]] = defaultdict(list)
    for first in sorted(rests):
        equal[frozenset(rests[first])].append(first)
    for rest_set, firsts in equal.items():
        for box in _boxes(sorted(rest_set)):
            yield (tuple(firsts), *box)
