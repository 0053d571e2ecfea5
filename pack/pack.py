"""The pack pass: the one place where tensors are read, evaluated in float64, rounded once, and written."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from pydantic import JsonValue

from scute_compile.formats.artifact import open_artifact
from scute_compile.formats.base_checkpoint import BaseCheckpoint
from scute_compile.formats.layout import SAFETENSORS_NAMES, file_layout, tensor_name
from scute_compile.formats.manifest import FIRST_VERSION, SCHEMA_VERSION, SiteRecord, rank_file_name
from scute_compile.formats.peft_folder import AdapterFolder
from scute_compile.formats.reading import opened
from scute_compile.formats.safetensors import read_exactly, read_tensor
from scute_compile.formats.safetensors_writer import SafetensorsWriter, sha256_of
from scute_compile.formats.writer import new_artifact, write_factor, write_manifest
from scute_compile.ir.dtypes import DType
from scute_compile.ir.expressions import ColumnNorm, Expression, Fill, Ref, Source, Subtract, VeraProjection
from scute_compile.ir.program import Program, Site
from scute_compile.ir.target import LoraSharding
from scute_compile.pack.column_norms import NormRequest, one_thread_per_operation, stream_norms
from scute_compile.pack.evaluate import Array, evaluate
from scute_compile.pack.manifest_records import finding_record, note_record, site_record, site_slices, term_slices
from scute_compile.pack.rounding import TooNarrow, factor_digest, raw_bytes, rounded
from scute_compile.pack.vera_projection import draw
from scute_compile.passes.scale import column_norms

TORCH_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A planned adapter, ready to be written."""

    name: str
    program: Program
    adapter: AdapterFolder
    base: Mapping[str, JsonValue]
    """The base's identity, as the manifest holds it."""
    sources: Mapping[str, str]
    """Hashes of the adapter's files."""
    dtypes: tuple[DType, ...]
    """Tried in this order: later ones when values don't survive the rounding to an earlier one."""
    tool: str


Norms = Mapping[Expression, Array]


def read_norms(
    packages: Sequence[Package], base: BaseCheckpoint, advance: Callable[[int, int], None]
) -> tuple[Norms, ...]:
    """Stream all column norms of all packages in one reading of the base; one mapping per package."""
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
        tile = torch.from_numpy(buffer).view(TORCH_DTYPES[stored.entry.dtype]).view(norm.tile_rows, -1)
        with opened(stored.file) as file:
            file.seek(stored.entry.begin)
            for start, stop in norm.tiles():
                read_exactly(file, buffer[: (stop - start) * width], stored.file)
                yield tile[: stop - start]

    def value(owner: int, x: Expression) -> Array:
        return evaluate(x, _reader(packages[owner].adapter, base), {}, lambda array: array)

    weights = {request.norm.weight.key: math.prod(request.norm.weight.shape) for request in requests}
    total, done = sum(weights.values()), 0

    def weight_done(values: int) -> None:
        nonlocal done
        done += values
        advance(done, total)

    for request, norm in stream_norms(requests, tiles, value, weight_done):
        norms[request.owner][request.norm] = norm
    return norms


def _reader(adapter: AdapterFolder, base: BaseCheckpoint) -> Callable[[Ref], Array]:
    def read(ref: Ref) -> Array:
        if ref.source is Source.BASE:
            return base.read_tensor(ref.key)
        return read_tensor(adapter.weights, adapter.tensors[ref.key])

    return read


def pack(package: Package, base: BaseCheckpoint, norms: Norms, store: Path) -> Path:
    """Write one artifact into the store and return its folder.

    Raises:
        ScuteError: SC320 when values survive none of the package's dtypes, SC109 when writing fails.
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
    with new_artifact(store, package.name) as folder, one_thread_per_operation():
        values = _Values(package, base, norms, dtype)
        factors = _write_factors(values, package.program.sites, store)
        sites = tuple(site_record(site, lambda shared: str(factors[shared]["hash"])) for site in package.program.sites)
        _write_ranks(folder, values, package.program, sites, dtype)
        write_manifest(folder, _manifest(folder, package, dtype, sites, list(factors.values())))
    # Read back as a reader does. The rank files' hashes were taken from the disk a moment ago; a shared factor may have
    # lain in the store for long, so its bytes are hashed again.
    open_artifact(store / package.name, verify_hashes=bool(factors))
    return store / package.name


class _Values:
    """Evaluates a package's expressions; a shared matrix that is drawn from its key is drawn once."""

    def __init__(self, package: Package, base: BaseCheckpoint, norms: Norms, dtype: DType) -> None:
        self.dtype = dtype
        self._read = _reader(package.adapter, base)
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


def _write_factors(values: _Values, sites: Sequence[Site], store: Path) -> dict[Expression, dict[str, JsonValue]]:
    factors: dict[Expression, dict[str, JsonValue]] = {}
    for factor in (factor for site in sites for term in site.terms for factor in (term.a, term.b)):
        if factor.shared is None or factor.shared in factors:
            continue
        tensor = values.stored(factor.shared, "shared factor")
        rank, features = tensor.shape
        digest = factor_digest(tensor, values.dtype)
        write_factor(store, digest, SAFETENSORS_NAMES[values.dtype], (rank, features), raw_bytes(tensor))
        factors[factor.shared] = {
            "hash": digest,
            "rank": rank,
            "features": features,
            "dtype": values.dtype.value,
            "bytes": tensor.numel() * values.dtype.itemsize,
        }
    return factors


def _write_ranks(folder: Path, values: _Values, program: Program, sites: Sequence[SiteRecord], dtype: DType) -> None:
    tp = program.target.tp
    with ExitStack() as stack:
        writers = []
        for rank in range(tp):
            layout = {
                name: (SAFETENSORS_NAMES[kind], shape)
                for name, (kind, shape) in file_layout(sites, rank, dtype).items()
            }
            path = folder / rank_file_name(rank, tp)
            writers.append(stack.enter_context(SafetensorsWriter(path, layout, {"format": "scute"})))
        for site in program.sites:
            for slot, number, tensor in _site_tensors(site, values):
                for rank, writer in enumerate(writers):
                    writer.write(
                        tensor_name(site.name, slot, number), raw_bytes(_slice(site, slot, number, rank, tensor))
                    )


def _site_tensors(site: Site, values: _Values) -> Iterator[tuple[str, int | None, torch.Tensor]]:
    """Yield every tensor of a site whole, rounded, one at a time."""
    if site.rotation is not None:
        yield "dR", None, values.stored(site.rotation.delta, f"{site.name}.dR")
    if site.s is not None:
        difference = Subtract(site.s, Fill(1.0, site.s.shape))
        yield "ds", None, values.stored(difference, f"{site.name}.ds")
    if site.b is not None:
        yield "b", None, rounded(values.exact(site.b), DType.FLOAT32, f"{site.name}.b")
    for number, term in enumerate(site.terms):
        owned = (
            ("A", term.a.value if term.a.shared is None else None),
            ("B", term.b.value if term.b.shared is None else None),
            ("d", term.d),
            ("e", term.e),
        )
        for slot, value in owned:
            if value is not None:
                yield slot, number, values.stored(value, f"{site.name}.{slot}")


def _slice(site: Site, slot: str, number: int | None, rank: int, tensor: torch.Tensor) -> torch.Tensor:
    slices = site_slices(site, rank) if number is None else term_slices(site, number, rank)
    held = slices.get(slot)
    if held is None:
        return tensor
    axis, ranges = held
    return torch.cat([tensor.narrow(axis, start, stop - start) for start, stop in ranges], dim=axis)


def _manifest(
    folder: Path,
    package: Package,
    dtype: DType,
    sites: Sequence[SiteRecord],
    factors: Sequence[Mapping[str, JsonValue]],
) -> dict[str, JsonValue]:
    program, workload = package.program, package.program.target.workload
    ranks: list[JsonValue] = []
    for rank in range(program.target.tp):
        path = folder / rank_file_name(rank, program.target.tp)
        ranks.append({"file": path.name, "sha256": sha256_of(path), "bytes": path.stat().st_size})
    total = sum((folder / rank_file_name(rank, program.target.tp)).stat().st_size for rank in range(program.target.tp))
    listed = _by_hash(factors)
    sharding = program.target.lora_sharding
    full = {"lora_sharding": sharding.value} if sharding is not LoraSharding.DEFAULT else {}
    return {
        "schema_version": SCHEMA_VERSION if full else FIRST_VERSION,
        "tool": package.tool,
        "name": package.name,
        "method": program.method.value,
        "dtype": dtype.value,
        "tp": program.target.tp,
        **full,
        "base": dict(package.base),
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
        "sites": [site.model_dump(mode="json", exclude_defaults=True) for site in sites],
        "factors": list(listed),
        "ranks": ranks,
        "bytes": {"ranks": total, "shared": sum(int(str(factor["bytes"])) for factor in listed)},
        "notes": [note_record(note) for note in program.notes],
        "findings": [finding_record(finding) for finding in program.findings],
    }


def _by_hash(factors: Sequence[Mapping[str, JsonValue]]) -> list[dict[str, JsonValue]]:
    """Return the factors once each: two expressions may have one content."""
    return [dict(factor) for factor in {str(factor["hash"]): factor for factor in factors}.values()]
