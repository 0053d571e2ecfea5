"""Sites and factors as `scute inspect` describes them, from a plan or from a manifest."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from scute_compile.formats.layout import SHIFT_DTYPE, rank_layout
from scute_compile.formats.manifest import Manifest, SiteRecord
from scute_compile.ir.dtypes import DType
from scute_compile.ir.expressions import Expression, Ref, VeraProjection
from scute_compile.ir.linear import Split
from scute_compile.ir.program import Owner, Program, Rotation, RotationKind, Site
from scute_compile.pack.manifest_records import site_record

PLANNED_DTYPES = (DType.FLOAT32, DType.BFLOAT16)
"""The dtypes that an adapter's sizes are given in; float16 takes as many bytes as bfloat16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotView:
    """One slot or factor of a site."""

    slot: str
    """`R`, `s`, `b`, `A`, `B`, `d`, `e`, the last four with the term's number when there are several."""
    owner: Owner
    route: str | None = None
    """Where a live slot is computed; None for factors, and before routes are chosen."""
    shared: str | None = None
    """The name of the shared factor that it is a window of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteView:
    """One adapted layer. Sizes that are 0 are unknown."""

    name: str
    gemm: str
    """The fused site: equal for layers that an engine multiplies in one GEMM."""
    in_features: int
    out_features: int
    split: Split
    rotation: str | None
    """`diagonal`, or the number and width of the blocks; None without R."""
    ranks: tuple[int, ...]
    """Ranks of the low-rank terms."""
    slots: tuple[SlotView, ...]
    bytes: tuple[tuple[DType, tuple[int, ...]], ...]
    """Per dtype the tensor bytes on each tensor-parallel rank, without shared factors; empty when unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedView:
    """A factor that adapters share. A store holds it once."""

    name: str
    """The hash of its content; in a plan the key or the seed that it is made from."""
    rank: int
    features: int
    bytes: tuple[tuple[DType, int], ...]
    sites: int
    """The number of sites that use it."""


def recorded_site(record: SiteRecord, dtypes: Sequence[DType]) -> SiteView:
    """Describe a site by its manifest record; its bytes follow from the layout of the rank files."""
    routes = {live.slot: live.route for live in record.live}
    suffixes = _suffixes(len(record.terms))
    slots = [name for name, used in (("R", record.rotation), ("s", record.scale), ("b", record.shift)) if used]
    views = [SlotView(slot=name, owner=Owner.ADAPTER, route=routes.get(name)) for name in slots]
    for suffix, term in zip(suffixes, record.terms, strict=True):
        for name, window in (("A", term.a), ("B", term.b)):
            owner = Owner.SHARED if window else Owner.ADAPTER
            views.append(SlotView(slot=name + suffix, owner=owner, shared=window.factor if window else None))
        inner = [name + suffix for name, used in (("d", term.d), ("e", term.e)) if used]
        views += [SlotView(slot=name, owner=Owner.ADAPTER, route=routes.get(name)) for name in inner]
    rotation = record.rotation
    return SiteView(
        name=record.name,
        gemm=record.gemm,
        in_features=record.in_features,
        out_features=record.out_features,
        split=record.split,
        rotation=_blocks(rotation.kind, rotation.blocks, rotation.block) if rotation else None,
        ranks=tuple(term.rank for term in record.terms),
        slots=tuple(views),
        bytes=tuple((dtype, _rank_bytes(record, dtype)) for dtype in dtypes),
    )


def _rank_bytes(record: SiteRecord, dtype: DType) -> tuple[int, ...]:
    ranks = range(len(record.inputs))
    layouts = (rank_layout(record, rank, dtype).values() for rank in ranks)
    return tuple(sum(stored.itemsize * prod(shape) for stored, shape in layout) for layout in layouts)


def planned_site(site: Site) -> SiteView:
    """Describe a site of a plan: by its future manifest record, or without a cut by the shapes of its values."""
    if site.cut is not None:
        planned = recorded_site(site_record(site, _stand_in), PLANNED_DTYPES)
        names = {_stand_in(whole): _name(whole) for whole in _shared_factors(site)}
        slots = (replace(slot, shared=names[slot.shared]) if slot.shared else slot for slot in planned.slots)
        return replace(planned, slots=tuple(slots))
    linear = site.linear
    return SiteView(
        name=site.name,
        gemm=linear.fused_site,
        in_features=linear.in_features,
        out_features=linear.out_features,
        split=linear.split,
        rotation=_blocks_of(site.rotation) if site.rotation else None,
        ranks=tuple(term.rank for term in site.terms),
        slots=tuple(_folded_slots(site)),
        bytes=_whole_bytes(site),
    )


def _folded_slots(site: Site) -> Iterator[SlotView]:
    """Yield the slots of a site without a cut and routes."""
    for name, value in (("R", site.rotation), ("s", site.s), ("b", site.b)):
        if value is not None:
            yield SlotView(slot=name, owner=Owner.ADAPTER)
    for suffix, term in zip(_suffixes(len(site.terms)), site.terms, strict=True):
        for name, factor in (("A", term.a), ("B", term.b)):
            whole = factor.shared
            yield SlotView(slot=name + suffix, owner=factor.owner, shared=_name(whole) if whole else None)
        for name, vector in (("d", term.d), ("e", term.e)):
            if vector is not None:
                yield SlotView(slot=name + suffix, owner=Owner.ADAPTER)


def _whole_bytes(site: Site) -> tuple[tuple[DType, tuple[int, ...]], ...]:
    """Return the bytes of a single rank, from the shapes of the slots' values."""
    shared = [f.value for term in site.terms for f in (term.a, term.b) if f.owner is not Owner.ADAPTER]
    private = [value for value in site.expressions() if value not in shared]
    if any(prod(value.shape) == 0 for value in private):
        return ()
    shift = prod(site.b.shape) if site.b is not None else 0
    values = sum(prod(value.shape) for value in private) - shift
    return tuple((dtype, (values * dtype.itemsize + shift * SHIFT_DTYPE.itemsize,)) for dtype in PLANNED_DTYPES)


def recorded_factors(manifest: Manifest) -> Iterator[SharedView]:
    """Yield the shared factors that an artifact names."""
    uses = [
        {window.factor for term in site.terms for window in (term.a, term.b) if window is not None}
        for site in manifest.sites
    ]
    for factor in manifest.factors:
        yield SharedView(
            name=factor.hash,
            rank=factor.rank,
            features=factor.features,
            bytes=((factor.dtype, factor.rank * factor.features * factor.dtype.itemsize),),
            sites=sum(factor.hash in used for used in uses),
        )


def _shared_factors(site: Site) -> Iterator[Expression]:
    for term in site.terms:
        yield from (factor.shared for factor in (term.a, term.b) if factor.shared is not None)


def planned_factors(program: Program) -> Iterator[SharedView]:
    """Yield the shared factors that a program's sites are windows of."""
    users: dict[Expression, int] = {}
    for site in program.sites:
        for whole in dict.fromkeys(_shared_factors(site)):
            users[whole] = users.get(whole, 0) + 1
    for whole, sites in users.items():
        rank, features = whole.shape
        sizes = tuple((dtype, rank * features * dtype.itemsize) for dtype in PLANNED_DTYPES) if features else ()
        yield SharedView(name=_name(whole), rank=rank, features=features, bytes=sizes, sites=sites)


def _stand_in(whole: Expression) -> str:
    # A record names a factor by the hash of its content, which is unknown before packing.
    return hashlib.sha256(repr(whole).encode()).hexdigest()


def _name(whole: Expression) -> str:
    for node in whole.walk():
        if isinstance(node, Ref):
            return node.key
        if isinstance(node, VeraProjection):
            return f"{node.which} drawn from key {node.seed}"
    return "shared"


def _blocks_of(rotation: Rotation) -> str:
    return _blocks(rotation.kind, rotation.delta.shape[0], rotation.block)


def _blocks(kind: RotationKind, blocks: int, block: int) -> str:
    if kind is RotationKind.DIAGONAL:
        return "diagonal"
    return f"one block of {block}, repeated" if blocks == 1 else f"{blocks} blocks of {block}"


def _suffixes(terms: int) -> Sequence[str]:
    return [f".{number}" for number in range(terms)] if terms > 1 else [""] * terms
