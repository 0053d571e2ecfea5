"""Each slot matters: an artifact that lacks one no longer equals PEFT, and `verify` says so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.artifact_files import Tensors, rank_tensors, tampered
from tests.commands import compiled, scute, verified

NOTICED = 1e-2
FLOAT32 = 5e-5
Folder = Callable[[str], Path]
Adapter = Callable[[str, str], Path]


def _every(ending: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    def apply(tensors: Tensors) -> None:
        for key in [key for key in tensors if key.endswith(ending)]:
            tensors[key] = change(tensors[key]).contiguous()

    return apply


def _first(ending: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    def apply(tensors: Tensors) -> None:
        key = min(key for key in tensors if key.endswith(ending))
        tensors[key] = change(tensors[key]).contiguous()

    return apply


def _without_merged_scale(tensors: Tensors) -> None:
    """Divide DoRA's `e` out of every B again: it equals `s`, which stands beside it."""
    for key in [key for key in tensors if key.endswith(".terms.0.B")]:
        tensors[key] = tensors[key] / (1 + tensors[key.replace(".terms.0.B", ".ds")])


zeroed = torch.zeros_like
identity = torch.ones_like

DROPPED: Mapping[str, tuple[str, str, Callable[[Tensors], None]]] = {
    "one A of LoRA": ("lora", "llama", _first(".terms.0.A", zeroed)),
    "one B of LoRA": ("lora", "llama", _first(".terms.0.B", zeroed)),
    "c of LoRA (6 / 4)": ("lora", "llama", _every(".terms.0.B", lambda value: value / 1.5)),
    "c of rsLoRA (3 / sqrt 9)": ("rslora", "llama", _every(".terms.0.B", lambda value: value / 3)),
    "b of a bias on B": ("lora-bias-on-b", "qwen2", _every(".b", zeroed)),
    "b of a trained bias": ("lora-base-bias", "qwen2", _every(".b", zeroed)),
    "s of DoRA": ("dora", "llama", _every(".ds", zeroed)),
    "e of DoRA, merged into B": ("dora", "llama", _without_merged_scale),
    "b of DoRA beside a bias": ("dora", "qwen2", _every(".b", zeroed)),
    "the term of DoRA": ("dora", "llama", _every(".terms.0.A", zeroed)),
    "s of IA3": ("ia3", "llama", _every("_proj.ds", zeroed)),
    "IA3's input vector, moved to up_proj": ("ia3", "llama", _every("up_proj.ds", zeroed)),
    "R of IA3 on o_proj": ("ia3-inputs", "llama", _every("o_proj.dR", zeroed)),
    "R of IA3 in a plain feed-forward part": ("ia3", "gpt2", _every("mlp.c_proj.dR", zeroed)),
    "s of IA3 on fused projections": ("ia3", "phi3", _every("qkv_proj.ds", zeroed)),
    "d of VeRA": ("vera", "llama", _every(".d", identity)),
    "e of VeRA": ("vera", "llama", _every(".e", identity)),
    "one e of VeRA": ("vera", "llama", _first(".e", zeroed)),
    "R of OFT": ("oft", "llama", _every(".dR", zeroed)),
    "one R of OFT": ("oft", "llama", _first(".dR", zeroed)),
    "R of OFT, turned the other way": ("oft-exact", "llama", _every(".dR", lambda value: value.transpose(-1, -2))),
}


@pytest.mark.parametrize("what", DROPPED)
def test_a_dropped_slot_is_noticed(what: str, base_folder: Folder, adapter_folder: Adapter, tmp_path: Path) -> None:
    recipe, base, drop = DROPPED[what]
    where, adapter = base_folder(base), adapter_folder(recipe, base)
    artifact = compiled(adapter, where, tmp_path / "store", "--dtype", "float32")
    assert verified(artifact, adapter, where)["relative_error"] <= FLOAT32
    ran = scute("verify", tampered(artifact, "tampered", drop), "--adapter", adapter, "--base", where, "--json")
    assert ran.code == 1
    assert ran.answer["relative_error"] > NOTICED


def test_the_trained_spectrum_of_adalora_is_merged_and_noticed_when_dropped(
    base_folder: Folder, adapter_folder: Adapter, tmp_path: Path
) -> None:
    """AdaLoRA's E stands between factors that the adapter owns: no tensor of its own is left, only its effect."""
    where, adapter = base_folder("llama"), adapter_folder("adalora", "llama")
    artifact = compiled(adapter, where, tmp_path / "store", "--dtype", "float32")
    assert not [key for key in rank_tensors(artifact)[0] if key.endswith((".d", ".e"))]
    assert verified(artifact, adapter, where)["relative_error"] <= FLOAT32
    raw = load_file(adapter / "adapter_model.safetensors")

    def drop(tensors: Tensors) -> None:
        for key in [key for key in tensors if key.endswith(".terms.0.A")]:
            stem = "base_model.model." + key.removesuffix(".terms.0.A") + ".lora_"
            tensors[key] = raw[stem + "A"].clone()
            tensors[key.removesuffix("A") + "B"] = (18 / (6 + 1e-5)) * raw[stem + "B"].T.contiguous()

    copy = tampered(artifact, "tampered", drop)
    assert verified(copy, adapter, where)["relative_error"] > NOTICED


TERM = (".terms.0.A", ".terms.0.B")
HELD: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("lora", "llama"): TERM,
    ("dora", "llama"): (*TERM, ".ds"),
    ("dora", "qwen2"): (*TERM, ".ds", ".b"),
    ("ia3", "llama"): (".ds",),
    ("ia3-inputs", "llama"): (".ds", ".dR"),
    ("vera", "llama"): (".terms.0.d", ".terms.0.e"),
    ("oft", "qwen2"): (".dR",),
    ("adalora", "llama"): TERM,
}
"""Endings of the tensors that an artifact holds: live slots and owned factors. The rest was merged or is shared."""


@pytest.mark.parametrize(("recipe", "base"), HELD)
def test_an_artifact_holds_live_slots_and_owned_factors_alone(
    recipe: str, base: str, base_folder: Folder, adapter_folder: Adapter, tmp_path: Path
) -> None:
    artifact = compiled(adapter_folder(recipe, base), base_folder(base), tmp_path / "store")
    keys = list(rank_tensors(artifact)[0])
    held = HELD[recipe, base]
    assert [key for key in keys if not key.endswith(held)] == []
    assert [ending for ending in held if not any(key.endswith(ending) for key in keys)] == []


def test_shifts_are_float32_whatever_the_dtype(base_folder: Folder, adapter_folder: Adapter, tmp_path: Path) -> None:
    adapter, where = adapter_folder("dora", "qwen2"), base_folder("qwen2")
    artifact = compiled(adapter, where, tmp_path / "store", "--dtype", "bfloat16")
    tensors = rank_tensors(artifact)[0]
    assert {value.dtype for key, value in tensors.items() if key.endswith(".b")} == {torch.float32}
    assert {value.dtype for key, value in tensors.items() if key.endswith(".A")} == {torch.bfloat16}
