"""The shard pass: which rows and columns of a site each rank holds, and what can't be cut."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from scute_compile.base.cuts import advice, cut, cut_term, obstacle
from scute_compile.diagnostics import Code, Findings
from scute_compile.ir.linear import Cut, Split
from scute_compile.ir.program import Program, RotationKind, Site, Stage
from scute_compile.ir.target import LoraSharding, Target


def shard(program: Program) -> Program:
    """Give every site its cut. Obstacles must have been looked for first."""
    sites = tuple(replace(site, cut=_cut(site, program.target)) for site in program.sites)
    return replace(program, sites=sites, stage=Stage.SHARDED)


def _cut(site: Site, target: Target) -> Cut:
    own = cut(site.linear, target.tp)
    if target.tp == 1 or target.lora_sharding is LoraSharding.DEFAULT:
        return own
    return replace(own, terms=tuple(cut_term(site.linear, term.rank, target.tp) for term in site.terms))


def find_obstacles(sites: Iterable[Site], tp: int, findings: Findings) -> None:
    """Record every site that doesn't divide over `tp` ranks, one finding per kind of layer.

    The way out that each names holds for all sites, not for its own layer alone.
    """
    seen = set()
    sites = tuple(sites)
    for site in sites:
        found = obstacle(site.linear, tp)
        if found is not None:
            found = replace(found, next=advice([other.linear for other in sites]))
            kind = (found.code, found.found, found.expected)
            if kind not in seen:
                seen.add(kind)
                findings.diagnostics.append(found)
            continue
        _check_rotation(site, cut(site.linear, tp), findings)


def _check_rotation(site: Site, ranks: Cut, findings: Findings) -> None:
    rotation = site.rotation
    if rotation is None or rotation.kind is not RotationKind.BLOCKS or site.linear.split is not Split.ROW:
        return
    edges = {edge for ranges in ranks.inputs for piece in ranges for edge in piece}
    across = sorted(edge for edge in edges if edge % rotation.block)
    if across:
        tp, width = len(ranks.inputs), site.linear.in_features
        works = [n for n in range(1, tp) if obstacle(site.linear, n) is None and _fits(site, n)]
        findings.error(
            Code.SC502,
            where=site.name,
            found=f"blocks of {rotation.block} inputs; tp = {tp} cuts the {width} inputs at {across[0]}",
            expected=f"every cut at a multiple of {rotation.block}",
            next=f"compile with --tp {' or '.join(map(str, works))}, or train with a block size that divides "
            f"{width // tp}",
        )


def _fits(site: Site, tp: int) -> bool:
    if site.rotation is None:
        return True
    ranks = cut(site.linear, tp)
    return all(edge % site.rotation.block == 0 for ranges in ranks.inputs for piece in ranges for edge in piece)
