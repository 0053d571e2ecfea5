"""Finds what tensor-parallel ranks can't cut: layers that don't divide, and rotation blocks across a cut."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from scute_compile.base.cuts import advice, cut, obstacle
from scute_compile.diagnostics import Code, Findings
from scute_compile.ir.linear import Cut, Split
from scute_compile.ir.program import RotationKind, Site


def find_obstacles(sites: Iterable[Site], tp: int, findings: Findings) -> None:
    """Record every site that doesn't divide over `tp` ranks (SC501, SC502, SC503), one finding per kind of layer.

    The degrees that a finding suggests work for all sites, not only for the layer that it names.
    """
    seen = set()
    sites = tuple(sites)
    for site in sites:
        found = obstacle(site.linear, tp)
        if found is None:
            _check_rotation(site, cut(site.linear, tp), findings)
            continue
        kind = (found.code, found.found, found.expected)
        if kind not in seen:
            seen.add(kind)
            findings.add(replace(found, next=advice([other.linear for other in sites])))


def _check_rotation(site: Site, ranks: Cut, findings: Findings) -> None:
    rotation = site.rotation
    if rotation is None or rotation.kind is not RotationKind.BLOCKS or site.linear.split is not Split.ROW:
        return
    across = [edge for edge in _edges(ranks) if edge % rotation.block]
    if across:
        tp, width = len(ranks.inputs), site.linear.in_features
        works = [n for n in range(1, tp) if obstacle(site.linear, n) is None and _fits(site, n, rotation.block)]
        findings.error(
            Code.SC502,
            where=site.name,
            found=f"blocks of {rotation.block} inputs; tp = {tp} cuts the {width} inputs at {across[0]}",
            expected=f"every cut at a multiple of {rotation.block}",
            next=f"compile with --tp {' or '.join(map(str, works))}, or train with a block size that divides "
            f"{width // tp}",
        )


def _fits(site: Site, tp: int, block: int) -> bool:
    return all(edge % block == 0 for edge in _edges(cut(site.linear, tp)))


def _edges(ranks: Cut) -> list[int]:
    """Return the edges of the ranks' input ranges, ascending."""
    return sorted({edge for ranges in ranks.inputs for interval in ranges for edge in interval})
