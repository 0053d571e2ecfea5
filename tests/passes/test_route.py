"""The route pass: every live slot gets its route, with the costs of the route and of its alternatives."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scute_compile.ir.dtypes import DType
from scute_compile.ir.expressions import Expression, Ref, Source, Take
from scute_compile.ir.linear import Cut, Linear
from scute_compile.ir.method import Method
from scute_compile.ir.program import (
    Action,
    Alternative,
    Factor,
    Note,
    Owner,
    Program,
    Rotation,
    RotationKind,
    Route,
    RouteChoice,
    Site,
    Stage,
    Term,
)
from scute_compile.ir.target import Target, Workload
from scute_compile.passes import route as route_pass
from tests.support.programs import context

FREE_LAUNCHES = Workload(launch=0.0)


def value(key: str, *shape: int) -> Expression:
    return Ref(Source.ADAPTER, key, shape, "F32")


def linear(name: str, inputs: int, outputs: int, gemm: str = "") -> Linear:
    weight = Ref(Source.BASE, f"{name}.weight", (outputs, inputs), "BF16")
    return Linear(name=name, in_features=inputs, out_features=outputs, weight=weight, gemm=gemm)


def program(*sites: Site, workload: Workload = FREE_LAUNCHES, dtype: DType | None = None) -> Program:
    target = Target(workload=workload, dtype=dtype)
    return Program(method=Method.LORA, stage=Stage.SHARDED, sites=sites, target=target)


def route(sharded: Program, *also: Linear) -> Program:
    """Run the pass on a base of the program's layers; `also` are layers that the adapter doesn't touch."""
    return route_pass.route(sharded, context([*(site.linear for site in sharded.sites), *also]))


def rotated(name: str, inputs: int, outputs: int, block: int, gemm: str = "") -> Site:
    delta = value(f"{name}.R", inputs // block, block, block)
    return Site(linear=linear(name, inputs, outputs, gemm), rotation=Rotation(kind=RotationKind.BLOCKS, delta=delta))


def vera(name: str, inputs: int, outputs: int, rank: int) -> Site:
    a = Factor(value=value("vera_A", rank, inputs), owner=Owner.SHARED)
    b = Factor(value=value("vera_B", rank, outputs), owner=Owner.SHARED)
    term = Term(a=a, b=b, d=value(f"{name}.d", rank), e=value(f"{name}.e", outputs))
    return Site(linear=linear(name, inputs, outputs), terms=(term,))


def choices(compiled: Program) -> dict[str, RouteChoice]:
    return {choice.slot: choice for site in compiled.sites for choice in site.routes}


def only(compiled: Program) -> RouteChoice:
    (choice,) = compiled.sites[0].routes
    return choice


def qkv(workload: Workload) -> Program:
    sites = (
        rotated("q", 4096, 4096, 32, "qkv"),
        rotated("k", 4096, 1024, 32, "qkv"),
        rotated("v", 4096, 1024, 32, "qkv"),
    )
    return program(*sites, workload=workload)


def test_s_is_computed_in_the_expand_and_its_alternatives_are_priced() -> None:
    site = Site(linear=linear("q", 64, 48), s=value("s", 48))
    choice = only(route(program(site, workload=Workload(tenants=3, tokens=5, launch=0.0))))
    assert choice.route is Route.EXPAND
    assert dict(choice.candidates) == {
        Route.EXPAND: 3 * 48 * 2,
        Alternative.SEPARATE_PASS: 3 * 48 * 2 + 2 * 5 * 48 * 2,
        Alternative.MERGED_COPY: 3 * 64 * 48 * 2,
        Alternative.AS_LORA: 3 * 48 * (64 + 48) * 2,
    }


def test_a_launch_is_charged_as_the_bytes_that_memory_moves_in_its_time() -> None:
    site = Site(linear=linear("q", 64, 48), s=value("s", 48))
    free = dict(only(route(program(site))).candidates)
    paid = dict(only(route(program(site, workload=Workload(launch=1e-6, bandwidth=1e12)))).candidates)
    assert paid[Alternative.SEPARATE_PASS] - free[Alternative.SEPARATE_PASS] == 1_000_000
    assert paid[Route.EXPAND] == free[Route.EXPAND]


def test_b_counts_as_float32_in_a_half_precision_artifact() -> None:
    site = Site(linear=linear("q", 64, 48), b=value("b", 48))
    choice = only(route(program(site, dtype=DType.BFLOAT16)))
    assert choice.candidates[0] == (Route.EXPAND, 16 * 48 * 4)


def test_the_targets_dtype_takes_precedence_over_the_bases() -> None:
    site = Site(linear=linear("q", 64, 48), s=value("s", 48))
    assert only(route(program(site, dtype=DType.FLOAT32))).candidates[0] == (Route.EXPAND, 16 * 48 * 4)


def test_veras_vectors_stay_beside_the_pair_that_is_read_once() -> None:
    found = choices(route(program(vera("q", 64, 48, 8), workload=Workload(tenants=4, launch=0.0))))
    pair = 8 * (64 + 48) * 2
    assert found["d"].route is Route.SHRINK
    assert found["e"].route is Route.EXPAND
    assert dict(found["d"].candidates)[Route.SHRINK] == pair + 4 * 8 * 2
    assert dict(found["e"].candidates)[Route.EXPAND] == pair + 4 * 48 * 2
    assert dict(found["d"].candidates)[Alternative.MERGED_COPY] == 4 * pair


def test_for_a_single_tenant_a_merged_copy_costs_less_and_the_note_says_why_it_is_no_route() -> None:
    compiled = route(program(vera("q", 64, 48, 8), workload=Workload(tenants=1, tokens=1)))
    found = choices(compiled)
    assert {found[slot].candidates[0][0] for slot in "de"} == {Alternative.MERGED_COPY}
    assert (found["d"].route, found["e"].route) == (Route.SHRINK, Route.EXPAND)
    assert all("a private merged copy would cost less, but it rounds once more" in note.why for note in compiled.notes)


@pytest.mark.parametrize(("tokens", "cheapest"), [(16, Route.DELTA_ROWS), (4096, Alternative.BEFORE_GEMM)])
def test_rotations_are_delta_rows_at_decode_and_at_prefill_where_rotating_x_costs_less(
    tokens: int, cheapest: Route | Alternative
) -> None:
    compiled = route(qkv(Workload(tenants=16, tokens=tokens)))
    for site in compiled.sites:
        (choice,) = site.routes
        assert choice.route is Route.DELTA_ROWS
        assert choice.candidates[0][0] is cheapest


def test_rotation_bytes_count_values_rows_and_float32_products() -> None:
    choice = only(route(program(rotated("o", 64, 48, 8), workload=Workload(tenants=3, tokens=5, launch=0.0))))
    values, rows, products = 3 * 64 * 8 * 2, 5 * 64 * 2, 5 * 48 * 4
    assert dict(choice.candidates) == {
        Route.DELTA_ROWS: values + 3 * rows + 2 * products,
        Alternative.BEFORE_GEMM: values + 2 * rows,
        Alternative.MERGED_COPY: 3 * 64 * 48 * 2,
        Alternative.AS_LORA: 3 * 64 * (64 + 48) * 2,
    }


def test_a_rotation_that_every_block_shares_is_read_as_one_block() -> None:
    delta = value("R", 1, 8, 8)
    site = Site(linear=linear("o", 64, 48), rotation=Rotation(kind=RotationKind.BLOCKS, delta=delta))
    alone = dict(only(route(program(site))).candidates)
    apart = dict(only(route(program(rotated("o", 64, 48, 8)))).candidates)
    assert apart[Alternative.BEFORE_GEMM] - alone[Alternative.BEFORE_GEMM] == 16 * 7 * 8 * 8 * 2


def test_sites_with_one_rotation_share_its_rotated_input() -> None:
    delta = value("R", 8, 8, 8)
    rotation = Rotation(kind=RotationKind.BLOCKS, delta=delta)
    gate, up = (Site(linear=linear(name, 64, 48, "gate_up"), rotation=rotation) for name in ("gate", "up"))
    both = dict(only(route(program(gate, up))).candidates)
    alone = dict(only(route(program(gate))).candidates)
    assert both[Alternative.BEFORE_GEMM] == alone[Alternative.BEFORE_GEMM]
    assert both[Alternative.MERGED_COPY] == 2 * alone[Alternative.MERGED_COPY]


def test_members_that_the_adapter_leaves_alone_split_the_gemm_too() -> None:
    bare = linear("k", 64, 16, "qkv")
    site, work = rotated("q", 64, 48, 8, "qkv"), Workload(launch=1e-6, bandwidth=1e12)
    without = dict(only(route(program(site, workload=work))).candidates)
    known = dict(only(route(program(site, workload=work), bare)).candidates)
    assert known[Alternative.BEFORE_GEMM] - without[Alternative.BEFORE_GEMM] == 1_000_000
    assert known[Route.DELTA_ROWS] - without[Route.DELTA_ROWS] == 16 * 16 * 4


def test_a_rotation_is_delta_rows_even_where_rotating_x_costs_less() -> None:
    compiled = route(program(rotated("o", 64, 48, 8)))
    choice = only(compiled)
    assert choice.route is Route.DELTA_ROWS
    assert choice.candidates[0][0] is Alternative.BEFORE_GEMM
    assert "a rotation near the identity may not survive it" in compiled.notes[-1].why


def test_of_equal_costs_the_route_is_listed_first() -> None:
    """The costs of the two forms are made equal by the price of one launch."""
    site = (rotated("q", 8, 4, 8, "qkv"), rotated("k", 8, 4, 8, "qkv"))
    # Delta rows move 16 * 8 * 2 * 2 + 16 * (2 * 8 + 8) * 4 = 2048 bytes more; splitting takes one launch more.
    tied = route(program(*site, workload=Workload(launch=2048e-6, bandwidth=1e6)))
    bytes_of = dict(tied.sites[0].routes[0].candidates)
    assert bytes_of[Route.DELTA_ROWS] == bytes_of[Alternative.BEFORE_GEMM]
    order = [way for way, _ in tied.sites[0].routes[0].candidates]
    assert order.index(Route.DELTA_ROWS) < order.index(Alternative.BEFORE_GEMM)


def test_a_rank_counts_what_it_holds() -> None:
    halves = (((0, 24),), ((24, 48),))
    cut = Cut(inputs=(((0, 64),),) * 2, outputs=halves)
    s = value("s", 48)
    site = Site(linear=linear("q", 64, 48), s=s, cut=cut)
    assert only(route(program(site))).candidates[0] == (Route.EXPAND, 16 * 24 * 2)


def test_slots_of_several_terms_carry_the_terms_number() -> None:
    site = vera("q", 64, 48, 8)
    double = replace(site, terms=site.terms * 2)
    assert list(choices(route(program(double)))) == ["d.0", "e.0", "d.1", "e.1"]


def test_owned_factors_leave_nothing_to_route() -> None:
    term = Term(a=Factor(value=value("A", 4, 64)), b=Factor(value=value("B", 4, 48)))
    compiled = route(program(Site(linear=linear("q", 64, 48), terms=(term,))))
    assert (compiled.stage, compiled.sites[0].routes, compiled.notes) == (Stage.ROUTED, (), ())


def test_every_live_slot_gets_one_note_after_the_earlier_ones() -> None:
    earlier = Note(site="q", slot="c", action=Action.MERGED, rule="c into B")
    site = replace(vera("q", 64, 48, 8), s=value("s", 48), b=value("b", 48))
    before = replace(program(site), notes=(earlier,))
    compiled = route(before)
    assert compiled.notes[0] == earlier
    added = compiled.notes[1:]
    assert [(n.slot, n.route, n.candidates) for n in added] == [
        (c.slot, c.route, c.candidates) for c in compiled.sites[0].routes
    ]
    assert all(n.action is Action.LIVE and n.rule.startswith("live: ") and n.neighbours and n.why for n in added)
    assert before.sites[0].routes == ()


@settings(max_examples=60, deadline=None)
@given(
    inputs=st.integers(1, 64).map(lambda n: 8 * n),
    outputs=st.integers(1, 512),
    rank=st.integers(1, 64),
    tenants=st.integers(1, 64),
    tokens=st.integers(1, 5000),
    launch=st.floats(0, 1e-5),
)
def test_costs_ascend_and_contain_the_route_once(
    *, inputs: int, outputs: int, rank: int, tenants: int, tokens: int, launch: float
) -> None:
    work = Workload(tenants=tenants, tokens=tokens, launch=launch)
    site = replace(
        vera("q", inputs, outputs, rank),
        rotation=rotated("q", inputs, outputs, 8).rotation,
        s=value("s", outputs),
        b=value("b", outputs),
    )
    found = choices(route(program(site, workload=work)))
    assert list(found) == ["R", "s", "b", "d", "e"]
    for choice in found.values():
        numbers = [count for _, count in choice.candidates]
        assert numbers == sorted(numbers)
        assert [way for way, _ in choice.candidates if isinstance(way, Route)] == [choice.route]
        assert len({way for way, _ in choice.candidates}) == len(numbers) >= 2
    cheapest = {slot: choice.candidates[0][0] for slot, choice in found.items()}
    assert (cheapest["s"], cheapest["b"]) == (Route.EXPAND, Route.EXPAND)


def test_an_expressions_form_does_not_matter_for_its_route() -> None:
    site = Site(linear=linear("q", 64, 48), s=value("s", 48))
    taken = replace(site, s=Take(value("longer", 96), 0, ((0, 48),)))
    assert only(route(program(taken))) == only(route(program(site)))
