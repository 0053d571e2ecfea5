"""Stores in tests: small artifacts by hand, the writer under test, and processes that use one store."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from scute_compile.formats.artifact import open_artifact
from scute_compile.formats.artifact_tensors import load_rank
from scute_compile.formats.manifest import FactorFile
from scute_compile.formats.writer import artifact_writer
from tests.support.artifact_files import manifest_of, rank_file
from tests.support.artifacts import Written, write_artifact

FORK = multiprocessing.get_context("fork")
Faults = multiprocessing.Queue
SITE = "layers.0.up"


def artifact(folder: Path, value: float, *, tp: int = 2, shared: bool = False) -> Path:
    """Write an artifact by hand, of which every number of `ds` is `value`."""
    slots = {"ds": torch.full((8,), value)}
    if shared:
        slots |= {"A0": torch.arange(12.0).reshape(2, 6), "B0": torch.ones(2, 8)}
    site = Written(name=SITE, in_features=6, out_features=8, slots=slots, shared=frozenset({"A0"} & slots.keys()))
    return write_artifact(folder, [site], tp=tp)


def write(store: Path, source: Path, name: str = "one") -> None:
    """Write the files of another artifact into a store."""
    write_fields(store, source, manifest_of(source), name)


def write_fields(store: Path, source: Path, manifest: dict[str, Any], name: str = "one") -> None:
    with artifact_writer(store, name) as writer:
        for record in manifest["factors"]:
            raw = (source.parent / "factors" / f"{record['hash']}.safetensors").read_bytes()
            writer.add_factor(FactorFile.model_validate_json(json.dumps(record)), raw)
        for rank in range(manifest["tp"]):
            writer.add_rank(rank, manifest["tp"], rank_file(source, rank).read_bytes())
        writer.commit({key: value for key, value in manifest.items() if key != "digest"})


def values(folder: Path) -> set[float]:
    artifact = open_artifact(folder)
    tensors = (load_rank(artifact, rank)[f"{SITE}.ds"] for rank in range(artifact.manifest.tp))
    return {value for tensor in tensors for value in tensor.tolist()}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def expected_names(source: Path) -> list[str]:
    return sorted(["manifest.json", *(rank["file"] for rank in manifest_of(source)["ranks"])])


def report(work: Callable[[], None], faults: Faults[str]) -> None:
    try:
        work()
    except Exception as error:  # noqa: BLE001 - the test shows every fault
        faults.put(str(error) or repr(error))
    faults.put("")


def all_succeed(*works: Callable[[], None]) -> None:
    faults: Faults[str] = FORK.Queue()
    processes = [FORK.Process(target=report, args=(work, faults)) for work in works]
    for process in processes:
        process.start()
    messages: list[str] = []
    while messages.count("") < len(works):
        messages.append(faults.get(timeout=60))
    for process in processes:
        process.join()
    assert set(messages) == {""}


def contents(folder: Path) -> dict[str, object]:
    return {
        str(path.relative_to(folder)): str(path.readlink()) if path.is_symlink() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }
