"""Each invariant of the spec fails on a program that breaks it, and holds for programs that the passes return."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scute_compile.ir.expressions import ColumnNorm, Divide, Expression, Fill, Ref, Source
from scute_compile.ir.linear import Cut, TermCut
from scute_compile.ir.method import Method
from scute_compile.ir.program import Factor, Owner, Program, Rotation, RotationKind, Site, Stage, Term
from scute_compile.ir.spec import SPEC, verify
from tests.support.programs import METHODS, linear, value

LINEAR = linear("h.0.k_proj", 8, 6)
WHOLE = Cut(inputs=(((0, 8),),), outputs=(((0, 6),),))


def term(**changes: object) -> Term:
    made = Term(a=Factor(value=value("A", 2, 8)), b=Factor(value=value("B", 2, 6)))
    return replace(made, **changes)  # type: ignore[arg-type] # tests pass one field at a time


def site(**changes: object) -> Site:
    made = Site(linear=LINEAR, terms=(term(),), cut=WHOLE)
    return replace(made, **changes)  # type: ignore[arg-type] # likewise


def rotated(delta: Ref, kind: RotationKind) -> Site:
    return site(rotation=Rotation(kind=kind, delta=delta))


def dora_scale(tile_rows: int) -> Expression:
    return Divide(value("m", 6), ColumnNorm(LINEAR.weight, False, value("A", 2, 8), value("B", 2, 6), 1.0, tile_rows))


def ref(key: str, *shape: int) -> Ref:
    return Ref(Source.ADAPTER, key, shape, "F32")


WINDOW = Factor(value=value("A", 2, 8), owner=Owner.SHARED, shared=value("whole", 2, 9))
SHARED_B = Factor(value=value("B", 2, 6), owner=Owner.SHARED, shared=value("whole B", 2, 9))
OTHER_BIAS = Ref(Source.BASE, "h.1.k_proj.bias", (6,), "BF16")

BROKEN: dict[str, tuple[str, Stage, Site]] = {
    "a site too early": ("nothing_is_parsed_yet", Stage.OPENED, site()),
    "ranks differ": ("terms_fit_their_site", Stage.PARSED, site(terms=(term(b=Factor(value=value("B", 3, 6))),))),
    "A lacks inputs": ("terms_fit_their_site", Stage.FOLDED, site(terms=(term(a=Factor(value=value("A", 2, 7))),))),
    "d lacks the rank": ("terms_fit_their_site", Stage.PARSED, site(terms=(term(d=value("d", 3)),))),
    "e lacks the outputs": ("terms_fit_their_site", Stage.PLACED, site(terms=(term(e=value("e", 8)),))),
    "s lacks the outputs": ("slots_fit_their_site", Stage.SHARDED, site(s=value("s", 8))),
    "a bias lacks the outputs": ("slots_fit_their_site", Stage.PARSED, site(beta=value("beta", 8))),
    "R lacks the inputs": ("slots_fit_their_site", Stage.PARSED, rotated(ref("R", 6), RotationKind.DIAGONAL)),
    "blocks don't divide": ("slots_fit_their_site", Stage.PARSED, rotated(ref("R", 2, 3, 3), RotationKind.BLOCKS)),
    "blocks are missing": ("slots_fit_their_site", Stage.PARSED, rotated(ref("R", 2, 2, 2), RotationKind.BLOCKS)),
    "shared without a whole": (
        "shared_factors_are_windows",
        Stage.PARSED,
        site(terms=(term(a=replace(WINDOW, shared=None)),)),
    ),
    "owned with a whole": (
        "shared_factors_are_windows",
        Stage.FOLDED,
        site(terms=(term(a=replace(WINDOW, owner=Owner.ADAPTER)),)),
    ),
    "another layer's bias": ("base_is_referenced_by_bias_or_norm", Stage.PARSED, site(beta=OTHER_BIAS)),
    "b too early": ("bias_is_in_normal_form", Stage.PLACED, site(b=value("b", 6))),
    "beta too late": ("bias_is_compiled", Stage.FOLDED, site(beta=value("beta", 6))),
    "c is left": ("slots_beside_owned_factors_are_merged", Stage.FOLDED, site(terms=(term(c=2.0),))),
    "d beside A": ("slots_beside_owned_factors_are_merged", Stage.SCALED, site(terms=(term(d=value("d", 2)),))),
    "d beside B": (
        "slots_beside_owned_factors_are_merged",
        Stage.FOLDED,
        site(terms=(term(a=WINDOW, d=value("d", 2)),)),
    ),
    "e after B": ("slots_beside_owned_factors_are_merged", Stage.FOLDED, site(terms=(term(e=value("e", 6)),))),
    "a norm without its tiles": ("every_norm_has_its_tiles", Stage.SCALED, site(s=dora_scale(0))),
    "nothing is left": ("site_is_not_empty", Stage.FOLDED, site(terms=())),
    "no cut": ("every_rank_has_a_cut", Stage.SHARDED, site(cut=None)),
    "an empty cut": ("every_rank_has_a_cut", Stage.SHARDED, site(cut=replace(WHOLE, outputs=(((3, 3),),)))),
    "a cut beyond the layer": ("every_rank_has_a_cut", Stage.ROUTED, site(cut=replace(WHOLE, inputs=(((0, 9),),)))),
    "a term without its cut": (
        "every_term_has_a_cut_or_none_has",
        Stage.SHARDED,
        site(cut=replace(WHOLE, terms=(TermCut(),) * 2)),
    ),
    "a row that two ranks hold": (
        "every_term_has_a_cut_or_none_has",
        Stage.ROUTED,
        site(cut=replace(WHOLE, terms=(TermCut(rows=((0, 2), (1, 2))),))),
    ),
    "an output that no rank holds": (
        "every_term_has_a_cut_or_none_has",
        Stage.SHARDED,
        site(cut=replace(WHOLE, terms=(TermCut(columns=((0, 5),)),))),
    ),
    "s without a route": ("every_live_slot_has_a_route", Stage.ROUTED, site(s=value("s", 6))),
    "e without a route": (
        "every_live_slot_has_a_route",
        Stage.ROUTED,
        site(terms=(term(b=SHARED_B, e=value("e", 6)),)),
    ),
}
"""The fault -> the invariant that must report it, the stage, and the site."""


def program(stage: Stage, broken: Site) -> Program:
    return Program(method=Method.LORA, stage=stage, sites=(broken,))


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_program_is_reported_with_stage_site_and_invariant(fault: str) -> None:
    invariant, stage, broken = BROKEN[fault]
    with pytest.raises(AssertionError, match=rf"^after {stage}: .*\bh\.0\.k_proj: {invariant}: "):
        verify(program(stage, broken))


def test_every_invariant_is_broken_by_a_program() -> None:
    assert {invariant.__name__ for _, _, invariant in SPEC} == {name for name, _, _ in BROKEN.values()}


def test_the_site_that_the_faults_are_built_on_breaks_no_invariant() -> None:
    for stage in Stage:
        if stage is Stage.OPENED:
            continue
        assert verify(program(stage, site())) == program(stage, site())


@pytest.mark.parametrize(
    ("stage", "allowed"),
    [
        (Stage.PARSED, site(terms=(term(c=2.0, d=value("d", 2), e=value("e", 6)),))),
        (Stage.PLACED, site(beta=value("beta", 6))),
        (Stage.FOLDED, site(b=value("b", 6), cut=None)),
        (Stage.FOLDED, site(s=dora_scale(0))),
        (Stage.SCALED, site(s=dora_scale(4))),
        (Stage.SHARDED, site(s=value("s", 6))),
        (Stage.FOLDED, site(terms=(term(a=WINDOW, b=SHARED_B, d=value("d", 2), e=value("e", 6)),))),
        (Stage.FOLDED, rotated(ref("one block", 1, 4, 4), RotationKind.BLOCKS)),
        (Stage.FOLDED, site(b=LINEAR.bias)),
    ],
    ids=lambda x: x.value if isinstance(x, Stage) else "",
)
def test_a_program_may_break_the_invariants_of_later_stages(stage: Stage, allowed: Site) -> None:
    verify(program(stage, allowed))


def test_unknown_sizes_break_no_invariant() -> None:
    """An adapter that is planned without its base has layers of size 0 where its tensors don't give the size."""
    unknown = replace(LINEAR, in_features=0, out_features=0, bias=None)
    verify(program(Stage.PARSED, site(linear=unknown, s=Fill(1.0, (6,)))))


@pytest.mark.parametrize("method", METHODS)
def test_a_planned_program_keeps_the_spec_until_a_route_is_removed(method: str) -> None:
    made = METHODS[method]()
    assert made.stage is Stage.ROUTED
    assert verify(made) == made
    first = next(site for site in made.sites if site.routes)
    with pytest.raises(AssertionError, match="every_live_slot_has_a_route"):
        verify(replace(made, sites=(replace(first, routes=()),)))
