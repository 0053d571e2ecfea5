"""Reading one rank's part of an artifact into a packed adapter."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace

import torch

from scute_compile.diagnostics import Code, fail
from scute_compile.formats.artifact import Artifact
from scute_compile.formats.artifact_tensors import load_factor, load_rank
from scute_compile.formats.layout import tensor_name, term_columns
from scute_compile.formats.manifest import Manifest, SharedWindow, SiteRecord, TermRecord
from scute_compile.ir.dtypes import torch_dtype
from scute_compile.ir.expressions import Ranges, width
from scute_compile.ir.linear import Split
from scute_compile.ir.target import LoraSharding
from scute_compile.runtime_min.layers import match_sites
from scute_compile.runtime_min.pool.directory import DirectoryEntry, values_per_granule
from scute_compile.runtime_min.pool.fully_sharded import RowOrder, owned_term, pair_rows, split_outputs
from scute_compile.runtime_min.pool.packed_adapter import (
    FactorWindow,
    PackedAdapter,
    PackedFactor,
    PairWindow,
    SharedTerm,
    SiteContent,
    pack_adapter,
    pack_factor,
    window_of,
)
from scute_compile.runtime_min.ranks.exchange import take_rows
from scute_compile.runtime_min.reference import SiteTensors, TermTensors, take

Factors = MutableMapping[str, PackedFactor]
"""Shared factors by key, all in one dtype."""


def read_adapter(
    artifact: Artifact,
    sites: Sequence[DirectoryEntry],
    dtype: torch.dtype,
    *,
    name: str = "",
    tp: int = 1,
    rank: int = 0,
    sharding: LoraSharding = LoraSharding.DEFAULT,
    factors: Factors | None = None,
    convert: bool = False,
    pin: bool = False,
) -> PackedAdapter:
    """Read one rank's file, and the shared factors that it names, into a packed adapter.

    Args:
        artifact: An opened artifact.
        sites: The model's layers as the rank holds them, in the order of the directory and under the artifact's names;
            when fully sharded, a row-parallel layer has one entry for the outputs that the rank expands to, and
            others for the rest.
        dtype: The pool's dtype.
        name: The adapter's name; empty for the artifact's.
        tp: Number of ranks of the runtime.
        rank: This rank.
        sharding: The layout of terms on the runtime's ranks.
        factors: Shared factors in host memory; those that this artifact adds are stored in it.
        convert: Whether an artifact of another dtype is rounded to the pool's; it is refused otherwise.
        pin: Whether buffers lie in pinned memory.

    Raises:
        ScuteError: SC801 (another tp or dtype), SC812 (another layout of terms), SC402 (another base), SC803 (terms
            that mix owned and shared factors, or several shared terms at a site), SC320 (values that the pool's dtype
            can't hold), and what `load_rank` and `load_factor` raise.
    """
    name = name or artifact.manifest.name
    _check_target(artifact, name, tp=tp, dtype=dtype, convert=convert)
    _check_sharding(artifact.manifest, name, sharding)
    entries: dict[str, list[DirectoryEntry]] = {}
    for site in sites:
        entries.setdefault(site.name, []).append(site)
    tensors = {key: _rounded(value, key, dtype) for key, value in load_rank(artifact, rank).items()}
    reader = _Reader(
        artifact=artifact,
        name=name,
        rank=rank,
        dtype=dtype,
        tensors=tensors,
        factors={} if factors is None else factors,
        pin=pin,
    )
    contents: dict[str, SiteContent] = {}
    for record in artifact.manifest.sites:
        parts, content = entries.get(record.name, []), reader.site(record)
        whole = all(entry.part is None for entry in parts)
        contents |= {record.name: content} if whole else split_outputs(record, rank, content, parts)
    return pack_adapter(
        name,
        sites,
        contents,
        dtype,
        digest=artifact.manifest.digest,
        shares=tp if sharding is LoraSharding.FULL else 1,
        pin=pin,
    )


def named_as_in(artifact: Artifact, sites: Sequence[DirectoryEntry]) -> list[DirectoryEntry]:
    """Return the model's entries under the artifact's names: equal, or equal after one change of the prefix."""
    found = match_sites(artifact, [site.name for site in sites])
    named = {layer: name for name, layer in found.mapping.items()}
    return [replace(site, name=named.get(site.name, site.name)) for site in sites]


def _check_target(artifact: Artifact, name: str, *, tp: int, dtype: torch.dtype, convert: bool) -> None:
    manifest = artifact.manifest
    if manifest.tp != tp:
        fail(
            Code.SC801,
            where=name,
            found=f"an artifact for tp {manifest.tp}",
            expected=f"tp {tp}, on which this runtime runs",
            next=f"compile the adapter again with --tp {tp}",
        )
    if torch_dtype(manifest.dtype.value) is not dtype and not convert:
        wanted = str(dtype).removeprefix("torch.")
        fail(
            Code.SC801,
            where=name,
            found=f"an artifact in {manifest.dtype}",
            expected=f"{wanted}, the pool's dtype",
            next=f"compile the adapter again with --dtype {wanted}, or serve it with convert=True, which rounds again",
        )


def _check_sharding(manifest: Manifest, name: str, sharding: LoraSharding) -> None:
    """Refuse terms in another layout than the runtime's; without terms that ranks share, the layouts are equal."""
    cut = manifest.tp > 1 and any(site.terms and site.split is not Split.REPLICATED for site in manifest.sites)
    if cut and manifest.lora_sharding is not sharding:
        fail(
            Code.SC812,
            where=name,
            found=f"lora_sharding {manifest.lora_sharding.value}, on {manifest.tp} ranks",
            expected=f"lora_sharding {sharding.value}, in which the ranks of this runtime hold low-rank terms",
            next=f"compile the adapter again with --lora-sharding {sharding.value}",
        )


def _rounded(tensor: torch.Tensor, key: str, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor in the pool's dtype, except for the shift `b`, which stays float32."""
    if tensor.dtype is dtype or key.endswith(".b"):
        return tensor
    rounded = tensor.to(dtype)
    if not bool(rounded.isfinite().all()):
        fail(
            Code.SC320,
            where=key,
            found=f"values up to {float(tensor.abs().max()):.3g}",
            expected=f"at most {torch.finfo(dtype).max:.3g}, the largest value of the pool's dtype",
            next="use a pool in bfloat16 or float32",
        )
    return rounded


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Reader:
    """Reads the sites of one rank's file."""

    artifact: Artifact
    name: str
    rank: int
    dtype: torch.dtype
    tensors: Mapping[str, torch.Tensor]
    factors: Factors
    pin: bool

    def site(self, record: SiteRecord) -> SiteContent:
        """Return the rank's tensors of a site."""

        def held(slot: str, number: int | None = None) -> torch.Tensor | None:
            return self.tensors.get(tensor_name(record.name, slot, number))

        shared: SharedTerm | None = None
        terms: list[TermTensors] = []
        for number, term in enumerate(record.terms):
            _check_term(self.name, record, number, term)
            if term.a is None or term.b is None:
                a, b = (self.tensors[tensor_name(record.name, slot, number)] for slot in ("A", "B"))
                terms.append(owned_term(a, b, term, self.rank))
                continue
            rows = pair_rows(term, self.rank)
            pair = PairWindow(
                a=self.window(term.a, record.inputs[self.rank], rows.a if rows else None),
                b=self.window(term.b, term_columns(record, term, self.rank), rows.b if rows else None),
            )
            d = held("d", number)
            shared = SharedTerm(pair=pair, d=d if rows is None or d is None else rows.d_of(d), e=held("e", number))
        tensors = SiteTensors(
            rotation=record.rotation.kind if record.rotation else None,
            delta=held("dR"),
            ds=held("ds"),
            b=held("b") if record.shift_rank in (-1, self.rank) else None,
            terms=tuple(terms),
        )
        inputs, outputs = width(record.inputs[self.rank]), width(record.outputs[self.rank])
        return SiteContent(in_features=inputs, out_features=outputs, tensors=tensors, shared=shared)

    def window(self, window: SharedWindow, ranges: Ranges, rows: RowOrder | None) -> FactorWindow:
        """Return the window of the rank's columns in a shared factor.

        One interval of columns that starts at a granule is an offset into the whole factor, which all sites share.
        Other columns are packed as a separate factor, and so are the `rows` of a fully sharded term.
        """
        start = ranges[0][0]
        whole = len(ranges) == 1 and start % values_per_granule(self.dtype) == 0 and rows is None
        key = window.factor if whole else f"{window.factor}:{','.join(f'{first}-{last}' for first, last in ranges)}"
        key = key if rows is None else f"{key}:{rows.name}"
        packed = self.factors.get(key)
        if packed is None:
            factor = _rounded(load_factor(self.artifact, window.factor), window.factor, self.dtype)
            part = factor if whole else take(factor, 1, ranges)
            part = part if rows is None else take_rows(part, rows.order)
            packed = pack_factor(key, part, self.dtype, pin=self.pin)
            self.factors[key] = packed
        return window_of(packed, self.dtype, column=start if whole else 0)


def _check_term(name: str, record: SiteRecord, number: int, term: TermRecord) -> None:
    """Refuse terms that kernels don't compute (SC803).

    An owned term must have d and e folded into its factors; a shared term must be the only term of its site.
    """
    owned = term.a is None and term.b is None and not term.d and not term.e
    single = term.a is not None and term.b is not None and len(record.terms) == 1
    if owned or single:
        return
    owners = ["shared" if window else "owned" for window in (term.a, term.b)]
    live = "".join(f" and {slot}" for slot, present in (("d", term.d), ("e", term.e)) if present)
    fail(
        Code.SC803,
        where=f"{name}: {record.name}, term {number} of {len(record.terms)}",
        found=f"A {owners[0]}, B {owners[1]}{live}",
        expected="terms with owned factors, into which d and e are folded, or a single term with two shared factors",
        next="compile the adapter again with this version; if that changes nothing, serve it on another engine",
    )
