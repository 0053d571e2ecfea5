"""Compiles a PEFT folder when an engine loads it, and keeps the result in a store for all ranks and later starts."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from scute_compile.diagnostics import ScuteError
from scute_compile.formats.artifact import Artifact, is_artifact, open_artifact
from scute_compile.formats.lock import locked
from scute_compile.formats.safetensors_writer import sha256_of
from scute_compile.ir.dtypes import DType
from scute_compile.ir.target import Target
from scute_compile.pipeline import compile_planned, open_model, plan
from scute_compile.runtime_vllm.engine_base import EngineBase


def compile_folder(adapter: Path, base: EngineBase, *, tp: int, dtype: torch.dtype, store: Path) -> Artifact:
    """Compile a PEFT folder for an engine, or open the artifact of an earlier compile of the same content.

    Every rank calls this. The first to take the store's lock compiles; the others wait and open the result.

    Args:
        adapter: The PEFT folder.
        base: The engine's model; DoRA's norms are computed from its files.
        tp: The engine's number of ranks.
        dtype: The pool's dtype.
        store: Where compiled folders are kept.

    Raises:
        ScuteError: What the compiler refuses.
    """
    target = Target(tp=tp, dtype=DType(str(dtype).removeprefix("torch.")))
    name = f"{adapter.name.lstrip('.') or 'adapter'}-{_identity(adapter, base, target)}"
    store.mkdir(parents=True, exist_ok=True)
    with locked(_lock(store)):
        if is_artifact(store / name):
            try:
                return open_artifact(store / name)
            except ScuteError:  # damaged, or of an older format: compile it again
                pass
        planned = plan(str(adapter), base.opened, target, hash_files=True, name=name)
        if planned.refused:
            raise ScuteError(planned.findings)
        (result,) = compile_planned((planned,), open_model(base.folder, weights=True), store, lambda *_: None)
    if isinstance(result, ScuteError):
        raise result
    return open_artifact(result)


def _lock(store: Path) -> Path:
    """Return a folder to lock; the store's own lock is taken when an artifact is written."""
    folder = store / ".compiling"
    folder.mkdir(exist_ok=True)
    return folder


def _identity(adapter: Path, base: EngineBase, target: Target) -> str:
    """Return a hash of the adapter's files, the base, the number of ranks and the dtype."""
    digest = hashlib.sha256(f"{base.opened.structure_hash()} {base.folder} {target.tp} {target.dtype}".encode())
    for file in sorted(adapter.glob("adapter_*")):
        if file.is_file():
            digest.update(f"{file.name} {sha256_of(file)}".encode())
    return digest.hexdigest()[:16]
