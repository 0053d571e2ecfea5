"""Packed adapters: the bytes of an adapter's pages in host memory, which one contiguous copy moves to the device.

`pack_adapter` lays tensors out; `scute_compile.runtime_min.pool.reading` reads them from artifacts.
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
    absent_rows,
    granules,
    pages_of,
)
from scute_compile.runtime_min.reference import SiteTensors


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class PackedFactor:
    """A shared factor, stored once for all adapters that use it."""

    key: str
    """Hash of the factor, followed by its columns and rows where only some of them are held."""
    rank: int
    features: int
    buffer: torch.Tensor
    """1-D uint8, whole pages; in pinned memory if requested."""
    payload: int
    """Bytes of the values, without padding."""

    @property
    def whole(self) -> str:
        """Hash of the whole factor, even where only some of its columns are held."""
        return self.key.partition(":")[0]

    @property
    def pages(self) -> int:
        """Number of pages."""
        return self.buffer.numel() // PAGE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FactorWindow:
    """The columns of a shared factor that a site uses: from granule `offset` of each row on."""

    factor: PackedFactor
    offset: int
    stride: int
    """Granules per row."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PairWindow:
    """The windows of A and B of a shared term."""

    a: FactorWindow
    b: FactorWindow

    @property
    def rank(self) -> int:
        """Rows of B. A may have fewer, where a rank holds a share of them."""
        return self.b.factor.rank

    @property
    def key(self) -> tuple[str, int, str, int]:
        """Identifies the windows: equal keys mean equal columns of equal factors."""
        return self.a.factor.key, self.a.offset, self.b.factor.key, self.b.offset

    @property
    def shared(self) -> tuple[str, str]:
        """Identifies the pair of factors, regardless of the columns that a site uses."""
        return self.a.factor.whole, self.b.factor.whole


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedTerm:
    """A low-rank term whose factors are shared."""

    pair: PairWindow
    d: torch.Tensor | None = None
    """`(rank,)`."""
    e: torch.Tensor | None = None
    """`(out,)`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SiteContent:
    """The tensors of one site: any number of owned terms in `tensors.terms`, or one shared term."""

    in_features: int
    """Inputs of the rank's part of the layer."""
    out_features: int
    """Outputs of the rank's part of the layer."""
    tensors: SiteTensors = field(default_factory=SiteTensors)
    shared: SharedTerm | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedAdapter:
    """One rank's part of an adapter, laid out for one directory and one dtype."""

    name: str
    digest: str
    """Content digest of the artifact's manifest."""
    dtype: torch.dtype
    buffer: torch.Tensor
    """1-D uint8, whole pages; in pinned memory if requested."""
    payload: int
    """Bytes of the tensors, without padding and without shared factors."""
    rows: torch.Tensor
    """int32 `(sites, 16)`: the directory rows, with page starts of 0, and `PAIR` an index into `pairs`."""
    pairs: tuple[PairWindow, ...]
    own_rank: int
    """Largest rank of owned terms, rounded up to a multiple of the shares; 0 without owned terms."""
    rotated: bool
    """Whether any site has a rotation."""
    beside_pair: bool
    """Whether any site has tensors and no window of the shared pair."""

    @property
    def pages(self) -> int:
        """Number of pages, without those of shared factors."""
        return self.buffer.numel() // PAGE_BYTES

    @property
    def factors(self) -> tuple[PackedFactor, ...]:
        """The shared factors that it uses, each once."""
        return tuple({window.factor.key: window.factor for pair in self.pairs for window in (pair.a, pair.b)}.values())


def host_bytes(adapters: Iterable[PackedAdapter]) -> int:
    """Return the bytes that adapters take in host memory, each shared factor counted once."""
    listed = list(adapters)
    factors = {factor.key: factor for packed in listed for factor in packed.factors}
    return sum(len(packed.buffer) for packed in listed) + sum(len(factor.buffer) for factor in factors.values())


@dataclass(slots=True)
class _Layout:
    """Positions of tensors, assigned before any byte is copied."""

    dtype: torch.dtype
    end: int = 0
    """Granules in use."""
    payload: int = 0
    matrices: list[tuple[int, int, torch.Tensor]] = field(default_factory=list)
    """First granule, granules per row, and a matrix in its stored dtype."""
    rotations: dict[int, int] = field(default_factory=dict)
    """First granule by `id` of a rotation: the parts of one layer share the rotation of its input."""

    def place_values(self, tensor: torch.Tensor, *, dtype: torch.dtype | None = None) -> int:
        """Place values without gaps and return their first granule."""
        row = tensor.reshape(1, -1)
        return self.place_matrices([row], row.shape[1], dtype=dtype)

    def place_matrices(self, parts: Sequence[torch.Tensor], width: int, *, dtype: torch.dtype | None = None) -> int:
        """Place the rows of several matrices one after another and return the first granule."""
        start, stored = self.end, self.dtype if dtype is None else dtype
        stride = granules(width, stored)
        for part in parts:
            self.matrices.append((self.end, stride, part if part.dtype == stored else part.to(stored)))
            self.end += stride * len(part)
            self.payload += part.numel() * stored.itemsize
        return start

    def buffer(self, *, pin: bool) -> torch.Tensor:
        """Return the bytes of all tensors, in whole pages.

        numpy copies them, on one core, as in `scute_compile.formats.artifact_tensors`: PyTorch would synchronise all
        cores for every tensor.
        """
        size = max(1, pages_of(self.end * GRANULE_BYTES)) * PAGE_BYTES
        buffer = torch.empty(size, dtype=torch.uint8, pin_memory=pin)
        target = buffer.numpy()
        target.fill(0)
        for start, stride, part in (entry for entry in self.matrices if entry[2].numel()):
            first, length = start * GRANULE_BYTES, stride * GRANULE_BYTES * len(part)
            rows = part.detach().reshape(len(part), -1).contiguous().view(torch.uint8).numpy()
            target[first : first + length].reshape(len(part), -1)[:, : rows.shape[1]] = rows
        return buffer


def pack_factor(key: str, factor: torch.Tensor, dtype: torch.dtype, *, pin: bool = False) -> PackedFactor:
    """Pack a shared factor `(rank, features)`, its rows padded to whole granules."""
    layout = _Layout(dtype=dtype)
    layout.place_matrices([factor], factor.shape[1])
    return PackedFactor(
        key=key,
        rank=factor.shape[0],
        features=factor.shape[1],
        buffer=layout.buffer(pin=pin),
        payload=layout.payload,
    )


def window_of(factor: PackedFactor, dtype: torch.dtype, *, column: int = 0) -> FactorWindow:
    """Return the window of a factor that starts at `column`, which must be the first of a granule."""
    stride = granules(factor.features, dtype)
    return FactorWindow(factor=factor, offset=granules(column, dtype), stride=stride)


def pack_adapter(
    name: str,
    sites: Sequence[DirectoryEntry],
    contents: Mapping[str, SiteContent],
    dtype: torch.dtype,
    *,
    digest: str = "",
    shares: int = 1,
    pin: bool = False,
) -> PackedAdapter:
    """Lay an adapter's tensors out as its pages hold them.

    Args:
        name: The adapter's name.
        sites: The model's layers, in the order of the directory.
        contents: The adapted layers by the key of their entry; all must be among `sites`.
        dtype: The pool's dtype, to which all tensors but `b` are rounded.
        digest: Content digest of the artifact.
        shares: Number of ranks that a term's rank is divided among; `own_rank` is a multiple of it.
        pin: Whether the buffer lies in pinned memory.

    Raises:
        ScuteError: SC402 when a layer doesn't exist or has another shape.
    """
    indices = {site.key: index for index, site in enumerate(sites)}
    layout = _Layout(dtype=dtype)
    pairs: dict[tuple[str, int, str, int], tuple[int, PairWindow]] = {}
    rows = absent_rows(len(sites))
    for key, content in contents.items():
        index = indices.get(key)
        if index is None:
            _refuse_site(name, key, "a layer that the model doesn't have")
        site, row = sites[index], rows[index]
        _check_shape(name, site, content)
        row[Field.OWN_PAGES] = 0
        _place_vectors(row, content.tensors, layout)
        if content.tensors.terms:
            _place_terms(row, site, content.tensors, layout)
        if content.shared is not None:
            pair, _ = pairs.setdefault(content.shared.pair.key, (len(pairs), content.shared.pair))
            _place_shared(row, content.shared, pair, layout)
    own_rank = int((rows[:, Field.RANK] * (rows[:, Field.PAIR] < 0)).max()) if sites else 0
    return PackedAdapter(
        name=name,
        digest=digest,
        dtype=dtype,
        buffer=layout.buffer(pin=pin),
        payload=layout.payload,
        rows=rows,
        pairs=tuple(window for _, window in pairs.values()),
        own_rank=-(-own_rank // shares) * shares,
        rotated=bool((rows[:, Field.R_OFFSET] >= 0).any()),
        beside_pair=_beside_pair(rows),
    )


def _beside_pair(rows: torch.Tensor) -> bool:
    touched = (rows != absent_rows(len(rows))).any(1)
    return bool((touched & (rows[:, Field.PAIR] < 0)).any())


def _check_shape(adapter: str, site: DirectoryEntry, content: SiteContent) -> None:
    if (site.in_features, site.out_features) != (content.in_features, content.out_features):
        found = f"tensors for {content.in_features} inputs and {content.out_features} outputs"
        _refuse_site(adapter, site.key, found, f"{site.in_features} inputs and {site.out_features} outputs")


def _place_vectors(row: torch.Tensor, tensors: SiteTensors, layout: _Layout) -> None:
    if tensors.ds is not None:
        row[Field.DS_OFFSET] = layout.place_values(tensors.ds)
    if tensors.b is not None:
        row[Field.SHIFT_OFFSET] = layout.place_values(tensors.b, dtype=torch.float32)
    if tensors.delta is not None:
        if id(tensors.delta) not in layout.rotations:
            layout.rotations[id(tensors.delta)] = layout.place_values(tensors.delta)
        row[Field.R_OFFSET] = layout.rotations[id(tensors.delta)]
        blocks = tensors.rotation is RotationKind.BLOCKS
        row[Field.R_BLOCK] = tensors.delta.shape[-1] if blocks else 1
        row[Field.R_SHARED] = int(blocks and len(tensors.delta) == 1)


def _place_terms(row: torch.Tensor, site: DirectoryEntry, tensors: SiteTensors, layout: _Layout) -> None:
    """Concatenate the owned terms of a site along the rank: the sum of `x A B` over terms is one product.

    `RANK` is the rank of B. A may hold only a share of the rows, and then gives that share of the intermediate.
    """
    row[Field.RANK] = sum(len(term.b) for term in tensors.terms)
    row[Field.A_PAGES] = row[Field.B_PAGES] = 0
    row[Field.A_OFFSET] = layout.place_matrices([term.a for term in tensors.terms], site.in_features)
    row[Field.A_STRIDE] = granules(site.in_features, layout.dtype)
    row[Field.B_OFFSET] = layout.place_matrices([term.b for term in tensors.terms], site.out_features)
    row[Field.B_STRIDE] = granules(site.out_features, layout.dtype)


def _place_shared(row: torch.Tensor, term: SharedTerm, pair: int, layout: _Layout) -> None:
    row[Field.RANK] = term.pair.rank
    row[Field.PAIR] = pair
    row[Field.A_OFFSET], row[Field.A_STRIDE] = term.pair.a.offset, term.pair.a.stride
    row[Field.B_OFFSET], row[Field.B_STRIDE] = term.pair.b.offset, term.pair.b.stride
    if term.d is not None:
        row[Field.D_OFFSET] = layout.place_values(term.d)
    if term.e is not None:
        row[Field.E_OFFSET] = layout.place_values(term.e)


def _refuse_site(adapter: str, site: str, found: str, expected: str = "layers of the model that is served") -> NoReturn:
    fail(
        Code.SC402,
        where=f"{adapter}: {site}",
        found=found,
        expected=expected,
        next="serve the adapter on the base that it was compiled for, or compile it for this one",
    )
