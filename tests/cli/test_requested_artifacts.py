"""Commands refuse artifacts that differ from the request, and findings name their adapter in a call with several."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.commands import compiled, scute
from tests.support.damage import Saved

Folder = Callable[[str], Path]
Pair = Callable[[str, str], tuple[Path, Path]]

OTHERS = {
    "--tp": (("--tp", 2), "SC801", 1),
    "--lora-sharding": (("--lora-sharding", "full"), "SC801", 1),
    "--tenants": (("--tenants", 3), "SC703", 2),
    "--tokens": (("--tokens", 5), "SC703", 2),
}


@pytest.fixture
def artifact(pair: Pair, tmp_path: Path) -> Path:
    return compiled(*pair("dora", "llama"), tmp_path / "store")


@pytest.mark.parametrize("command", ["inspect", "explain-folds"])
@pytest.mark.parametrize("option", OTHERS)
def test_an_artifact_is_not_described_for_another_target(command: str, option: str, artifact: Path) -> None:
    words, code, status = OTHERS[option]
    if command == "inspect" and option in {"--tenants", "--tokens"}:
        return  # inspect has no such options
    ran = scute(command, artifact, *words)
    assert (ran.code, ran.out) == (status, "")
    assert code in ran.err
    assert f"an artifact compiled with {option}" in ran.err


@pytest.mark.parametrize("command", ["inspect", "explain-folds"])
def test_the_target_of_an_artifact_may_be_given(command: str, artifact: Path, base_folder: Folder) -> None:
    plain = scute(command, artifact)
    explicit = scute(command, artifact, "--tp", 1, "--lora-sharding", "default", "--base", base_folder("llama"))
    assert (plain.code, explicit.code) == (0, 0)
    assert explicit.out == plain.out


@pytest.mark.parametrize("command", ["inspect", "explain-folds"])
def test_an_artifact_is_not_described_for_another_base(command: str, artifact: Path, base_folder: Folder) -> None:
    ran = scute(command, artifact, "--base", base_folder("gpt2"))
    assert (ran.code, "SC608" in ran.err) == (1, True)


def test_verify_notes_that_the_adapter_changed_since_it_was_compiled(pair: Pair, tmp_path: Path) -> None:
    adapter, base = pair("lora", "llama")
    copy = Path(shutil.copytree(adapter, tmp_path / "lora"))
    artifact = compiled(copy, base, tmp_path / "store")
    same = scute("verify", artifact, "--adapter", copy, "--base", base, "--tokens", 8)
    assert (same.code, same.err) == (0, "")
    config = copy / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()), indent=7))
    reworded = scute("verify", artifact, "--adapter", copy, "--base", base, "--tokens", 8)
    assert reworded.code == 0
    assert "note[SC609]" in reworded.err
    assert "adapter_config.json" in reworded.err
    saved = Saved.read(copy)
    saved.tensors = {key: 2 * value for key, value in saved.tensors.items()}
    saved.write(copy)
    trained = scute("verify", artifact, "--adapter", copy, "--base", base, "--tokens", 8, "--json")
    assert trained.code == 1
    changed, differs = trained.answer["findings"]
    assert (changed["code"], differs["code"]) == ("SC609", "SC704")
    assert differs["next"] == changed["next"]
    saved.tensors = {key: value[:, :3].contiguous() for key, value in saved.tensors.items()}
    saved.write(copy)
    cut = scute("verify", artifact, "--adapter", copy, "--base", base, "--tokens", 8)
    assert cut.code == 1
    assert "SC609" in cut.err


def _with_base(adapter: Path, folder: Path, base: str) -> Path:
    shutil.copytree(adapter, folder)
    config = folder / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": base}))
    return folder


@pytest.mark.parametrize("first", ["good", "lost"])
def test_a_missing_base_refuses_only_the_adapters_that_name_it(first: str, pair: Pair, tmp_path: Path) -> None:
    adapter, base = pair("lora", "llama")
    folders = {
        "good": _with_base(adapter, tmp_path / "good", str(base)),
        "lost": _with_base(adapter, tmp_path / "lost", "/no/such/base"),
    }
    ordered = sorted(folders.values(), key=lambda folder: folder.name != first)
    for command in (("check",), ("compile", "-o", tmp_path / "store")):
        ran = scute(command[0], *ordered, *command[1:], "--json")
        assert ran.code == 1
        outcomes = {
            item["name"]: (item["outcome"], [finding["code"] for finding in item["findings"]])
            for item in ran.answer["adapters"]
        }
        assert outcomes["lost"] == ("refused", ["SC401"])
        assert outcomes["good"][0] == "exact"
        assert [item["name"] for item in ran.answer["adapters"]] == [folder.name for folder in ordered]
        assert scute(command[0], folders["lost"], *command[1:]).code == 2
    assert (tmp_path / "store" / "good" / "manifest.json").is_file()


def test_findings_name_their_adapter_in_a_call_with_several(pair: Pair, tmp_path: Path) -> None:
    adapter, base = pair("lora", "llama")
    bad = []
    for name in ("first", "second"):
        saved = Saved.read(adapter)
        key = next(iter(saved.tensors))
        saved.tensors[key] = torch.full_like(saved.tensors[key], float("nan"))
        saved.write(tmp_path / name)
        bad.append(tmp_path / name)
    both = scute("check", *bad, "--base", base)
    assert both.code == 1
    for folder in bad:
        assert f"  adapter   {folder}\n" in both.err
    alone = scute("check", bad[0], "--base", base)
    assert "  adapter   " not in alone.err
