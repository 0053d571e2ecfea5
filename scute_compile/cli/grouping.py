"""Groups of names that differ only in numbers, with one label: `model.layers.0-31.self_attn.q_proj`."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

Numbers = tuple[int, ...]
"""The numbers of one name from left to right: the layer's, then an expert's."""
Axes = tuple[Numbers, ...]
"""For each number of a name, the values that occur, ascending. The axes stand for every combination of them."""

MAX_NUMBERS = 8
"""Numbers of one name that may vary inside a group; further numbers must be equal."""

_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")
_WORD = re.compile(r"[\w.{}-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Group(Generic[T]):
    """Items whose names differ only in numbers."""

    pattern: str
    """The name with `{}` in place of each number."""
    axes: Axes
    items: tuple[T, ...]
    """In ascending order of their numbers; never empty."""

    @property
    def label(self) -> str:
        """The name with ranges of numbers: `model.layers.0-3,7.mlp.up_proj`."""
        return self.pattern.format(*map(ranges, self.axes))

    @property
    def size(self) -> int:
        """The number of names that the label stands for."""
        return sum(1 for _ in itertools.product(*self.axes))


def pattern(name: str) -> tuple[str, Numbers]:
    """Split a name into a pattern with `{}` for each number between its dots, and these numbers.

    Braces in the name are doubled, so that `text.format(*numbers)` is the name.

    >>> pattern("model.layers.12.self_attn.q_proj")
    ('model.layers.{}.self_attn.q_proj', (12,))
    >>> pattern("lm_head")
    ('lm_head', ())
    """
    parts: list[str] = []
    numbers: list[int] = []
    for part in name.split("."):
        if len(numbers) < MAX_NUMBERS and _NUMBER.fullmatch(part):
            numbers.append(int(part))
            parts.append("{}")
        else:
            parts.append(part.replace("{", "{{").replace("}", "}}"))
    return ".".join(parts), tuple(numbers)


def ranges(numbers: Iterable[int]) -> str:
    """Return numbers as text, with ranges for runs.

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
    """Group items of equal key whose names differ only in numbers. Every item is in exactly one group.

    Args:
        items: The items; groups are in the order of their first items.
        name: Returns an item's name.
        key: Returns what must be equal inside a group beside the name.
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
    """Group names that differ only in numbers.

    >>> [group.label for group in grouped(["h.0.up", "h.1.up", "h.0.down", "h.2.down", "head"])]
    ['h.0-1.up', 'h.0,2.down', 'head']
    >>> [group.label for group in grouped(["h.0.e.0", "h.0.e.1", "h.1.e.0", "h.1.e.1", "h.2.e.5"])]
    ['h.0-1.e.0-1', 'h.2.e.5']
    """
    return by_layers(names, name=lambda text: text)


def relabelled(text: str, numbers: Numbers, labels: Sequence[str]) -> str:
    """Replace the numbers in module paths of a text by labels, in the paths that have exactly these numbers.

    >>> relabelled("computed as s of h.3.up: 2 x 3 in 3 tiles", (3,), ["0-31"])
    'computed as s of h.0-31.up: 2 x 3 in 3 tiles'
    """

    def replaced(match: re.Match[str]) -> str:
        word = match.group()
        path, found = pattern(word)
        matches = found == numbers and any(character.isalpha() for character in word)
        return path.format(*labels) if matches else word

    return _WORD.sub(replaced, text) if numbers else text


def _boxes(numbers: Collection[Numbers]) -> Iterator[Axes]:
    """Split a set of number tuples into full products, with the leading axes as wide as possible."""
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
