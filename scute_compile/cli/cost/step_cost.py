"""Bytes and predicted time of one decode step: arithmetic on shapes, nothing fitted.

What is counted, and how often in a step:

- once: the base's weights; a factor that tenants share (VeRA's pair), once per site that reads it;
- once per tenant: every value that an adapter owns (A, B, s, d, e, rotation blocks), read once and never written;
- once per token: activations, apart from the above (`activation_bytes`). At decode they mostly stay in a GPU's
  second-level cache, so the tables of adapter bytes leave them out and `cost_report` shows them beside;
- launches beyond the base's own, per fused site, whatever number of tenants or methods share them: one shrink, one
  expand, one rotation.

Values of `width` bytes each, no padding unless the function says so, no page waste. Predicted time is
`bytes / bandwidth + launches * launch`, in seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum

from scute_compile.base.shapes import ModelShape
from scute_compile.ir.method import Method


class Kernel(StrEnum):
    """The launches that adapters may add at a fused site."""

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
    """Return the bytes of `tenants` adapters of one rank on every site; AdaLoRA's E is merged, so it counts alike."""
    return tenants * rank * (shape.inputs + shape.outputs) * width


def padded_bytes(shape: ModelShape, *, ranks: Sequence[int], width: int) -> int:
    """Return the bytes that a pool of LoRA adapters moves when each is padded to the largest rank."""
    return lora_bytes(shape, rank=max(ranks, default=0), tenants=len(ranks), width=width)


def scale_bytes(shape: ModelShape, *, tenants: int, width: int) -> int:
    """Return the bytes of one `s` per site and tenant: what DoRA adds to LoRA."""
    return tenants * shape.outputs * width


def ia3_bytes(shape: ModelShape, *, tenants: int, width: int) -> int:
    """Return the bytes of IA3's vectors."""
    return tenants * shape.layers * sum(length for _, length in shape.ia3_vectors) * width


def vera_pair_bytes(shape: ModelShape, *, rank: int, width: int) -> int:
    """Return the bytes of VeRA's shared pair, read at each site once for all tenants."""
    return rank * (shape.inputs + shape.outputs) * width


def vera_vector_bytes(shape: ModelShape, *, rank: int, tenants: int, width: int) -> int:
    """Return the bytes of the tenants' own `d` and `e`."""
    return tenants * (shape.layers * len(shape.projections) * rank + shape.outputs) * width


def oft_bytes(shape: ModelShape, *, block: int, tenants: int, width: int) -> int:
    """Return the bytes of `R - I` in blocks of `block` inputs."""
    return tenants * shape.inputs * block * width


def gemm_bytes(shape: ModelShape, *, width: int) -> int:
    """Return the bytes of the base's projections, read once per step."""
    return shape.weights * width


def launches(shape: ModelShape, methods: Iterable[Method]) -> int:
    """Return the launches that a pool of these methods adds to a step; tenants and methods share them."""
    chosen = frozenset(methods)
    scaled = {gemm for gemm, _ in shape.ia3_vectors}
    count = 0
    for gemm in shape.gemms:
        present = (method for method in chosen if method is not Method.IA3 or gemm in scaled)
        count += len(frozenset[Kernel]().union(*(_KERNELS[method] for method in present)))
    return shape.layers * count


def predicted_seconds(moved: int, *, bandwidth: float, launches: int = 0, launch: float = 0.0) -> float:
    """Return the predicted time of moving `moved` bytes with `launches` extra kernels of `launch` seconds each."""
    return moved / bandwidth + launches * launch
