"""A base that is only a config.json gets the structure of its checkpoint."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from safetensors import safe_open

from scute_compile.base.config_only import structure_tensors
from scute_compile.base.structure import build_structure
from scute_compile.cli.app import main
from scute_compile.diagnostics import Code, ScuteError
from scute_compile.ir.expressions import Ref, Source
from tests.support.artifact_files import rank_file


def headers(folder: Path) -> Mapping[str, Ref]:
    """Return names and shapes of all tensors in a folder."""
    found: dict[str, Ref] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "np") as file:
            for key in file.keys():  # noqa: SIM118 - not a mapping
                part = file.get_slice(key)
                found[key] = Ref(Source.BASE, key, tuple(part.get_shape()), part.get_dtype())
    return found


@pytest.mark.parametrize(
    "name", ["llama", "llama-tied", "llama-bf16", "gpt2", "phi3", "gpt_neox", "mixtral", "vision-language"]
)
def test_structure_from_the_configuration_alone_equals_that_of_the_checkpoint(
    name: str, base_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = base_folder(name)
    shutil.copy(folder / "config.json", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    planned = structure_tensors(tmp_path / "config.json")
    assert dict(planned) == dict(headers(folder))
    assert build_structure(config, planned) == build_structure(config, headers(folder))


def test_an_architecture_that_transformers_does_not_know_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "not_a_model"}))
    with pytest.raises(ScuteError, match="not_a_model") as caught:
        structure_tensors(tmp_path / "config.json")
    assert [d.code for d in caught.value.diagnostics] == [Code.SC405]


def test_a_configuration_that_cannot_be_built_is_a_diagnostic(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": "wide"}))
    with pytest.raises(ScuteError) as caught:
        structure_tensors(tmp_path / "config.json")
    assert [d.code for d in caught.value.diagnostics] == [Code.SC405]


def test_a_missing_torch_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # an import of it fails, as that of an absent package does
    with pytest.raises(ScuteError, match="no package `torch`") as caught:
        structure_tensors(tmp_path / "config.json")
    assert [d.code for d in caught.value.diagnostics] == [Code.SC701]


@pytest.mark.parametrize("recipe", ["lora", "adalora", "ia3", "oft", "vera", "vera-regenerated"])
def test_an_adapter_that_needs_no_weights_compiles_against_a_config_alone(
    recipe: str, base_folder: Callable[[str], Path], adapter_folder: Callable[[str, str], Path], tmp_path: Path
) -> None:
    (tmp_path / "config").mkdir()
    shutil.copy(base_folder("llama") / "config.json", tmp_path / "config")
    adapter = adapter_folder(recipe, "llama")
    for base, store in ((tmp_path / "config", "alone"), (base_folder("llama"), "whole")):
        assert main(["compile", str(adapter), "--base", str(base), "--tp", "2", "-o", str(tmp_path / store)]) == 0
    for rank in range(2):
        files = [rank_file(tmp_path / store / adapter.name, rank) for store in ("alone", "whole")]
        assert files[0].read_bytes() == files[1].read_bytes()
    recorded = json.loads((tmp_path / "alone" / adapter.name / "manifest.json").read_text())["base"]
    whole = json.loads((tmp_path / "whole" / adapter.name / "manifest.json").read_text())["base"]
    assert recorded["content"] is None
    assert recorded["structure"] == whole["structure"]


@pytest.mark.parametrize(("recipe", "base"), [("dora", "llama"), ("dora", "qwen2")])
def test_a_slot_that_needs_weights_is_refused_by_name_without_them(
    recipe: str,
    base: str,
    base_folder: Callable[[str], Path],
    adapter_folder: Callable[[str, str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "config").mkdir()
    shutil.copy(base_folder(base) / "config.json", tmp_path / "config")
    store = tmp_path / "store"
    arguments = ["compile", str(adapter_folder(recipe, base)), "--base", str(tmp_path / "config"), "-o", str(store)]
    assert main(arguments) == 1
    assert "SC403" in capsys.readouterr().err
    assert not store.exists()
