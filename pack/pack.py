"""Packs planned adapters: reads tensors, evaluates expressions in float64, rounds once and writes the artifact."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from pydantic import JsonValue
from safetensors.torch import save

from scute_compile.formats.artifact import FACTOR_TENSOR, open_artifact
from scute_compile.formats.artifact_tensors import factor_digest
from scute_compile.formats.base_checkpoint import BaseCheckpoint
from scute_compile.formats.hub import portable_name
from scute_compile.formats.layout import SHIFT_DTYPE, tensor_name
from scute_compile.formats.manifest import FORMAT, SCHEMA_VERSION, FactorFile, RankFile, SiteRecord
from scute_compile.formats.peft_folder import AdapterFolder
from scute_compile.formats.reading import check_unchanged, opened, refuse_changed
from scute_compile.formats.safetensors import read_exactly, read_tensor
from scute_compile.formats.samples import Samples
from scute_compile.formats.writer import artifact_writer
from scute_compile.ir.dtypes import DType, torch_dtype
from scute_compile.ir.expressions import ColumnNorm, Expression, Fill, Ref, Source, Subtract, VeraProjection
from scute_compile.ir.program import Program, Site
from scute_compile.pack.column_norms import NormRequest, one_thread_per_operation, stream_norms
from scute_compile.pack.evaluate import Array, evaluate
from scute_compile.pack.manifest_records import note_record, site_record
from scute_compile.pack.rounding import TooNarrow, rounded
from scute_compile.pack.slices import site_slices, term_slices
from scute_compile.pack.vera_projection import draw
from scute_compile.passes.scale import column_norms

Norms = Mapping[Expression, Array]
"""Column norms by expression, each `(out,)`."""
Slot = tuple[Site, str, int | None]
"""A site, the name of a slot's tensor, and the term's number; None for slots of the site itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A planned adapter, ready to be written."""

    name: str
    program: Program
    adapter: AdapterFolder
    base: Mapping[str, JsonValue]
    """The fields of the manifest's `base` that don't depend on the adapter: all but `name`."""
    sources: Mapping[str, str]
    """Hashes of the adapter's files."""
    tensor_sha256: Mapping[str, str]
    """Hashes of its tensors, from the reading of the files that `sources` is of; packed tensors must have them."""
    dtypes: tuple[DType, ...]
    """Tried in this order: a later dtype is used when values don't fit the earlier ones."""
    tool: str


def read_norms(
    packages: Sequence[Package], base: BaseCheckpoint, advance: Callable[[int, int], None]
) -> tuple[Norms, ...]:
    """Compute the column norms of all packages, reading each base weight once.

    Args:
        packages: The planned adapters.
        base: Their base, with weights.
        advance: Called with the number of weights (entries) that were read, and with their total.

    Returns:
        One mapping per package.
    """
    requests = [
        NormRequest(index, norm)
        for index, package in enumerate(packages)
        for norm in column_norms(package.program.sites)
    ]
    norms: tuple[dict[Expression, Array], ...] = tuple({} for _ in packages)

    def tiles(norm: ColumnNorm) -> Iterator[torch.Tensor]:
        stored = base.tensors[norm.weight.key]
        if stored.file is None:
            raise AssertionError(norm.weight.key)
        width = stored.entry.nbytes // norm.weight.shape[0]
        buffer = np.empty(norm.tile_rows * width, np.uint8)
        tile = torch.from_numpy(buffer).view(torch_dtype(stored.entry.dtype)).view(norm.tile_rows, -1)
        samples = Samples(stored.entry)
        with opened(stored.file) as file:
            file.seek(stored.entry.begin)
            for start, stop in norm.tiles():
                samples.add(read_exactly(file, buffer[: (stop - start) * width], stored.file))
                yield tile[: stop - start]
        base.check_samples(norm.weight.key, samples)

    def value(package: int, x: Expression) -> Array:
        return evaluate(x, _reader(packages[package], base), {}, lambda array: array)

    weights = {request.norm.weight.key: math.prod(request.norm.weight.shape) for request in requests}
    total, done = sum(weights.values()), 0

    def weight_done(values: int) -> None:
        nonlocal done
        done += values
        advance(done, total)

    for request, norm in stream_norms(requests, tiles, value, weight_done):
        norms[request.package][request.norm] = norm
    return norms


def _reader(package: Package, base: BaseCheckpoint) -> Callable[[Ref], Array]:
    adapter = package.adapter

    def read(ref: Ref) -> Array:
        def check(raw: npt.NDArray[np.uint8]) -> None:
            if hashlib.sha256(raw.data).hexdigest() != package.tensor_sha256[ref.key]:
                refuse_changed(f"{adapter.weights}: {ref.key}", "other bytes", "those that the adapter was planned for")

        if ref.source is Source.BASE:
            return base.read_tensor(ref.key)
        return read_tensor(adapter.weights, adapter.tensors[ref.key], check)

    return read


def pack(package: Package, base: BaseCheckpoint, norms: Norms, store: Path) -> Path:
    """Write one artifact into the store and return its folder.

    Peak memory is the adapter's tensors in the artifact's dtype, and the file of one rank.

    Raises:
        ScuteError: SC111 when files of the adapter or the base changed since they were opened; SC320 when values fit
            none of the package's dtypes; as for `artifact_writer` when the artifact can't be written.
    """
    for dtype in package.dtypes[:-1]:
        try:
            return _pack_as(dtype, package, base, norms, store)
        except TooNarrow:
            continue
    try:
        return _pack_as(package.dtypes[-1], package, base, norms, store)
    except TooNarrow as error:
        error.refuse()


def _pack_as(dtype: DType, package: Package, base: BaseCheckpoint, norms: Norms, store: Path) -> Path:
    sites, tp = package.program.sites, package.program.target.tp
    with one_thread_per_operation():
        values = _Values(package, base, norms, dtype)
        factors = {shared: values.stored(shared, "shared factor").contiguous() for shared in _shared_matrices(sites)}
        slots = tuple(slot for site in sites for slot in _slots(site, values))
    listed = {shared: _factor_record(tensor, dtype) for shared, tensor in factors.items()}
    with artifact_writer(store, package.name) as writer:
        for shared, record in listed.items():
            writer.add_factor(record, save({FACTOR_TENSOR: factors[shared]}))
        ranks = tuple(writer.add_rank(rank, tp, save(_rank_tensors(slots, rank))) for rank in range(tp))
        records = tuple(site_record(site, lambda shared: listed[shared].hash) for site in sites)
        check_unchanged({**package.adapter.identities, **base.identities})
        used = tuple({record.hash: record for record in listed.values()}.values())
        writer.commit(_manifest(package, dtype, records, used, ranks))
    # The writer hashed every file; this checks that readers accept their headers and the manifest.
    open_artifact(store / package.name, verify_hashes=False)
    return store / package.name


class _Values:
    """Evaluates a package's expressions; each of VeRA's shared matrices is drawn once."""

    def __init__(self, package: Package, base: BaseCheckpoint, norms: Norms, dtype: DType) -> None:
        self.dtype = dtype
        self._read = _reader(package, base)
        drawn: dict[Expression, Array] = {
            node: draw(node)
            for site in package.program.sites
            for value in site.expressions()
            for node in set(value.walk())
            if isinstance(node, VeraProjection)
        }
        self._given: Mapping[Expression, Array] = {**norms, **drawn}

    def exact(self, x: Expression) -> Array:
        return evaluate(x, self._read, self._given, lambda array: _widened(array, self.dtype))

    def stored(self, x: Expression, where: str) -> torch.Tensor:
        return rounded(self.exact(x), self.dtype, where)


def _widened(array: Array, dtype: DType) -> Array:
    return np.asarray(rounded(array, dtype, "ds").double().numpy())


def _shared_matrices(sites: Sequence[Site]) -> tuple[Expression, ...]:
    """Return the matrices that are written to the store's `factors`, once each."""
    factors = (factor for site in sites for term in site.terms for factor in (term.a, term.b))
    return tuple(dict.fromkeys(factor.shared for factor in factors if factor.shared is not None))


def _factor_record(tensor: torch.Tensor, dtype: DType) -> FactorFile:
    rank, features = tensor.shape
    return FactorFile(
        hash=factor_digest(tensor, dtype, rank, features),
        rank=rank,
        features=features,
        dtype=dtype,
        bytes=tensor.numel() * dtype.itemsize,
    )


def _slots(site: Site, values: _Values) -> Iterator[tuple[Slot, torch.Tensor]]:
    """Yield the tensors of a site that rank files hold, rounded and not yet cut."""
    if site.rotation is not None:
        yield (site, "dR", None), values.stored(site.rotation.delta, f"{site.name}.dR")
    if site.s is not None:
        difference = Subtract(site.s, Fill(1.0, site.s.shape))
        yield (site, "ds", None), values.stored(difference, f"{site.name}.ds")
    if site.b is not None:
        yield (site, "b", None), rounded(values.exact(site.b), SHIFT_DTYPE, f"{site.name}.b")
    for number, term in enumerate(site.terms):
        owned = (
            ("A", term.a.value if term.a.shared is None else None),
            ("B", term.b.value if term.b.shared is None else None),
            ("d", term.d),
            ("e", term.e),
        )
        for slot, value in owned:
            if value is not None:
                yield (site, slot, number), values.stored(value, f"{site.name}.{slot}")


def _rank_tensors(slots: Sequence[tuple[Slot, torch.Tensor]], rank: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a rank's file."""
    return {
        tensor_name(site.name, slot, number): _slice(site, slot, number, rank, tensor)
        for (site, slot, number), tensor in slots
    }


def _slice(site: Site, slot: str, number: int | None, rank: int, tensor: torch.Tensor) -> torch.Tensor:
    slices = site_slices(site, rank) if number is None else term_slices(site, number, rank)
    axis, ranges = slices.get(slot, (0, ((0, tensor.shape[0]),)))
    if ranges == ((0, tensor.shape[axis]),):
        return tensor.contiguous()
    return torch.cat([tensor.narrow(axis, start, stop - start) for start, stop in ranges], dim=axis)


def _manifest(
    package: Package,
    dtype: DType,
    sites: Sequence[SiteRecord],
    factors: Sequence[FactorFile],
    ranks: Sequence[RankFile],
) -> dict[str, JsonValue]:
    program, workload = package.program, package.program.target.workload
    return {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        "tool": package.tool,
        "name": package.name,
        "method": program.method.value,
        "dtype": dtype.value,
        "tp": program.target.tp,
        "lora_sharding": program.target.lora_sharding.value,
        "base": {**package.base, "name": portable_name(package.adapter.base_model)},
        "sources": dict(package.sources),
        "settings": dict(program.settings),
        "renamed": dict(program.renamed),
        "workload": {
            "tenants": workload.tenants,
            "tokens": workload.tokens,
            "bandwidth": workload.bandwidth,
            "launch": workload.launch,
            "activation_bytes": workload.activation_bytes,
        },
        "sites": [site.model_dump(mode="json") for site in sites],
        "factors": [factor.model_dump(mode="json") for factor in factors],
        "ranks": [rank.model_dump(mode="json") for rank in ranks],
        "bytes": {"ranks": sum(rank.bytes for rank in ranks), "shared": sum(factor.bytes for factor in factors)},
        "notes": [note_record(note) for note in program.notes],
        "findings": [dict(finding.to_json()) for finding in program.findings],
    }
