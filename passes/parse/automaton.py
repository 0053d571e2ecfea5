"""Matches regular expressions of Python's `re` in bounded time and memory.

PEFT matches module paths with `re`, whose search backtracks: some patterns take time that grows exponentially with the
path. This module parses a pattern with the parser of `re`, so that its meaning is the same, and runs it as a finite
automaton (K. Thompson, "Regular expression search algorithm", CACM 11(6), 1968): all alternatives advance together,
one character at a time. It refuses what an automaton can't express (back-references, atomic groups).
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

# `re` has no public parser. These two modules have had these names and node types since Python 3.11.
from re import _constants as op  # type: ignore[attr-defined] # see above
from re import _parser as parser  # type: ignore[attr-defined] # see above
from typing import Any, TypeAlias

LONGEST = 16_384
"""Most characters of a pattern; the longest that training programs write list a few hundred names."""
DEEPEST = 64
"""Most nested groups."""
MOST_STATES = 20_000
"""Most states of an automaton; `a{1000}` takes a thousand."""
MOST_STEPS = 1_000_000
"""Most state visits for one text: less than a second of processor time."""
MOST_CACHED = 4_096
"""Most entries of each cache of a pattern; a full cache is cleared."""

Accepts: TypeAlias = Callable[[str], bool]
"""Whether a state consumes a character."""
Holds: TypeAlias = Callable[[str, int, "Budget"], bool]
"""Whether a condition (an anchor or a look-around) holds at a position of a text."""


class UnsupportedPatternError(ValueError):
    """Raised for a pattern that no automaton of bounded size can match; the message gives the reason."""


@dataclass(slots=True)
class Budget:
    """The number of state visits that are left for one text."""

    left: int = MOST_STEPS

    def spend(self, steps: int) -> None:
        """Count visits. Raises UnsupportedPatternError when none are left."""
        self.left -= steps
        if self.left < 0:
            raise UnsupportedPatternError(f"it takes more than {MOST_STEPS} steps on one name")


@dataclass(slots=True)
class Pattern:
    """A compiled pattern. State 0 is the start, and state 1 is reached by a match."""

    accepts: dict[int, tuple[Accepts, int]] = field(default_factory=dict)
    """By state: the characters that it consumes, and the next state."""
    jumps: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """By state: the states that are reached without a character, each with a condition's index, or -1 for none."""
    conditions: list[Holds] = field(default_factory=list)
    count: int = 2
    groups: int = 0
    """The number of capturing groups."""
    _closures: dict[tuple[frozenset[int], tuple[bool, ...]], frozenset[int]] = field(default_factory=dict)
    _steps: dict[tuple[frozenset[int], str], frozenset[int]] = field(default_factory=dict)

    def fullmatch(self, text: str, budget: Budget | None = None) -> bool:
        """Return whether the pattern matches all of `text`, as `re.fullmatch` does.

        Raises:
            UnsupportedPatternError: when that would take more than `MOST_STEPS` state visits.
        """
        spent, states = budget or Budget(), frozenset((0,))
        for position, character in enumerate(text):
            states = self._step(self._closure(states, text, position, spent), character, spent)
            if not states:
                return False
        return 1 in self._closure(states, text, len(text), spent)

    def ends(self, text: str, start: int, budget: Budget) -> Iterator[int]:
        """Yield the positions at which a match that begins at `start` may end, the shortest match first."""
        states = frozenset((0,))
        for position in range(start, len(text) + 1):
            states = self._closure(states, text, position, budget)
            if 1 in states:
                yield position
            if position < len(text):
                states = self._step(states, text[position], budget)
            if not states:
                return

    def _closure(self, states: frozenset[int], text: str, position: int, budget: Budget) -> frozenset[int]:
        """Return the states, and all that are reached from them without a character."""
        truths = tuple(holds(text, position, budget) for holds in self.conditions)
        key = (states, truths)
        found = self._closures.get(key)
        if found is None:
            reached, waiting = set(states), list(states)
            while waiting:
                for target, condition in self.jumps.get(waiting.pop(), ()):
                    if target not in reached and (condition < 0 or truths[condition]):
                        reached.add(target)
                        waiting.append(target)
            budget.spend(len(reached))
            found = _remember(self._closures, key, frozenset(reached))
        return found

    def _step(self, states: frozenset[int], character: str, budget: Budget) -> frozenset[int]:
        key = (states, character)
        found = self._steps.get(key)
        if found is None:
            budget.spend(len(states))
            pairs = (self.accepts[state] for state in states if state in self.accepts)
            found = _remember(self._steps, key, frozenset(after for accepts, after in pairs if accepts(character)))
        budget.spend(1)
        return found


def _remember(cache: dict[Any, frozenset[int]], key: object, value: frozenset[int]) -> frozenset[int]:
    if len(cache) >= MOST_CACHED:
        cache.clear()
    cache[key] = value
    return value


@lru_cache(maxsize=512)
def compiled(pattern: str) -> Pattern:
    """Compile a pattern of Python's `re`.

    Raises:
        UnsupportedPatternError: for a pattern that is too long, too deeply nested, or not a regular expression in the
            strict sense.
        re.error: for a pattern that `re` refuses as well.
    """
    if len(pattern) > LONGEST:
        raise UnsupportedPatternError(f"it has {len(pattern)} characters, more than {LONGEST}")
    if (depth := _depth(pattern)) > DEEPEST:
        raise UnsupportedPatternError(f"it nests {depth} groups, more than {DEEPEST}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `re` warns of sets whose meaning may change
        try:
            tree = parser.parse(pattern)
        except (OverflowError, RecursionError) as error:
            raise UnsupportedPatternError(str(error)) from None
    if _repeats_a_repeat(tree):
        raise UnsupportedPatternError("it repeats a group that contains a repeat, which may take `re` exponential time")
    automaton = _build(tree, tree.state.flags)
    automaton.groups = tree.state.groups - 1
    return automaton


def _depth(pattern: str) -> int:
    """Return an upper bound of the nesting of groups: escaped parentheses and those in sets count as well."""
    depth = deepest = 0
    for character in pattern:
        depth += (character == "(") - (character == ")" and depth > 0)
        deepest = max(deepest, depth)
    return deepest


def _repeats_a_repeat(tree: Any, *, inside: bool = False) -> bool:  # noqa: ANN401 - the parser's class has no public name
    """Return whether an unbounded repeat contains another one: the shape on which PEFT, with `re`, may never end."""
    for kind, argument in tree:
        if kind in (op.MAX_REPEAT, op.MIN_REPEAT):
            unbounded = argument[1] == op.MAXREPEAT
            if (unbounded and inside) or _repeats_a_repeat(argument[2], inside=inside or unbounded):
                return True
        elif any(_repeats_a_repeat(part, inside=inside) for part in _parts(kind, argument)):
            return True
    return False


def _parts(kind: Any, argument: Any) -> Sequence[Any]:  # noqa: ANN401 - the parser's constants
    """Return the trees inside a node other than a repeat."""
    if kind is op.BRANCH:
        return argument[1]  # type: ignore[no-any-return] # the parser's list
    if kind is op.SUBPATTERN:
        return (argument[3],)
    return (argument[1],) if kind in (op.ASSERT, op.ASSERT_NOT) else ()


def _build(tree: Any, flags: int) -> Pattern:  # noqa: ANN401 - the parser's own class has no public name
    size = _size(tree)
    if size > MOST_STATES:
        raise UnsupportedPatternError(f"it takes {size} states, more than {MOST_STATES}")
    pattern = Pattern()
    _Builder(pattern).sequence(tree, 0, 1, flags)
    return pattern


def _size(tree: Any) -> int:  # noqa: ANN401 - likewise
    """Return how many states a tree takes, without building it."""
    total = 0
    for kind, argument in tree:
        if kind is op.BRANCH:
            total += 1 + sum(_size(branch) for branch in argument[1])
        elif kind is op.SUBPATTERN:
            total += 1 + _size(argument[3])
        elif kind in (op.MAX_REPEAT, op.MIN_REPEAT):
            low, high, inner = argument
            copies = low + 1 if high == op.MAXREPEAT else high
            total += 2 + int(copies) * (1 + _size(inner))
        elif kind in (op.ASSERT, op.ASSERT_NOT):
            total += 1 + _size(argument[1])
        else:
            total += 1
    return total


@dataclass(frozen=True, slots=True)
class _Builder:
    """Adds a parsed tree to a pattern, between two of its states."""

    pattern: Pattern

    def state(self) -> int:
        self.pattern.count += 1
        return self.pattern.count - 1

    def jump(self, start: int, end: int, condition: int = -1) -> None:
        self.pattern.jumps.setdefault(start, []).append((end, condition))

    def condition(self, holds: Holds, start: int, end: int) -> None:
        self.pattern.conditions.append(holds)
        self.jump(start, end, len(self.pattern.conditions) - 1)

    def sequence(self, tree: Sequence[Any], start: int, end: int, flags: int) -> None:
        for kind, argument in tree:
            after = self.state()
            self.node(kind, argument, start, after, flags)
            start = after
        self.jump(start, end)

    def node(self, kind: Any, argument: Any, start: int, end: int, flags: int) -> None:  # noqa: ANN401 - the parser's constants
        if kind is op.BRANCH:
            for branch in argument[1]:
                self.sequence(branch, start, end, flags)
        elif kind is op.SUBPATTERN:
            _, added, removed, inner = argument
            self.sequence(inner, start, end, (flags | added) & ~removed)
        elif kind in (op.MAX_REPEAT, op.MIN_REPEAT):  # greediness doesn't change which texts match
            low, high, inner = argument
            self.repeat(low, high, inner, start, end, flags)
        elif kind is op.AT:
            self.condition(_anchor(argument, flags), start, end)
        elif kind in (op.ASSERT, op.ASSERT_NOT):
            self.condition(_look_around(*argument, wanted=kind is op.ASSERT, flags=flags), start, end)
        else:
            self.consume(_character(kind, argument, flags), start, end)

    def consume(self, accepts: Accepts, start: int, end: int) -> None:
        state = self.state()  # a new state, since `start` may consume in another branch as well
        self.jump(start, state)
        self.pattern.accepts[state] = (accepts, end)

    def repeat(self, low: int, high: int, inner: Any, start: int, end: int, flags: int) -> None:  # noqa: ANN401 - likewise
        for _ in range(low):
            after = self.state()
            self.sequence(inner, start, after, flags)
            start = after
        if high == op.MAXREPEAT:
            loop = self.state()
            self.jump(start, loop)
            self.sequence(inner, loop, loop, flags)
            start = loop
        else:
            for _ in range(high - low):
                self.jump(start, end)
                after = self.state()
                self.sequence(inner, start, after, flags)
                start = after
        self.jump(start, end)


def _character(kind: Any, argument: Any, flags: int) -> Accepts:  # noqa: ANN401 - the parser's constants
    """Return the test for the characters that a node consumes."""
    if kind is op.ANY:
        return (lambda _: True) if flags & re.DOTALL else (lambda character: character != "\n")
    if kind is op.IN:
        negated = argument[0][0] is op.NEGATE
        members = [_member(k, a, flags) for k, a in argument[negated:]]
        return lambda character: any(member(character) for member in members) is not negated
    if kind is op.LITERAL:
        return _member(kind, argument, flags)
    if kind is op.NOT_LITERAL:
        accepts = _member(op.LITERAL, argument, flags)
        return lambda character: not accepts(character)
    raise UnsupportedPatternError(f"`{str(kind).lower()}` is not part of a regular expression in the strict sense")


def _member(kind: Any, argument: Any, flags: int) -> Accepts:  # noqa: ANN401 - likewise
    if kind is op.CATEGORY:
        return _category(argument, flags)
    if kind not in (op.LITERAL, op.RANGE):
        raise UnsupportedPatternError(f"a set holds `{str(kind).lower()}`")
    first, last = argument if kind is op.RANGE else (argument, argument)
    if not flags & re.IGNORECASE:
        return lambda character: first <= ord(character) <= last
    return lambda character: any(first <= ord(case) <= last for case in _cases(character, flags))


def _cases(character: str, flags: int) -> tuple[str, ...]:
    """Return a character in the cases that `(?i)` takes for the same; only cases of one character count."""
    if flags & re.ASCII and not character.isascii():
        return (character,)
    lower = character.lower()[:1]
    upper = lower.upper()
    return (character, lower, upper, upper.lower()) if len(upper) == 1 else (character, lower)


def _is_word(character: str) -> bool:
    return character.isalnum() or character == "_"


def _category(name: Any, flags: int) -> Accepts:  # noqa: ANN401 - likewise
    tests: dict[str, Accepts] = {"DIGIT": str.isdecimal, "SPACE": str.isspace, "WORD": _is_word}
    word = str(name).removeprefix("CATEGORY_")
    test = tests[word.removeprefix("NOT_")]
    narrow = bool(flags & re.ASCII)
    return lambda c: (test(c) and (c.isascii() or not narrow)) is not word.startswith("NOT_")


def _anchor(where: Any, flags: int) -> Holds:  # noqa: ANN401 - likewise
    lines = bool(flags & re.MULTILINE)
    if where is op.AT_BEGINNING_STRING or (where is op.AT_BEGINNING and not lines):
        return lambda _, position, __: position == 0
    if where is op.AT_END_STRING:
        return lambda text, position, _: position == len(text)
    if where is op.AT_END and not lines:
        return lambda text, position, _: position == len(text) or text[position:] == "\n"
    if where in (op.AT_BOUNDARY, op.AT_NON_BOUNDARY) and not flags & re.ASCII:
        if where is op.AT_BOUNDARY:
            return lambda text, position, _: _at_boundary(text, position)
        return lambda text, position, _: not _at_boundary(text, position) and (bool(text) or _EMPTY_HAS_NO_BOUNDARY)
    raise UnsupportedPatternError(f"`{str(where).lower()}` is not supported with its flags")


_EMPTY_HAS_NO_BOUNDARY = re.fullmatch(r"\B", "") is not None
"""Python 3.14 changed whether `\\B` matches an empty text."""


def _at_boundary(text: str, position: int) -> bool:
    before = position > 0 and _is_word(text[position - 1])
    return before is not (position < len(text) and _is_word(text[position]))


def _look_around(direction: int, tree: Any, *, wanted: bool, flags: int) -> Holds:  # noqa: ANN401 - likewise
    inner = _build(tree, flags)
    if direction > 0:
        return lambda text, position, budget: (next(inner.ends(text, position, budget), None) is not None) is wanted
    low, high = tree.getwidth()
    if low != high or inner.conditions:
        raise UnsupportedPatternError("its look-behind has no fixed width, or contains an anchor")

    def behind(text: str, position: int, budget: Budget) -> bool:
        return (position >= low and inner.fullmatch(text[position - low : position], budget)) is wanted

    return behind
