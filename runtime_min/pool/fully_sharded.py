"""Fully sharded terms of one rank's file in the pool's layout: rows of A and B in the order of the ranks' exchange.

Ranks with fewer rows than others hold rows of zeros as well, so that all ranks send equally many entries; see
`scute_compile.runtime_min.ranks.exchange`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from scute_compile.diagnostics import Code, fail
from scute_compile.formats.manifest import Manifest, SiteRecord, TermRecord
from scute_compile.ir.expressions import Interval
from scute_compile.runtime_min.pool.directory import DirectoryEntry
from scute_compile.runtime_min.pool.packed_adapter import SiteContent
from scute_compile.runtime_min.ranks.exchange import TermExchange, row_order, share_order, take_rows
from scute_compile.runtime_min.reference import SiteTensors, TermTensors


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOrder:
    """The rows of a shared factor that a rank holds, in order."""

    name: str
    """Identifies the order among all orders of one factor."""
    order: tuple[int, ...]
    """-1 stands for a row of zeros."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRows:
    """The rows of a shared pair that a rank holds for one layer."""

    a: RowOrder
    b: RowOrder

    def d_of(self, d_R: torch.Tensor) -> torch.Tensor:
        """Return d with a zero for each of A's rows of zeros, which come last."""
        return torch.nn.functional.pad(d_R, (0, len(self.a.order) - len(d_R)))


def check_exchanges(name: str, manifest: Manifest, rank: int, exchanges: Mapping[str, TermExchange | None]) -> None:
    """Refuse terms whose layout differs from that in which the ranks exchange intermediates.

    Args:
        name: The adapter's name.
        manifest: The artifact's manifest.
        rank: The rank whose part is read.
        exchanges: The exchange at each site; None where the ranks exchange nothing.

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
                found="a term that is " + _layout(term.rows is not None, part),
                expected=_layout(not whole, exchange.part if exchange else None) + ", as in this runtime",
                next="pass an exchange for every layer that the ranks share, as `ServedModel.for_rank` does",
            )


def _layout(sharded: bool, part: Interval | None) -> str:
    if part is not None:
        return f"fully sharded by outputs, {part[0]} to {part[1]} on this rank"
    return "fully sharded by rank" if sharded else "whole on every rank"


def owned_term(a: torch.Tensor, b: torch.Tensor, term: TermRecord, rank: int) -> TermTensors:
    """Return a term's owned factors in the pool's layout; unchanged unless the term's rank is divided among ranks.

    Args:
        a: The rank's rows of A `(rows, K)`.
        b: B `(R, N)`.
        term: The manifest record, with the rows of each rank.
        rank: The rank that holds `a`.
    """
    if term.rows is None:
        return TermTensors(a=a, b=b)
    order = share_order(term.rows, rank)
    padded = torch.nn.functional.pad(a, (0, 0, 0, len(order) - len(a)))
    return TermTensors(a=padded, b=take_rows(b, row_order(term.rows)))


def pair_rows(term: TermRecord, rank: int) -> PairRows | None:
    """Return the rows of a shared pair that a rank holds; None where the term isn't fully sharded.

    A pair has the same rank at all layers. At row-parallel layers, where every rank holds all rows, rows of zeros
    therefore round it up to a multiple of the number of ranks too.
    """
    if term.rows is not None:
        start, stop = term.rows[rank]
        return PairRows(
            a=RowOrder(name=f"rows {start}-{stop}", order=share_order(term.rows, rank)),
            b=RowOrder(name=f"interleaved over {len(term.rows)}", order=row_order(term.rows)),
        )
    if term.columns is None:
        return None
    ranks = len(term.columns)
    padding = -term.rank % ranks
    every = RowOrder(name=f"padded for {ranks}", order=(*range(term.rank), *(-1,) * padding))
    return PairRows(a=every, b=every)


def split_outputs(
    record: SiteRecord, rank: int, content: SiteContent, parts: Sequence[DirectoryEntry]
) -> dict[str, SiteContent]:
    """Return a row-parallel layer's tensors by directory entry: vectors are cut, terms belong to this rank's entry.

    Args:
        record: The manifest record of the layer.
        rank: This rank.
        content: The tensors of the whole layer.
        parts: The layer's directory entries.

    Raises:
        ScuteError: SC402 when no entry has the outputs of the rank's terms.
    """
    columns = next((term.columns[rank] for term in record.terms if term.columns is not None), None)
    if columns is not None and columns not in [entry.part for entry in parts]:
        fail(
            Code.SC402,
            where=record.name,
            found=f"terms for outputs {columns[0]} to {columns[1]} on rank {rank}",
            expected="the model's " + ", ".join(entry.key for entry in parts),
            next="load the model that the artifact was compiled for, or compile the adapter again",
        )
    contents: dict[str, SiteContent] = {}
    tensors = content.tensors
    for entry in parts:
        start, stop = entry.part or (0, entry.out_features)
        has_terms = entry.part == columns
        vectors = SiteTensors(
            rotation=tensors.rotation,
            delta=tensors.delta,
            ds=None if tensors.ds is None else tensors.ds[start:stop],
            b=None if tensors.b is None else tensors.b[start:stop],
            terms=tensors.terms if has_terms else (),
        )
        contents[entry.key] = replace(
            content, out_features=stop - start, tensors=vectors, shared=content.shared if has_terms else None
        )
    return contents
