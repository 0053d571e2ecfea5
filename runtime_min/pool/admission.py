"""Checks of the resident pool's arguments and capacity; all of them run before anything on the device changes."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import NoReturn

import torch

from scute_compile.diagnostics import Code, Findings, fail
from scute_compile.runtime_min.pool.directory import PAGE_BYTES
from scute_compile.runtime_min.pool.packed_adapter import PackedAdapter


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What a set of adapters needs on the device, or what the device has."""

    adapters: int
    pages: int
    shared_pages: int
    """Pages of shared factors."""
    pairs: int

    def fits(self, capacity: Room) -> bool:
        """Return whether no number is larger than in `capacity`."""
        return all(need <= have for need, have in zip(astuple(self), astuple(capacity), strict=True))

    def __str__(self) -> str:
        pages, shared = self.pages * PAGE_BYTES, self.shared_pages * PAGE_BYTES
        return f"{self.adapters} adapters, {pages} bytes, {shared} bytes of shared factors, {self.pairs} shared pairs"


def check_pool(*, num_pages: int, max_adapters: int, shared_pages: int) -> None:
    """Refuse a pool without pages or adapters (SC703)."""
    if num_pages < 1 or max_adapters < 1 or shared_pages < 0:
        fail(
            Code.SC703,
            where="a pool",
            found=f"{num_pages} pages, {max_adapters} adapters, {shared_pages} shared pages",
            expected="at least 1 page, 1 adapter and 0 shared pages",
            next="choose other sizes",
        )


def check_known(names: Iterable[str], known: Mapping[str, object]) -> None:
    """Refuse unknown names, with one finding for each (SC802)."""
    findings = Findings()
    for name in names:
        if name not in known:
            listed = ", ".join(list(known)[:8]) + (", ..." if len(known) > 8 else "")
            findings.error(
                Code.SC802,
                where=name,
                found="no adapter of that name",
                expected=f"one of the {len(known)} that were added: {listed}" if known else "an adapter that was added",
                next="add it first, or correct the name",
            )
    findings.raise_if_errors()


def check_resident(name: str, resident: Container[str]) -> None:
    """Refuse an adapter that lies in host memory only (SC802)."""
    if name not in resident:
        fail(
            Code.SC802,
            where=name,
            found="an adapter in host memory only",
            expected="an adapter on the device",
            next="move it to the device first, with `ensure` or `acquire`",
        )


def check_new(name: str, known: Mapping[str, PackedAdapter]) -> None:
    """Refuse a name that is taken (SC806), or anything but a non-empty string, such as None for the base (SC703)."""
    if not isinstance(name, str) or not name:
        fail(
            Code.SC703,
            where="an adapter's name",
            found=f"{name!r:.40}",
            expected="a string of at least 1 character",
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
    """Refuse an adapter that was packed for another pool (SC801), or that has several shared pairs (SC803)."""
    if packed.dtype is not dtype or len(packed.rows) != sites:
        fail(
            Code.SC801,
            where=packed.name,
            found=f"an adapter packed in {packed.dtype} for {len(packed.rows)} layers",
            expected=f"an adapter packed in {dtype} for {sites} layers",
            next="pack it for this pool",
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
    """Refuse an adapter that is larger than the pool (SC805).

    Args:
        packed: The adapter.
        pages: All pages of the pool.
        shared: All pages for shared factors.
    """
    factors = sum(factor.pages for factor in packed.factors)
    for needed, total, what in ((packed.pages, pages, ""), (factors, shared, " for shared factors")):
        if needed > total:
            fail(
                Code.SC805,
                where=packed.name,
                found=f"{needed * PAGE_BYTES} bytes needed{what}",
                expected=f"at most {total * PAGE_BYTES} bytes, all that the pool has{what}",
                next=f"make the pool with at least {needed * PAGE_BYTES} bytes{what}, {needed} pages",
            )


def check_batch(batch: Mapping[str, PackedAdapter], held: Sequence[PackedAdapter], capacity: Room) -> None:
    """Refuse adapters that don't fit together beside the held ones (SC804; SC805 for a single adapter)."""
    names, adapters = list(batch), [*batch.values(), *held]
    factors = {factor.key: factor.pages for packed in adapters for factor in packed.factors}
    needed = Room(
        adapters=len(adapters),
        pages=sum(packed.pages for packed in adapters),
        shared_pages=sum(factors.values()),
        pairs=len({pair.shared for packed in adapters for pair in packed.pairs}),
    )
    if needed.fits(capacity):
        return
    fail(
        Code.SC804 if len(adapters) > 1 else Code.SC805,
        where=", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else ""),
        found=f"{len(names)} adapters, and {len(held)} others that are held: {needed}",
        expected=f"at most {capacity}",
        next="split the batch, release running steps, or make the pool larger",
    )


def refuse_room(packed: PackedAdapter, *, needed: int, free: int) -> NoReturn:
    """Refuse an adapter for which too little can be evicted (SC804); `needed` and `free` are pages."""
    fail(
        Code.SC804,
        where=packed.name,
        found=f"{needed * PAGE_BYTES} bytes and an adapter index needed, {free * PAGE_BYTES} bytes free",
        expected="room for one more adapter beside those that are held",
        next="release running steps, or make the pool larger",
    )


def refuse_eviction(name: str, uses: int) -> NoReturn:
    """Refuse to evict an adapter that `uses` running steps read (SC806)."""
    fail(
        Code.SC806,
        where=name,
        found=f"{uses} running steps that read it",
        expected="an adapter that no step reads",
        next="release the step's lease first",
    )
