"""Plain PEFT LoRA as vLLM has loaded it, laid out for the runtime's pool: the same factors, the scale folded once."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """One of the model's wrapped layers."""

    name: str
    """Its path in the model."""
    layer: AdaptedLinear
    sites: tuple[DirectoryEntry, ...]
    """One per slice."""


def pack_stock_lora(
    name: str,
    loras: Mapping[str, Any],
    modules: Sequence[Module],
    sites: Sequence[DirectoryEntry],
    dtype: torch.dtype,
    *,
    pin: bool,
) -> PackedAdapter:
    """Lay out vLLM's LoRA weights of the wrapped layers.

    Args:
        name: The adapter's, for messages.
        loras: vLLM's `LoRALayerWeights` by the name of a layer or of its slice; A `(r, in)`, B `(out, r)`, unscaled.
        modules: The wrapped layers.
        sites: All sites of the pool.
        dtype: The pool's.
        pin: Whether to lay them out in pinned memory.

    Raises:
        ScuteError: SC309 when a number of A isn't finite, SC320 when the scaled B leaves the pool's dtype (or has such
            numbers), SC402 when shapes don't fit the model.
    """
    contents: dict[str, SiteContent] = {}
    for module in modules:
        given = [loras.get(site.name) for site in module.sites]
        if not any(given):
            continue
        cut = _cut(module.layer, given)
        for site, one, (a, b) in zip(module.sites, given, cut, strict=True):
            if one is not None:
                _check_finite(a, f"{name}: {site.name}, A")
                term = TermTensors(a=a.to(dtype), b=_scaled(b, float(one.scaling), dtype, f"{name}: {site.name}"))
                contents[site.name] = SiteContent(
                    in_features=a.shape[1], out_features=b.shape[0], tensors=SiteTensors(terms=(term,))
                )
    return pack_adapter(name, sites, contents, dtype, pin=pin)


def _cut(layer: Any, given: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Return this rank's part of each slice's A and B, by vLLM's own rule."""
    a = [None if one is None else one.lora_a for one in given]
    b = [None if one is None else one.lora_b for one in given]
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
    """Return `B` rank-major with its scale, rounded once."""
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
