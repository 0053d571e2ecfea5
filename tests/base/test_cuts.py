"""What each rank holds: whole heads, every entry once, and replicated kv heads where ranks outnumber heads."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scute_compile.base.cuts import cut, obstacle, possible_degrees
from scute_compile.diagnostics import Code, ScuteError
from scute_compile.ir.expressions import Ranges, Ref, Source, width
from scute_compile.ir.linear import Linear, Part, Split


def layer(split: Split, *parts: Part, other: int = 8) -> Linear:
    """Return a layer whose split axis consists of `parts`."""
    size = sum(part.size for part in parts)
    outputs, inputs = (size, other) if split is Split.COLUMN else (other, size)
    weight = Ref(Source.BASE, "x.weight", (outputs, inputs), "F32")
    return Linear(name="x", in_features=inputs, out_features=outputs, weight=weight, split=split, parts=parts, gemm="x")


def heads(name: str, count: int, unit: int, *, replicable: bool = False) -> Part:
    """Return a part of `count` heads, each of width `unit`."""
    return Part(name=name, size=count * unit, unit=unit, replicable=replicable)


def entries(ranges: Ranges) -> list[int]:
    """Return every index that `ranges` cover, in order."""
    return [index for start, stop in ranges for index in range(start, stop)]


divisible = st.integers(1, 8).flatmap(
    lambda tp: st.tuples(
        st.just(tp),
        st.lists(
            st.builds(
                lambda n, unit: Part(name="p", size=n * tp * unit, unit=unit), st.integers(1, 3), st.integers(1, 5)
            ),
            min_size=1,
            max_size=4,
        ),
    )
)


@given(divisible, st.sampled_from([Split.COLUMN, Split.ROW]))
def test_ranks_partition_the_axis_evenly_and_in_whole_units(case: tuple[int, list[Part]], split: Split) -> None:
    tp, parts = case
    linear = layer(split, *parts)
    found = cut(linear, tp)
    held, whole = (found.outputs, found.inputs) if split is Split.COLUMN else (found.inputs, found.outputs)
    assert whole == (((0, 8),),) * tp
    size = sum(part.size for part in parts)
    assert sorted(index for ranges in held for index in entries(ranges)) == list(range(size))
    assert {width(ranges) for ranges in held} == {size // tp}
    offset = 0
    for part in parts:
        for ranges in held:
            inside = [index - offset for index in entries(ranges) if offset <= index < offset + part.size]
            assert len(inside) == part.size // tp
            assert inside == list(range(inside[0], inside[0] + len(inside)))
            assert inside[0] % part.unit == 0
        offset += part.size
    assert all(a[1] < b[0] for ranges in held for a, b in itertools.pairwise(ranges)), "adjacent ranges are merged"


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 4), st.integers(1, 5))
def test_each_rank_holds_the_kv_heads_that_its_query_heads_read(kv: int, copies: int, group: int, unit: int) -> None:
    tp = kv * copies
    q_heads = tp * group  # so query head h reads kv head h // (q_heads // kv)
    q = cut(layer(Split.COLUMN, heads("q", q_heads, unit)), tp)
    k = cut(layer(Split.COLUMN, heads("k", kv, unit, replicable=True)), tp)
    for q_ranges, k_ranges in zip(q.outputs, k.outputs, strict=True):
        read = {index // unit // (q_heads // kv) for index in entries(q_ranges)}
        assert {index // unit for index in entries(k_ranges)} == read
        assert width(k_ranges) == unit


def test_a_fused_qkv_is_cut_part_by_part() -> None:
    linear = layer(Split.COLUMN, heads("q", 4, 2), heads("k", 2, 2, replicable=True), heads("v", 2, 2, replicable=True))
    assert cut(linear, 2).outputs == (((0, 4), (8, 10), (12, 14)), ((4, 8), (10, 12), (14, 16)))
    assert cut(linear, 4).outputs[1] == ((2, 4), (8, 10), (12, 14))
    assert cut(linear, 4).outputs[2] == ((4, 6), (10, 12), (14, 16))


def test_interleaved_heads_stay_whole() -> None:
    linear = layer(Split.COLUMN, heads("qkv", 4, 3 * 5))
    assert cut(linear, 2).outputs == (((0, 30),), ((30, 60),))
    assert possible_degrees([linear]) == (1, 2, 4)


def test_a_replicated_layer_is_whole_on_every_rank() -> None:
    found = cut(layer(Split.REPLICATED, Part(name="in", size=7)), 3)
    assert found.inputs == (((0, 7),),) * 3
    assert found.outputs == (((0, 8),),) * 3


def test_an_unknown_layer_is_whole_on_one_rank_and_refused_on_more() -> None:
    linear = layer(Split.UNKNOWN, Part(name="in", size=8))
    assert cut(linear, 1).inputs == (((0, 8),),)
    found = obstacle(linear, 2)
    assert found is not None
    assert found.code is Code.SC503
    assert possible_degrees([linear]) == (1,)
    with pytest.raises(ScuteError, match="--tp 1"):
        cut(linear, 2)


@given(st.integers(1, 12), st.integers(1, 3), st.booleans(), st.integers(2, 16))
def test_an_obstacle_names_both_numbers_and_the_degrees_that_work(n: int, unit: int, replicable: bool, tp: int) -> None:
    linear = layer(Split.COLUMN, heads("k", n, unit, replicable=replicable))
    found = obstacle(linear, tp)
    if found is None:
        assert len(cut(linear, tp).outputs) == tp
        assert tp in possible_degrees([linear])
        return
    assert found.code is Code.SC501
    assert re.match(rf"{n} (heads|entries), tp {tp}\b", found.found)
    offered = {int(number) for number in re.findall(r"\d+", found.next.removeprefix("compile with --tp"))}
    degrees = possible_degrees([linear])
    # the smallest few, and the largest when there are more
    assert offered == set(degrees[:8]) | {degrees[-1]}
    assert 1 in offered
    assert tp not in offered
    assert all(obstacle(linear, degree) is None for degree in offered)


def test_degrees_of_several_layers_work_for_all_of_them() -> None:
    nine = layer(Split.COLUMN, heads("q", 9, 64))
    three = layer(Split.COLUMN, heads("k", 3, 64, replicable=True))
    plain = layer(Split.ROW, Part(name="in", size=1536))
    assert possible_degrees([nine, three]) == (1, 3, 9)
    assert possible_degrees([nine, three, plain]) == (1, 3)
