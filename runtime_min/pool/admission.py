"""What a resident pool refuses, and how it says so; every check comes before anything on the device is touched."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import NoReturn

import torch

from scute_compile.diagnostics import Code, Findings, fail
from scute_compile.runtime_min.pool.directory import PAGE_BYTES
from scute_compile.runtime_min.pool.leases import Resident
from scute_compile.runtime_min.pool.packed_adapter import PackedAdapter
from scute_compile.runtime_min.pool.pages import PageCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What adapters take at once, or what there is for them."""

    slots: int
    pages: int
    shared: int
    """Pages of shared factors."""
    pairs: int

    def fits(self, other: Room) -> bool:
        """Whether there is no more of anything than in `other`."""
        mine, there = astuple(self), astuple(other)
        return all(need <= have for need, have in zip(mine, there, strict=True))

    def __str__(self) -> str:
        own, shared = self.pages * PAGE_BYTES, self.shared * PAGE_BYTES
        return f"{self.slots} slots, {own} bytes, {shared} bytes of shared factors, {self.pairs} shared pairs"


def check_pool(*, num_pages: int, max_adapters: int, shared_pages: int, tp: int, rank: int) -> None:
    """Refuse a pool of no size, and a rank that there isn't (SC703)."""
    if num_pages < 1 or max_adapters < 1 or shared_pages < 0 or not 0 <= rank < tp:
        fail(
            Code.SC703,
            where="a pool",
            found=f"{num_pages} pages, {max_adapters} adapters, {shared_pages} shared pages, rank {rank} of {tp}",
            expected="at least 1 page and 1 slot, and ranks from 0 to below tp",
            next="choose other sizes",
        )


def check_known(names: Iterable[str], known: Mapping[str, object]) -> None:
    """Refuse names that the pool doesn't know, all of them together (SC802)."""
    findings = Findings()
    for name in names:
        if name not in known:
            some = ", ".join(list(known)[:8]) + (", ..." if len(known) > 8 else "")
            findings.error(
                Code.SC802,
                where=name,
                found="no adapter of that name",
                expected=f"one of the {len(known)} that were added: {some}" if known else "an adapter that was added",
                next="add it first, or correct the name",
            )
    findings.raise_if_errors()


def check_resident(name: str, resident: Container[str]) -> None:
    """Refuse an adapter that is in host memory alone (SC802)."""
    if name not in resident:
        fail(
            Code.SC802,
            where=name,
            found="an adapter in host memory alone",
            expected="one that is on the device",
            next="bring it in first: ensure, acquire or pin it",
        )


def check_new(name: str, known: Mapping[str, PackedAdapter]) -> None:
    """Refuse a second adapter of one name (SC806), and what is no name: None stands for the base (SC703)."""
    if not isinstance(name, str) or not name:
        fail(
            Code.SC703,
            where="an adapter's name",
            found=f"{name!r:.40}",
            expected="a text of at least one character",
            next="load the adapter under a name",
        )
    if name in known:
        fail(
            Code.SC806,
            where=name,
            found=f"an adapter of that name, {known[name].payload} bytes",
            expected="a new name",
            next="replace it, or remove it first",
        )


def check_layout(packed: PackedAdapter, *, sites: int, dtype: torch.dtype) -> None:
    """Refuse an packed that was laid out for another pool (SC801), or that has several shared pairs (SC803)."""
    if packed.dtype is not dtype or len(packed.records) != sites:
        fail(
            Code.SC801,
            where=packed.name,
            found=f"an packed in {packed.dtype} for {len(packed.records)} layers",
            expected=f"one in {dtype} for {sites} layers",
            next="lay it out for this pool",
        )
    pairs = {pair.shared for pair in packed.pairs}
    if len(pairs) > 1:
        fail(
            Code.SC803,
            where=packed.name,
            found=f"{len(pairs)} different pairs of shared factors",
            expected="one pair for all sites of an adapter",
            next="train the adapter with one pair, or serve it on another engine",
        )


def check_size(packed: PackedAdapter, *, pages: int, shared: int) -> None:
    """Refuse an adapter that needs more than all `pages`, or its factors more than all `shared` pages (SC805)."""
    factors = sum(factor.pages for factor in packed.factors)
    for needed, there, what in ((packed.pages, pages, ""), (factors, shared, " for shared factors")):
        if needed > there:
            fail(
                Code.SC805,
                where=packed.name,
                found=f"{needed * PAGE_BYTES} bytes needed{what}",
                expected=f"at most {there * PAGE_BYTES} bytes, all that the pool has{what}",
                next=f"make the pool with at least {needed * PAGE_BYTES} bytes{what}, {needed} pages",
            )


def check_batch(batch: Mapping[str, PackedAdapter], held: Sequence[PackedAdapter], room: Room) -> None:
    """Refuse adapters that don't fit at once beside those that are held (SC804; SC805 for one that stands alone)."""
    names, packed_adapters = list(batch), [*batch.values(), *held]
    factors = {factor.key: factor.pages for packed in packed_adapters for factor in packed.factors}
    needed = Room(
        slots=len(packed_adapters),
        pages=sum(packed.pages for packed in packed_adapters),
        shared=sum(factors.values()),
        pairs=len({pair.shared for packed in packed_adapters for pair in packed.pairs}),
    )
    if needed.fits(room):
        return
    fail(
        Code.SC804 if len(packed_adapters) > 1 else Code.SC805,
        where=", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else ""),
        found=f"{len(names)} adapters, and {len(held)} others that are held: {needed}",
        expected=f"at most {room}, what is lent not counted",
        next="split the batch, release or unpin others, or make the pool larger",
    )


def refuse_room(packed: PackedAdapter, *, needed: int, free: int) -> NoReturn:
    """Refuse an adapter that finds no room beside those that are held (SC804)."""
    fail(
        Code.SC804,
        where=packed.name,
        found=f"{needed * PAGE_BYTES} bytes and a slot needed, {free * PAGE_BYTES} bytes free",
        expected="room for one more adapter beside those that are held",
        next="release a step, unpin adapters, or make the pool larger",
    )


def refuse_eviction(name: str, resident: Resident) -> NoReturn:
    """Refuse to evict an adapter that is held (SC806)."""
    fail(
        Code.SC806,
        where=name,
        found=f"{resident.uses} running steps that read it" if resident.uses else "a pinned adapter",
        expected="an adapter that no step reads and nothing pins",
        next="release the step's lease first" if resident.uses else "unpin it first",
    )


def refuse_loan(count: int, counts: PageCounts, *, lendable: int, held: int) -> NoReturn:
    """Refuse a loan that is over the limit, or for which too few pages can be freed (SC805)."""
    fail(
        Code.SC805,
        where="a loan to the cache",
        found=f"{count} pages asked, {counts.lent} lent already, {counts.free} free, {held} of adapters that are held",
        expected=f"at most {lendable} of {counts.total} pages lent, and room beside the adapters that are held",
        next="raise the part of the pool that may be lent, or end requests first",
    )
