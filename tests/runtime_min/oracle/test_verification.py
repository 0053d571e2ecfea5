"""Verification against PEFT: correct artifacts are exact, wrong artifacts are not, and refusals give their reason."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from scute_compile.formats.artifact import open_artifact
from scute_compile.formats.peft_folder import open_adapter
from scute_compile.runtime_min.oracle.peft_model import locate, why_not_comparable, wrap
from scute_compile.runtime_min.oracle.verification import Verification, verify
from tests.support.artifacts import Written, write_artifact
from tests.support.bases import load_base

Folder = Callable[[str], Path]
Adapter = Callable[[str, str], Path]
PREFIX = "base_model.model."
SCALE = 6 / 4
"""`lora_alpha` over the rank of the recipe `lora`."""
# Two float32 computations of log-probabilities near 10, for an adapter whose effect is near 1.
EXACT = 10 * 64 * 2.0**-24


@pytest.fixture
def base(base_folder: Folder) -> Path:
    return base_folder("llama")


@pytest.fixture
def adapter(adapter_folder: Adapter, tmp_path: Path) -> Path:
    return Path(shutil.copytree(adapter_folder("lora", "llama"), tmp_path / "adapter"))


def artifact_of(
    adapter: Path, store: Path, *, scale: float = SCALE, tp: int = 1, renamed: dict[str, str] | None = None
) -> Path:
    """Write the artifact of a LoRA adapter by hand, before a test changes the adapter's keys."""
    tensors = load_file(adapter / "adapter_model.safetensors")
    sites = []
    for key, a in tensors.items():
        if key.endswith(".lora_A.weight"):
            b = scale * tensors[key.replace("lora_A", "lora_B")].T
            name = key.removeprefix(PREFIX).removesuffix(".lora_A.weight")
            split = "row" if name.endswith(("o_proj", "down_proj")) else "column"
            slots = {"A0": a, "B0": b.contiguous()}
            sites.append(Written(name=name, in_features=a.shape[1], out_features=b.shape[1], slots=slots, split=split))
    return write_artifact(store, sites, tp=tp, change=lambda manifest: manifest.update(renamed=renamed or {}))


def edit(adapter: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    path = adapter / "adapter_model.safetensors"
    tensors = change(load_file(path))
    save_file(tensors, path, metadata={"format": "pt"})


def configure(adapter: Path, **fields: object) -> None:
    path = adapter / "adapter_config.json"
    config = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({key: value for key, value in config.items() if value != "absent"}))


def found(verification: Verification) -> str:
    assert not verification.comparable
    assert verification.relative_error is None
    assert verification.reason is not None
    assert verification.reason.code.name == "SC702"
    return verification.reason.found


@pytest.mark.parametrize("tp", [1, 2])
def test_a_correct_artifact_is_exact(adapter: Path, base: Path, tmp_path: Path, tp: int) -> None:
    result = verify(artifact_of(adapter, tmp_path / "store", tp=tp), adapter, base, tokens=32)
    assert (result.comparable, result.tokens, result.tp) == (True, 32, tp)
    assert result.relative_error is not None
    assert result.mean_abs_adapter_effect is not None
    assert result.relative_error < EXACT
    assert result.mean_abs_adapter_effect > 0.1
    assert json.loads(json.dumps(result.to_json()))["reason"] is None


def test_a_wrong_scale_has_a_large_error(adapter: Path, base: Path, tmp_path: Path) -> None:
    result = verify(artifact_of(adapter, tmp_path / "store", scale=1.01 * SCALE), adapter, base, tokens=32)
    assert result.relative_error is not None
    assert result.relative_error > 1e-3


def test_renamed_keys_are_loaded_into_the_same_modules(adapter: Path, base: Path, tmp_path: Path) -> None:
    names = {key.rsplit(".", 2)[0] for key in load_file(adapter / "adapter_model.safetensors") if "lora_A" in key}
    renamed = {f"_orig_mod.{name}": name.removeprefix(PREFIX) for name in names}
    artifact = artifact_of(adapter, tmp_path / "store", renamed=renamed)
    edit(adapter, lambda tensors: {f"_orig_mod.{key}": tensor for key, tensor in tensors.items()})
    result = verify(artifact, adapter, base, tokens=32)
    assert result.relative_error is not None
    assert result.relative_error < EXACT


def test_a_missing_key_is_named(adapter: Path, base: Path, tmp_path: Path) -> None:
    artifact = artifact_of(adapter, tmp_path / "store")
    key = f"{PREFIX}model.layers.1.self_attn.q_proj.lora_B.weight"
    edit(adapter, lambda tensors: {name: tensor for name, tensor in tensors.items() if name != key})
    assert "layers.1.self_attn.q_proj.lora_B" in found(verify(artifact, adapter, base, tokens=8))


def test_an_unread_key_is_named(adapter: Path, base: Path, tmp_path: Path) -> None:
    artifact = artifact_of(adapter, tmp_path / "store")
    edit(adapter, lambda tensors: {**tensors, f"{PREFIX}model.layers.7.x.lora_A.weight": torch.ones(4, 64)})
    assert "layers.7" in found(verify(artifact, adapter, base, tokens=8))


def test_a_shape_that_peft_refuses_is_not_comparable(adapter: Path, base: Path, tmp_path: Path) -> None:
    artifact = artifact_of(adapter, tmp_path / "store")
    configure(adapter, r=5)
    assert "can't load" in found(verify(artifact, adapter, base, tokens=8))


def reason_of(adapter: Path, tmp_path: Path) -> str:
    """Return why an adapter isn't comparable; the artifact only supplies a manifest."""
    site = Written(
        name="model.layers.0.self_attn.q_proj", in_features=64, out_features=64, slots={"ds": torch.zeros(64)}
    )
    manifest = open_artifact(write_artifact(tmp_path / "any", [site])).manifest
    names = [f"model.layers.{layer}.self_attn.{name}_proj" for layer in range(2) for name in "qkvo"]
    folder = open_adapter(str(adapter))
    reason = why_not_comparable(folder, locate(folder, manifest, {name: name for name in names}))
    shutil.rmtree(tmp_path / "any")
    return reason


def test_rotations_of_older_peft_versions_are_not_comparable(adapter_folder: Adapter, tmp_path: Path) -> None:
    adapter = Path(shutil.copytree(adapter_folder("oft", "llama"), tmp_path / "adapter"))
    assert not reason_of(adapter, tmp_path)
    configure(adapter, peft_version="absent")
    assert "PEFT 0.16 or 0.17" in reason_of(adapter, tmp_path)
    configure(adapter, use_cayley_neumann=False)
    assert not reason_of(adapter, tmp_path)
    edit(adapter, lambda tensors: {key.replace("oft_R.weight", "oft_r"): v for key, v in tensors.items()})
    assert "0.15 or older" in reason_of(adapter, tmp_path)


def test_bias_keys_of_older_peft_versions_are_not_comparable(adapter: Path, tmp_path: Path) -> None:
    configure(adapter, bias="lora_only")
    assert not reason_of(adapter, tmp_path)
    edit(adapter, lambda tensors: {**tensors, f"{PREFIX}model.layers.0.self_attn.q_proj.bias": torch.zeros(64)})
    assert "PEFT 0.6 and older" in reason_of(adapter, tmp_path)


def test_regenerated_projections_are_rounded_to_the_dtype_of_the_base(
    adapter_folder: Adapter, base: Path, tmp_path: Path
) -> None:
    folder = open_adapter(str(adapter_folder("vera-regenerated", "llama")))
    manifest = open_artifact(write_artifact(tmp_path, [])).manifest
    projections = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = load_base("llama", base)
        names = {name: name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
        wrapped = wrap(model, folder, locate(folder, manifest, names), dtype)
        layer = wrapped.get_submodule(f"{PREFIX}model.layers.0.self_attn.k_proj")
        projections[dtype] = layer.vera_A["default"]  # type: ignore[index] # a module attribute
    rounded = projections[torch.float32].to(torch.bfloat16).float()
    assert torch.equal(projections[torch.bfloat16], rounded)
    assert not torch.equal(projections[torch.bfloat16], projections[torch.float32])
