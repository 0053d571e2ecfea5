"""Grouping by layer numbers: patterns restore their names, and labels stand for exactly the names of their group."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from scute_compile.cli.grouping import by_layers, grouped, pattern, ranges, relabelled

NUMBERS = st.sets(st.integers(0, 40), min_size=1)
PARTS = st.one_of(st.integers(0, 6).map(str), st.sampled_from(["h", "q", "{}", "a{0}", "07", "x1"]))
NAMES = st.lists(PARTS, min_size=1, max_size=5).map(".".join)


def numbers_in(text: str) -> list[int]:
    """Return the numbers of a list of ranges."""
    pairs = [run.split("-") for run in text.split(",")]
    return [number for pair in pairs for number in range(int(pair[0]), int(pair[-1]) + 1)]


@given(NUMBERS)
def test_ranges_name_exactly_the_numbers(numbers: set[int]) -> None:
    assert numbers_in(ranges(numbers)) == sorted(numbers)


@given(NUMBERS)
def test_no_two_ranges_touch(numbers: set[int]) -> None:
    runs = [numbers_in(run) for run in ranges(numbers).split(",")]
    assert all(left[-1] + 1 < right[0] for left, right in pairwise(runs))


@given(NAMES)
def test_a_pattern_filled_with_its_numbers_is_the_name(name: str) -> None:
    text, numbers = pattern(name)
    assert text.format(*numbers) == name


@given(st.lists(NAMES, max_size=30), st.data())
def test_every_item_is_in_one_group_and_every_label_stands_for_its_items(names: list[str], data: st.DataObject) -> None:
    items = [(name, data.draw(st.sampled_from("sb"))) for name in names]
    groups = by_layers(items, name=lambda item: item[0], key=lambda item: item[1])
    assert Counter(item for group in groups for item in group.items) == Counter(items)
    for group in groups:
        assert len({slot for _, slot in group.items}) == 1
        assert group.size == len({name for name, _ in group.items})
        assert {pattern(name)[0] for name, _ in group.items} == {group.pattern}


def test_layers_with_the_same_experts_are_one_group_and_others_are_not() -> None:
    names = [f"h.{layer}.e.{expert}.up" for layer in range(4) for expert in range(8)] + ["h.4.e.2.up"]
    assert [group.label for group in grouped(names)] == ["h.0-3.e.0-7.up", "h.4.e.2.up"]


def test_only_module_paths_of_the_same_layer_are_relabelled() -> None:
    text = "s of h.3.up and h.4.up; 3 tiles of 3.3 x 3,000"
    assert relabelled(text, (3,), ["0-7"]) == "s of h.0-7.up and h.4.up; 3 tiles of 3.3 x 3,000"
