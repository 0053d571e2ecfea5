"""Bytes and predicted time of one decode step, computed from shapes alone.

A step reads or runs:

- once: the base's weights, and a factor that tenants share (VeRA's pair) at each site that uses it;
- once per tenant: every value that an adapter owns (A, B, s, d, e, rotation blocks);
- once per token: activations. At decode they mostly stay in a GPU's L2 cache, so adapter bytes leave them out, and
  reports show them in a column beside;
- at most one shrink, one expand and one rotation per fused site beyond the base's kernels. All tenants and methods
  share them.

Values have `width` bytes, without padding (except in `padded_bytes`) and without partly filled pages. The predicted
time is `bytes / bandwidth + launches * launch`, in seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum

from scute_compile.base.shapes import ModelShape
from scute_compile.ir.method import Method


class Kernel(StrEnum):
    """The kernels that adapters add at a fused site."""

    ROTATION = "rotation"
    SHRINK = "shrink"
    EXPAND = "expand"


_KERNELS: Mapping[Method, frozenset[Kernel]] = {
    Method.LORA: frozenset({Kernel.SHRINK, Kernel.EXPAND}),
    Method.DORA: frozenset({Kernel.SHRINK, Kernel.EXPAND}),
    Method.ADALORA: frozenset({Kernel.SHRINK, Kernel.EXPAND}),
    Method.VERA: frozenset({Kernel.SHRINK, Kernel.EXPAND}),
    Method.IA3: frozenset({Kernel.EXPAND}),
    Method.OFT: frozenset({Kernel.ROTATION, Kernel.EXPAND}),  # the expand adds the delta rows' products
}


def lora_bytes(shape: ModelShape, *, rank: int, tenants: int, width: int) -> int:
    """Return the bytes of LoRA adapters of one rank on every site. AdaLoRA takes as many, since its E is merged."""
    return tenants * rank * (shape.inputs + shape.outputs) * width


def padded_bytes(shape: ModelShape, *, ranks: Sequence[int], width: int) -> int:
    """Return the bytes of a pool of LoRA adapters that are padded to the largest rank."""
    return lora_bytes(shape, rank=max(ranks, default=0), tenants=len(ranks), width=width)


def scale_bytes(shape: ModelShape, *, tenants: int, width: int) -> int:
    """Return the bytes of one `s` per site and tenant, which DoRA has beyond LoRA."""
    return tenants * shape.outputs * width


def ia3_bytes(shape: ModelShape, *, tenants: int, width: int) -> int:
    """Return the bytes of IA3's vectors."""
    return tenants * shape.layers * sum(length for _, length in shape.ia3_vectors) * width


def vera_pair_bytes(shape: ModelShape, *, rank: int, width: int) -> int:
    """Return the bytes of VeRA's shared pair, read once at each site for all tenants."""
    return rank * (shape.inputs + shape.outputs) * width


def vera_vector_bytes(shape: ModelShape, *, rank: int, tenants: int, width: int) -> int:
    """Return the bytes of VeRA's `d` and `e`, one of each per tenant and site."""
    return tenants * (shape.layers * len(shape.projections) * rank + shape.outputs) * width


def oft_bytes(shape: ModelShape, *, block: int, tenants: int, width: int) -> int:
    """Return the bytes of `R - I` in blocks of `block` inputs."""
    return tenants * shape.inputs * block * width


def gemm_bytes(shape: ModelShape, *, width: int) -> int:
    """Return the bytes of the base's projections, read once per step."""
    return shape.weights * width


def launches(shape: ModelShape, methods: Iterable[Method]) -> int:
    """Return the kernels that a pool of these methods adds to a step. Tenants and methods share them."""
    chosen = frozenset(methods)
    scaled = {gemm for gemm, _ in shape.ia3_vectors}
    count = 0
    for gemm in shape.gemms:
        present = (method for method in chosen if method is not Method.IA3 or gemm in scaled)
        count += len(frozenset[Kernel]().union(*(_KERNELS[method] for method in present)))
    return shape.layers * count


def predicted_seconds(moved: int, *, bandwidth: float, launches: int = 0, launch: float = 0.0) -> float:
    """Return the predicted seconds.

    Args:
        moved: Bytes to move.
        bandwidth: Bytes per second.
        launches: The number of kernels.
        launch: Seconds per kernel.
    """
    return moved / bandwidth + launches * launch
