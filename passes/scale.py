"""The scale pass: plans how the base's weights are read for DoRA's column norms, and checks that they can be read.

The tile order is the same for every tensor-parallel degree: stored rows of each weight, from the first to the last.
Rows are outputs (or, for a Conv1D, inputs whose squares are summed), so no rank's cut enters the sums; `s` is computed
whole and sliced afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from scute_compile.diagnostics import Code
from scute_compile.ir.dtypes import FORMATS
from scute_compile.ir.expressions import ColumnNorm, Expression, Ref, Source
from scute_compile.ir.program import Action, Note, Owner, Program, Site, Stage
from scute_compile.passes.context import Context

TILE_VALUES = 1 << 19
"""Weights per tile: 2 MiB in float32, which stay in a core's cache between the product and the sum.

All norms of a 1B model (benchmarks/compile_dora.py, two cores, the best of 7) take 1.48 s at 2^16, 0.90 s at 2^17,
0.79 s at 2^18, 0.94 s at 2^19, 0.90 s at 2^20 and 0.89 s at 2^21. On a busy machine the medians fall until 2^20, since
threads take turns in Python between tiles.
"""


def scale(program: Program, context: Context) -> Program:
    """Give every column norm its tiles, with a note for each. No weights are read.

    Records SC403 when values need base tensors and the base is only a configuration, and SC404 when they need tensors
    that are stored in a quantized form.
    """
    _check_base_tensors(program, context)
    sites = tuple(site.rewritten(_planned) if column_norms([site]) else site for site in program.sites)
    notes = tuple(_note(site, norm) for site in sites for norm in column_norms([site]))
    return replace(program, sites=sites, notes=program.notes + notes, stage=Stage.SCALED)


def plan_norm(norm: ColumnNorm) -> ColumnNorm:
    """Return the norm with the number of rows per tile that its weight's shape gives."""
    return replace(norm, tile_rows=max(1, TILE_VALUES // norm.weight.shape[1]))


def column_norms(sites: Iterable[Site]) -> tuple[ColumnNorm, ...]:
    """Return the distinct norms that the sites need, in order of appearance."""
    values = (node for site in sites for value in site.expressions() for node in value.walk())
    return tuple(dict.fromkeys(node for node in values if isinstance(node, ColumnNorm)))


def _planned(value: Expression) -> Expression:
    return plan_norm(value) if isinstance(value, ColumnNorm) else value


def _note(site: Site, norm: ColumnNorm) -> Note:
    tiles, (rows, row_width) = len(list(norm.tiles())), norm.weight.shape
    return Note(
        site=site.name,
        slot="s",
        action=Action.PLANNED,
        rule="s = m / colnorm(W + c A B)",
        neighbours=(("W", Owner.BASE),),
        why=f"streamed in {tiles} {'tile' if tiles == 1 else 'tiles'} of {min(norm.tile_rows, rows)} x {row_width} "
        "weights",
    )


def _check_base_tensors(program: Program, context: Context) -> None:
    needed: dict[Ref, str] = {
        ref: site.name
        for site in program.sites
        for value in site.expressions()
        for ref in value.references(Source.BASE)
    }
    if needed and not context.weights:
        ref, site = next(iter(needed.items()))
        context.findings.error(
            Code.SC403,
            where=site,
            found=f"{len(needed)} base tensors are needed, such as `{ref.key}`; the base folder holds only a "
            "config.json",
            expected="the base's weights (DoRA's norms) or biases",
        )
    coded = {ref: site for ref, site in needed.items() if ref.dtype not in FORMATS}
    if coded:
        ref, site = next(iter(coded.items()))
        context.findings.error(
            Code.SC404,
            where=site,
            found=f"{len(coded)} base tensors that are needed, such as `{ref.key}` in {ref.dtype}",
            expected="weights in float32, bfloat16 or float16",
        )
