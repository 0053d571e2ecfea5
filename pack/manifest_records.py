"""Converts sites and notes to the records of a manifest."""

from __future__ import annotations

from collections.abc import Callable

from pydantic import JsonValue

from scute_compile.formats.manifest import LiveSlot, RotationRecord, SharedWindow, SiteRecord, TermRecord
from scute_compile.ir.expressions import Expression
from scute_compile.ir.linear import Split, TermCut
from scute_compile.ir.program import Factor, Note, RotationKind, Site, Term
from scute_compile.pack.slices import term_cuts

HashOf = Callable[[Expression], str]
"""A shared matrix -> the hash of its content."""


def site_record(site: Site, hash_of: HashOf) -> SiteRecord:
    """Return the manifest record of a site.

    Args:
        site: A routed site.
        hash_of: Returns the hash of a shared matrix.
    """
    cut = site.cut
    if cut is None:
        raise AssertionError(site)
    linear = site.linear
    return SiteRecord(
        name=site.name,
        in_features=linear.in_features,
        out_features=linear.out_features,
        gemm=linear.fused_site,
        split=linear.split,
        inputs=cut.inputs,
        outputs=cut.outputs,
        rotation=_rotation(site),
        scale=site.s is not None,
        shift=site.b is not None,
        shift_rank=0 if linear.split is Split.ROW else -1,
        terms=tuple(_term(term, of_term, hash_of) for term, of_term in zip(site.terms, term_cuts(site), strict=True)),
        live=tuple(
            LiveSlot(
                slot=choice.slot,
                route=choice.route.value,
                candidates=tuple((route.value, moved) for route, moved in choice.candidates),
            )
            for choice in site.routes
        ),
    )


def _rotation(site: Site) -> RotationRecord | None:
    rotation = site.rotation
    if rotation is None:
        return None
    blocks = rotation.delta.shape[0]
    if rotation.kind is RotationKind.DIAGONAL:
        return RotationRecord(kind=rotation.kind, block=1, blocks=blocks)
    return RotationRecord(kind=rotation.kind, block=rotation.block, blocks=blocks)


def _term(term: Term, held: TermCut, hash_of: HashOf) -> TermRecord:
    return TermRecord(
        rank=term.rank,
        a=_window(term.a, hash_of),
        b=_window(term.b, hash_of),
        d=term.d is not None,
        e=term.e is not None,
        rows=held.rows,
        columns=held.columns,
    )


def _window(factor: Factor, hash_of: HashOf) -> SharedWindow | None:
    if factor.shared is None:
        return None
    return SharedWindow(factor=hash_of(factor.shared), features=factor.value.shape[1])


def note_record(note: Note) -> dict[str, JsonValue]:
    """Return a note as plain JSON values."""
    return {
        "site": note.site,
        "slot": note.slot,
        "action": note.action.value,
        "rule": note.rule,
        "neighbours": [[name, owner.value] for name, owner in note.neighbours],
        "why": note.why,
        "route": note.route.value if note.route else None,
        "candidates": [[route.value, moved] for route, moved in note.candidates],
    }
