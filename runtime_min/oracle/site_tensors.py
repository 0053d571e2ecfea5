"""From an artifact's files to the tensors of its sites, rank by rank; shared factors are loaded once."""

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
"""Shared factors by hash, for all artifacts of a process."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankSite:
    """What one rank holds of a site, and what of the base's weight it multiplies."""

    tensors: SiteTensors
    """From this rank's own file; `b` is None on ranks that don't add it."""
    inputs: Ranges
    outputs: Ranges
    adds_bias: bool
    """Whether this rank adds the base's bias."""
    sharded: tuple[FullyShardedTerm, ...] = ()
    """The low-rank terms when they are fully sharded; `tensors` has none then."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadedSite:
    """A site of an artifact, with the tensors of all its ranks."""

    record: SiteRecord
    ranks: tuple[RankSite, ...]


def load_sites(artifact: Artifact, factors: Factors, device: torch.device) -> Mapping[str, LoadedSite]:
    """Load every site of an artifact, each rank's part from that rank's file alone; all ranks in this process.

    Args:
        artifact: An opened artifact.
        factors: Shared factors that are loaded already; those that this artifact needs are added.
        device: Where the tensors go.

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
    # what is replicated is computed whole, by each rank for itself
    adds = record.split is not Split.ROW or record.shift_rank == rank
    terms = _terms(record, rank, tensors, factors)
    sharded = any(term.rows is not None or term.columns is not None for term in record.terms)
    return RankSite(
        tensors=SiteTensors(
            rotation=record.rotation.kind if record.rotation else None,
            delta=tensors.get(tensor_name(record.name, "dR")),
            ds=tensors.get(tensor_name(record.name, "ds")),
            b=tensors.get(tensor_name(record.name, "b")) if adds else None,
            terms=() if sharded else tuple(terms),
        ),
        inputs=record.inputs[rank],
        outputs=record.outputs[rank],
        adds_bias=adds,
        sharded=tuple(map(partial(_sharded, rank), terms, record.terms)) if sharded else (),
    )


def _sharded(rank: int, tensors: TermTensors, term: TermRecord) -> FullyShardedTerm:
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
    """Check that ranks which hold the same outputs (key and value heads) hold equal tensors for them."""
    held: dict[tuple[int, int], tuple[int, Mapping[str, torch.Tensor]]] = {}
    divided = {
        tensor_name(record.name, slot, number)
        for number, term in enumerate(record.terms)
        if term.rows is not None
        for slot in ("A", "d")
    }
    for rank, tensors in enumerate(files):
        parts = {
            key: value
            for key, value in tensors.items()
            if key.startswith(f"{record.name}.") and key not in divided  # ranks hold different rows of these
        }
        position = 0
        for start, stop in record.outputs[rank]:
            cut = {key: _outputs_of(key, value, position, stop - start) for key, value in parts.items()}
            first, other = held.setdefault((start, stop), (rank, cut))
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
    """Return a tensor's entries for a run of the rank's outputs; whole where it doesn't run along outputs."""
    return tensor.narrow(-1, start, length) if key.rsplit(".", 1)[1] in ("ds", "b", "B", "e") else tensor
