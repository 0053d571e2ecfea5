"""The scale pass: plans how DoRA's column norms are streamed from the base's files.

One tile order for every tp: the stored rows of each weight, top to bottom. Rows are outputs (or, for a Conv1D, inputs
whose squares are summed), so no rank's cut enters, and `s` is sliced afterwards with equal bits for every tp.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from scute_compile.ir.expressions import ColumnNorm, Expression
from scute_compile.ir.program import Action, Note, Owner, Program, Site, Stage

TILE_VALUES = 1 << 19
"""Weights per tile: 2 MiB in float32, which stays in a core's cache between the product and the sum.

All norms of a 1B model (benchmarks/compile_dora.py, two cores, the best of 7) take 1.48 s at 2^16, 0.90 s at 2^17,
0.79 s at 2^18, 0.94 s at 2^19, 0.90 s at 2^20 and 0.89 s at 2^21; the medians on a busy machine fall until 2^20, since
threads take turns in Python between tiles.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class NormPlan:
    """How one weight is read for all norms over it."""

    key: str
    rows: int
    row_width: int
    rows_per_tile: int

    def tiles(self) -> Iterator[tuple[int, int]]:
        """Yield half-open row ranges in reading order."""
        for start in range(0, self.rows, self.rows_per_tile):
            yield start, min(start + self.rows_per_tile, self.rows)


def plan_norm(norm: ColumnNorm) -> NormPlan:
    """Return the reading plan of a norm's weight."""
    rows, row_width = norm.weight.shape
    per_tile = max(1, TILE_VALUES // row_width)
    return NormPlan(key=norm.weight.key, rows=rows, row_width=row_width, rows_per_tile=per_tile)


def site_expressions(site: Site) -> Iterator[Expression]:
    """Yield every value that the site's slots hold."""
    rotation = site.rotation.delta if site.rotation else None
    for value in (rotation, site.s, site.beta, site.b):
        if value is not None:
            yield value
    for term in site.terms:
        yield from (value for value in (term.a.value, term.b.value, term.d, term.e) if value is not None)


def column_norms(sites: Iterable[Site]) -> tuple[ColumnNorm, ...]:
    """Return the distinct norms that the sites need, in order of appearance."""
    found: dict[ColumnNorm, None] = {}
    for site in sites:
        for value in site_expressions(site):
            found.update((node, None) for node in value.walk() if isinstance(node, ColumnNorm))
    return tuple(found)


def scale(program: Program) -> Program:
    """Record how each norm will be read; nothing is read here."""
    notes = []
    for site in program.sites:
        for norm in column_norms([site]):
            plan = plan_norm(norm)
            tiles = len(list(plan.tiles()))
            height = min(plan.rows_per_tile, plan.rows)
            notes.append(
                Note(
                    site=site.name,
                    slot="s",
                    action=Action.PLANNED,
                    rule="s = m / colnorm(W + c A B)",
                    neighbours=(("W", Owner.BASE),),
                    why=f"streamed in {tiles} {'tile' if tiles == 1 else 'tiles'} of {height} x {plan.row_width} "
                    "weights",
                )
            )
    return replace(program, notes=program.notes + tuple(notes), stage=Stage.SCALED)
