"""Computes which part of each slot's tensor a rank holds."""

from __future__ import annotations

from collections.abc import Mapping

from scute_compile.ir.expressions import Ranges
from scute_compile.ir.linear import Cut, TermCut
from scute_compile.ir.program import Site

Slice = tuple[int, Ranges]
"""An axis, and the ranges of it on a rank."""


def site_slices(site: Site, rank: int) -> Mapping[str, Slice]:
    """Return the slices of the slots outside terms on a rank; slots that are whole on every rank are absent.

    Ranges of `dR` in blocks count blocks.
    """
    cut = _cut(site)
    inputs, outputs = cut.inputs[rank], cut.outputs[rank]
    slices: dict[str, Slice] = {"ds": (0, outputs), "b": (0, outputs)}
    rotation = site.rotation
    if rotation is not None and rotation.delta.shape[0] > 1:
        slices["dR"] = (0, tuple((start // rotation.block, stop // rotation.block) for start, stop in inputs))
    return slices


def term_slices(site: Site, number: int, rank: int) -> Mapping[str, Slice]:
    """Return the slices of a term's slots on a rank; slots that are whole on every rank are absent.

    No slot is cut along two axes: a term's rank is cut only on sites with whole inputs.
    """
    cut, held = _cut(site), term_cuts(site)[number]
    columns = cut.outputs[rank] if held.columns is None else (held.columns[rank],)
    slices: dict[str, Slice] = {"A": (1, cut.inputs[rank]), "B": (1, columns), "e": (0, columns)}
    if held.rows is not None:
        slices |= {"A": (0, (held.rows[rank],)), "d": (0, (held.rows[rank],))}
    return slices


def term_cuts(site: Site) -> tuple[TermCut, ...]:
    """Return one cut per term, empty for terms that are cut as the site is."""
    return _cut(site).terms or (TermCut(),) * len(site.terms)


def _cut(site: Site) -> Cut:
    if site.cut is None:
        raise AssertionError(site)
    return site.cut
