"""Adapters of real models' shapes, drawn at random with no artifact behind them: for benchmarks and tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from scute_compile.ir.program import RotationKind
from scute_compile.runtime_min.pool.directory import DirectoryEntry
from scute_compile.runtime_min.pool.packed_adapter import (
    PackedAdapter,
    PairWindow,
    SharedTerm,
    SiteContent,
    pack_adapter,
    pack_factor,
    window_of,
)
from scute_compile.runtime_min.reference import SiteTensors, TermTensors

Draw = Callable[..., torch.Tensor]
METHODS = ("lora", "dora", "ia3", "oft", "vera", "adalora")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a gated transformer."""

    hidden: int
    keys: int
    """Outputs of `k_proj` and of `v_proj`."""
    inner: int
    layers: int


LLAMA_8B = Shape(hidden=4096, keys=1024, inner=14336, layers=32)
SMOLLM2_135M = Shape(hidden=576, keys=192, inner=1536, layers=30)


def sites_of(shape: Shape) -> tuple[DirectoryEntry, ...]:
    """Return the seven projections of every layer, fused ones side by side."""
    h, k, i = shape.hidden, shape.keys, shape.inner
    layer = (
        ("self_attn.q_proj", h, h, "qkv"),
        ("self_attn.k_proj", h, k, "qkv"),
        ("self_attn.v_proj", h, k, "qkv"),
        ("self_attn.o_proj", h, h, "o"),
        ("mlp.gate_proj", h, i, "gate_up"),
        ("mlp.up_proj", h, i, "gate_up"),
        ("mlp.down_proj", i, h, "down"),
    )
    return tuple(
        DirectoryEntry(
            name=f"model.layers.{number}.{name}", in_features=inputs, out_features=outputs, gemm=f"{number}.{gemm}"
        )
        for number in range(shape.layers)
        for name, inputs, outputs, gemm in layer
    )


def pair_of(
    sites: Sequence[DirectoryEntry], rank: int, dtype: torch.dtype, *, seed: int = 0, pin: bool = False
) -> PairWindow:
    """Return one VeRA pair as wide as the widest site, as PEFT shares it among all layers."""
    generator = torch.Generator().manual_seed(seed)
    widths = max(site.in_features for site in sites), max(site.out_features for site in sites)
    a, b = (
        pack_factor(f"{name}{seed}", torch.randn(rank, width, generator=generator).to(dtype), dtype, pin=pin)
        for name, width in zip("ab", widths, strict=True)
    )
    return PairWindow(a=window_of(a, dtype), b=window_of(b, dtype))


def tenant(
    method: str,
    sites: Sequence[DirectoryEntry],
    dtype: torch.dtype,
    *,
    rank: int = 16,
    block: int = 32,
    pair: PairWindow | None = None,
    seed: int = 0,
    pin: bool = False,
) -> PackedAdapter:
    """Return an adapter of `METHODS` on all sites; IA3 as PEFT's defaults place it, on k, v and the MLP.

    Values are small enough that a model with it stays finite. VeRA needs a `pair`.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, scale: float = 0.01) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(dtype)

    contents = {}
    for site in sites:
        if method == "ia3" and not site.name.endswith(("k_proj", "v_proj", "up_proj")):
            continue
        tensors, shared = _slots(method, site, draw, rank=rank, block=block), None
        if method == "vera":
            if pair is None:
                raise ValueError("VeRA needs a pair")
            shared = SharedTerm(pair=pair, d=draw(pair.rank), e=draw(site.out_features))
        contents[site.name] = SiteContent(
            in_features=site.in_features, out_features=site.out_features, tensors=tensors, shared=shared
        )
    return pack_adapter(f"{method}-{seed}", sites, contents, dtype, pin=pin)


def _slots(method: str, site: DirectoryEntry, draw: Draw, *, rank: int, block: int) -> SiteTensors:
    if method in ("lora", "dora", "adalora"):
        term = TermTensors(a=draw(rank, site.in_features), b=draw(rank, site.out_features))
        return SiteTensors(terms=(term,), ds=draw(site.out_features) if method == "dora" else None)
    if method == "ia3":
        return SiteTensors(ds=draw(site.out_features))
    if method == "oft":
        return SiteTensors(rotation=RotationKind.BLOCKS, delta=draw(site.in_features // block, block, block))
    return SiteTensors()
