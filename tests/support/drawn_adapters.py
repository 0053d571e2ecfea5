"""Random adapters of real models' shapes, packed without an artifact, for benchmarks and tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from scute_compile.base.shapes import SHAPES, ModelShape
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
LLAMA_8B = SHAPES["llama-3.1-8b"]
SMOLLM2_135M = SHAPES["smollm2-135m"]
BLOCKS = {"qkv": "self_attn", "o": "self_attn", "gate_up": "mlp", "down": "mlp"}
"""Fused site -> the block of the layer that contains it."""


def sites_of(shape: ModelShape) -> tuple[DirectoryEntry, ...]:
    """Return the projections of every layer; those of a fused site are adjacent."""
    return tuple(
        DirectoryEntry(
            name=f"model.layers.{number}.{BLOCKS[projection.gemm]}.{projection.name}",
            in_features=projection.inputs,
            out_features=projection.outputs,
            gemm=f"{number}.{projection.gemm}",
        )
        for number in range(shape.layers)
        for projection in shape.projections
    )


def gemms_of(shape: ModelShape) -> tuple[tuple[str, int, tuple[int, ...]], ...]:
    """Return the name, the inputs and the outputs of the slices of each fused site of a layer.

    >>> gemms_of(LLAMA_8B)[0]
    ('qkv', 4096, (4096, 1024, 1024))
    """
    slices = {gemm: [each for each in shape.projections if each.gemm == gemm] for gemm in shape.gemms}
    return tuple((gemm, parts[0].inputs, tuple(part.outputs for part in parts)) for gemm, parts in slices.items())


def pair_of(
    sites: Sequence[DirectoryEntry], rank: int, dtype: torch.dtype, *, seed: int = 0, pin: bool = False
) -> PairWindow:
    """Return a VeRA pair as wide as the widest site; PEFT shares such a pair among all layers."""
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
    """Return a random adapter whose values are small enough that the model's activations stay finite.

    Args:
        method: One of `METHODS`.
        sites: The sites to adapt; IA3 adapts only k, v and up.
        dtype: Dtype of the values.
        rank: Rank of LoRA, DoRA and AdaLoRA.
        block: Width of OFT's blocks.
        pair: VeRA's pair.
        seed: Seed of the values; the adapter's name is `METHOD-SEED`.
        pin: Whether the bytes are in pinned memory.

    Raises:
        ValueError: VeRA without a pair.
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
