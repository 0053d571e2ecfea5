"""The route pass: gives each live slot its route, with the costs of the route and of its alternatives.

A slot has one route, the one that computes its effect without a further rounding to the activations' or the weights'
dtype. The alternatives are priced so that `explain-folds` can compare them. Costs are bytes per step, launches included
(`scute_compile.passes.route_costs`). R is computed for a fused GEMM as a whole, so its costs are the GEMM's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from scute_compile.base.structure import ModelStructure
from scute_compile.ir.dtypes import DType
from scute_compile.ir.expressions import width
from scute_compile.ir.linear import TermCut
from scute_compile.ir.program import Action, Note, Owner, Program, Route, RouteChoice, Site, Stage
from scute_compile.ir.target import Workload
from scute_compile.passes.context import Context
from scute_compile.passes.route_costs import (
    Cost,
    GemmMember,
    SiteShape,
    TermShape,
    inner_costs,
    outer_costs,
    ranked,
    rotation_costs,
    scale_costs,
    shift_costs,
)

_BASE_ONLY = (("W", Owner.BASE),)


@dataclass(frozen=True, slots=True, kw_only=True)
class _LiveSlot:
    slot: str
    rule: str
    neighbours: tuple[tuple[str, Owner], ...]
    costs: Sequence[Cost]


def route(program: Program, context: Context) -> Program:
    """Give every live slot its route, and add a note for each.

    Args:
        program: A sharded program.
        context: Its base gives the artifact's dtype, and the members of a fused GEMM that the adapter doesn't touch.
    """
    dtype = program.target.dtype or context.base.dtype
    gemms = _gemms(program, context.base)
    sites: list[Site] = []
    notes: list[Note] = []
    for site in program.sites:
        choices: list[RouteChoice] = []
        for live in _live_slots(site, gemms[site.linear.fused_site], dtype, program.target.workload):
            choice, note = _choose(site, live, program.target.workload)
            choices.append(choice)
            notes.append(note)
        sites.append(replace(site, routes=tuple(choices)))
    return replace(program, stage=Stage.ROUTED, sites=tuple(sites), notes=(*program.notes, *notes))


def _live_slots(site: Site, gemm: Sequence[Site], dtype: DType, workload: Workload) -> Iterator[_LiveSlot]:
    shape = _shape(site, dtype)
    if site.rotation is not None:
        members = [GemmMember(shape=_shape(member, dtype), rotation=member.rotation) for member in gemm]
        costs = rotation_costs(members, workload)
        yield _LiveSlot(slot="R", rule="live: R beside the base's W", neighbours=_BASE_ONLY, costs=costs)
    if site.s is not None:
        costs = scale_costs(shape, workload)
        yield _LiveSlot(slot="s", rule="live: s beside the base's W", neighbours=_BASE_ONLY, costs=costs)
    if site.b is not None:
        costs = shift_costs(shape, workload)
        yield _LiveSlot(slot="b", rule="live: b beside the base's W", neighbours=_BASE_ONLY, costs=costs)
    yield from _live_in_terms(site, shape, workload)


def _live_in_terms(site: Site, shape: SiteShape, workload: Workload) -> Iterator[_LiveSlot]:
    for number, term in enumerate(site.terms):
        of_term = _term_shape(site, number, shape)
        suffix = f".{number}" if len(site.terms) > 1 else ""
        a, b = ("A", term.a.owner), ("B", term.b.owner)
        if term.d is not None:
            rule = "live: d between factors that the adapter doesn't own"
            yield _LiveSlot(slot=f"d{suffix}", rule=rule, neighbours=(a, b), costs=inner_costs(of_term, workload))
        if term.e is not None:
            rule = "live: e after a B that the adapter doesn't own"
            yield _LiveSlot(slot=f"e{suffix}", rule=rule, neighbours=(b,), costs=outer_costs(of_term, workload))


def _choose(site: Site, live: _LiveSlot, workload: Workload) -> tuple[RouteChoice, Note]:
    costs = ranked(live.costs, workload)
    chosen, way = next((cost, cost.way) for cost in costs if isinstance(cost.way, Route))
    candidates = tuple((cost.way, cost.charge(workload)) for cost in costs)
    note = Note(
        site=site.name,
        slot=live.slot,
        action=Action.LIVE,
        rule=live.rule,
        neighbours=live.neighbours,
        why=_why(live, chosen, costs[0], workload),
        route=way,
        candidates=candidates,
    )
    return RouteChoice(slot=live.slot, route=way, candidates=candidates), note


def _why(live: _LiveSlot, chosen: Cost, cheapest: Cost, workload: Workload) -> str:
    owners = " and ".join(
        f"{name} is {'the ' if owner is Owner.BASE else ''}{owner}" for name, owner in live.neighbours
    )
    launches = f"{chosen.launches} launch{'es' if chosen.launches > 1 else ''}" if chosen.launches else "no launch"
    load = f"{workload.tenants} tenants and {workload.tokens} tokens"
    sentences = [
        f"{owners}, so {live.slot} can't merge",
        f"{chosen.way} moves {chosen.moved:,} bytes and adds {launches} for {load}",
    ]
    if live.slot == "R":
        sentences.append("one choice for its whole fused GEMM")
    if cheapest is not chosen:
        lost = "a rotation near the identity may not survive it" if live.slot == "R" else "it rounds once more"
        sentences.append(f"{cheapest.way} would cost less, but {lost}")
    return "; ".join(sentences)


def _gemms(program: Program, structure: ModelStructure) -> Mapping[str, tuple[Site, ...]]:
    found: dict[str, dict[str, Site]] = defaultdict(dict)
    for linear in structure.linears.values():
        found[linear.fused_site][linear.name] = Site(linear=linear)
    for site in program.sites:
        found[site.linear.fused_site][site.name] = site
    return {gemm: tuple(members.values()) for gemm, members in found.items()}


def _shape(site: Site, dtype: DType) -> SiteShape:
    # The widest rank decides: all ranks take the same route, and the step waits for the slowest.
    linear = site.linear
    inputs = max(map(width, site.cut.inputs)) if site.cut else linear.in_features
    outputs = max(map(width, site.cut.outputs)) if site.cut else linear.out_features
    return SiteShape(inputs=inputs, outputs=outputs, width=dtype.itemsize)


def _term_shape(site: Site, number: int, shape: SiteShape) -> TermShape:
    """Return what the widest rank holds of a term."""
    rank = site.terms[number].rank
    held = site.cut.terms[number] if site.cut and site.cut.terms else TermCut()
    rows = rank if held.rows is None else max(stop - start for start, stop in held.rows)
    columns = shape.outputs if held.columns is None else max(stop - start for start, stop in held.columns)
    return TermShape(rows=rows, inputs=shape.inputs, rank=rank, columns=columns, width=shape.width)
