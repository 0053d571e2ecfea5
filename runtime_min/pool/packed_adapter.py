"""Host packed_adapters: an adapter as the bytes that its pages will hold, so that it comes in as one contiguous copy.

`pack_adapter` lays tensors out; `scute_compile.runtime_min.pool.reading` feeds it from artifacts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import torch

from scute_compile.diagnostics import Code, fail
from scute_compile.ir.program import RotationKind
from scute_compile.runtime_min.pool.directory import (
    GRANULE_BYTES,
    PAGE_BYTES,
    DirectoryEntry,
    Field,
    absent_records,
    granules,
    pages_of,
)
from scute_compile.runtime_min.reference import SiteTensors


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class PackedFactor:
    """A shared factor, stored once for all adapters that use it."""

    key: str
    """Its hash; with the columns, where only some are held."""
    rank: int
    features: int
    buffer: torch.Tensor
    """1-D uint8 of whole pages; pinned where asked."""
    payload: int
    """Bytes of its values."""

    @property
    def whole(self) -> str:
        """Hash of the factor that it is, or is columns of."""
        return self.key.partition(":")[0]

    @property
    def pages(self) -> int:
        """Pages that it takes."""
        return self.buffer.numel() // PAGE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FactorWindow:
    """The columns of a shared factor that a site uses, from granule `offset` of each row on."""

    factor: PackedFactor
    offset: int
    stride: int
    """Granules per row."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PairWindow:
    """A and B of a shared term."""

    a: FactorWindow
    b: FactorWindow

    @property
    def rank(self) -> int:
        """Rows of B, and of A, of which a rank may hold a share alone."""
        return self.b.factor.rank

    @property
    def key(self) -> tuple[str, int, str, int]:
        """What makes two windows the same one."""
        return self.a.factor.key, self.a.offset, self.b.factor.key, self.b.offset

    @property
    def shared(self) -> tuple[str, str]:
        """What makes two pairs the same one: the factors; which of their columns a site uses follows from the site."""
        return self.a.factor.whole, self.b.factor.whole


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedTerm:
    """A low-rank term between shared factors."""

    pair: PairWindow
    d: torch.Tensor | None = None
    """`(rank,)`."""
    e: torch.Tensor | None = None
    """`(out,)`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SiteContent:
    """The tensors of one site; `tensors.terms` are its own terms, and none of these stands beside a shared one."""

    in_features: int
    """Of the part of the layer that the tensors were cut for."""
    out_features: int
    tensors: SiteTensors = field(default_factory=SiteTensors)
    shared: SharedTerm | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedAdapter:
    """One rank's part of an adapter, laid out for one sequence of sites and one dtype."""

    name: str
    digest: str
    """Of the artifact's manifest."""
    tp: int
    rank: int
    dtype: torch.dtype
    buffer: torch.Tensor
    """1-D uint8 of whole pages; pinned where asked."""
    payload: int
    """Bytes of its tensors, without padding and without shared factors."""
    records: torch.Tensor
    """int32 `(sites, 16)`: its directory records, with page starts of 0 and `PAIR` counting in its own `pairs`."""
    pairs: tuple[PairWindow, ...]
    own_rank: int
    """Largest rank of its own terms, in whole shares of the ranks that divide it; 0 without any."""
    rotated: bool
    """Whether it turns the input of any site."""
    beside_pair: bool
    """Whether it has tensors at sites that its shared pair does not touch."""

    @property
    def pages(self) -> int:
        """Pages that it takes, without those of shared factors."""
        return self.buffer.numel() // PAGE_BYTES

    @property
    def factors(self) -> tuple[PackedFactor, ...]:
        """The shared factors that it needs, each once."""
        return tuple({window.factor.key: window.factor for pair in self.pairs for window in (pair.a, pair.b)}.values())


def host_bytes(packed_adapters: Iterable[PackedAdapter]) -> int:
    """Return the bytes of packed_adapters in host memory, shared factors counted once."""
    listed = list(packed_adapters)
    factors = {factor.key: factor for packed in listed for factor in packed.factors}
    return sum(len(packed.buffer) for packed in listed) + sum(len(factor.buffer) for factor in factors.values())


@dataclass(slots=True)
class _Layout:
    """Places of tensors, gathered before a byte is copied."""

    dtype: torch.dtype
    end: int = 0
    """Granules in use."""
    payload: int = 0
    rows: list[tuple[int, int, torch.Tensor]] = field(default_factory=list)
    """First granule, granules per row, and a matrix whose dtype is the stored one."""
    rotations: dict[int, int] = field(default_factory=dict)
    """First granule by the identity of a tensor: the parts of one layer turn its input alike."""

    def run(self, tensor: torch.Tensor, *, dtype: torch.dtype | None = None) -> int:
        """Place values without gaps and return their first granule."""
        row = tensor.reshape(1, -1)
        return self.matrix([row], row.shape[1], dtype=dtype)

    def matrix(self, parts: Sequence[torch.Tensor], width: int, *, dtype: torch.dtype | None = None) -> int:
        """Place the rows of all parts below each other and return the first granule."""
        start, stored = self.end, self.dtype if dtype is None else dtype
        stride = granules(width, stored)
        for part in parts:
            self.rows.append((self.end, stride, part if part.dtype == stored else part.to(stored)))
            self.end += stride * len(part)
            self.payload += part.numel() * stored.itemsize
        return start

    def buffer(self, *, pin: bool) -> torch.Tensor:
        """Return the bytes of everything, in whole pages.

        Copied by numpy, on one core, as `scute_compile.formats.artifact_tensors` reads: PyTorch would wait for all
        cores at every tensor.
        """
        size = max(1, pages_of(self.end * GRANULE_BYTES)) * PAGE_BYTES
        buffer = torch.empty(size, dtype=torch.uint8, pin_memory=pin)
        whole = buffer.numpy()
        whole.fill(0)
        for start, stride, part in (row for row in self.rows if row[2].numel()):
            first, length = start * GRANULE_BYTES, stride * GRANULE_BYTES * len(part)
            rows = part.detach().reshape(len(part), -1).contiguous().view(torch.uint8).numpy()
            whole[first : first + length].reshape(len(part), -1)[:, : rows.shape[1]] = rows
        return buffer


def pack_factor(key: str, factor: torch.Tensor, dtype: torch.dtype, *, pin: bool = False) -> PackedFactor:
    """Return the packed of a shared factor `(rank, features)`, its rows padded to whole granules."""
    layout = _Layout(dtype=dtype)
    layout.matrix([factor], factor.shape[1])
    return PackedFactor(
        key=key,
        rank=factor.shape[0],
        features=factor.shape[1],
        buffer=layout.buffer(pin=pin),
        payload=layout.payload,
    )


def window_of(factor: PackedFactor, dtype: torch.dtype, *, column: int = 0) -> FactorWindow:
    """Return the window of a factor that starts at `column`, which must start a granule."""
    stride = granules(factor.features, dtype)
    return FactorWindow(factor=factor, offset=granules(column, dtype), stride=stride)


def pack_adapter(
    name: str,
    sites: Sequence[DirectoryEntry],
    contents: Mapping[str, SiteContent],
    dtype: torch.dtype,
    *,
    digest: str = "",
    tp: int = 1,
    rank: int = 0,
    shares: int = 1,
    pin: bool = False,
) -> PackedAdapter:
    """Lay an adapter's tensors out as its pages will hold them.

    Args:
        name: The adapter's id, for messages.
        sites: The layers of the model, in the order of the directory.
        contents: The adapted layers by key; all must be among `sites`.
        dtype: The pool's dtype, to which all tensors but `b` are rounded.
        digest: Digest of the artifact.
        tp: Number of ranks that the tensors were cut for.
        rank: Whose part it is.
        shares: Among how many ranks terms are divided: what a row needs of intermediates comes in whole shares.
        pin: Whether to lay it out in pinned memory.

    Raises:
        ScuteError: SC402 when a layer doesn't exist or has other shapes.
    """
    index = {site.key: number for number, site in enumerate(sites)}
    layout = _Layout(dtype=dtype)
    pairs: dict[tuple[str, int, str, int], tuple[int, PairWindow]] = {}
    records = absent_records(len(sites))
    for site_name, content in contents.items():
        number = index.get(site_name)
        if number is None:
            _refuse_site(name, site_name, "a layer that the model doesn't have")
        site, record = sites[number], records[number]
        _check_shape(name, site, content)
        record[Field.OWN_PAGES] = 0
        _place_vectors(record, content.tensors, layout)
        if content.tensors.terms:
            _place_terms(record, site, content.tensors, layout)
        if content.shared is not None:
            known = pairs.setdefault(content.shared.pair.key, (len(pairs), content.shared.pair))
            _place_shared(record, content.shared, known[0], layout)
    own_rank = int((records[:, Field.RANK] * (records[:, Field.PAIR] < 0)).max()) if sites else 0
    return PackedAdapter(
        name=name,
        digest=digest,
        tp=tp,
        rank=rank,
        dtype=dtype,
        buffer=layout.buffer(pin=pin),
        payload=layout.payload,
        records=records,
        pairs=tuple(pair for _, pair in pairs.values()),
        own_rank=-(-own_rank // shares) * shares,
        rotated=bool((records[:, Field.R_OFFSET] >= 0).any()),
        beside_pair=_beside_pair(records),
    )


def _beside_pair(records: torch.Tensor) -> bool:
    touched = (records != absent_records(len(records))).any(1)
    return bool((touched & (records[:, Field.PAIR] < 0)).any())


def _check_shape(adapter: str, site: DirectoryEntry, content: SiteContent) -> None:
    if (site.in_features, site.out_features) != (content.in_features, content.out_features):
        found = f"tensors for {content.in_features} inputs and {content.out_features} outputs"
        _refuse_site(adapter, site.key, found, f"{site.in_features} inputs and {site.out_features} outputs")


def _place_vectors(record: torch.Tensor, tensors: SiteTensors, layout: _Layout) -> None:
    if tensors.ds is not None:
        record[Field.DS_OFFSET] = layout.run(tensors.ds)
    if tensors.b is not None:
        record[Field.SHIFT_OFFSET] = layout.run(tensors.b, dtype=torch.float32)
    if tensors.delta is not None:
        if id(tensors.delta) not in layout.rotations:
            layout.rotations[id(tensors.delta)] = layout.run(tensors.delta)
        record[Field.R_OFFSET] = layout.rotations[id(tensors.delta)]
        blocks = tensors.rotation is RotationKind.BLOCKS
        record[Field.R_BLOCK] = tensors.delta.shape[-1] if blocks else 1
        record[Field.R_SHARED] = int(blocks and len(tensors.delta) == 1)


def _place_terms(record: torch.Tensor, site: DirectoryEntry, tensors: SiteTensors, layout: _Layout) -> None:
    """Own terms of one site stand side by side along the rank: `x A B` summed over terms is one product.

    The rank is that of B: of A there may be a share alone, as of the entries that it gives.
    """
    record[Field.RANK] = sum(len(term.b) for term in tensors.terms)
    record[Field.A_PAGES] = record[Field.B_PAGES] = 0
    record[Field.A_OFFSET] = layout.matrix([term.a for term in tensors.terms], site.in_features)
    record[Field.A_STRIDE] = granules(site.in_features, layout.dtype)
    record[Field.B_OFFSET] = layout.matrix([term.b for term in tensors.terms], site.out_features)
    record[Field.B_STRIDE] = granules(site.out_features, layout.dtype)


def _place_shared(record: torch.Tensor, term: SharedTerm, number: int, layout: _Layout) -> None:
    record[Field.RANK] = term.pair.rank
    record[Field.PAIR] = number
    record[Field.A_OFFSET], record[Field.A_STRIDE] = term.pair.a.offset, term.pair.a.stride
    record[Field.B_OFFSET], record[Field.B_STRIDE] = term.pair.b.offset, term.pair.b.stride
    if term.d is not None:
        record[Field.D_OFFSET] = layout.run(term.d)
    if term.e is not None:
        record[Field.E_OFFSET] = layout.run(term.e)


def _refuse_site(adapter: str, site: str, found: str, expected: str = "layers of the model that is served") -> NoReturn:
    fail(
        Code.SC402,
        where=f"{adapter}: {site}",
        found=found,
        expected=expected,
        next="serve the adapter on the base that it was compiled for, or compile it for this one",
    )
