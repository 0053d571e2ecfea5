"""Lightly trained DoRA adapters, whose `s` differs from 1 by less than bfloat16 resolves, keep their effect."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import LoraLayer

from tests.support.artifact_files import Tensors, manifest_of, tampered
from tests.support.bases import ATTENTION, GATED, load_base
from tests.support.commands import compiled, verified

ROUNDING = 2.0**-8
"""The largest relative error of one value in bfloat16."""


def _light_dora(base: Path, folder: Path, *, spread: float, factors: float) -> Path:
    """Save a DoRA adapter with `s = 1 + spread * normal` and factors that bfloat16 holds exactly."""
    generator = torch.Generator().manual_seed(17)
    config = LoraConfig(r=4, lora_alpha=8, use_dora=True, target_modules=[*ATTENTION, *GATED], task_type="CAUSAL_LM")
    model = get_peft_model(load_base("llama", base), config)
    for module in model.modules():
        if not isinstance(module, LoraLayer):
            continue
        a, b = module.lora_A["default"].weight, module.lora_B["default"].weight
        a.data = (0.1 * torch.randn(a.shape, generator=generator)).bfloat16().float()
        b.data = (factors * torch.randn(b.shape, generator=generator)).bfloat16().float()
        weight = module.get_base_layer().weight
        norms = (weight + module.scaling["default"] * b.data @ a.data).norm(dim=1)
        magnitude = module.lora_magnitude_vector["default"].weight
        magnitude.data = norms * (1 + spread * torch.randn(norms.shape, generator=generator))
    model.save_pretrained(folder)
    return folder


def _scale_in_bfloat16(tensors: Tensors) -> None:
    """Round `ds` as if the artifact held `s` and not `s - 1`."""
    for key in [key for key in tensors if key.endswith(".ds")]:
        tensors[key] = ((1 + tensors[key].float()).bfloat16().float() - 1).to(tensors[key].dtype)


@pytest.fixture
def light(base_folder: Callable[[str], Path], tmp_path: Path) -> tuple[Path, Path]:
    """Return the base, and an adapter of which `s` contributes a few per cent of the effect."""
    base = base_folder("llama")
    return base, _light_dora(base, tmp_path / "adapter", spread=2e-4, factors=0.002)


def test_a_lightly_trained_dora_keeps_its_effect_in_bfloat16(light: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = light
    artifact = compiled(adapter, base, tmp_path / "store", "--tp", 2, "--dtype", "bfloat16")
    assert manifest_of(artifact)["dtype"] == "bfloat16"
    figures = verified(artifact, adapter, base)
    assert figures["mean_abs_adapter_effect"] > 1e-3
    assert figures["relative_error"] <= 1e-3


def test_the_same_check_fails_when_the_scale_itself_is_rounded(light: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = light
    artifact = compiled(adapter, base, tmp_path / "store", "--dtype", "bfloat16")
    copy = tampered(artifact, "scale-in-bfloat16", _scale_in_bfloat16)
    assert verified(copy, adapter, base)["relative_error"] > 3e-2


def test_a_scale_alone_loses_no_more_than_one_rounding(base_folder: Callable[[str], Path], tmp_path: Path) -> None:
    base = base_folder("llama")
    adapter = _light_dora(base, tmp_path / "adapter", spread=1e-3, factors=0.0)
    artifact = compiled(adapter, base, tmp_path / "store", "--dtype", "bfloat16")
    assert verified(artifact, adapter, base)["relative_error"] <= ROUNDING
    copy = tampered(artifact, "scale-in-bfloat16", _scale_in_bfloat16)
    assert verified(copy, adapter, base)["relative_error"] > 0.5
