"""The fold rule, row by row: for random shapes, owners and values, the term computes the same before and after."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scute_compile.ir.expressions import Add, Concatenate, Expression, Fill, Multiply, Subtract
from scute_compile.ir.linear import Linear, Part, Product
from scute_compile.ir.method import Method
from scute_compile.ir.program import Action, Factor, Note, Owner, Program, Rotation, RotationKind, Site, Stage, Term
from scute_compile.passes.fold import compile_bias, fold_term
from scute_compile.passes.place import place, scale_output
from scute_compile.passes.rewrites import TERM_REWRITES, Rewrite
from tests.support.normal_form import Drawn, assert_equal, coarse, factor, linear, value
from tests.support.programs import context

APPLIES: Mapping[str, Callable[[Term, bool, bool], bool]] = {
    "d-into-A": lambda term, a_owned, _: term.d is not None and a_owned,
    "d-into-B": lambda term, a_owned, b_owned: term.d is not None and not a_owned and b_owned,
    "e-into-B": lambda term, _, b_owned: term.e is not None and b_owned,
    "c-into-B": lambda term, _, b_owned: term.c != 1 and b_owned,
    "c-into-A": lambda term, a_owned, b_owned: term.c != 1 and a_owned and not b_owned,
    "c-into-d": lambda term, a_owned, b_owned: term.c != 1 and not a_owned and not b_owned,
}
"""The condition of each row, restated from the rule: a slot merges into a neighbour that the adapter owns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A term of a layer, with inputs and values."""

    term: Term
    linear: Linear
    drawn: Drawn
    tokens: int

    def before_and_after(self, after: Term) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the term's outputs before and after, and the sums of absolute values."""
        x = self.drawn.inputs(self.tokens, self.linear.in_features)
        bound = replace(self.drawn, absolute=True)
        return self.drawn.term(x, self.term), self.drawn.term(x, after), bound.term(np.abs(x), self.term)


sizes = st.integers(1, 7)
owners = st.sampled_from(Owner)
scalars = st.one_of(st.just(1.0), st.floats(0.01, 100), st.floats(-100, -0.01))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    inputs, outputs, rank = draw(sizes), draw(sizes), draw(sizes)
    term = Term(
        a=factor("A", draw(owners), rank, inputs),
        b=factor("B", draw(owners), rank, outputs),
        d=value("d", rank) if draw(st.booleans()) else None,
        e=value("e", outputs) if draw(st.booleans()) else None,
        c=draw(scalars),
    )
    drawn = Drawn(seed=draw(st.integers(0, 2**32 - 1)), spread=draw(st.floats(0, 3)))
    return Case(term=term, linear=linear(inputs, outputs, bias=False), drawn=drawn, tokens=draw(sizes))


def owned(factor: Factor) -> bool:
    return factor.owner is Owner.ADAPTER


def test_every_row_of_the_table_is_tested() -> None:
    assert {row.name for row in TERM_REWRITES} == set(APPLIES)


@pytest.mark.parametrize("row", TERM_REWRITES, ids=lambda row: row.name)
@settings(deadline=None)
@given(case=cases())
def test_a_row_applies_exactly_for_its_owners_and_keeps_the_value(row: Rewrite, case: Case) -> None:
    term = case.term
    after = row.apply(term)
    assert (after is not None) is APPLIES[row.name](term, owned(term.a), owned(term.b))
    if after is None:
        return
    assert_equal(*case.before_and_after(after))
    assert after.c == 1 if row.slot == "c" else getattr(after, row.slot) is None
    assert (after.a.owner, after.b.owner) == (term.a.owner, term.b.owner)


@settings(deadline=None)
@given(case=cases())
def test_the_whole_table_leaves_slots_only_between_factors_that_are_not_owned(case: Case) -> None:
    term, notes = case.term, list[Note]()
    after = fold_term(term, Site(linear=case.linear, terms=(term,)), "", notes)
    assert_equal(*case.before_and_after(after))
    unowned = not owned(term.a) and not owned(term.b)
    assert after.c == 1
    assert (after.d is not None) is (unowned and (term.d is not None or term.c != 1))
    assert (after.e is not None) is (not owned(term.b) and term.e is not None)
    for old, new in ((term.a, after.a), (term.b, after.b)):
        assert owned(old) or old == new
    assert [note.slot for note in notes] == [row.slot for row in TERM_REWRITES if APPLIES[row.name](*judged(term))]
    assert all(note.action is Action.MERGED for note in notes)


def judged(term: Term) -> tuple[Term, bool, bool]:
    return term, owned(term.a), owned(term.b)


def test_a_term_with_every_slot_folds_into_its_owned_factors() -> None:
    full = Term(
        a=factor("A", Owner.ADAPTER, 3, 4), b=factor("B", Owner.ADAPTER, 3, 5), d=value("d", 3), e=value("e", 5), c=2.0
    )
    after = fold_term(full, Site(linear=linear(4, 5, bias=False), terms=(full,)), "", [])
    assert (after.d, after.e, after.c) == (None, None, 1.0)
    assert {ref.key for ref in after.a.value.references()} == {"A", "d"}
    assert {ref.key for ref in after.b.value.references()} == {"B", "e"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteCase:
    """A site before folding, with inputs and values."""

    site: Site
    drawn: Drawn
    tokens: int

    @property
    def x(self) -> np.ndarray:
        """The inputs."""
        return self.drawn.inputs(self.tokens, self.site.linear.in_features)

    @property
    def bound(self) -> Drawn:
        """The absolute values."""
        return replace(self.drawn, absolute=True)


def biases(site: Site) -> list[Expression | None]:
    """Return every form of an adapted layer's bias that a front end gives."""
    base_bias, outputs = site.linear.bias, site.linear.out_features
    saved: list[Expression | None] = [None, value("saved bias", outputs)]
    if base_bias is not None:
        saved.append(Add(base_bias, value("lora_B.bias", outputs)))
        saved += [Multiply(site.s, base_bias)] if site.s is not None else []
    return saved


@st.composite
def site_cases(draw: st.DrawFn) -> SiteCase:
    inputs, outputs, rank = draw(sizes), draw(sizes), draw(sizes)
    site = Site(
        linear=linear(inputs, outputs, bias=draw(st.booleans())),
        s=value("s", outputs) if draw(st.booleans()) else None,
        terms=tuple(
            Term(
                a=factor(f"A{k}", Owner.ADAPTER, rank, inputs),
                b=factor(f"B{k}", Owner.ADAPTER, rank, outputs),
                e=value(f"e{k}", outputs) if draw(st.booleans()) else None,
                c=draw(scalars),
            )
            for k in range(draw(st.integers(0, 2)))
        ),
    )
    site = replace(site, beta=draw(st.sampled_from(biases(site))))
    drawn = Drawn(seed=draw(st.integers(0, 2**32 - 1)), spread=draw(st.floats(0, 2)))
    return SiteCase(site=site, drawn=drawn, tokens=draw(sizes))


@settings(deadline=None)
@given(case=site_cases())
def test_scaling_the_output_scales_weight_path_bias_and_terms(case: SiteCase) -> None:
    """IA3's vector on the input of `down` multiplies everything that `up` computes."""
    vector = value("l", case.site.linear.out_features)
    after = scale_output(case.site, vector)
    expected = case.drawn.normal_form(case.x, case.site) * case.drawn.of(vector)
    bound = case.bound.normal_form(np.abs(case.x), case.site) * case.bound.of(vector)
    assert_equal(expected, case.drawn.normal_form(case.x, after), bound)


@settings(deadline=None)
@given(case=site_cases())
def test_the_compiled_form_of_a_bias_equals_the_normal_form(case: SiteCase) -> None:
    """`y` includes the base's bias; `y + y * ds + b` must include the adapted layer's bias instead."""
    after = compile_bias(case.site, [])
    assert after.beta is None
    bound = case.bound.normal_form(np.abs(case.x), case.site) + _bias_bound(case)
    assert_equal(case.drawn.normal_form(case.x, case.site), case.drawn.compiled_form(case.x, after), bound)


@settings(deadline=None)
@given(case=site_cases())
def test_scaling_and_compiling_together_equal_the_scaled_normal_form(case: SiteCase) -> None:
    vector = value("l", case.site.linear.out_features)
    after = compile_bias(scale_output(case.site, vector), [])
    expected = case.drawn.normal_form(case.x, case.site) * case.drawn.of(vector)
    bound = (case.bound.normal_form(np.abs(case.x), case.site) + _bias_bound(case)) * (1 + case.bound.of(vector))
    assert_equal(expected, case.drawn.compiled_form(case.x, after), bound)


def _bias_bound(case: SiteCase) -> np.ndarray:
    """Return `(1 + s) (x W + beta)` of absolute values: the terms that cancel in the compiled form."""
    y = case.bound.product(np.abs(case.x), case.site)
    y = y if case.site.linear.bias is None else y + case.bound.of(case.site.linear.bias)
    return y * (1 if case.site.s is None else 2 + case.bound.of(case.site.s))


@settings(deadline=None)
@given(case=site_cases())
def test_b_is_computed_from_s_as_it_is_stored(case: SiteCase) -> None:
    """A rounded `s` also scales the base's bias in `y`; b removes exactly that, whatever the rounding error."""
    drawn = replace(case.drawn, rounding=coarse)
    site, base_bias = case.site, case.site.linear.bias
    after = compile_bias(site, [])
    stored = 1.0 if site.s is None else 1.0 + coarse(drawn.of(site.s) - 1.0).astype(np.float64)
    if site.s is not None and base_bias is not None and site.beta == Multiply(site.s, base_bias):
        assert after.b is None
        beta = stored * drawn.of(base_bias)  # IA3: s scales the bias, and the stored s scales both
    else:
        bias = site.beta or base_bias
        beta = drawn.of(bias) if bias is not None else np.zeros(site.linear.out_features)
    expected = drawn.product(case.x, site) * stored + beta + drawn.terms(case.x, site)
    bound = case.bound.normal_form(np.abs(case.x), site) + 2 * _bias_bound(case)
    assert_equal(expected, drawn.compiled_form(case.x, after), bound)


@settings(deadline=None)
@given(gate=sizes, up=sizes, seed=st.integers(0, 2**32 - 1), fused=st.booleans())
def test_an_input_vector_moves_onto_the_plain_factor_of_the_product(gate: int, up: int, seed: int, fused: bool) -> None:
    """`(g * u) * l = g * (u * l)`: of a fused gate_up layer only the outputs of `up` are scaled."""
    outputs = gate + up if fused else up
    target = linear(3, outputs, bias=True)
    if fused:
        target = replace(target, parts=(Part(name="gate", size=gate), Part(name="up", size=up)))
    down = replace(linear(up, 3, bias=False), name="down", input_product=Product(site="up", part=1 if fused else 0))
    vector, drawn = value("l", up), Drawn(seed=seed)
    rotation = Rotation(kind=RotationKind.DIAGONAL, delta=Subtract(vector, Fill(1.0, (up,))))
    program = Program(method=Method.IA3, stage=Stage.PARSED, sites=(Site(linear=down, rotation=rotation),))
    (site,) = place(program, context([target, down])).sites
    assert site.name == "up"
    scales = drawn.of(vector)
    scales = np.concatenate([np.ones(gate), scales]) if fused else scales
    assert site.s is not None
    assert np.array_equal(drawn.of(site.s), scales)
    assert not fused or isinstance(site.s, Concatenate)


def test_an_input_vector_stays_where_a_term_reads_the_same_input() -> None:
    """A low-rank term reads x unscaled: scaling x upstream would scale the term as well."""
    up, down = (
        linear(3, 4, bias=False),
        replace(linear(4, 3, bias=False), name="down", input_product=Product(site="up")),
    )
    rotation = Rotation(kind=RotationKind.DIAGONAL, delta=value("l - 1", 4))
    term = Term(a=factor("A", Owner.ADAPTER, 2, 4), b=factor("B", Owner.ADAPTER, 2, 3))
    site = Site(linear=down, rotation=rotation, terms=(term,))
    program = Program(method=Method.IA3, stage=Stage.PARSED, sites=(site,))
    assert place(program, context([up, down])).sites == (site,)
