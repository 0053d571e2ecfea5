"""One bad adapter of a call has a finding, and the others are checked and compiled."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel

from scute_compile import pipeline
from scute_compile.diagnostics import Code
from scute_compile.driver import packing
from scute_compile.formats.fingerprint import content_hash
from scute_compile.formats.peft_folder import AdapterFolder, open_adapter
from scute_compile.passes.scan import scan
from tests.support.bases import load_base
from tests.support.commands import scute
from tests.support.damage import Saved

Folder = Callable[[str], Path]
Adapter = Callable[[str, str], Path]
Reshaped = Callable[[torch.Tensor], torch.Tensor]

PARAMETERS: dict[str, tuple[str, ...]] = {
    "dora": ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector"),
    "lora-bias-on-b": ("lora_A.weight", "lora_B.bias"),
    "adalora": ("lora_A", "lora_B", "lora_E"),
    "ia3": ("ia3_l",),
    "vera": ("vera_lambda_d", "vera_lambda_b", "vera_A", "vera_B"),
    "oft": ("oft_R.weight",),
}
"""The ends of the keys of each recipe's tensors."""
SHAPES: dict[str, Reshaped] = {
    "no dimension": lambda tensor: tensor.flatten()[0].reshape(()),
    "all in one dimension": lambda tensor: tensor.flatten() if tensor.ndim > 1 else tensor.flatten()[:-1],
    "a first dimension of 1": lambda tensor: tensor[None],
    "a last dimension of 1": lambda tensor: tensor[..., None],
    "a row in two": lambda tensor: tensor.reshape(2, -1) if tensor.ndim == 1 else tensor[..., None, None],
    "one entry more": lambda tensor: torch.cat((tensor, tensor[:1])),
    "an empty huge dimension": lambda tensor: torch.empty((0, *tensor.shape[1:], 2**20)),
}


def _reshaped(source: Path, folder: Path, end: str, change: Reshaped) -> str:
    """Write a copy with one tensor of another shape, and return its key."""
    saved = Saved.read(source)
    key = next(key for key in saved.tensors if key.endswith(f".{end}"))
    saved.tensors[key] = change(saved.tensors[key]).contiguous()
    saved.write(folder)
    return key


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("recipe", "end"), [(recipe, end) for recipe, ends in PARAMETERS.items() for end in ends])
def test_a_tensor_of_another_shape_is_refused_as_peft_refuses_it(
    recipe: str, end: str, shape: str, base_folder: Folder, adapter_folder: Adapter, tmp_path: Path
) -> None:
    base = base_folder("llama")
    _reshaped(adapter_folder(recipe, "llama"), tmp_path / "bad", end, SHAPES[shape])
    ran = scute("check", tmp_path / "bad", "--base", base, "--json")
    codes = {finding["code"] for finding in ran.adapter["findings"] if finding["severity"] == "error"}
    assert codes
    assert codes <= {"SC305", "SC307", "SC308", "SC310", "SC402"}
    try:
        PeftModel.from_pretrained(load_base("llama", base), str(tmp_path / "bad"))
    except Exception:  # noqa: BLE001 - PEFT refuses with several types
        return
    assert (recipe, shape) in LOADED_BY_PEFT


LOADED_BY_PEFT: set[tuple[str, str]] = set()


@pytest.mark.parametrize("command", ["check", "compile"])
def test_the_other_adapters_of_a_call_go_on(
    command: str, base_folder: Folder, adapter_folder: Adapter, tmp_path: Path
) -> None:
    good = [adapter_folder(recipe, "llama") for recipe in ("lora", "vera")]
    _reshaped(adapter_folder("dora", "llama"), tmp_path / "bad", "lora_magnitude_vector", SHAPES["no dimension"])
    store = ("-o", tmp_path / "store") if command == "compile" else ()
    ran = scute(command, good[0], tmp_path / "bad", good[1], "--base", base_folder("llama"), "--json", *store)
    assert ran.code == 1
    assert [item["outcome"] for item in ran.answer["adapters"]] == ["exact", "refused", "exact"]


def _codes_of(report: object) -> list[set[str]]:
    return [{finding.code.name for finding in item.findings} for item in report.adapters]  # type: ignore[attr-defined] # a report


def test_an_internal_fault_in_one_adapter_is_its_finding(
    base_folder: Folder, adapter_folder: Adapter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import scute_compile as api

    monkeypatch.delenv("SCUTE_DEBUG", raising=False)

    def failing(adapter: AdapterFolder, *, hash_files: bool = False) -> object:
        assert adapter.name != "vera", "a fault of the scan"
        return scan(adapter, hash_files=hash_files)

    monkeypatch.setattr(pipeline, "scan", failing)
    adapters = [adapter_folder(recipe, "llama") for recipe in ("lora", "vera", "dora")]
    base = base_folder("llama")
    assert _codes_of(api.check(adapters, base=base)) == [set(), {"SC705"}, set()]
    report = api.compile(adapters, base=base, store=tmp_path / "store")
    assert _codes_of(report) == [set(), {"SC705"}, set()]
    assert [bool(item.artifact) for item in report.adapters] == [True, False, True]
    monkeypatch.setenv("SCUTE_DEBUG", "1")
    with pytest.raises(AssertionError, match=re.escape("a fault of the scan")):
        api.check(adapters, base=base)


def test_a_fault_while_column_norms_are_read_is_that_adapters_finding(
    base_folder: Folder, adapter_folder: Adapter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    import scute_compile as api

    monkeypatch.delenv("SCUTE_DEBUG", raising=False)
    adapters = [adapter_folder("dora", "llama"), tmp_path / "gone", adapter_folder("lora", "llama")]
    shutil.copytree(adapters[0], adapters[1])

    def removing(checkpoint: object) -> object:
        (adapters[1] / "adapter_model.safetensors").unlink(missing_ok=True)
        return content_hash(checkpoint)  # type: ignore[arg-type] # passed through

    monkeypatch.setattr(packing, "content_hash", removing)
    report = api.compile(adapters, base=base_folder("llama"), store=tmp_path / "store")
    assert _codes_of(report) == [set(), {Code.SC109.name}, set()]
    assert open_adapter(str(adapters[0])).tensors
