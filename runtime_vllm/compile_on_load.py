"""Compiling a PEFT folder when an engine loads it: once per content, kept in a store, shared by all ranks."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from scute_compile.diagnostics import ScuteError
from scute_compile.driver.bases import open_model
from scute_compile.driver.packing import compile_planned
from scute_compile.formats.artifact import Artifact, is_artifact, open_artifact
from scute_compile.formats.lock import locked
from scute_compile.formats.reading import sha256_of
from scute_compile.ir.dtypes import DType
from scute_compile.ir.target import Target
from scute_compile.pipeline import plan
from scute_compile.runtime_vllm.engine_base import EngineBase


def compile_folder(adapter: Path, base: EngineBase, *, tp: int, dtype: torch.dtype, store: Path) -> Artifact:
    """Compile a PEFT folder for an engine, or open what was compiled from the same content before.

    Every rank calls this; the first one to hold the store's lock compiles, the others wait and open.

    Args:
        adapter: The folder.
        base: The engine's model, whose files DoRA's norms are read from.
        tp: The engine's ranks.
        dtype: The pool's.
        store: Where compiled folders are kept.

    Raises:
        ScuteError: Whatever the compiler refuses.
    """
    target = Target(tp=tp, dtype=DType(str(dtype).removeprefix("torch.")))
    name = f"{adapter.name.lstrip('.') or 'adapter'}-{_identity(adapter, base, target)}"
    store.mkdir(parents=True, exist_ok=True)
    with locked(_lock(store)):
        if is_artifact(store / name):
            try:
                return open_artifact(store / name)
            except ScuteError:  # damaged, or of an older version: compiled anew
                pass
        planned = plan(str(adapter), base.opened, target, hash_files=True, name=name)
        if planned.refused:
            raise ScuteError(planned.findings)
        (result,) = compile_planned((planned,), open_model(base.folder, weights=True), store, lambda *_: None)
    if isinstance(result, ScuteError):
        raise result
    return open_artifact(result)


def _lock(store: Path) -> Path:
    """Return a folder to lock beside the store's own lock, which writing an artifact takes."""
    folder = store / ".compiling"
    folder.mkdir(exist_ok=True)
    return folder


def _identity(adapter: Path, base: EngineBase, target: Target) -> str:
    """Return what makes two compiles the same: the adapter's files, the base, ranks and dtype."""
    digest = hashlib.sha256(f"{base.opened.structure_hash()} {base.folder} {target.tp} {target.dtype}".encode())
    for file in sorted(adapter.glob("adapter_*")):
        if file.is_file():
            digest.update(f"{file.name} {sha256_of(file)}".encode())
    return digest.hexdigest()[:16]
