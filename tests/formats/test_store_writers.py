"""Several processes at one store: writers of one name, readers beside them, and writers that were killed."""

from __future__ import annotations

import multiprocessing
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from scute_compile.diagnostics import ScuteError
from scute_compile.formats import writer as artifact_writer
from scute_compile.formats.artifact import open_artifact
from scute_compile.formats.artifact_tensors import load_rank
from scute_compile.formats.lock import exchange
from scute_compile.formats.manifest import Method
from scute_compile.formats.writer import new_artifact
from tests.support.commands import compiled

Pair = Callable[[str, str], tuple[Path, Path]]
FORK = multiprocessing.get_context("fork")
Faults = multiprocessing.Queue


def _report(work: Callable[[], None], faults: Faults[str]) -> None:
    try:
        work()
    except Exception as error:  # noqa: BLE001 - whatever it is, the test shows it
        faults.put(str(error))
    faults.put("")


def _all_succeed(*works: Callable[[], None]) -> None:
    faults: Faults[str] = FORK.Queue()
    processes = [FORK.Process(target=_report, args=(work, faults)) for work in works]
    for process in processes:
        process.start()
    said: list[str] = []
    while said.count("") < len(works):
        said.append(faults.get(timeout=60))
    for process in processes:
        process.join()
    assert set(said) == {""}


def _write(store: Path, number: int) -> None:
    for turn in range(60):
        with new_artifact(store, "one") as folder:
            (folder / "manifest.json").write_text(f"{number} {turn}")


@pytest.mark.parametrize("exchanges", [True, False])
def test_writers_of_one_name_replace_each_other_and_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, exchanges: bool
) -> None:
    if not exchanges:
        monkeypatch.setattr(artifact_writer, "exchange", lambda *_: False)
    store = tmp_path / "store"
    _all_succeed(*(partial(_write, store, number) for number in range(3)))
    assert [folder.name for folder in store.iterdir()] == ["one"]


def _copy(store: Path, sources: tuple[Path, ...], turns: int) -> None:
    for turn in range(turns):
        with new_artifact(store, "one") as folder:
            shutil.copytree(sources[turn % len(sources)], folder, dirs_exist_ok=True)


def _open(store: Path, tensors: dict[Method, set[str]], turns: int) -> None:
    for _ in range(turns):
        artifact = open_artifact(store / "one")
        try:
            names = set(load_rank(artifact, 0))
        except ScuteError as error:
            if not error.diagnostics[0].found.startswith("another artifact"):
                raise
        else:
            assert names == tensors[artifact.manifest.method]


def test_readers_find_one_artifact_or_the_other_and_never_a_mixture(pair: Pair, tmp_path: Path) -> None:
    if not _exchanges(tmp_path):
        pytest.skip("this file system can't exchange folders in one step")
    sources = tuple(compiled(*pair(recipe, "llama"), tmp_path / recipe) for recipe in ("dora", "lora"))
    opened = [open_artifact(source) for source in sources]
    tensors = {artifact.manifest.method: set(load_rank(artifact, 0)) for artifact in opened}
    assert len(tensors) == 2
    store = tmp_path / "store"
    _copy(store, sources, 1)
    _all_succeed(partial(_copy, store, sources, 150), *[partial(_open, store, tensors, 150)] * 2)


def _exchanges(folder: Path) -> bool:
    one, other = folder / "one", folder / "other"
    for made in (one, other):
        made.mkdir()
    return exchange(one, other)


def _hang(store: Path) -> None:
    with new_artifact(store, "one") as folder:
        (folder / "rank").write_bytes(bytes(1 << 20))
        time.sleep(60)


def test_what_a_killed_writer_left_goes_with_the_next_write_and_a_living_writers_folder_stays(tmp_path: Path) -> None:
    store = tmp_path / "store"
    writers = [FORK.Process(target=_hang, args=(store,)) for _ in range(2)]
    for writer in writers:
        writer.start()
    deadline = time.monotonic() + 30
    while len(list(store.glob(".one.*/rank"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    writers[0].kill()
    writers[0].join()
    assert len(list(store.glob(".one.*"))) == 2
    _copy_text(store, "next")
    assert len(list(store.glob(".one.*"))) == 1
    writers[1].kill()
    writers[1].join()
    _copy_text(store, "last")
    assert sorted(folder.name for folder in store.iterdir()) == ["last", "next"]


def _copy_text(store: Path, name: str) -> None:
    with new_artifact(store, name) as folder:
        (folder / "manifest.json").write_text("{}")


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_what_is_no_artifact_is_never_replaced(tmp_path: Path, kind: str) -> None:
    store = tmp_path / "store"
    _copy_text(store, "other")
    target = store / "one"
    if kind == "folder":
        target.mkdir()
    elif kind == "file":
        target.write_text("mine")
    else:
        target.symlink_to(store / "other")
    with pytest.raises(ScuteError, match="no artifact"):
        _copy_text(store, "one")
    assert sorted(path.name for path in store.iterdir()) == ["one", "other"]
