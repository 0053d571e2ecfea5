"""Opening adapter folders: missing and wrong files are reported, all at once."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from scute_compile.diagnostics import Code, Diagnostic, ScuteError
from scute_compile.formats.peft_folder import CONFIG, PICKLE, WEIGHTS, open_adapter
from tests.support.hub_server import serving

CONFIG_TEXT = json.dumps({"peft_type": "LORA", "r": 2})


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep this process off the network; tests of Hub repositories start other processes."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "tenant-a"
    made.mkdir()
    (made / CONFIG).write_text(CONFIG_TEXT)
    save_file({"k": np.ones((2, 3), np.float32)}, made / WEIGHTS)
    return made


def refused(source: Path | str) -> tuple[Diagnostic, ...]:
    with pytest.raises(ScuteError) as caught:
        open_adapter(str(source))
    return caught.value.diagnostics


def codes(source: Path | str) -> list[Code]:
    return [d.code for d in refused(source)]


def test_a_folder_is_opened_without_reading_tensors(folder: Path) -> None:
    adapter = open_adapter(f"{folder}/")
    assert (adapter.name, adapter.source) == ("tenant-a", f"{folder}/")
    assert adapter.config == {"peft_type": "LORA", "r": 2}
    assert adapter.tensors["k"].shape == (2, 3)
    assert adapter.weights == folder / WEIGHTS


@pytest.mark.parametrize(
    ("named", "base"), [("owner/name", "owner/name"), ("/data/base", "/data/base"), ("", None), (7, None), (None, None)]
)
def test_the_configurations_base_is_text_or_none(folder: Path, named: object, base: str | None) -> None:
    (folder / CONFIG).write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": named}))
    assert open_adapter(str(folder)).base_model == base


def test_windows_line_ends_and_a_byte_order_mark_are_read(folder: Path) -> None:
    (folder / CONFIG).write_bytes(
        b"\xef\xbb\xbf" + json.dumps({"peft_type": "LORA"}, indent=1).replace("\n", "\r\n").encode()
    )
    assert open_adapter(str(folder)).config == {"peft_type": "LORA"}


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[1]", b'"LORA"', b'{"r": NaN}', b'{"r": 1e999}', b'{"r": 1, "r": 2}', b"\xff\xfe{}", b"[" * 99_999],
)
def test_a_configuration_other_than_a_json_object_is_refused(folder: Path, text: bytes) -> None:
    (folder / CONFIG).write_bytes(text)
    assert codes(folder) == [Code.SC108]


def test_faults_of_configuration_and_weights_are_reported_together(folder: Path) -> None:
    (folder / CONFIG).write_text('{"r": 8}')
    (folder / WEIGHTS).write_bytes(b"12345678")
    assert codes(folder) == [Code.SC201, Code.SC104]
    (folder / CONFIG).write_text("{")
    (folder / WEIGHTS).unlink()
    (folder / PICKLE).touch()
    assert set(codes(folder)) == {Code.SC108, Code.SC102}


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"base_model": "robot/base"}, "base_model"),
        ({"lora_parameters": {}, "num_layers": 16}, "MLX"),
        ({"config": {}, "model_class": "X"}, "`adapters` library"),
        ({"peft_type": 7}, "7"),
    ],
)
def test_another_programs_configuration_is_named(folder: Path, config: object, word: str) -> None:
    (folder / CONFIG).write_text(json.dumps(config))
    (found,) = refused(folder)
    assert found.code is Code.SC201
    assert word in found.found


def test_a_pickle_is_refused_unopened(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / PICKLE).write_bytes(b"\x80\x04.")
    (folder / PICKLE).chmod(0)
    (found,) = refused(folder)
    assert found.code is Code.SC102
    assert PICKLE in found.found


def test_safetensors_are_preferred_to_a_pickle(folder: Path) -> None:
    (folder / PICKLE).touch()
    assert open_adapter(str(folder)).tensors


def test_missing_files_are_named(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (found,) = refused(folder)
    assert (found.code, WEIGHTS in found.expected) == (Code.SC107, True)
    (folder / CONFIG).unlink()
    assert codes(folder) == [Code.SC107, Code.SC107]


@pytest.mark.parametrize(
    ("file", "found", "way"),
    [
        ("manifest.json", "compiled already", "PEFT folder"),
        ("legal/manifest.json", "a store with the artifacts legal", "other/legal"),
        ("config.json", "a model's config.json", "--base"),
    ],
)
def test_artifacts_stores_and_models_are_identified(tmp_path: Path, file: str, found: str, way: str) -> None:
    other = tmp_path / "other"
    (other / file).parent.mkdir(parents=True)
    (other / file).write_text("{}")
    (diagnostic,) = refused(other)
    assert diagnostic.code is Code.SC107
    assert found in diagnostic.found
    assert way in diagnostic.next


def test_an_adapter_saved_under_a_name_is_found_in_its_subfolder(folder: Path) -> None:
    inner = folder.parent / "saved" / "legal"
    inner.parent.mkdir()
    folder.rename(inner)
    (found,) = refused(inner.parent)
    assert found.code is Code.SC107
    assert str(inner) in found.next
    assert open_adapter(str(inner)).name == "legal"


def test_an_empty_adapter_is_refused(folder: Path) -> None:
    save_file({}, folder / WEIGHTS)
    (found,) = refused(folder)
    assert found.code is Code.SC106
    assert "gather" in found.next


def test_a_file_is_refused_with_its_folder_as_advice(folder: Path) -> None:
    (found,) = refused(folder / WEIGHTS)
    assert found.code is Code.SC101
    assert str(folder) in found.next


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file_is_a_diagnostic(folder: Path) -> None:
    (folder / CONFIG).chmod(0)
    assert codes(folder) == [Code.SC109]


def test_broken_links_are_a_diagnostic(folder: Path) -> None:
    (folder / CONFIG).unlink()
    (folder / CONFIG).symlink_to(folder / "absent.json")
    assert codes(folder) == [Code.SC109]


@pytest.mark.parametrize(
    "source", ["absent", "./absent/folder", "/absent", "a/b/c", "a\0b", "", "../x/y", "a/b\x1b[31m"]
)
def test_sources_that_are_neither_folder_nor_repository_are_refused(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (found, *_) = refused(source)
    assert found.code is Code.SC101


def test_an_unreachable_hub_is_reported_with_the_repository() -> None:
    (found,) = refused("owner/absent")
    assert found.code is Code.SC101
    assert "owner/absent" in found.found
    assert "offline" in found.found


OPEN = """
from scute_compile.diagnostics import ScuteError
from scute_compile.formats.peft_folder import open_adapter
try:
    adapter = open_adapter({!r})
    print(adapter.name, sorted(p.name for p in adapter.path.iterdir()), list(adapter.tensors))
except ScuteError as error:
    print(error)
"""


def test_two_files_of_a_repository_are_downloaded_and_reopened_offline(folder: Path, tmp_path: Path) -> None:
    for extra in ("optimizer.pt", "README.md", "tokenizer.json"):
        (folder / extra).write_bytes(b"x" * 1000)
    with serving(folder) as hub:
        done = hub.run(OPEN.format("owner/name"), tmp_path / "home")
        assert done.stdout.strip() == f"name ['{CONFIG}', '{WEIGHTS}'] ['k']", done.stderr
        assert set(hub.sent) - {""} == {CONFIG, WEIGHTS}
        absent = hub.run(OPEN.format("owner/absent"), tmp_path / "home")
        assert "SC101" in absent.stdout, absent.stderr
        assert "no such repository" in absent.stdout
    again = hub.run(OPEN.format("owner/name"), tmp_path / "home")
    assert again.stdout == done.stdout, again.stderr


def test_a_repository_with_a_pickle_only_is_refused_without_a_download(folder: Path, tmp_path: Path) -> None:
    (folder / WEIGHTS).rename(folder / PICKLE)
    with serving(folder) as hub:
        done = hub.run(OPEN.format("owner/name"), tmp_path / "home")
        assert "SC102" in done.stdout, done.stderr
        assert set(hub.sent) == {""}


def test_a_repository_with_subfolders_names_them(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "repository").mkdir()
    folder.rename(tmp_path / "repository" / "legal")
    with serving(tmp_path / "repository") as hub:
        done = hub.run(OPEN.format("owner/name"), tmp_path / "home")
        assert "SC107" in done.stdout, done.stderr
        assert "legal" in done.stdout
