"""Changes that drop one slot from an artifact, each of which must change the outputs of every runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from tests.support.artifact_files import Tensors


def every(ending: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    """Return a change of all tensors whose keys have this ending."""

    def apply(tensors: Tensors) -> None:
        for key in [key for key in tensors if key.endswith(ending)]:
            tensors[key] = change(tensors[key]).contiguous()

    return apply


def first(ending: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    """Return a change of the first tensor whose key has this ending."""

    def apply(tensors: Tensors) -> None:
        key = min(key for key in tensors if key.endswith(ending))
        tensors[key] = change(tensors[key]).contiguous()

    return apply


def without_merged_scale(tensors: Tensors) -> None:
    """Divide DoRA's `e`, which equals `s`, out of every B."""
    for key in [key for key in tensors if key.endswith(".terms.0.B")]:
        tensors[key] = tensors[key] / (1 + tensors[key.replace(".terms.0.B", ".ds")])


zeroed = torch.zeros_like
identity = torch.ones_like

DROPPED: Mapping[str, tuple[str, str, Callable[[Tensors], None]]] = {
    "one A of LoRA": ("lora", "llama", first(".terms.0.A", zeroed)),
    "one B of LoRA": ("lora", "llama", first(".terms.0.B", zeroed)),
    "c of LoRA (6 / 4)": ("lora", "llama", every(".terms.0.B", lambda value: value / 1.5)),
    "c of rsLoRA (3 / sqrt 9)": ("rslora", "llama", every(".terms.0.B", lambda value: value / 3)),
    "b of a bias on B": ("lora-bias-on-b", "qwen2", every(".b", zeroed)),
    "b of a trained bias": ("lora-base-bias", "qwen2", every(".b", zeroed)),
    "s of DoRA": ("dora", "llama", every(".ds", zeroed)),
    "e of DoRA, merged into B": ("dora", "llama", without_merged_scale),
    "b of DoRA beside a bias": ("dora", "qwen2", every(".b", zeroed)),
    "the term of DoRA": ("dora", "llama", every(".terms.0.A", zeroed)),
    "s of IA3": ("ia3", "llama", every("_proj.ds", zeroed)),
    "IA3's input vector, moved to up_proj": ("ia3", "llama", every("up_proj.ds", zeroed)),
    "R of IA3 on o_proj": ("ia3-inputs", "llama", every("o_proj.dR", zeroed)),
    "R of IA3 in a plain feed-forward part": ("ia3", "gpt2", every("mlp.c_proj.dR", zeroed)),
    "s of IA3 on fused projections": ("ia3", "phi3", every("qkv_proj.ds", zeroed)),
    "d of VeRA": ("vera", "llama", every(".d", identity)),
    "e of VeRA": ("vera", "llama", every(".e", identity)),
    "one e of VeRA": ("vera", "llama", first(".e", zeroed)),
    "R of OFT": ("oft", "llama", every(".dR", zeroed)),
    "one R of OFT": ("oft", "llama", first(".dR", zeroed)),
    "R of OFT, inverted": ("oft-exact", "llama", every(".dR", lambda value: value.transpose(-1, -2))),
}
"""By dropped slot: the recipe of the adapter, its base, and the change of a rank's tensors."""
