"""Small adapters with random tensors for tests of the resident pool, made without artifacts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache

import pytest
import torch

from scute_compile.diagnostics import ScuteError
from scute_compile.ir.program import RotationKind
from scute_compile.runtime_min.pool.directory import DirectoryEntry, Field
from scute_compile.runtime_min.pool.packed_adapter import (
    PackedAdapter,
    PackedFactor,
    PairWindow,
    SharedTerm,
    SiteContent,
    pack_adapter,
    pack_factor,
    window_of,
)
from scute_compile.runtime_min.pool.read_back import read_field
from scute_compile.runtime_min.pool.resident_pool import ResidentPool
from scute_compile.runtime_min.reference import SiteTensors, TermTensors

SITES = (
    DirectoryEntry(name="q", in_features=40, out_features=72, gemm="qv"),
    DirectoryEntry(name="v", in_features=40, out_features=20, gemm="qv"),
    DirectoryEntry(name="down", in_features=300, out_features=40, gemm="down"),
)
DTYPE = torch.bfloat16
PAIR_RANK = 24
METHODS = ("lora", "dora", "ia3", "oft", "vera")


def pool_of(
    num_pages: int, max_adapters: int, *, map_entries: int | None = None, shared_pages: int = 64
) -> ResidentPool:
    """Return an empty pool on the CPU for `SITES`."""
    return ResidentPool(
        SITES,
        num_pages=num_pages,
        max_adapters=max_adapters,
        dtype=DTYPE,
        device=torch.device("cpu"),
        map_entries=map_entries,
        shared_pages=shared_pages,
    )


def code_of(error: pytest.ExceptionInfo[ScuteError]) -> str:
    """Return the code of the first finding."""
    return error.value.diagnostics[0].code.name


def load(pool: ResidentPool, name: str, adapter: PackedAdapter) -> int:
    """Add an adapter, make it resident, and return its index."""
    pool.add(name, adapter)
    return pool.ensure([name])[name]


@contextmanager
def in_use(pool: ResidentPool, *names: str) -> Iterator[Mapping[str, int]]:
    """Hold the adapters of a step inside a `with` block, which gets their indices by name."""
    lease = pool.acquire(names)
    try:
        yield lease.indices
    finally:
        pool.release(lease)


def read_back(pool: ResidentPool, index: int, site: str, field: Field, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor of the adapter at an index, found through the device's tables."""
    pool.memory.wait()
    return read_field(pool.memory, index, [entry.key for entry in pool.sites].index(site), field, shape)


@cache
def shared_factors(seed: int) -> tuple[PackedFactor, PackedFactor]:
    """Return a shared pair as wide as the widest site."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(PAIR_RANK, max(site.in_features for site in SITES), generator=generator)
    b = torch.randn(PAIR_RANK, max(site.out_features for site in SITES), generator=generator)
    return pack_factor(f"a{seed}", a.to(DTYPE), DTYPE), pack_factor(f"b{seed}", b.to(DTYPE), DTYPE)


def content(method: str, site: DirectoryEntry, seed: int) -> SiteContent:
    """Return a site's tensors as the method leaves them after folding; LoRA has one term at `q` and two elsewhere."""
    generator = torch.Generator().manual_seed(seed + 1000 * len(site.name))

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(DTYPE)

    tensors, shared = SiteTensors(), None
    if method in ("lora", "dora"):
        rank = 1 + seed % 13
        terms = tuple(
            TermTensors(a=drawn(rank + number, site.in_features), b=drawn(rank + number, site.out_features))
            for number in range(1 if site.name == "q" else 2)
        )
        dora = method == "dora"
        tensors = SiteTensors(
            terms=terms,
            ds=drawn(site.out_features) if dora else None,
            b=drawn(site.out_features).float() / 3 if dora else None,
        )
    elif method == "ia3":
        diagonal = site.name == "down"
        tensors = SiteTensors(
            rotation=RotationKind.DIAGONAL if diagonal else None,
            delta=drawn(site.in_features) if diagonal else None,
            ds=None if diagonal else drawn(site.out_features),
        )
    elif method == "oft":
        blocks = 1 if site.name == "v" else site.in_features // 20
        tensors = SiteTensors(rotation=RotationKind.BLOCKS, delta=drawn(blocks, 20, 20))
    else:
        a, b = shared_factors(seed % 2)
        pair = PairWindow(a=window_of(a, DTYPE), b=window_of(b, DTYPE))
        shared = SharedTerm(pair=pair, d=drawn(PAIR_RANK), e=drawn(site.out_features))
    return SiteContent(in_features=site.in_features, out_features=site.out_features, tensors=tensors, shared=shared)


@cache
def contents(method: str, seed: int) -> Mapping[str, SiteContent]:
    """Return the contents of all sites but one, which the seed chooses."""
    return {site.name: content(method, site, seed) for number, site in enumerate(SITES) if number != seed % 4}


@cache
def packed(method: str, seed: int) -> PackedAdapter:
    """Return a packed adapter."""
    return pack_adapter(f"{method}-{seed}", SITES, contents(method, seed), DTYPE)


def tensors(method: str, seed: int) -> Mapping[tuple[str, Field], torch.Tensor]:
    """Return the tensors that must be read back, by site and field."""
    found: dict[tuple[str, Field], torch.Tensor] = {}
    for name, held in contents(method, seed).items():
        site = next(site for site in SITES if site.name == name)
        parts: dict[Field, torch.Tensor | None] = {
            Field.DS_OFFSET: held.tensors.ds,
            Field.SHIFT_OFFSET: held.tensors.b,
            Field.R_OFFSET: held.tensors.delta,
        }
        if held.tensors.terms:
            parts[Field.A_OFFSET] = torch.cat([term.a for term in held.tensors.terms])
            parts[Field.B_OFFSET] = torch.cat([term.b for term in held.tensors.terms])
        if held.shared is not None:
            a, b = (
                factor.buffer.view(DTYPE)[: PAIR_RANK * padded].view(PAIR_RANK, padded)
                for factor, padded in zip(shared_factors(seed % 2), (304, 72), strict=True)
            )
            parts |= {Field.A_OFFSET: a[:, : site.in_features], Field.B_OFFSET: b[:, : site.out_features]}
            parts |= {Field.D_OFFSET: held.shared.d, Field.E_OFFSET: held.shared.e}
        found |= {(name, field): tensor for field, tensor in parts.items() if tensor is not None}
    return found


def assert_reads_back(pool: ResidentPool, index: int, method: str, seed: int) -> None:
    """Assert that the device's tables lead to every tensor of the adapter, and to no other."""
    wanted = tensors(method, seed)
    for (site, field), tensor in wanted.items():
        assert torch.equal(read_back(pool, index, site, field, tuple(tensor.shape)), tensor), (
            method,
            seed,
            site,
            field,
        )
    present = _present(pool.memory.directory[index], [site.name for site in pool.sites])
    assert present == set(wanted)


def _present(rows: torch.Tensor, sites: Sequence[str]) -> set[tuple[str, Field]]:
    offsets = [field for field in Field if field.name.endswith("_OFFSET")]
    return {(name, field) for name, row in zip(sites, rows, strict=True) for field in offsets if row[field] >= 0}
