"""`verify` detects an artifact that lacks any slot."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.artifact_files import Tensors, rank_tensors, tampered
from tests.support.commands import compiled, scute, verified
from tests.support.dropped_slots import DROPPED

DETECTED = 1e-2
FLOAT32 = 5e-5
Folder = Callable[[str], Path]
Adapter = Callable[[str, str], Path]


@pytest.mark.parametrize("what", DROPPED)
def test_a_dropped_slot_is_detected(what: str, base_folder: Folder, adapter_folder: Adapter, tmp_path: Path) -> None:
    recipe, base, drop = DROPPED[what]
    where, adapter = base_folder(base), adapter_folder(recipe, base)
    artifact = compiled(adapter, where, tmp_path / "store", "--dtype", "float32")
    assert verified(artifact, adapter, where)["relative_error"] <= FLOAT32
    ran = scute("verify", tampered(artifact, "tampered", drop), "--adapter", adapter, "--base", where, "--json")
    assert ran.code == 1
    assert ran.answer["relative_error"] > DETECTED


def test_the_merged_e_of_adalora_is_detected_when_dropped(
    base_folder: Folder, adapter_folder: Adapter, tmp_path: Path
) -> None:
    """AdaLoRA's E is between two owned factors, so it is merged and has no tensor in the artifact."""
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
    assert verified(copy, adapter, where)["relative_error"] > DETECTED


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
"""Endings of the tensor names in an artifact: live slots and owned factors. Other slots are merged or shared."""


@pytest.mark.parametrize(("recipe", "base"), HELD)
def test_an_artifact_holds_only_live_slots_and_owned_factors(
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
