"""What each possible route of a live slot would cost at one site for one workload: what the route pass compares.

Counted for every tenant: the slot's own values, once. Counted once: a shared pair. Counted for every token: the
activations that this route reads and writes *beyond* what the pipeline moves anyway (the output tile that an expand
holds is free, a second pass over it is not). Launches are those beyond the one shrink and one expand that a fused site
has in any mixed pool; the comparison charges each as the bytes that memory would move in that time.

Every tenant of the workload is taken to have an adapter like this one. A rank's own widths count, not the layer's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scute_compile.ir.program import Rotation, Route
from scute_compile.ir.target import Workload

_FLOAT32 = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One possible route of a live slot."""

    route: Route
    moved: int
    """Bytes per step."""
    launches: int = 0
    """Kernels beyond the fused site's shrink and expand."""
    exact: bool = True
    """Whether the slot's effect is computed without one more rounding to the activations' or the weights' dtype."""

    def charge(self, workload: Workload) -> int:
        """Return the bytes per step, with each launch as the bytes that memory moves in its time."""
        return self.moved + round(self.launches * workload.launch * workload.bandwidth)


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteShape:
    """What one rank holds of a site."""

    inputs: int
    outputs: int
    width: int
    """Bytes per stored value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TermShape:
    """What one rank holds of a low-rank term; of a fully sharded one it holds less than the site's own cut says."""

    rows: int
    """Of A, and entries of d."""
    inputs: int
    rank: int
    """Rows of B."""
    columns: int
    """Of B, and entries of e."""
    width: int
    """Bytes per stored value."""

    @property
    def pair(self) -> int:
        """Bytes of A and B."""
        return (self.rows * self.inputs + self.rank * self.columns) * self.width


@dataclass(frozen=True, slots=True, kw_only=True)
class Turned:
    """A site of a fused GEMM as the choice for its rotations sees it."""

    shape: SiteShape
    rotation: Rotation | None
    """None: the site's input is not turned."""
    changed_rows: int | None = None
    """Rows of R that differ from the identity; None: all of them."""

    @property
    def values(self) -> int:
        """Numbers that one tenant's `R - I` holds on this rank."""
        if self.rotation is None:
            return 0
        whole, size = self.rotation.delta.shape[0], self.rotation.block
        blocks = -(-self.shape.inputs // size)
        return (1 if whole == 1 else blocks) * size * size


def ranked(candidates: Sequence[Candidate], workload: Workload) -> tuple[Candidate, ...]:
    """Return the candidates cheapest first; of equals, the exact one first."""
    return tuple(sorted(candidates, key=lambda c: (c.charge(workload), not c.exact)))


def scale_candidates(site: SiteShape, workload: Workload, *, changed_columns: int | None = None) -> list[Candidate]:
    """Return the routes of `s`; `changed_columns` is how many of its entries differ from 1 (None: all)."""
    vectors = workload.tenants * site.outputs * site.width
    rank = site.outputs if changed_columns is None else min(max(changed_columns, 1), site.outputs)
    return [
        Candidate(route=Route.EXPAND, moved=vectors),
        Candidate(route=Route.SEPARATE_PASS, moved=vectors + _over(site.outputs, workload), launches=1, exact=False),
        _merged_copy(site, workload),
        _as_lora(site, workload, rank),
    ]


def shift_candidates(site: SiteShape, workload: Workload) -> list[Candidate]:
    """Return the routes of `b`, which is float32 wherever it is stored."""
    vectors = workload.tenants * site.outputs * _FLOAT32
    separate = vectors + _over(site.outputs, workload)
    return [
        Candidate(route=Route.EXPAND, moved=vectors),
        Candidate(route=Route.SEPARATE_PASS, moved=separate, launches=1, exact=False),
    ]


def inner_candidates(term: TermShape, workload: Workload) -> list[Candidate]:
    """Return the routes of `d` between shared factors."""
    return _beside_pair(term, workload, length=term.rows, route=Route.SHRINK)


def outer_candidates(term: TermShape, workload: Workload) -> list[Candidate]:
    """Return the routes of `e` after a shared B."""
    return _beside_pair(term, workload, length=term.columns, route=Route.EXPAND)


def _beside_pair(term: TermShape, workload: Workload, *, length: int, route: Route) -> list[Candidate]:
    live = term.pair + workload.tenants * length * term.width
    return [
        Candidate(route=route, moved=live),
        Candidate(route=Route.SEPARATE_PASS, moved=live + _over(length, workload), launches=1, exact=False),
        # Each tenant then owns a pair of its own, as a plain LoRA does: the same two launches serve it.
        Candidate(route=Route.MERGED_COPY, moved=workload.tenants * term.pair, exact=False),
    ]


def rotation_candidates(gemm: Sequence[Turned], workload: Workload) -> list[Candidate]:
    """Return the routes of R for a whole fused GEMM: splitting it, or appending rows to it, is one decision.

    `gemm` lists all sites of the fused GEMM, turned or not. Sites with equal rotations share one turned input.
    """
    turned = [site for site in gemm if site.rotation is not None]
    first = {site.rotation: site for site in reversed(turned)}  # one site for each distinct rotation
    values = sum(workload.tenants * site.values * site.shape.width for site in first.values())
    rows = workload.tokens * sum(site.shape.inputs for site in first.values()) * workload.activation_bytes
    # The GEMM multiplies an appended row by all columns; the expand reads back only those of the row's own sites.
    columns = sum(site.shape.outputs for site in gemm)
    written = workload.tokens * len(first) * columns * _FLOAT32
    added = workload.tokens * sum(site.shape.outputs for site in turned) * _FLOAT32
    pieces = len({site.rotation for site in gemm})
    copies = [_merged_copy(site.shape, workload) for site in turned]
    ranks = [s.shape.inputs if s.changed_rows is None else min(max(s.changed_rows, 1), s.shape.inputs) for s in turned]
    loras = [_as_lora(site.shape, workload, rank) for site, rank in zip(turned, ranks, strict=True)]
    return [
        # x read, delta rows written by the rotation and read by the GEMM
        Candidate(route=Route.DELTA_ROWS, moved=values + 3 * rows + written + added, launches=1),
        # x read, x' written; the GEMM reads x' where it read x
        Candidate(route=Route.BEFORE_GEMM, moved=values + 2 * rows, launches=pieces, exact=False),
        Candidate(route=Route.MERGED_COPY, moved=sum(c.moved for c in copies), launches=len(copies), exact=False),
        Candidate(route=Route.AS_LORA, moved=sum(c.moved for c in loras), exact=False),
    ]


def _over(length: int, workload: Workload) -> int:
    return 2 * workload.tokens * length * workload.activation_bytes  # one read and one write


def _merged_copy(site: SiteShape, workload: Workload) -> Candidate:
    moved = workload.tenants * site.inputs * site.outputs * site.width
    return Candidate(route=Route.MERGED_COPY, moved=moved, launches=1, exact=False)


def _as_lora(site: SiteShape, workload: Workload, rank: int) -> Candidate:
    moved = workload.tenants * rank * (site.inputs + site.outputs) * site.width
    return Candidate(route=Route.AS_LORA, moved=moved, exact=False)
