"""Loading the tensors of an artifact's sites, for all of its ranks; shared factors are loaded once."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from scute_compile.diagnostics import Code, fail
from scute_compile.formats.artifact import Artifact
from scute_compile.formats.artifact_tensors import load_factor, load_rank
from scute_compile.formats.layout import tensor_name, term_columns, term_rows
from scute_compile.formats.manifest import SharedWindow, SiteRecord, TermRecord
from scute_compile.ir.expressions import Ranges
from scute_compile.ir.linear import Split
from scute_compile.runtime_min.oracle.fully_sharded import FullyShardedTerm
from scute_compile.runtime_min.reference import SiteTensors, TermTensors, take

Factors = MutableMapping[str, torch.Tensor]
"""Shared factors by hash, of any number of artifacts."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankSite:
    """One rank's tensors of a site, and its part of the base's weight."""

    tensors: SiteTensors
    """From this rank's file; `b` is None on ranks that don't add it."""
    inputs: Ranges
    outputs: Ranges
    adds_bias: bool
    """Whether this rank adds the base's bias."""
    fully_sharded: tuple[FullyShardedTerm, ...] = ()
    """The low-rank terms where they are fully sharded; `tensors.terms` is empty then."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadedSite:
    """A site of an artifact with the tensors of all ranks."""

    record: SiteRecord
    ranks: tuple[RankSite, ...]


def load_sites(artifact: Artifact, factors: Factors, device: torch.device) -> Mapping[str, LoadedSite]:
    """Load every site of an artifact, each rank's part from that rank's file.

    Args:
        artifact: An opened artifact.
        factors: Loaded shared factors; those that this artifact adds are stored in it.
        device: The device of the tensors.

    Raises:
        ScuteError: SC605 when two ranks hold the same outputs with different tensors.
    """
    _load_factors(artifact, factors, device)
    files = [
        {name: tensor.to(device) for name, tensor in load_rank(artifact, rank).items()}
        for rank in range(artifact.manifest.tp)
    ]
    loaded = {}
    for record in artifact.manifest.sites:
        ranks = tuple(_rank_site(record, rank, tensors, factors) for rank, tensors in enumerate(files))
        if record.split is not Split.ROW:
            _check_copies(record, files)
        loaded[record.name] = LoadedSite(record=record, ranks=ranks)
    return loaded


def _load_factors(artifact: Artifact, factors: Factors, device: torch.device) -> None:
    for factor in artifact.manifest.factors:
        if factor.hash not in factors:
            factors[factor.hash] = load_factor(artifact, factor.hash).to(device)


def _rank_site(
    record: SiteRecord, rank: int, tensors: Mapping[str, torch.Tensor], factors: Mapping[str, torch.Tensor]
) -> RankSite:
    # every rank computes a replicated site whole
    adds = record.split is not Split.ROW or record.shift_rank == rank
    terms = _terms(record, rank, tensors, factors)
    fully_sharded = any(term.rows is not None or term.columns is not None for term in record.terms)
    return RankSite(
        tensors=SiteTensors(
            rotation=record.rotation.kind if record.rotation else None,
            delta=tensors.get(tensor_name(record.name, "dR")),
            ds=tensors.get(tensor_name(record.name, "ds")),
            b=tensors.get(tensor_name(record.name, "b")) if adds else None,
            terms=() if fully_sharded else tuple(terms),
        ),
        inputs=record.inputs[rank],
        outputs=record.outputs[rank],
        adds_bias=adds,
        fully_sharded=tuple(map(partial(_fully_sharded, rank), terms, record.terms)) if fully_sharded else (),
    )


def _fully_sharded(rank: int, tensors: TermTensors, term: TermRecord) -> FullyShardedTerm:
    return FullyShardedTerm(
        tensors=tensors,
        rows=None if term.rows is None else term.rows[rank],
        columns=None if term.columns is None else term.columns[rank],
    )


def _terms(
    record: SiteRecord, rank: int, tensors: Mapping[str, torch.Tensor], factors: Mapping[str, torch.Tensor]
) -> list[TermTensors]:
    def factor(slot: str, window: SharedWindow | None, rows: Ranges, ranges: Ranges) -> torch.Tensor:
        if window is None:
            return tensors[tensor_name(record.name, slot, number)]
        return take(take(factors[window.factor][:, : window.features], 0, rows), 1, ranges)

    terms = []
    for number, term in enumerate(record.terms):
        terms.append(
            TermTensors(
                a=factor("A", term.a, term_rows(term, rank), record.inputs[rank]),
                b=factor("B", term.b, ((0, term.rank),), term_columns(record, term, rank)),
                d=tensors.get(tensor_name(record.name, "d", number)),
                e=tensors.get(tensor_name(record.name, "e", number)),
            )
        )
    return terms


def _check_copies(record: SiteRecord, files: Sequence[Mapping[str, torch.Tensor]]) -> None:
    """Check that ranks with the same outputs (of key and value heads) hold equal tensors for them."""
    first_copies: dict[tuple[int, int], tuple[int, Mapping[str, torch.Tensor]]] = {}
    sharded_by_rank = {
        tensor_name(record.name, slot, number)
        for number, term in enumerate(record.terms)
        if term.rows is not None
        for slot in ("A", "d")
    }
    for rank, tensors in enumerate(files):
        parts = {
            key: value
            for key, value in tensors.items()
            if key.startswith(f"{record.name}.") and key not in sharded_by_rank
        }
        position = 0
        for start, stop in record.outputs[rank]:
            cut = {key: _outputs_of(key, value, position, stop - start) for key, value in parts.items()}
            first, other = first_copies.setdefault((start, stop), (rank, cut))
            for key, value in cut.items():
                if not torch.equal(value, other[key]):
                    fail(
                        Code.SC605,
                        where=key,
                        found=f"different values on ranks {first} and {rank} for outputs {start} to {stop}",
                        expected="equal copies on ranks that hold the same outputs",
                        next="compile the adapter again",
                    )
            position += stop - start


def _outputs_of(key: str, tensor: torch.Tensor, start: int, length: int) -> torch.Tensor:
    """Return a tensor's entries for an interval of the rank's outputs; the whole tensor if it has no output axis."""
    return tensor.narrow(-1, start, length) if key.rsplit(".", 1)[1] in ("ds", "b", "B", "e") else tensor
