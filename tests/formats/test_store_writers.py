"""Writing into a store: several writers and readers at once, killed writers, damaged files, and files of others."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from scute_compile.diagnostics import ScuteError
from scute_compile.formats.artifact import open_artifact
from scute_compile.formats.artifact_tensors import load_factor
from tests.support.artifact_files import rank_file
from tests.support.stores import all_succeed, artifact, contents, expected_names, names, values, write


def _write_often(store: Path, sources: tuple[Path, ...], times: int) -> None:
    for turn in range(times):
        write(store, sources[turn % len(sources)])


def _open_often(store: Path, expected: tuple[float, ...], times: int) -> None:
    for _ in range(times):
        try:
            found = values(store / "one")
        except ScuteError as error:
            if not error.diagnostics[0].found.startswith("an artifact that was replaced"):
                raise
        else:
            assert found in [{value} for value in expected]


def test_readers_beside_two_writers_find_one_artifact_or_the_other(tmp_path: Path) -> None:
    sources = (artifact(tmp_path / "a", 1.0), artifact(tmp_path / "b", 2.0, tp=1))
    store = tmp_path / "store"
    write(store, sources[0])
    writers = [partial(_write_often, store, order, 100) for order in (sources, sources[::-1])]
    all_succeed(*writers, *[partial(_open_often, store, (1.0, 2.0), 150)] * 2)
    assert names(store) == ["one"]
    assert names(store / "one") in [expected_names(source) for source in sources]


def _user_folder(target: Path) -> None:
    target.mkdir()
    (target / "notes.txt").write_text("text")


def _peft_folder(target: Path) -> None:
    target.mkdir()
    (target / "adapter_config.json").write_text("{}")
    (target / "adapter_model.safetensors").write_bytes(b"")


def _manifest_of_another_program(target: Path) -> None:
    target.mkdir()
    (target / "manifest.json").write_text('{"schema_version": "2.0", "name": "app"}')


def _damaged_manifest_of_another_program(target: Path) -> None:
    target.mkdir()
    (target / "manifest.json").write_text('{"schema_version": "2.0", "name": "a')


def _linked_manifest(target: Path) -> None:
    target.mkdir()
    (target / "manifest.json").symlink_to(target.parent / "other" / "manifest.json")


FOREIGN: dict[str, Callable[[Path], object]] = {
    "a user's folder": _user_folder,
    "a PEFT adapter": _peft_folder,
    "a manifest of another program": _manifest_of_another_program,
    "a damaged manifest of another program": _damaged_manifest_of_another_program,
    "a link to a manifest": _linked_manifest,
    "a file": lambda target: target.write_text("text"),
    "a link to an artifact": lambda target: target.symlink_to(target.parent / "other"),
    "a link to nothing": lambda target: target.symlink_to(target.parent / "absent"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_what_is_no_artifact_is_refused_and_left_untouched(tmp_path: Path, kind: str) -> None:
    source, store = artifact(tmp_path / "a", 1.0), tmp_path / "store"
    write(store, source, "other")
    FOREIGN[kind](store / "one")
    before = contents(store)
    with pytest.raises(ScuteError, match="nothing was overwritten") as refused:
        write(store, source)
    assert refused.value.diagnostics[0].code.name == "SC601"
    assert contents(store) == before


def test_an_empty_folder_is_written_into(tmp_path: Path) -> None:
    source, store = artifact(tmp_path / "a", 1.0), tmp_path / "store"
    (store / "one").mkdir(parents=True)
    write(store, source)
    assert values(store / "one") == {1.0}


DAMAGE: dict[str, Callable[[str], str]] = {
    "cut short": lambda text: text[: len(text) // 3],
    "another digest": lambda text: text.replace('"digest": "', '"digest": "f'),
    "a later version": lambda text: text.replace('"2.0"', '"3.0"'),
    "an unknown field": lambda text: text.replace('"tool":', '"future": 1, "tool":'),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_an_artifact_with_a_damaged_manifest_is_replaced(tmp_path: Path, damage: str) -> None:
    source, store = artifact(tmp_path / "a", 1.0), tmp_path / "store"
    write(store, source)
    manifest = store / "one" / "manifest.json"
    text = manifest.read_text()
    manifest.write_text(DAMAGE[damage](text))
    with pytest.raises(ScuteError, match="SC60"):
        open_artifact(store / "one")
    write(store, source)
    assert manifest.read_text() == text
    assert names(store / "one") == expected_names(source)


def test_files_of_others_in_an_artifacts_folder_are_kept(tmp_path: Path) -> None:
    store = tmp_path / "store"
    write(store, artifact(tmp_path / "a", 1.0))
    others = ("README.md", ".gitattributes", "rank-00000-of-00001.safetensors", "adapter_model.safetensors", "x.tmp")
    for name in others:
        (store / "one" / name).write_text(name)
    new = artifact(tmp_path / "b", 2.0)
    write(store, new)
    assert values(store / "one") == {2.0}
    assert names(store / "one") == sorted([*expected_names(new), *others])
    assert all((store / "one" / name).read_text() == name for name in others)


def test_a_damaged_rank_file_is_written_again_and_an_undamaged_one_stays(tmp_path: Path) -> None:
    source, store = artifact(tmp_path / "a", 1.0), tmp_path / "store"
    write(store, source)
    first, second = (rank_file(store / "one", rank) for rank in range(2))
    kept = first.stat()
    raw = bytearray(second.read_bytes())
    raw[-1] ^= 1
    second.write_bytes(raw)
    write(store, source)
    assert values(store / "one") == {1.0}
    assert (first.stat().st_ino, first.stat().st_mtime_ns) == (kept.st_ino, kept.st_mtime_ns)


def _flip(file: Path) -> None:
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)


def _move_behind_a_link(file: Path) -> None:
    outside = file.parent.parent / "outside"
    file.rename(outside)
    file.symlink_to(outside)


FACTOR_DAMAGE: dict[str, Callable[[Path], object]] = {
    "a flipped bit": _flip,
    "cut short": lambda file: os.truncate(file, file.stat().st_size - 4),
    "empty": lambda file: file.write_bytes(b""),
    "a link": _move_behind_a_link,
}


@pytest.mark.parametrize("damage", FACTOR_DAMAGE)
def test_a_damaged_shared_factor_is_repaired_by_writing_the_artifact_again(tmp_path: Path, damage: str) -> None:
    source, store = artifact(tmp_path / "a", 1.0, shared=True), tmp_path / "store"
    write(store, source)
    (file,) = (store / "factors").iterdir()
    good = file.read_bytes()
    FACTOR_DAMAGE[damage](file)
    with pytest.raises(ScuteError):
        open_artifact(store / "one")
    write(store, source)
    opened = open_artifact(store / "one")
    assert not file.is_symlink()
    assert file.read_bytes() == good
    assert load_factor(opened, opened.manifest.factors[0].hash).tolist() == torch.arange(12.0).view(2, 6).tolist()
    kept = file.stat().st_ino
    write(store, source, "other")
    assert file.stat().st_ino == kept


def test_factors_behind_a_link_are_refused(tmp_path: Path) -> None:
    source, store = artifact(tmp_path / "a", 1.0, shared=True), tmp_path / "store"
    store.mkdir()
    outside = tmp_path / "outside"
    outside.mkdir()
    (store / "factors").symlink_to(outside)
    with pytest.raises(ScuteError, match="symbolic link") as refused:
        write(store, source)
    assert refused.value.diagnostics[0].code.name == "SC604"
    assert names(outside) == []
    assert names(store) == ["factors"]


@pytest.mark.parametrize(
    "name", ["factors", "Factors", ".one", "", ".", "..", "a/b", "../one", "a\\b", "a\0b", "\udcff"]
)
def test_reserved_names_are_refused(tmp_path: Path, name: str) -> None:
    source, store = artifact(tmp_path / "a", 1.0), tmp_path / "store"
    with pytest.raises(ScuteError) as refused:
        write(store, source, name)
    assert refused.value.diagnostics[0].code.name == "SC607"
    assert not store.exists()


def test_a_store_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("text")
    with pytest.raises(ScuteError) as refused:
        write(tmp_path / "store", artifact(tmp_path / "a", 1.0))
    assert refused.value.diagnostics[0].code.name == "SC109"


def test_a_folder_of_the_name_in_another_case_is_not_replaced(tmp_path: Path) -> None:
    source, store = artifact(tmp_path / "a", 1.0), tmp_path / "store"
    write(store, source)
    with (
        patch("scute_compile.formats.writer.names_in", return_value=("One",)),
        pytest.raises(ScuteError, match="differs in case") as refused,
    ):
        write(store, source)
    assert refused.value.diagnostics[0].code.name == "SC601"
