"""Computes which entries of a layer's two axes each tensor-parallel rank holds.

The layout is Megatron's (arXiv:1909.08053 section 3): column layers are cut by output, part by part and in whole heads;
row layers by input; key and value heads are replicated when there are more ranks than heads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from scute_compile.diagnostics import Code, Diagnostic, ScuteError
from scute_compile.ir.expressions import Ranges
from scute_compile.ir.linear import Cut, Linear, Part, Split, TermCut

MOST_RANKS = 64
"""The largest degree of tensor parallelism that a message suggests."""

LISTED = 8
"""The number of degrees that a message lists."""


def cut(linear: Linear, tp: int) -> Cut:
    """Return what each of `tp` ranks holds of a layer.

    Raises:
        ScuteError: with the layer's `obstacle`, when it can't be cut over `tp` ranks.
    """
    if (found := obstacle(linear, tp)) is not None:
        raise ScuteError([found])
    inputs = (_whole(linear.in_features),) * tp
    outputs = (_whole(linear.out_features),) * tp
    if tp > 1 and linear.split is Split.COLUMN:
        outputs = tuple(_held(linear.parts, rank, tp) for rank in range(tp))
    elif tp > 1 and linear.split is Split.ROW:
        inputs = tuple(_held(linear.parts, rank, tp) for rank in range(tp))
    return Cut(inputs=inputs, outputs=outputs)


def cut_term(linear: Linear, rank: int, tp: int) -> TermCut:
    """Return what each of `tp` ranks holds of a fully sharded term of `rank` (arXiv:2311.03285 section 6).

    On column layers the term's rank is divided; on row layers the outputs are. A replicated layer's terms are not
    divided.
    """
    if tp > 1 and linear.split is Split.COLUMN:
        return TermCut(rows=shares(rank, tp))
    if tp > 1 and linear.split is Split.ROW:
        return TermCut(columns=shares(linear.out_features, tp))
    return TermCut()


def shares(size: int, tp: int) -> Ranges:
    """Divide `size` entries into `tp` intervals, in order; the first `size % tp` intervals are longer by one.

    >>> shares(5, 2), shares(2, 3)
    (((0, 3), (3, 5)), ((0, 1), (1, 2), (2, 2)))
    """
    each, more = divmod(size, tp)
    edges = [rank * each + min(rank, more) for rank in range(tp + 1)]
    return tuple(pairwise(edges))


def obstacle(linear: Linear, tp: int) -> Diagnostic | None:
    """Return the reason why a layer can't be cut over `tp` ranks (SC501, SC503), or None when it can."""
    if tp == 1 or linear.split is Split.REPLICATED:
        return None
    if linear.split is Split.UNKNOWN:
        return Diagnostic(
            code=Code.SC503,
            where=linear.name,
            found=f"tp {tp}, and no rule for how ranks divide this layer",
            expected="a tensor-parallel plan taken from transformers, or a row of the table of architectures",
        )
    part = next((part for part in linear.parts if not _divides(part, tp)), None)
    if part is None:
        return None
    units = _units(part)
    counted = f"{units} heads" if part.unit > 1 else f"{units} entries"
    multiples = f", or tp a multiple of {units}" if part.replicable else ""
    return Diagnostic(
        code=Code.SC501,
        where=linear.name,
        found=f"{counted}, tp {tp} ({_described(linear, part)})",
        expected=f"a tp that divides {units}{multiples}",
        next=advice([linear]),
    )


def advice(linears: Iterable[Linear]) -> str:
    """Return the suggestion of degrees to compile for, the smallest few when there are many."""
    degrees = possible_degrees(linears)
    few = degrees[:LISTED]
    more = f" (or more, up to {degrees[-1]})" if len(degrees) > LISTED else ""
    return f"compile with --tp {_listed(few)}{more}"


def possible_degrees(linears: Iterable[Linear]) -> tuple[int, ...]:
    """Return the degrees of tensor parallelism, up to `MOST_RANKS`, over which all the layers can be cut."""
    shapes = {(linear.split, linear.parts) for linear in linears}
    return tuple(
        tp for tp in range(1, MOST_RANKS + 1) if tp == 1 or all(_allows(split, parts, tp) for split, parts in shapes)
    )


def _allows(split: Split, parts: Sequence[Part], tp: int) -> bool:
    if split in {Split.UNKNOWN, Split.REPLICATED}:
        return split is Split.REPLICATED
    return all(_divides(part, tp) for part in parts)


def _units(part: Part) -> int:
    return part.size // part.unit


def _divides(part: Part, tp: int) -> bool:
    units = _units(part)
    return units % tp == 0 or (part.replicable and tp % units == 0)


def _held(parts: Sequence[Part], rank: int, tp: int) -> Ranges:
    """Return the entries of one rank: its share of every part, in the order of the parts."""
    held: list[tuple[int, int]] = []
    offset = 0
    for part in parts:
        units = _units(part)
        # With more ranks than units, tp / units neighbouring ranks hold the same unit.
        first, count = (rank * (units // tp), units // tp) if units % tp == 0 else (rank * units // tp, 1)
        start, stop = offset + first * part.unit, offset + (first + count) * part.unit
        if held and held[-1][1] == start:
            held[-1] = (held[-1][0], stop)
        else:
            held.append((start, stop))
        offset += part.size
    return tuple(held)


def _whole(size: int) -> Ranges:
    return ((0, size),)


def _described(linear: Linear, part: Part) -> str:
    axis = "outputs" if linear.split is Split.COLUMN else "inputs"
    heads = f", {part.unit} a head" if part.unit > 1 else ""
    return f"part {part.name}: {part.size} {axis}{heads}"


def _listed(degrees: Sequence[int]) -> str:
    """Join numbers with commas and `or`.

    >>> _listed((1, 2, 4))
    '1, 2 or 4'
    """
    *front, last = (str(degree) for degree in degrees)
    return f"{', '.join(front)} or {last}" if front else last
