"""Inputs that look valid but are not: they are refused, noted, or compiled to what was trained."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import AdaLoraConfig, LoraConfig, VeraConfig
from safetensors.torch import load_file, save_file

from tests.support.adapters import write_config
from tests.support.artifact_files import rank_file
from tests.support.commands import Ran, compiled, scute, verified
from tests.support.damage import ROOT, Edit, Saved, changed, configured, renamed, without

Folder = Callable[[str], Path]
Adapter = Callable[[str, str], Path]
Q = ROOT + "model.layers.0.self_attn.q_proj."
FLOAT32 = 5e-5
"""Relative error of float32 artifacts on these models: a few rounding errors per layer, far below any fault."""


def _edited(source: Path, folder: Path, *edits: Edit) -> Path:
    saved = Saved.read(source)
    for edit in edits:
        edit(saved)
    saved.write(folder)
    return folder


def _found(ran: Ran) -> dict[str, str]:
    """Return severity by code."""
    return {str(finding["code"]): str(finding["severity"]) for finding in ran.adapter["findings"]}


def _text(ran: Ran) -> str:
    return " ".join(str(part) for finding in ran.adapter["findings"] for part in finding.values())


def _second_copy_without_the_prefix(saved: Saved) -> None:
    for letter in "AB":
        bare = Q.removeprefix(ROOT) + f"lora_{letter}.weight"
        saved.tensors[bare] = 2 * saved.tensors[f"{Q}lora_{letter}.weight"]


def _named_by(name: str, pattern: str = "lora_[AB]") -> Edit:
    return renamed(rf"({pattern})\.weight$", rf"\1.{name}.weight")


def _with_lm_head_among_targets(saved: Saved) -> None:
    saved.config["target_modules"] = [*saved.config["target_modules"], "lm_head"]  # type: ignore[misc] # JSON


def _with_a_target_of_another_model(saved: Saved) -> None:
    saved.config["target_modules"] = [*saved.config["target_modules"], "wqkv"]  # type: ignore[misc] # JSON


def _with_a_larger_vocabulary(saved: Saved) -> None:
    saved.tensors[ROOT + "model.embed_tokens.weight"] = torch.ones(132, 64)


def _with_a_head_in_eight_bits(saved: Saved) -> None:
    saved.tensors[ROOT + "lm_head.weight"] = torch.ones(128, 64, dtype=torch.int8)


REFUSED: dict[str, tuple[str, tuple[Edit, ...], str, str]] = {
    "one module twice, with and without the prefix": ("lora", (_second_copy_without_the_prefix,), "SC306", "q_proj"),
    "the prefix on some of the keys": ("lora", (renamed(rf"^{ROOT}(model\.layers\.0)", r"\1"),), "SC303", ROOT),
    "tensors of two adapters": ("lora", (_named_by("other", r"layers\.0.*lora_[AB]"),), "SC301", "`other`"),
    "the head among the targets, without tensors": ("lora", (_with_lm_head_among_targets,), "SC319", "lm_head"),
    "biases on B that the configuration denies": (
        "lora-bias-on-b",
        (configured(lora_bias=False),),
        "SC310",
        "lora_bias",
    ),
    "no biases on B where the configuration has them": ("lora", (configured(lora_bias=True),), "SC305", "lora_B.bias"),
    "a bias that PEFT doesn't know": ("lora", (configured(bias="weird"),), "SC205", "bias"),
    "a layers_pattern that is no pattern": (
        "lora",
        (configured(layers_to_transform=[0, 1], layers_pattern="("),),
        "SC205",
        "layers_pattern",
    ),
    "embeddings of a resized vocabulary": ("lora", (_with_a_larger_vocabulary,), "SC312", "resized"),
    "a copy of the head in eight bits": ("lora", (_with_a_head_in_eight_bits,), "SC403", "I8"),
    "AdaLoRA without its initial rank": ("adalora", (without("init_r"),), "SC310", "init_r"),
    "AdaLoRA with an initial rank of zero": ("adalora", (configured(init_r=0),), "SC310", "init_r"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_contradictions_that_peft_loads_silently_are_refused(
    what: str, base_folder: Folder, adapter_folder: Adapter, tmp_path: Path
) -> None:
    recipe, edits, code, word = REFUSED[what]
    folder = _edited(adapter_folder(recipe, "llama"), tmp_path / "adapter", *edits)
    ran = scute("check", folder, "--base", base_folder("llama"), "--json")
    assert ran.code == 1
    assert _found(ran)[code] == "error"
    assert word in _text(ran)


NOTED: dict[str, tuple[tuple[Edit, ...], str, str]] = {
    "keys without PEFT's prefix": ((renamed(f"^{ROOT}", ""),), "SC304", ROOT),
    "keys that carry another adapter's name": ((_named_by("my_run"),), "SC318", "my_run"),
    "a target that the base lacks": ((_with_a_target_of_another_model,), "SC208", "wqkv"),
    "no targets": ((configured(target_modules=None),), "SC315", "target_modules"),
    "no rank": ((configured(r=None),), "SC315", "rank"),
}


@pytest.mark.parametrize("what", NOTED)
def test_what_peft_reads_differently_is_noted_and_compiled_as_trained(
    what: str, pair: Callable[[str, str], tuple[Path, Path]], tmp_path: Path
) -> None:
    edits, code, word = NOTED[what]
    original, base = pair("lora", "llama")
    folder = _edited(original, tmp_path / "edited" / original.name, *edits)
    ran = scute("check", folder, "--base", base, "--json")
    assert ran.code == 0
    assert _found(ran)[code] == "note"
    assert word in _text(ran)
    first, second = (compiled(source, base, tmp_path / name) for source, name in ((original, "a"), (folder, "b")))
    assert rank_file(first).read_bytes() == rank_file(second).read_bytes()


def test_the_default_adapter_name_in_keys_is_not_noted(
    base_folder: Folder, adapter_folder: Adapter, tmp_path: Path
) -> None:
    folder = _edited(adapter_folder("lora", "llama"), tmp_path / "adapter", _named_by("default"))
    ran = scute("check", folder, "--base", base_folder("llama"), "--json")
    assert (ran.code, ran.adapter["findings"]) == (0, [])


def test_several_alpha_patterns_on_one_module_are_noted(base_folder: Folder, tmp_path: Path) -> None:
    base = base_folder("llama")
    config = LoraConfig(
        r=4, lora_alpha=6, target_modules=["q_proj", "v_proj"], alpha_pattern={"self_attn.q_proj": 9, "q_proj": 33}
    )
    write_config(config, "llama", base, tmp_path / "adapter")
    ran = scute("check", tmp_path / "adapter", "--base", base, "--json")
    assert _found(ran) == {"SC213": "note"}
    assert {"(33),", "(9)"} <= set(_text(ran).split())
    # PEFT takes the first pattern of the saved file when it loads the adapter.
    artifact = compiled(tmp_path / "adapter", base, tmp_path / "store")
    assert verified(artifact, tmp_path / "adapter", base)["relative_error"] < FLOAT32


def test_foreign_keys_are_not_reported_missing_too(
    base_folder: Folder, adapter_folder: Adapter, tmp_path: Path
) -> None:
    edit = renamed(r"lora_A\.weight$", "lora_down.weight"), renamed(r"lora_B\.weight$", "lora_up.weight")
    folder = _edited(adapter_folder("lora", "llama"), tmp_path / "adapter", *edit)
    assert set(_found(scute("check", folder, "--base", base_folder("llama"), "--json"))) == {"SC311"}


def _base_with(change: Callable[[torch.Tensor], torch.Tensor], source: Path, folder: Path) -> Path:
    """Copy a base and change the first layer's q_proj."""
    shutil.copytree(source, folder)
    for shard in folder.glob("*.safetensors"):
        tensors = load_file(shard)
        key = "model.layers.0.self_attn.q_proj.weight"
        if key in tensors:
            tensors[key] = change(tensors[key]).contiguous()
            save_file(tensors, shard, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_base_weights_in_a_quantized_dtype_are_refused_before_packing(
    dtype: torch.dtype, base_folder: Folder, adapter_folder: Adapter, tmp_path: Path
) -> None:
    base = _base_with(lambda weight: weight.to(dtype), base_folder("llama"), tmp_path / "base")
    ran = scute("check", adapter_folder("dora", "llama"), "--base", base, "--json")
    assert ran.code == 1
    assert _found(ran) == {"SC404": "error"}
    # LoRA needs no base weights.
    assert scute("check", adapter_folder("lora", "llama"), "--base", base, "--json").code == 0


def _first_row_zero(tensor: torch.Tensor) -> torch.Tensor:
    changed_tensor = tensor.clone()
    changed_tensor[0] = 0
    return changed_tensor


def test_a_column_norm_of_zero_is_named_without_warnings(
    base_folder: Folder, adapter_folder: Adapter, tmp_path: Path
) -> None:
    base = _base_with(_first_row_zero, base_folder("llama"), tmp_path / "base")
    edit = changed(r"layers\.0\.self_attn\.q_proj\.lora_B", _first_row_zero)
    folder = _edited(adapter_folder("dora", "llama"), tmp_path / "adapter", edit)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ran = scute("compile", folder, "--base", base, "-o", tmp_path / "store", "--json")
    assert ran.code == 1
    assert _found(ran) == {"SC309": "error"}
    assert "layers.0.self_attn.q_proj" in _text(ran)
    assert not (tmp_path / "store").exists()


def test_a_value_beyond_float32_is_refused_without_the_hint_of_another_dtype(
    base_folder: Folder, adapter_folder: Adapter, tmp_path: Path
) -> None:
    edit = changed(r"layers\.0\.self_attn\.q_proj\.lora_A", lambda tensor: tensor.double() * 1e300)
    folder = _edited(adapter_folder("lora", "llama"), tmp_path / "adapter", edit)
    ran = scute("compile", folder, "--base", base_folder("llama"), "-o", tmp_path / "store", "--json")
    assert _found(ran) == {"SC320": "error"}
    assert "--dtype" not in _text(ran)


VERIFIED: dict[str, tuple[str, Callable[[], object], tuple[Edit, ...]]] = {
    "biases of layers without factors": ("qwen2", lambda: LoraConfig(r=4, bias="all", target_modules=["q_proj"]), ()),
    "projections that the configuration ignores": (
        "llama",
        lambda: VeraConfig(r=8, target_modules=["q_proj", "down_proj"]),
        (configured(save_projection=False),),
    ),
}


@pytest.mark.parametrize("what", VERIFIED)
def test_unusual_adapters_that_peft_reads_as_trained_equal_peft(what: str, base_folder: Folder, tmp_path: Path) -> None:
    name, config, edits = VERIFIED[what]
    base = base_folder(name)
    write_config(config(), name, base, tmp_path / "saved")
    folder = _edited(tmp_path / "saved", tmp_path / "adapter", *edits)
    answer = verified(compiled(folder, base, tmp_path / "store"), folder, base)
    assert answer["comparable"]
    assert answer["relative_error"] < FLOAT32


def test_a_method_in_lower_case_is_not_comparable_with_peft(
    base_folder: Folder, adapter_folder: Adapter, tmp_path: Path
) -> None:
    base = base_folder("llama")
    folder = _edited(adapter_folder("lora", "llama"), tmp_path / "adapter", configured(peft_type="lora"))
    answer = verified(compiled(folder, base, tmp_path / "store"), folder, base)
    assert not answer["comparable"]


def test_an_adapter_that_adalora_pruned_keeps_its_scale(base_folder: Folder, tmp_path: Path) -> None:
    base = base_folder("llama")
    config = AdaLoraConfig(init_r=6, target_r=3, lora_alpha=18, total_step=10, target_modules=["q_proj"])
    write_config(config, "llama", base, tmp_path / "saved")

    def pruned(saved: Saved) -> None:
        saved.config["rank_pattern"] = {
            f"model.layers.{layer}.self_attn.q_proj.lora_E": [True] * 2 + [False] * 4 for layer in range(2)
        }

    cut: tuple[Edit, ...] = (
        pruned,
        changed("lora_[AE]", lambda tensor: tensor[:2]),
        changed("lora_B", lambda tensor: tensor[:, :2]),
    )
    folder = _edited(tmp_path / "saved", tmp_path / "adapter", *cut)
    assert verified(compiled(folder, base, tmp_path / "store"), folder, base)["relative_error"] < FLOAT32
    lost = _edited(folder, tmp_path / "lost", without("rank_pattern"))
    assert _found(scute("check", lost, "--base", base, "--json")) == {"SC310": "error"}


def test_an_empty_path_is_no_adapter(base_folder: Folder) -> None:
    ran = scute("check", "", "--base", base_folder("llama"), "--json")
    assert set(_found(ran)) == {"SC101"}
