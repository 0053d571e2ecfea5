"""Published configurations, from PEFT's first schema to the newest, are computed as PEFT computes them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.support.bases import BASES, load_base
from tests.support.commands import compiled, scute, verified

FOLDER = Path(__file__).parent / "real_configs"
SERVED: Mapping[str, str] = {
    "first-schema-with-enable-lora": "llama",
    "first-schema-naming-another-familys-module": "llama",
    "second-schema-fused-attention": "gpt_neox",
    "layers-pattern-era-plain-mlp": "opt",
    "megatron-era-neox": "gpt_neox",
    "megatron-era-all-projections-rank-64": "llama",
    "megatron-era-fused-projections": "phi3",
    "megatron-era-regex-in-a-wrapper": "vision-language",
    "corda-era-speech-with-auto-mapping": "llama",
    "qalora-era-vision-targets": "mistral",
    "target-parameters-era-qwen": "qwen3",
    "version-0.18-hybrid-targets-for-seq2seq": "llama",
    "version-0.18-without-a-task": "opt",
    "version-0.19-rank-64": "qwen2",
    "version-0.19-towers-excluded-by-regex": "gemma2",
    "version-0.19-unicode-path": "llama",
    "a-development-build": "llama",
    "version-0.21-every-field": "llama",
}
"""Configuration -> the base whose modules it targets."""
OTHER_MODELS = ("layers-pattern-era-packed-attention", "megatron-era-encoder-decoder-rank-1000")
FOREIGN = ("another-program-robot-policy", "another-program-bottleneck-adapters", "another-program-apple-lora")
UNREADABLE = {"SC203", "SC205", "SC108"}

Folder = Callable[[str], Path]


def _matches(targets: str | list[str], name: str) -> bool:
    """Return whether PEFT targets a module: the expression matches the whole path, or a name matches its end."""
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None
    return any(name == target or name.endswith(f".{target}") for target in targets)


def _with_tensors(config_name: str, base: str, base_folder: Path, folder: Path) -> Path:
    """Write an adapter for this configuration: LoRA factors on every module of the base that it targets."""
    file = FOLDER / f"{config_name}.json"
    config = json.loads(file.read_text())
    generator = torch.Generator().manual_seed(2)
    tensors: dict[str, torch.Tensor] = {}
    rank = config.get("r", 8)
    for name, module in load_base(base, base_folder).named_modules():
        if not isinstance(module, torch.nn.Linear) or not _matches(config.get("target_modules", ["q_proj"]), name):
            continue
        stem = f"base_model.model.{name}.lora_"
        tensors[stem + "A.weight"] = 0.1 * torch.randn(rank, module.in_features, generator=generator)
        tensors[stem + "B.weight"] = 0.1 * torch.randn(module.out_features, rank, generator=generator)
    if not tensors:
        stem = f"base_model.model.encoder.block.0.{config['target_modules'][0]}.lora_"
        tensors = {stem + "A.weight": torch.ones(rank, 64), stem + "B.weight": torch.ones(64, rank)}
    folder.mkdir()
    shutil.copy(file, folder / "adapter_config.json")
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


def test_every_configuration_is_tested() -> None:
    assert {file.stem for file in FOLDER.glob("*.json")} == {*SERVED, *OTHER_MODELS, *FOREIGN}
    assert set(SERVED.values()) <= set(BASES)


@pytest.mark.parametrize("name", SERVED)
def test_a_configuration_of_any_age_is_computed_as_peft_computes_it(
    name: str, base_folder: Folder, tmp_path: Path
) -> None:
    base = base_folder(SERVED[name])
    adapter = _with_tensors(name, SERVED[name], base, tmp_path / "adapter")
    figures = verified(compiled(adapter, base, tmp_path / "store"), adapter, base)
    assert figures["mean_abs_adapter_effect"] >= 0.1
    assert figures["relative_error"] <= 5e-5


@pytest.mark.parametrize("name", OTHER_MODELS)
def test_a_configuration_for_another_model_is_read_and_its_keys_are_refused(
    name: str, base_folder: Folder, tmp_path: Path
) -> None:
    base = base_folder("llama")
    adapter = _with_tensors(name, "llama", base, tmp_path / "adapter")
    ran = scute("check", adapter, "--base", base, "--json")
    codes = {finding["code"] for finding in ran.adapter["findings"]}
    assert ran.code == 1
    assert "SC302" in codes
    assert not codes & UNREADABLE


@pytest.mark.parametrize("name", FOREIGN)
def test_another_programs_settings_are_refused_as_such(name: str, base_folder: Folder, tmp_path: Path) -> None:
    base = base_folder("llama")
    adapter = _with_tensors(name, "llama", base, tmp_path / "adapter")
    ran = scute("check", adapter, "--base", base, "--json")
    assert ran.code == 1
    assert {finding["code"] for finding in ran.adapter["findings"]} == {"SC201"}
