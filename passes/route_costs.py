"""The cost of each way to compute a live slot at one site, for one workload.

Bytes counted per tenant: the slot's values. Counted once: a shared pair. Counted per token: the activations that are
read and written in addition to what the pipeline moves anyway (the output tile that an expand holds costs nothing, a
second pass over it does). Launches are those in addition to the one shrink and one expand that every fused site of a
mixed pool has; each is charged as the bytes that memory moves in its time.

Every tenant of the workload is assumed to have an adapter like this one. Sizes are those of one rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scute_compile.ir.dtypes import DType
from scute_compile.ir.program import Alternative, Rotation, Route
from scute_compile.ir.target import Workload

_FLOAT32 = DType.FLOAT32.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The cost of a live slot's route, or of an alternative to it."""

    way: Route | Alternative
    moved: int
    """Bytes per step."""
    launches: int = 0
    """Kernels in addition to the fused site's shrink and expand."""

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
    """What one rank holds of a low-rank term."""

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
class GemmMember:
    """A site of a fused GEMM, rotated or not."""

    shape: SiteShape
    rotation: Rotation | None

    @property
    def values(self) -> int:
        """Numbers of one tenant's `R - I` on this rank."""
        if self.rotation is None:
            return 0
        whole, size = self.rotation.delta.shape[0], self.rotation.block
        blocks = -(-self.shape.inputs // size)
        return (1 if whole == 1 else blocks) * size * size


def ranked(costs: Iterable[Cost], workload: Workload) -> tuple[Cost, ...]:
    """Return costs in ascending order; of equal costs, the route's first."""
    return tuple(sorted(costs, key=lambda cost: (cost.charge(workload), isinstance(cost.way, Alternative))))


def scale_costs(site: SiteShape, workload: Workload) -> list[Cost]:
    """Return the costs of `s`."""
    vectors = workload.tenants * site.outputs * site.width
    return [
        Cost(way=Route.EXPAND, moved=vectors),
        Cost(way=Alternative.SEPARATE_PASS, moved=vectors + _over(site.outputs, workload), launches=1),
        _merged_copy(site, workload),
        _as_lora(site, workload, site.outputs),
    ]


def shift_costs(site: SiteShape, workload: Workload) -> list[Cost]:
    """Return the costs of `b`, which is float32 in artifacts of every dtype."""
    vectors = workload.tenants * site.outputs * _FLOAT32
    return [
        Cost(way=Route.EXPAND, moved=vectors),
        Cost(way=Alternative.SEPARATE_PASS, moved=vectors + _over(site.outputs, workload), launches=1),
    ]


def inner_costs(term: TermShape, workload: Workload) -> list[Cost]:
    """Return the costs of `d` between shared factors."""
    return _beside_pair(term, workload, length=term.rows, route=Route.SHRINK)


def outer_costs(term: TermShape, workload: Workload) -> list[Cost]:
    """Return the costs of `e` after a shared B."""
    return _beside_pair(term, workload, length=term.columns, route=Route.EXPAND)


def _beside_pair(term: TermShape, workload: Workload, *, length: int, route: Route) -> list[Cost]:
    live = term.pair + workload.tenants * length * term.width
    return [
        Cost(way=route, moved=live),
        Cost(way=Alternative.SEPARATE_PASS, moved=live + _over(length, workload), launches=1),
        # Each tenant then has a private pair, as a plain LoRA does: the same two launches serve it.
        Cost(way=Alternative.MERGED_COPY, moved=workload.tenants * term.pair),
    ]


def rotation_costs(gemm: Sequence[GemmMember], workload: Workload) -> list[Cost]:
    """Return the costs of R for a whole fused GEMM, which is split, or extended by rows, as a whole.

    Args:
        gemm: All sites of the fused GEMM. Sites with equal rotations share one rotated input.
        workload: The decode step.
    """
    rotated = [site for site in gemm if site.rotation is not None]
    first = {site.rotation: site for site in reversed(rotated)}  # one site for each distinct rotation
    values = sum(workload.tenants * site.values * site.shape.width for site in first.values())
    rows = workload.tokens * sum(site.shape.inputs for site in first.values()) * workload.activation_bytes
    # The GEMM multiplies an appended row by all columns; the expand reads back only those of the row's sites.
    columns = sum(site.shape.outputs for site in gemm)
    written = workload.tokens * len(first) * columns * _FLOAT32
    added = workload.tokens * sum(site.shape.outputs for site in rotated) * _FLOAT32
    pieces = len({site.rotation for site in gemm})
    copies = [_merged_copy(site.shape, workload) for site in rotated]
    loras = [_as_lora(site.shape, workload, site.shape.inputs) for site in rotated]
    return [
        # x read, delta rows written by the rotation and read by the GEMM
        Cost(way=Route.DELTA_ROWS, moved=values + 3 * rows + written + added, launches=1),
        # x read, x' written; the GEMM reads x' where it read x
        Cost(way=Alternative.BEFORE_GEMM, moved=values + 2 * rows, launches=pieces),
        Cost(way=Alternative.MERGED_COPY, moved=sum(cost.moved for cost in copies), launches=len(copies)),
        Cost(way=Alternative.AS_LORA, moved=sum(cost.moved for cost in loras)),
    ]


def _over(length: int, workload: Workload) -> int:
    return 2 * workload.tokens * length * workload.activation_bytes  # one read and one write


def _merged_copy(site: SiteShape, workload: Workload) -> Cost:
    moved = workload.tenants * site.inputs * site.outputs * site.width
    return Cost(way=Alternative.MERGED_COPY, moved=moved, launches=1)


def _as_lora(site: SiteShape, workload: Workload, rank: int) -> Cost:
    moved = workload.tenants * rank * (site.inputs + site.outputs) * site.width
    return Cost(way=Alternative.AS_LORA, moved=moved)
