"""The shard pass: gives every site the rows and columns that each rank holds."""

from __future__ import annotations

from dataclasses import replace

from scute_compile.base.cuts import cut, cut_term
from scute_compile.ir.linear import Cut
from scute_compile.ir.program import Program, Site, Stage
from scute_compile.ir.target import LoraSharding, Target
from scute_compile.passes.context import Context


def shard(program: Program, context: Context) -> Program:
    """Give every site its cut. The parse and place passes have refused sites that can't be cut."""
    del context
    sites = tuple(replace(site, cut=_cut(site, program.target)) for site in program.sites)
    return replace(program, sites=sites, stage=Stage.SHARDED)


def _cut(site: Site, target: Target) -> Cut:
    of_site = cut(site.linear, target.tp)
    if target.tp == 1 or target.lora_sharding is LoraSharding.DEFAULT:
        return of_site
    return replace(of_site, terms=tuple(cut_term(site.linear, term.rank, target.tp) for term in site.terms))
