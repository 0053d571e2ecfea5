"""The fold rule as a table of named rewrites, each with its algebra.

A slot next to a factor that the adapter owns merges into it; a slot between shared or base factors stays live. Every
row is a pure function from a term to the rewritten term, or to None where the row doesn't apply.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from scute_compile.ir.expressions import Expression, Fill, Scale, ScaleColumns, ScaleRows
from scute_compile.ir.program import Factor, Owner, Term


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewrite:
    """One row of the fold rule."""

    name: str
    slot: str
    """The slot that the rewrite removes."""
    algebra: str
    """Left side = right side, with A of shape (in, rank) as in the normal form."""
    apply: Callable[[Term], Term | None]


def _owned(factor: Factor) -> bool:
    return factor.owner is Owner.ADAPTER


def _with(factor: Factor, value: Expression) -> Factor:
    return replace(factor, value=value)


def d_into_a(term: Term) -> Term | None:
    """Factors are rank-major, so the columns of A are the rows of its transpose."""
    if term.d is None or not _owned(term.a):
        return None
    return replace(term, a=_with(term.a, ScaleRows(term.a.value, term.d)), d=None)


def d_into_b(term: Term) -> Term | None:
    if term.d is None or _owned(term.a) or not _owned(term.b):
        return None
    return replace(term, b=_with(term.b, ScaleRows(term.b.value, term.d)), d=None)


def e_into_b(term: Term) -> Term | None:
    if term.e is None or not _owned(term.b):
        return None
    return replace(term, b=_with(term.b, ScaleColumns(term.b.value, term.e)), e=None)


def c_into_b(term: Term) -> Term | None:
    if term.c == 1.0 or not _owned(term.b):
        return None
    return replace(term, b=_with(term.b, Scale(term.b.value, term.c)), c=1.0)


def c_into_a(term: Term) -> Term | None:
    if term.c == 1.0 or _owned(term.b) or not _owned(term.a):
        return None
    return replace(term, a=_with(term.a, Scale(term.a.value, term.c)), c=1.0)


def c_into_d(term: Term) -> Term | None:
    if term.c == 1.0 or _owned(term.a) or _owned(term.b):
        return None
    d = Scale(term.d, term.c) if term.d is not None else Fill(term.c, (term.rank,))
    return replace(term, d=d, c=1.0)


TERM_REWRITES = (
    Rewrite(name="d-into-A", slot="d", algebra="((x A) * d) B = (x (A diag(d))) B", apply=d_into_a),
    Rewrite(name="d-into-B", slot="d", algebra="((x A) * d) B = (x A) (diag(d) B)", apply=d_into_b),
    Rewrite(name="e-into-B", slot="e", algebra="((x A) B) * e = (x A) (B diag(e))", apply=e_into_b),
    Rewrite(name="c-into-B", slot="c", algebra="c ((x A) B) = (x A) (c B)", apply=c_into_b),
    Rewrite(name="c-into-A", slot="c", algebra="c ((x A) B) = (x (c A)) B", apply=c_into_a),
    Rewrite(name="c-into-d", slot="c", algebra="c (((x A) * d) B) = ((x A) * (c d)) B", apply=c_into_d),
)
"""Each is tried once, in this order."""
