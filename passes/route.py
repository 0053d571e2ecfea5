"""Give each live slot the route that costs least for the target's workload, and keep what the others would cost.

The number beside a route is bytes per step, launches included at what memory would move in their time
(`scute_compile.passes.route_costs`). R is routed for a fused GEMM as a whole, so its numbers are the GEMM's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from scute_compile.base.structure import ModelStructure
from scute_compile.ir.expressions import width
from scute_compile.ir.linear import Linear, TermCut
from scute_compile.ir.program import Action, Note, Owner, Program, Route, RouteChoice, Site, Stage
from scute_compile.ir.target import Target, Workload
from scute_compile.passes.route_costs import (
    Candidate,
    SiteShape,
    TermShape,
    Turned,
    inner_candidates,
    outer_candidates,
    ranked,
    rotation_candidates,
    scale_candidates,
    shift_candidates,
)

_BASE_ONLY = (("W", Owner.BASE),)


@dataclass(frozen=True, slots=True, kw_only=True)
class _LiveSlot:
    slot: str
    rule: str
    neighbours: tuple[tuple[str, Owner], ...]
    candidates: Sequence[Candidate]
    must_be_exact: bool = False


def route(
    program: Program,
    *,
    changed: Mapping[str, int] = MappingProxyType({}),
    near_identity: Collection[str] = (),
    structure: ModelStructure | None = None,
) -> Program:
    """Return the program with a route for every live slot, and a note for each choice.

    Args:
        program: After sharding; unsharded sites count whole.
        changed: Site name -> how many columns of `s`, or rows of R, differ from the identity. Absent: all.
        near_identity: Sites whose `R - I` is lost when the turned input is rounded: their fused GEMMs take the cheapest
            route that keeps it, even where another moves fewer bytes.
        structure: The base, to count the members of a fused GEMM that the adapter doesn't touch. None: those of the
            program alone.
    """
    gemms = _gemms(program, structure)
    sites: list[Site] = []
    notes: list[Note] = []
    for site in program.sites:
        choices: list[RouteChoice] = []
        for live in _live_slots(site, program, gemms[_gemm(site.linear)], changed, near_identity):
            choice, note = _choose(site, live, program.target.workload)
            choices.append(choice)
            notes.append(note)
        sites.append(replace(site, routes=tuple(choices)))
    return replace(program, stage=Stage.ROUTED, sites=tuple(sites), notes=(*program.notes, *notes))


def _live_slots(
    site: Site,
    program: Program,
    gemm: Sequence[Site],
    changed: Mapping[str, int],
    near_identity: Collection[str],
) -> Iterator[_LiveSlot]:
    workload, shape = program.target.workload, _shape(site, program.target)
    if site.rotation is not None:
        turned = [
            Turned(shape=_shape(s, program.target), rotation=s.rotation, changed_rows=changed.get(s.name)) for s in gemm
        ]
        yield _LiveSlot(
            slot="R",
            rule="live: R beside the base's W",
            neighbours=_BASE_ONLY,
            candidates=rotation_candidates(turned, workload),
            must_be_exact=any(s.name in near_identity for s in gemm if s.rotation is not None),
        )
    if site.s is not None:
        found = scale_candidates(shape, workload, changed_columns=changed.get(site.name))
        yield _LiveSlot(slot="s", rule="live: s beside the base's W", neighbours=_BASE_ONLY, candidates=found)
    if site.b is not None:
        found = shift_candidates(shape, workload)
        yield _LiveSlot(slot="b", rule="live: b beside the base's W", neighbours=_BASE_ONLY, candidates=found)
    yield from _live_in_terms(site, shape, workload)


def _live_in_terms(site: Site, shape: SiteShape, workload: Workload) -> Iterator[_LiveSlot]:
    for number, term in enumerate(site.terms):
        held = _term_shape(site, number, shape)
        suffix = f".{number}" if len(site.terms) > 1 else ""
        a, b = ("A", term.a.owner), ("B", term.b.owner)
        if term.d is not None:
            found = inner_candidates(held, workload)
            rule = "live: d between factors that the adapter doesn't own"
            yield _LiveSlot(slot=f"d{suffix}", rule=rule, neighbours=(a, b), candidates=found)
        if term.e is not None:
            found = outer_candidates(held, workload)
            rule = "live: e after a B that the adapter doesn't own"
            yield _LiveSlot(slot=f"e{suffix}", rule=rule, neighbours=(b,), candidates=found)


def _choose(site: Site, live: _LiveSlot, workload: Workload) -> tuple[RouteChoice, Note]:
    order = ranked(live.candidates, workload)
    best = next((c for c in order if c.exact), order[0]) if live.must_be_exact else order[0]
    costs = tuple((c.route, c.charge(workload)) for c in order)
    note = Note(
        site=site.name,
        slot=live.slot,
        action=Action.LIVE,
        rule=live.rule,
        neighbours=live.neighbours,
        why=_why(live, best, order, workload),
        route=best.route,
        candidates=costs,
    )
    return RouteChoice(slot=live.slot, route=best.route, candidates=costs), note


def _why(live: _LiveSlot, best: Candidate, order: Sequence[Candidate], workload: Workload) -> str:
    owners = " and ".join(
        f"{name} is {'the ' if owner is Owner.BASE else ''}{owner}" for name, owner in live.neighbours
    )
    launches = "no launch" if best.launches == 0 else f"{best.launches} launch{'es' if best.launches > 1 else ''}"
    load = f"{workload.tenants} tenants and {workload.tokens} tokens"
    sentences = [
        f"{owners}, so {live.slot} can't merge",
        f"{best.route} moves {best.moved:,} bytes and adds {launches} for {load}",
    ]
    if live.slot == "R":
        sentences.append("one choice for its whole fused GEMM")
        if best.route is Route.BEFORE_GEMM:
            sentences.append("adds one rounding of x, which loses an R - I below that rounding; delta rows keep it")
        elif best is not order[0]:
            sentences.append(f"{order[0].route} would cost less, but a rotation near the identity may not survive it")
    if best.route in {Route.MERGED_COPY, Route.AS_LORA}:
        sentences.append("the artifact keeps the slot; a runtime makes the copy when it loads the adapter")
    return "; ".join(sentences)


def _gemms(program: Program, structure: ModelStructure | None) -> Mapping[str, tuple[Site, ...]]:
    found: dict[str, dict[str, Site]] = defaultdict(dict)
    for linear in structure.linears.values() if structure is not None else ():
        found[_gemm(linear)][linear.name] = Site(linear=linear)
    for site in program.sites:
        found[_gemm(site.linear)][site.name] = site
    return {gemm: tuple(members.values()) for gemm, members in found.items()}


def _gemm(linear: Linear) -> str:
    return linear.gemm or linear.name


def _shape(site: Site, target: Target) -> SiteShape:
    # The widest rank decides: all ranks take the same route, and the step waits for the slowest.
    linear = site.linear
    inputs = max(map(width, site.cut.inputs)) if site.cut else linear.in_features
    outputs = max(map(width, site.cut.outputs)) if site.cut else linear.out_features
    wide = 4 if linear.weight.dtype in {"F32", "F64"} else 2
    return SiteShape(inputs=inputs, outputs=outputs, width=target.dtype.itemsize if target.dtype else wide)


def _term_shape(site: Site, number: int, shape: SiteShape) -> TermShape:
    """Return what the widest rank holds of a term."""
    rank = site.terms[number].rank
    held = site.cut.terms[number] if site.cut and site.cut.terms else TermCut()
    rows = rank if held.rows is None else max(stop - start for start, stop in held.rows)
    columns = shape.outputs if held.columns is None else max(stop - start for start, stop in held.columns)
    return TermShape(rows=rows, inputs=shape.inputs, rank=rank, columns=columns, width=shape.width)
