"""Writers that are killed, interrupted, refused or out of space, and what they leave in a store."""

from __future__ import annotations

import fcntl
import os
import resource
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from scute_compile.diagnostics import ScuteError
from scute_compile.formats.artifact import open_artifact
from scute_compile.formats.lock import locked
from tests.support.artifact_files import manifest_of, rank_file
from tests.support.artifacts import Written, write_artifact
from tests.support.stores import (
    FORK,
    SITE,
    Faults,
    all_succeed,
    artifact,
    contents,
    expected_names,
    names,
    report,
    values,
    write,
    write_fields,
)


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
        write(store, source)
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
    old, new = artifact(tmp_path / "a", 1.0, tp=1), artifact(tmp_path / "b", 2.0, shared=True)
    store = tmp_path / "store"
    write(store, old)
    _kill_writer_at(step, store, new)
    assert values(store / "one") == ({1.0} if step < 6 else {2.0})
    write(store, new)
    assert values(store / "one") == {2.0}
    assert names(store / "one") == expected_names(new)
    assert len(names(store / "factors")) == 1


@pytest.mark.parametrize("step", STEPS)
def test_a_killed_first_writer_leaves_no_artifact_and_does_not_obstruct_the_next(tmp_path: Path, step: int) -> None:
    source, store = artifact(tmp_path / "a", 1.0, shared=True), tmp_path / "store"
    _kill_writer_at(step, store, source)
    if step < 6:
        with pytest.raises(ScuteError, match="SC601"):
            open_artifact(store / "one")
    write(store, source, "other")  # the lock ended with the process
    write(store, source)
    assert names(store / "one") == expected_names(source)
    assert names(store) == ["factors", "one", "other"]


def _write_beyond_a_limit(store: Path, source: Path) -> None:
    limit = rank_file(source, 1).stat().st_size - 1
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    with pytest.raises(ScuteError) as refused:
        write(store, source)
    assert refused.value.diagnostics[0].code.name == "SC109"
    assert "large" in refused.value.diagnostics[0].found


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("replaces", [True, False])
def test_a_write_that_fails_leaves_the_store_as_it_was(tmp_path: Path, *, replaces: bool, shared: bool) -> None:
    old, store = artifact(tmp_path / "a", 1.0), tmp_path / "store" / "inner"
    if replaces:
        write(store, old)
    slots = [{"ds": torch.ones(4 * (1 + 99 * rank))} for rank in range(2)]
    sites = [
        Written(
            name=SITE,
            in_features=6,
            out_features=404,
            slots={"ds": torch.cat([slot["ds"] for slot in slots])}
            | ({"A0": torch.ones(2, 6), "B0": torch.ones(2, 404)} if shared else {}),
            outputs=[[[0, 4]], [[4, 404]]],
            shared=frozenset({"A0"} if shared else ()),
        )
    ]
    before = contents(tmp_path / "store")
    all_succeed(partial(_write_beyond_a_limit, store, write_artifact(tmp_path / "b", sites, tp=2)))
    assert contents(tmp_path / "store") == before
    assert (tmp_path / "store").exists() is replaces


def test_an_interrupt_right_after_the_commit_keeps_the_artifact(tmp_path: Path) -> None:
    old, new, store = artifact(tmp_path / "a", 1.0), artifact(tmp_path / "b", 2.0), tmp_path / "store"
    write(store, old)
    replace = Path.replace

    def interrupted(path: Path, target: Path) -> None:
        replace(path, target)
        if target.name == "manifest.json":
            raise KeyboardInterrupt

    with patch.object(Path, "replace", interrupted), pytest.raises(KeyboardInterrupt):
        write(store, new)
    assert values(store / "one") == {2.0}


DEFECTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "a number of the wrong type": lambda fields: fields["workload"].update(tokens=1.5),
    "an infinite number": lambda fields: fields["workload"].update(bandwidth=float("inf")),
    "an unknown field": lambda fields: fields.update(future=1),
    "another major version": lambda fields: fields.update(schema_version="3.0"),
    "text that is not Unicode": lambda fields: fields.update(name="\udcff"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_manifest_that_readers_refuse_is_not_committed(tmp_path: Path, defect: str) -> None:
    old, new, store = artifact(tmp_path / "a", 1.0), artifact(tmp_path / "b", 2.0), tmp_path / "store"
    write(store, old)
    before = contents(store)
    fields = manifest_of(new)
    DEFECTS[defect](fields)
    with pytest.raises(ScuteError, match=r"SC60[12]"):
        write_fields(store, new, fields)
    assert contents(store) == before


def test_a_store_that_is_removed_while_a_writer_waits_is_made_again(tmp_path: Path) -> None:
    source, store = artifact(tmp_path / "a", 1.0), tmp_path / "above" / "store"
    store.mkdir(parents=True)
    begin, waits = FORK.Event(), FORK.Event()
    flock = fcntl.flock

    def announced(handle: int, operation: int) -> None:
        waits.set()
        flock(handle, operation)

    def wait_and_write() -> None:
        assert begin.wait(30)
        with patch.object(fcntl, "flock", announced):
            write(store, source)

    faults: Faults[str] = FORK.Queue()
    writer = FORK.Process(target=report, args=(wait_and_write, faults), daemon=True)
    writer.start()  # before the lock is taken: a forked process would hold it too
    with locked(store):
        begin.set()
        assert waits.wait(30)
        store.rmdir()
        store.parent.rmdir()
    assert faults.get(timeout=30) == ""
    writer.join()
    assert values(store / "one") == {1.0}


def test_a_store_that_is_removed_while_it_is_made_is_made_again(tmp_path: Path) -> None:
    source, store = artifact(tmp_path / "a", 1.0), tmp_path / "store"
    made = Path.mkdir

    def raced(path: Path, **options: Any) -> None:  # noqa: ANN401 - those of `mkdir`
        if path == store and not store.exists():
            made(store)
            store.rmdir()
            if next(attempts) < 3:
                raise FileExistsError
        made(path, **options)

    attempts = count()
    with patch.object(Path, "mkdir", raced):
        write(store, source)
    assert values(store / "one") == {1.0}
