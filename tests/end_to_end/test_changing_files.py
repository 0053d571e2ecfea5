"""Files that change between planning and packing: what is packed is what was hashed, or nothing is."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import scute_compile as scute
from scute_compile.driver import compiling, packing
from scute_compile.driver.packing import compile_planned
from scute_compile.driver.planning import plan_adapter
from scute_compile.formats.artifact import Artifact
from scute_compile.formats.base_checkpoint import BaseCheckpoint
from scute_compile.formats.fingerprint import content_hash
from scute_compile.formats.reading import sha256_of
from scute_compile.formats.safetensors import read_header
from scute_compile.pipeline import plan
from tests.support.damage import CONFIG, WEIGHTS

Folder = Callable[[str], Path]
Adapter = Callable[[str, str], Path]
Change = Callable[[Path], None]


def _keeping_times(file: Path, change: Change) -> None:
    before = file.stat()
    change(file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def _values(file: Path) -> None:
    """Change a low bit of one value of every tensor in place: outcome, shapes and scale stay."""
    entries = read_header(file)
    with file.open("r+b") as opened:
        for entry in entries.values():
            opened.seek(entry.begin)
            byte = opened.read(1)[0]
            opened.seek(entry.begin)
            opened.write(bytes([byte ^ 1]))


def _values_keeping_times(file: Path) -> None:
    _keeping_times(file, _values)


def _replaced(file: Path) -> None:
    other = file.with_name("other")
    shutil.copy(file, other)
    _values(other)
    other.replace(file)


CHANGES: dict[str, Change] = {
    "values in place": _values,
    "values in place, with the old times": _values_keeping_times,
    "another file": _replaced,
    "cut short": lambda file: os.truncate(file, file.stat().st_size - 8),
}


def _before_packing(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Run `act` once, after adapters were planned and before anything of them is packed."""
    acts = [act]

    def changing(*arguments: object) -> object:
        if acts:
            acts.pop()()
        return compile_planned(*arguments)  # type: ignore[arg-type] # passed through

    monkeypatch.setattr(compiling, "compile_planned", changing)


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("recipe", ["lora", "dora", "vera"])
def test_an_adapter_that_changes_after_it_was_planned_is_refused(
    recipe: str,
    what: str,
    base_folder: Folder,
    adapter_folder: Adapter,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    adapter = tmp_path / "adapter"
    shutil.copytree(adapter_folder(recipe, "llama"), adapter)
    _before_packing(monkeypatch, lambda: CHANGES[what](adapter / WEIGHTS))
    other = adapter_folder("ia3", "llama")
    report = scute.compile([adapter, other], base=base_folder("llama"), store=tmp_path / "store")
    codes = [{finding.code.name for finding in item.findings} for item in report.adapters]
    assert codes[0] <= {"SC111", "SC104"}
    assert [item.outcome for item in report.adapters] == ["refused", "exact"]
    assert sorted(path.name for path in (tmp_path / "store").iterdir() if path.name[0] != ".") == ["ia3"]
    again = scute.compile(adapter, base=base_folder("llama"), store=tmp_path / "store")
    if what != "cut short":
        manifest = scute.load_artifact(tmp_path / "store" / "adapter").manifest
        assert again.adapters[0].outcome == "exact"
        assert manifest.sources == {name: sha256_of(adapter / name) for name in (WEIGHTS, CONFIG)}


def test_values_that_change_without_a_trace_in_the_files_times_are_refused(
    base_folder: Folder, adapter_folder: Adapter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hashes of tensors alone, as on a file system whose times can be set back."""
    adapter = tmp_path / "adapter"
    shutil.copytree(adapter_folder("dora", "llama"), adapter)

    def planned_without_times(*arguments: object, **named: object) -> object:
        planned, base = plan_adapter(*arguments, **named)  # type: ignore[arg-type] # passed through
        assert planned.adapter is not None
        return replace(planned, adapter=replace(planned.adapter, identities={})), base

    monkeypatch.setattr(compiling, "plan_adapter", planned_without_times)
    _before_packing(monkeypatch, lambda: _values(adapter / WEIGHTS))
    report = scute.compile(adapter, base=base_folder("llama"), store=tmp_path / "store")
    assert [finding.code.name for finding in report.adapters[0].findings] == ["SC111"]
    assert not (tmp_path / "store").exists()


def test_a_configuration_that_changes_after_it_was_read_is_refused(
    base_folder: Folder, adapter_folder: Adapter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = tmp_path / "adapter"
    shutil.copytree(adapter_folder("lora", "llama"), adapter)
    file = adapter / CONFIG

    def act() -> None:
        file.write_text(file.read_text().replace('"lora_alpha": 6', '"lora_alpha": 7'))

    _before_packing(monkeypatch, act)
    report = scute.compile(adapter, base=base_folder("llama"), store=tmp_path / "store")
    assert [finding.code.name for finding in report.adapters[0].findings] == ["SC111"]


@pytest.mark.parametrize("times", ["new", "ignored"])
def test_a_base_that_changes_after_its_fingerprint_was_taken_is_refused(
    times: str, base_folder: Folder, adapter_folder: Adapter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tmp_path / "base"
    shutil.copytree(base_folder("llama"), base)

    def changing(checkpoint: BaseCheckpoint) -> str | None:
        answer = content_hash(checkpoint)
        for shard in base.glob("*.safetensors"):
            _values(shard)
        return answer

    monkeypatch.setattr(packing, "content_hash", changing)
    if times == "ignored":
        from scute_compile.pack import pack

        monkeypatch.setattr(pack, "check_unchanged", lambda _: None)
    report = scute.compile(adapter_folder("dora", "llama"), base=base, store=tmp_path / "store")
    assert [finding.code.name for finding in report.adapters[0].findings] == ["SC111"]
    assert str(base) in report.adapters[0].findings[0].where


def test_an_engine_keeps_an_artifact_under_the_bytes_that_were_packed(
    base_folder: Folder, adapter_folder: Adapter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from scute_compile.runtime_vllm import engine_base

    adapter, store = tmp_path / "adapter", tmp_path / "store"
    shutil.copytree(adapter_folder("dora", "llama"), adapter)
    shutil.copytree(adapter, tmp_path / "first")
    engine = engine_base.EngineBase(source=str(base_folder("llama")))

    def compile_folder() -> Artifact:
        return engine.compile_folder(adapter, tp=1, dtype=torch.float32, store=store)

    changes = [_values]

    def changing(*arguments: object, **named: object) -> object:
        if changes:
            changes.pop()(adapter / WEIGHTS)
        return plan(*arguments, **named)  # type: ignore[arg-type] # passed through

    monkeypatch.setattr(engine_base, "plan", changing)
    second = compile_folder()
    assert second.manifest.sources[WEIGHTS] == sha256_of(adapter / WEIGHTS)
    assert compile_folder().path == second.path
    shutil.copy(tmp_path / "first" / WEIGHTS, adapter / WEIGHTS)
    first = compile_folder()
    assert first.path != second.path
    assert first.manifest.sources[WEIGHTS] == sha256_of(tmp_path / "first" / WEIGHTS)
