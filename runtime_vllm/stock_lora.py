"""Packs stock PEFT LoRA, as vLLM loaded it, for the runtime's pool; its scale is folded into B once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from scute_compile.diagnostics import Code, fail
from scute_compile.runtime_min.pool.directory import DirectoryEntry
from scute_compile.runtime_min.pool.packed_adapter import PackedAdapter, SiteContent, pack_adapter
from scute_compile.runtime_min.reference import SiteTensors, TermTensors
from scute_compile.runtime_vllm.layers import AdaptedLinear
from scute_compile.runtime_vllm.vllm_types import LayerWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class WrappedLayer:
    """A layer of the model that the plugin wraps."""

    name: str
    """Its path in the model."""
    layer: AdaptedLinear
    sites: tuple[DirectoryEntry, ...]
    """The directory entry of each slice."""


def pack_stock_lora(
    name: str,
    loras: Mapping[str, LayerWeights],
    modules: Sequence[WrappedLayer],
    sites: Sequence[DirectoryEntry],
    dtype: torch.dtype,
    *,
    pin: bool,
) -> PackedAdapter:
    """Pack vLLM's LoRA weights of the wrapped layers, this rank's part of each.

    Args:
        name: The adapter's name, for messages.
        loras: By the name of a layer or of its slice; A `(r, in)`, B `(out, r)`, unscaled.
        modules: The wrapped layers.
        sites: All sites of the pool.
        dtype: The pool's dtype.
        pin: Whether to use pinned memory.

    Raises:
        ScuteError: SC309 when A has a number that isn't finite, SC320 when the scaled B overflows the pool's dtype or
            isn't finite, SC402 when shapes don't fit the model.
    """
    contents: dict[str, SiteContent] = {}
    for module in modules:
        weights = [loras.get(site.name) for site in module.sites]
        if not any(weights):
            continue
        parts = _cut(module.layer, weights)
        for site, weight, (a, b) in zip(module.sites, weights, parts, strict=True):
            if weight is not None:
                _check_finite(a, f"{name}: {site.name}, A")
                scaled = _scaled(b, float(weight.scaling), dtype, f"{name}: {site.name}")
                contents[site.name] = SiteContent(
                    in_features=a.shape[1],
                    out_features=b.shape[0],
                    tensors=SiteTensors(terms=(TermTensors(a=a.to(dtype), b=scaled),)),
                )
    return pack_adapter(name, sites, contents, dtype, pin=pin)


def _cut(layer: Any, weights: Sequence[LayerWeights | None]) -> list[tuple[Any, Any]]:
    """Return this rank's part of each slice's A and B, by vLLM's own rule; None for a slice without weights."""
    a = [None if weight is None else weight.lora_a for weight in weights]
    b = [None if weight is None else weight.lora_b for weight in weights]
    if layer.tp_size > 1:
        if layer.n_slices == 1:
            a, b = [layer.slice_lora_a(a[0])], [layer.slice_lora_b(b[0])]
        else:
            a, b = layer.slice_lora_a(a), layer.slice_lora_b(b)
    return list(zip(a, b, strict=True))


def _check_finite(tensor: torch.Tensor, where: str) -> None:
    if tensor.numel() and not all(bool(bound.isfinite()) for bound in torch.aminmax(tensor)):
        fail(
            Code.SC309,
            where=where,
            found="NaN or infinity",
            expected="finite numbers",
            next="save the adapter again from a run that converged",
        )


def _scaled(b: torch.Tensor, scaling: float, dtype: torch.dtype, where: str) -> torch.Tensor:
    """Return `scaling * B`, transposed to `(r, out)` and rounded once."""
    exact = b.double() * scaling
    rounded = exact.to(dtype)
    if not bool(rounded.isfinite().all()):
        fail(
            Code.SC320,
            where=where,
            found=f"values up to {float(exact.abs().max()):.3g} in B with its scale",
            expected=f"finite values in {str(dtype).removeprefix('torch.')}",
            next="serve in bfloat16 or float32",
        )
    return rounded.T.contiguous()
