"""Fully sharded terms of one rank's file as a pool lays them out: rows of A and B in the order of the ranks' exchange.

Ranks that hold fewer rows than others hold rows of zeros as well, so that all send alike; see
`scute_compile.runtime_min.ranks.exchange`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from scute_compile.diagnostics import Code, fail
from scute_compile.formats.manifest import Manifest, SiteRecord, TermRecord
from scute_compile.runtime_min.pool.directory import DirectoryEntry
from scute_compile.runtime_min.pool.packed_adapter import SiteContent
from scute_compile.runtime_min.ranks.exchange import TermExchange, row_order, share_order, take_rows
from scute_compile.runtime_min.reference import SiteTensors, TermTensors


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOrder:
    """Which rows of a shared factor a rank holds, in which order."""

    name: str
    """The same for the same order of the same factor."""
    order: tuple[int, ...]
    """-1: a row of zeros."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRows:
    """The rows of a shared pair that a rank holds for one layer."""

    a: RowOrder
    b: RowOrder

    def d_of(self, d_R: torch.Tensor) -> torch.Tensor:
        """Return d with zeros beside A's rows of zeros, which follow the others."""
        return torch.nn.functional.pad(d_R, (0, len(self.a.order) - len(d_R)))


def check_met(name: str, manifest: Manifest, rank: int, exchanges: Mapping[str, TermExchange | None]) -> None:
    """Refuse terms that the ranks wouldn't complete as they are divided, but serve in part.

    Args:
        name: The adapter's id.
        manifest: Its artifact's.
        rank: Whose part is read.
        exchanges: What the ranks do, by the artifact's name of a layer.

    Raises:
        ScuteError: SC812.
    """
    for record in manifest.sites if manifest.tp > 1 else ():
        exchange = exchanges.get(record.name)
        whole = exchange is None
        for term in record.terms:
            part = None if term.columns is None else term.columns[rank]
            if whole == (term.rows is None and part is None) and (exchange is None or exchange.part == part):
                continue
            fail(
                Code.SC812,
                where=f"{name}: {record.name}",
                found="a term that is " + _division(term.rows is not None, part),
                expected=_division(not whole, exchange.part if exchange else None)
                + ", as the ranks of this runtime do",
                next="let the ranks exchange at every layer that they share, as `ServedModel.for_rank` does",
            )


def _division(divided: bool, part: tuple[int, int] | None) -> str:
    if part is not None:
        return f"divided by outputs, {part[0]} to {part[1]} here"
    return "divided by rank" if divided else "whole on every rank"


def own_term(a: torch.Tensor, b: torch.Tensor, term: TermRecord, rank: int) -> TermTensors:
    """Return an adapter's own factors as the pool holds them; unchanged where the term's rank isn't divided.

    Args:
        a: The rank's rows of A `(rows, K)`.
        b: B `(R, N)`.
        term: Which rows each rank holds.
        rank: Whose part `a` is.
    """
    if term.rows is None:
        return TermTensors(a=a, b=b)
    order = share_order(term.rows, rank)
    padded = torch.nn.functional.pad(a, (0, 0, 0, len(order) - len(a)))
    return TermTensors(a=padded, b=take_rows(b, row_order(term.rows)))


def shared_rows(term: TermRecord, rank: int) -> PairRows | None:
    """Return which rows of a shared pair the rank holds; None where the term isn't fully sharded.

    A pair has one rank at all layers: also where the rank is whole there are rows of zeros, if it doesn't divide.
    """
    if term.rows is not None:
        start, stop = term.rows[rank]
        return PairRows(
            a=RowOrder(name=f"rows {start}-{stop}", order=share_order(term.rows, rank)),
            b=RowOrder(name=f"{len(term.rows)} in turn", order=row_order(term.rows)),
        )
    if term.columns is None:
        return None
    ranks = len(term.columns)
    padding = -term.rank % ranks
    every = RowOrder(name=f"for {ranks}", order=(*range(term.rank), *(-1,) * padding))
    return PairRows(a=every, b=every)


def in_parts(
    record: SiteRecord, rank: int, content: SiteContent, parts: Sequence[DirectoryEntry]
) -> dict[str, SiteContent]:
    """Return a row-parallel layer's tensors by the parts that the pool sees: vectors cut, terms at the rank's own.

    Raises:
        ScuteError: SC402 when the terms are for outputs that are no part.
    """
    own = next((term.columns[rank] for term in record.terms if term.columns is not None), None)
    if own is not None and own not in [slot.part for slot in parts]:
        fail(
            Code.SC402,
            where=record.name,
            found=f"terms whose outputs {own[0]} to {own[1]} are those of rank {rank}",
            expected="the model's " + ", ".join(slot.key for slot in parts),
            next="load the model that the artifact was compiled for, or compile the adapter again",
        )
    found: dict[str, SiteContent] = {}
    tensors = content.tensors
    for slot in parts:
        start, stop = slot.part or (0, slot.out_features)
        mine = slot.part == own
        vectors = SiteTensors(
            rotation=tensors.rotation,
            delta=tensors.delta,
            ds=None if tensors.ds is None else tensors.ds[start:stop],
            b=None if tensors.b is None else tensors.b[start:stop],
            terms=tensors.terms if mine else (),
        )
        found[slot.key] = replace(
            content, out_features=stop - start, tensors=vectors, shared=content.shared if mine else None
        )
    return found
