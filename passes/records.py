"""From sites and findings to the records of a manifest. No tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pydantic import JsonValue

from scute_compile.diagnostics import Diagnostic
from scute_compile.expressions import Expression
from scute_compile.formats.manifest import LiveSlot, RotationRecord, SharedWindow, SiteRecord, TermRecord
from scute_compile.ir import Cut, Factor, Note, RotationKind, Site, Term
from scute_compile.model import Split

HashOf = Callable[[Expression], str]
"""A shared matrix -> its content's hash."""


def site_record(site: Site, hash_of: HashOf) -> SiteRecord:
    """Describe a site as the manifest does.

    Args:
        site: a routed site.
        hash_of: gives the hash of a shared matrix.
    """
    cut = site.cut
    if cut is None:
        raise AssertionError(site)
    linear = site.linear
    return SiteRecord(
        name=site.name,
        in_features=linear.in_features,
        out_features=linear.out_features,
        gemm=linear.gemm or site.name,
        split=linear.split,
        inputs=cut.inputs,
        outputs=cut.outputs,
        rotation=_rotation(site),
        scale=site.s is not None,
        shift=site.b is not None,
        shift_rank=-1 if linear.split is Split.COLUMN else 0,
        terms=tuple(_term(term, hash_of) for term in site.terms),
        live=tuple(
            LiveSlot(slot=choice.slot, route=choice.route.value,
                     candidates=tuple((route.value, moved) for route, moved in choice.candidates))
            for choice in site.routes
        ),
    )  # fmt: skip


def _rotation(site: Site) -> RotationRecord | None:
    rotation = site.rotation
    if rotation is None:
        return None
    blocks = rotation.delta.shape[0]
    if rotation.kind is RotationKind.DIAGONAL:
        return RotationRecord(kind=rotation.kind, block=1, blocks=blocks)
    return RotationRecord(kind=rotation.kind, block=rotation.block, blocks=blocks)


def _term(term: Term, hash_of: HashOf) -> TermRecord:
    return TermRecord(
        rank=term.rank,
        a=_window(term.a, hash_of),
        b=_window(term.b, hash_of),
        d=term.d is not None,
        e=term.e is not None,
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


def finding_record(diagnostic: Diagnostic) -> dict[str, JsonValue]:
    """Return a finding as plain JSON values."""
    return dict(diagnostic.to_json())


def site_slices(site: Site, rank: int, cut: Cut) -> Mapping[str, tuple[int, tuple[tuple[int, int], ...]]]:
    """Return, per slot, the axis that a rank's cut divides and the ranges that it holds.

    Slots that every rank holds whole are absent. The ranges of blocks count blocks.
    """
    inputs, outputs = cut.inputs[rank], cut.outputs[rank]
    slices = {"A": (1, inputs), "B": (1, outputs), "ds": (0, outputs), "b": (0, outputs), "e": (0, outputs)}
    rotation = site.rotation
    if rotation is not None and rotation.delta.shape[0] > 1:
        slices["dR"] = (0, tuple((start // rotation.block, stop // rotation.block) for start, stop in inputs))
    return slices
