"""The invariants of a program at each stage: one small function per invariant, checked after every pass.

A violation is a fault of a pass, never of the user's input, so it raises an `AssertionError` that names the invariant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from scute_compile.ir.expressions import ColumnNorm, Ref, Source, width
from scute_compile.ir.program import Owner, Program, RotationKind, Site, Stage, Term

ORDER = tuple(Stage)


def nothing_is_parsed_yet(site: Site) -> Iterator[str]:
    """Before parsing, there are no sites."""
    yield f"{site.linear.name} before parsing"


def terms_fit_their_site(site: Site) -> Iterator[str]:
    """Ranks agree inside a term; A has the site's inputs, B its outputs, d the rank, e the outputs."""
    inputs, outputs = site.linear.in_features, site.linear.out_features
    for term in site.terms:
        if term.a.rank != term.b.rank:
            yield f"A has rank {term.a.rank}, B has rank {term.b.rank}"
        wanted = (
            (term.a.value, (term.rank, inputs)),
            (term.b.value, (term.rank, outputs)),
            (term.d, (term.rank,)),
            (term.e, (outputs,)),
        )
        # a size of 0 is unknown: the adapter is planned without its base
        known = ((value, shape) for value, shape in wanted if value is not None and 0 not in shape)
        yield from (f"{value} is not {shape}" for value, shape in known if value.shape != shape)


def slots_fit_their_site(site: Site) -> Iterator[str]:
    """The vectors s, beta and b have the site's outputs; R covers the inputs."""
    for value in (site.s, site.beta, site.b):
        if value is not None and site.linear.out_features and value.shape != (site.linear.out_features,):
            yield f"{value} is not ({site.linear.out_features},)"
    rotation = site.rotation if site.linear.in_features else None
    if (
        rotation is not None
        and rotation.kind is RotationKind.DIAGONAL
        and rotation.delta.shape != (site.linear.in_features,)
    ):
        yield f"R is {rotation.delta.shape}"
    if rotation is not None and rotation.kind is RotationKind.BLOCKS:
        blocks = rotation.delta.shape[0]
        if site.linear.in_features % rotation.block or blocks not in (1, site.linear.in_features // rotation.block):
            yield f"{blocks} blocks of {rotation.block} on {site.linear.in_features} inputs"


def shared_factors_are_windows(site: Site) -> Iterator[str]:
    """A shared factor names the whole matrix that it is a window of; an owned factor does not."""
    for term in site.terms:
        for factor in (term.a, term.b):
            if (factor.owner is Owner.SHARED) is not (factor.shared is not None):
                yield f"factor owned by {factor.owner} with shared = {factor.shared}"


def bias_is_in_normal_form(site: Site) -> Iterator[str]:
    """Before folding, the compiled shift b doesn't exist."""
    if site.b is not None:
        yield "b before folding"


def bias_is_compiled(site: Site) -> Iterator[str]:
    """After folding, only the compiled shift b exists."""
    if site.beta is not None:
        yield "beta after folding"


def slots_beside_owned_factors_are_merged(site: Site) -> Iterator[str]:
    """After folding, c is 1, d exists only between factors that are not owned, and e only after a B that is not."""
    for term in site.terms:
        yield from _unmerged(term)


def _unmerged(term: Term) -> Iterator[str]:
    owned = {factor.owner for factor in (term.a, term.b)}
    if term.c != 1.0:
        yield f"c = {term.c}"
    if term.d is not None and Owner.ADAPTER in owned:
        yield "d beside an owned factor"
    if term.e is not None and term.b.owner is Owner.ADAPTER:
        yield "e beside an owned B"


def site_is_not_empty(site: Site) -> Iterator[str]:
    """After folding, every site has at least one slot."""
    if site.empty:
        yield "no slots"


def every_norm_has_its_tiles(site: Site) -> Iterator[str]:
    """After scaling, every column norm has its reading plan."""
    for value in site.expressions():
        norms = (node for node in value.walk() if isinstance(node, ColumnNorm))
        yield from (f"no tiles for {norm.weight.key}" for norm in norms if norm.tile_rows < 1)


def every_rank_has_a_cut(site: Site) -> Iterator[str]:
    """After sharding, each rank holds a non-empty range of both axes inside the layer."""
    if site.cut is None:
        yield "no cut"
        return
    for ranges, size in ((site.cut.inputs, site.linear.in_features), (site.cut.outputs, site.linear.out_features)):
        if any(width(held) == 0 or max(stop for _, stop in held) > size for held in ranges):
            yield f"ranges {ranges} of {size}"


def every_term_has_a_cut_or_none_has(site: Site) -> Iterator[str]:
    """After sharding, all terms of a site are divided among all ranks in addition to the site's cut, or none is."""
    if site.cut is None or not site.cut.terms:
        return
    if len(site.cut.terms) != len(site.terms):
        yield f"{len(site.cut.terms)} cuts for {len(site.terms)} terms"
        return
    for term, held in zip(site.terms, site.cut.terms, strict=True):
        for intervals, size in ((held.rows, term.rank), (held.columns, site.linear.out_features)):
            if intervals is None:
                continue
            edges = [0, *(stop for _, stop in intervals)]
            starts = [start for start, _ in intervals]
            if starts != edges[:-1] or edges != sorted(edges) or edges[-1] != size:
                yield f"intervals {intervals} of {size}"


def every_live_slot_has_a_route(site: Site) -> Iterator[str]:
    """After routing, s, b, R and each d and e have a route."""
    live = [slot for slot, value in (("R", site.rotation), ("s", site.s), ("b", site.b)) if value is not None]
    routed = {choice.slot.split(".")[0] for choice in site.routes}
    live += [slot for term in site.terms for slot in ("d", "e") if getattr(term, slot) is not None]
    yield from (f"no route for {slot}" for slot in live if slot not in routed)


def base_is_referenced_by_bias_or_norm(site: Site) -> Iterator[str]:
    """Values depend on base tensors of their site's layer only."""
    of_layer = {site.linear.weight.key} | ({site.linear.bias.key} if site.linear.bias else set())
    for value in (site.s, site.b, site.beta):
        refs: Iterator[Ref] = value.references(Source.BASE) if value is not None else iter(())
        yield from (f"{ref.key} is not of this layer" for ref in refs if ref.key not in of_layer)


Invariant = Callable[[Site], Iterator[str]]

SPEC: tuple[tuple[Stage, Stage, Invariant], ...] = (
    (Stage.OPENED, Stage.OPENED, nothing_is_parsed_yet),
    (Stage.PARSED, Stage.ROUTED, terms_fit_their_site),
    (Stage.PARSED, Stage.ROUTED, slots_fit_their_site),
    (Stage.PARSED, Stage.ROUTED, shared_factors_are_windows),
    (Stage.PARSED, Stage.ROUTED, base_is_referenced_by_bias_or_norm),
    (Stage.PARSED, Stage.PLACED, bias_is_in_normal_form),
    (Stage.FOLDED, Stage.ROUTED, bias_is_compiled),
    (Stage.FOLDED, Stage.ROUTED, slots_beside_owned_factors_are_merged),
    (Stage.FOLDED, Stage.ROUTED, site_is_not_empty),
    (Stage.SCALED, Stage.ROUTED, every_norm_has_its_tiles),
    (Stage.SHARDED, Stage.ROUTED, every_rank_has_a_cut),
    (Stage.SHARDED, Stage.ROUTED, every_term_has_a_cut_or_none_has),
    (Stage.ROUTED, Stage.ROUTED, every_live_slot_has_a_route),
)
"""(first stage, last stage, invariant)."""


def verify(program: Program) -> Program:
    """Return the program if it keeps every invariant of its stage.

    Raises:
        AssertionError: naming the pass's stage, the site and each broken invariant.
    """
    at = ORDER.index(program.stage)
    broken = [
        f"{site.name}: {invariant.__name__}: {fault}"
        for first, last, invariant in SPEC
        if ORDER.index(first) <= at <= ORDER.index(last)
        for site in program.sites
        for fault in invariant(site)
    ]
    if broken:
        raise AssertionError(f"after {program.stage}: " + "; ".join(broken[:5]))
    return program
