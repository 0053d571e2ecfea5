"""Writing into a store: several writers and readers at once, killed writers, damaged files, and files of others."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from scute_compile.diagnostics import ScuteError
from scute_compile.formats.artifact import open_artifact
from scute_compile.formats.artifact_tensors import load_factor, load_rank
from scute_compile.formats.manifest import FactorFile
from scute_compile.formats.writer import artifact_writer
from tests.support.artifact_files import manifest_of, rank_file
from tests.support.artifacts import Written, write_artifact

FORK = multiprocessing.get_context("fork")
Faults = multiprocessing.Queue
SITE = "layers.0.up"


def _artifact(folder: Path, value: float, *, tp: int = 2, shared: bool = False) -> Path:
    """Write an artifact by hand, of which every number of `ds` is `value`."""
    slots = {"ds": torch.full((8,), value)}
    if shared:
        slots |= {"A0": torch.arange(12.0).reshape(2, 6), "B0": torch.ones(2, 8)}
    site = Written(name=SITE, in_features=6, out_features=8, slots=slots, shared=frozenset({"A0"} & slots.keys()))
    return write_artifact(folder, [site], tp=tp)


def _write(store: Path, source: Path, name: str = "one") -> None:
    """Write the files of another artifact into a store."""
    manifest = manifest_of(source)
    with artifact_writer(store, name) as writer:
        for record in manifest["factors"]:
            raw = (source.parent / "factors" / f"{record['hash']}.safetensors").read_bytes()
            writer.add_factor(FactorFile.model_validate_json(json.dumps(record)), raw)
        for rank in range(manifest["tp"]):
            writer.add_rank(rank, manifest["tp"], rank_file(source, rank).read_bytes())
        writer.commit({key: value for key, value in manifest.items() if key != "digest"})


def _values(folder: Path) -> set[float]:
    artifact = open_artifact(folder)
    tensors = (load_rank(artifact, rank)[f"{SITE}.ds"] for rank in range(artifact.manifest.tp))
    return {value for tensor in tensors for value in tensor.tolist()}


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _expected_names(source: Path) -> list[str]:
    return sorted(["manifest.json", *(rank["file"] for rank in manifest_of(source)["ranks"])])


def _report(work: Callable[[], None], faults: Faults[str]) -> None:
    try:
        work()
    except Exception as error:  # noqa: BLE001 - the test shows every fault
        faults.put(str(error) or repr(error))
    faults.put("")


def _all_succeed(*works: Callable[[], None]) -> None:
    faults: Faults[str] = FORK.Queue()
    processes = [FORK.Process(target=_report, args=(work, faults)) for work in works]
    for process in processes:
        process.start()
    messages: list[str] = []
    while messages.count("") < len(works):
        messages.append(faults.get(timeout=60))
    for process in processes:
        process.join()
    assert set(messages) == {""}


def _write_often(store: Path, sources: tuple[Path, ...], times: int) -> None:
    for turn in range(times):
        _write(store, sources[turn % len(sources)])


def _open_often(store: Path, values: tuple[float, ...], times: int) -> None:
    for _ in range(times):
        try:
            found = _values(store / "one")
        except ScuteError as error:
            if not error.diagnostics[0].found.startswith("an artifact that was replaced"):
                raise
        else:
            assert found in [{value} for value in values]


def test_readers_beside_two_writers_find_one_artifact_or_the_other(tmp_path: Path) -> None:
    sources = (_artifact(tmp_path / "a", 1.0), _artifact(tmp_path / "b", 2.0, tp=1))
    store = tmp_path / "store"
    _write(store, sources[0])
    writers = [partial(_write_often, store, order, 100) for order in (sources, sources[::-1])]
    _all_succeed(*writers, *[partial(_open_often, store, (1.0, 2.0), 150)] * 2)
    assert _names(store) == ["one"]
    assert _names(store / "one") in [_expected_names(source) for source in sources]


def _write_until(step: int, store: Path, source: Path) -> None:
    """Write an artifact and hang at a file's or a folder's sync."""
    done = 0

    def sync(_: int) -> None:
        nonlocal done
        if done == step:
            (store.parent / "hangs").touch()
            time.sleep(60)
        done += 1

    with patch.object(os, "fsync", sync):
        _write(store, source)
    (store.parent / "hangs").touch()
    time.sleep(60)


def _kill_writer_at(step: int, store: Path, source: Path) -> None:
    writer = FORK.Process(target=_write_until, args=(step, store, source))
    writer.start()
    deadline = time.monotonic() + 30
    while not (store.parent / "hangs").exists() and time.monotonic() < deadline:
        time.sleep(0.002)
    assert (store.parent / "hangs").exists()
    writer.kill()
    writer.join()


STEPS = range(8)
"""Syncs of a factor, `factors`, two rank files, the folder, the manifest, the folder and the store."""


@pytest.mark.parametrize("step", [*STEPS, len(STEPS)])
def test_a_writer_killed_at_any_step_leaves_the_old_artifact_or_the_new_one(tmp_path: Path, step: int) -> None:
    old, new = _artifact(tmp_path / "a", 1.0, tp=1), _artifact(tmp_path / "b", 2.0, shared=True)
    store = tmp_path / "store"
    _write(store, old)
    _kill_writer_at(step, store, new)
    assert _values(store / "one") == ({1.0} if step < 6 else {2.0})
    _write(store, new)
    assert _values(store / "one") == {2.0}
    assert _names(store / "one") == _expected_names(new)
    assert len(_names(store / "factors")) == 1


@pytest.mark.parametrize("step", STEPS)
def test_a_killed_first_writer_leaves_no_artifact_and_does_not_obstruct_the_next(tmp_path: Path, step: int) -> None:
    source, store = _artifact(tmp_path / "a", 1.0, shared=True), tmp_path / "store"
    _kill_writer_at(step, store, source)
    if step < 6:
        with pytest.raises(ScuteError, match="SC601"):
            open_artifact(store / "one")
    _write(store, source, "other")  # the lock ended with the process
    _write(store, source)
    assert _names(store / "one") == _expected_names(source)
    assert _names(store) == ["factors", "one", "other"]


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


def _contents(folder: Path) -> dict[str, object]:
    return {
        str(path.relative_to(folder)): str(path.readlink()) if path.is_symlink() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


@pytest.mark.parametrize("kind", FOREIGN)
def test_what_is_no_artifact_is_refused_and_left_untouched(tmp_path: Path, kind: str) -> None:
    source, store = _artifact(tmp_path / "a", 1.0), tmp_path / "store"
    _write(store, source, "other")
    FOREIGN[kind](store / "one")
    before = _contents(store)
    with pytest.raises(ScuteError, match="nothing was overwritten") as refused:
        _write(store, source)
    assert refused.value.diagnostics[0].code.name == "SC601"
    assert _contents(store) == before


def test_an_empty_folder_is_written_into(tmp_path: Path) -> None:
    source, store = _artifact(tmp_path / "a", 1.0), tmp_path / "store"
    (store / "one").mkdir(parents=True)
    _write(store, source)
    assert _values(store / "one") == {1.0}


DAMAGE: dict[str, Callable[[str], str]] = {
    "cut short": lambda text: text[: len(text) // 3],
    "another digest": lambda text: text.replace('"digest": "', '"digest": "f'),
    "a later version": lambda text: text.replace('"2.0"', '"3.0"'),
    "an unknown field": lambda text: text.replace('"tool":', '"future": 1, "tool":'),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_an_artifact_with_a_damaged_manifest_is_replaced(tmp_path: Path, damage: str) -> None:
    source, store = _artifact(tmp_path / "a", 1.0), tmp_path / "store"
    _write(store, source)
    manifest = store / "one" / "manifest.json"
    text = manifest.read_text()
    manifest.write_text(DAMAGE[damage](text))
    with pytest.raises(ScuteError, match="SC60"):
        open_artifact(store / "one")
    _write(store, source)
    assert manifest.read_text() == text
    assert _names(store / "one") == _expected_names(source)


def test_files_of_others_in_an_artifacts_folder_are_kept(tmp_path: Path) -> None:
    store = tmp_path / "store"
    _write(store, _artifact(tmp_path / "a", 1.0))
    others = ("README.md", ".gitattributes", "rank-00000-of-00001.safetensors", "adapter_model.safetensors", "x.tmp")
    for name in others:
        (store / "one" / name).write_text(name)
    new = _artifact(tmp_path / "b", 2.0)
    _write(store, new)
    assert _values(store / "one") == {2.0}
    assert _names(store / "one") == sorted([*_expected_names(new), *others])
    assert all((store / "one" / name).read_text() == name for name in others)


def test_a_damaged_rank_file_is_written_again_and_an_undamaged_one_stays(tmp_path: Path) -> None:
    source, store = _artifact(tmp_path / "a", 1.0), tmp_path / "store"
    _write(store, source)
    first, second = (rank_file(store / "one", rank) for rank in range(2))
    kept = first.stat()
    raw = bytearray(second.read_bytes())
    raw[-1] ^= 1
    second.write_bytes(raw)
    _write(store, source)
    assert _values(store / "one") == {1.0}
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
    source, store = _artifact(tmp_path / "a", 1.0, shared=True), tmp_path / "store"
    _write(store, source)
    (file,) = (store / "factors").iterdir()
    good = file.read_bytes()
    FACTOR_DAMAGE[damage](file)
    with pytest.raises(ScuteError):
        open_artifact(store / "one")
    _write(store, source)
    artifact = open_artifact(store / "one")
    assert not file.is_symlink()
    assert file.read_bytes() == good
    assert load_factor(artifact, artifact.manifest.factors[0].hash).tolist() == torch.arange(12.0).view(2, 6).tolist()
    kept = file.stat().st_ino
    _write(store, source, "other")
    assert file.stat().st_ino == kept


def test_factors_behind_a_link_are_refused(tmp_path: Path) -> None:
    source, store = _artifact(tmp_path / "a", 1.0, shared=True), tmp_path / "store"
    store.mkdir()
    outside = tmp_path / "outside"
    outside.mkdir()
    (store / "factors").symlink_to(outside)
    with pytest.raises(ScuteError, match="symbolic link") as refused:
        _write(store, source)
    assert refused.value.diagnostics[0].code.name == "SC604"
    assert _names(outside) == []
    assert _names(store) == ["factors"]


@pytest.mark.parametrize("name", ["factors", ".one", "", ".", "..", "a/b", "../one", "a\\b", "a\0b"])
def test_reserved_names_are_refused(tmp_path: Path, name: str) -> None:
    source, store = _artifact(tmp_path / "a", 1.0), tmp_path / "store"
    with pytest.raises(ScuteError) as refused:
        _write(store, source, name)
    assert refused.value.diagnostics[0].code.name == "SC607"
    assert not store.exists()


def _write_beyond_a_limit(store: Path, source: Path) -> None:
    limit = rank_file(source, 1).stat().st_size - 1
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    with pytest.raises(ScuteError) as refused:
        _write(store, source)
    assert refused.value.diagnostics[0].code.name == "SC109"
    assert "large" in refused.value.diagnostics[0].found


@pytest.mark.parametrize("replaces", [True, False])
def test_a_write_that_fails_leaves_the_store_as_it_was(tmp_path: Path, *, replaces: bool) -> None:
    old, store = _artifact(tmp_path / "a", 1.0), tmp_path / "store" / "inner"
    if replaces:
        _write(store, old)
    slots = [{"ds": torch.ones(4 * (1 + 99 * rank))} for rank in range(2)]
    sites = [
        Written(
            name=SITE,
            in_features=6,
            out_features=404,
            slots={"ds": torch.cat([slot["ds"] for slot in slots])},
            outputs=[[[0, 4]], [[4, 404]]],
        )
    ]
    before = _contents(tmp_path / "store")
    _all_succeed(partial(_write_beyond_a_limit, store, write_artifact(tmp_path / "b", sites, tp=2)))
    assert _contents(tmp_path / "store") == before
    assert (tmp_path / "store").exists() is replaces


def test_a_store_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("text")
    with pytest.raises(ScuteError) as refused:
        _write(tmp_path / "store", _artifact(tmp_path / "a", 1.0))
    assert refused.value.diagnostics[0].code.name == "SC109"
