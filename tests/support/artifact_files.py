"""Reads the files of artifacts, and changes them with matching hashes and names."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save

Tensors = dict[str, torch.Tensor]


def manifest_of(artifact: Path) -> dict[str, Any]:
    """Return the manifest as plain values."""
    manifest: dict[str, Any] = json.loads((artifact / "manifest.json").read_text())
    return manifest


def digest_of(manifest: dict[str, Any]) -> str:
    """Return the digest as docs/format.md defines it: sha256 of the canonical JSON without the digest."""
    body = {key: value for key, value in manifest.items() if key != "digest"}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def rank_file(artifact: Path, rank: int = 0) -> Path:
    """Return the file of a rank."""
    return artifact / str(manifest_of(artifact)["ranks"][rank]["file"])


def save_rank(folder: Path, rank: int, tp: int, tensors: Tensors) -> dict[str, Any]:
    """Write a rank's file under the name that its content requires, and return its manifest record."""
    raw = save(tensors)
    digest = hashlib.sha256(raw).hexdigest()
    file = folder / f"rank-{rank:05d}-of-{tp:05d}.{digest[:16]}.safetensors"
    file.write_bytes(raw)
    return {"file": file.name, "sha256": digest, "bytes": len(raw)}


def rank_tensors(artifact: Path) -> list[Tensors]:
    """Return the tensors of every rank."""
    return [load_file(artifact / rank["file"]) for rank in manifest_of(artifact)["ranks"]]


def tampered(artifact: Path, name: str, change: Callable[[Tensors], None], *, every_rank: bool = True) -> Path:
    """Copy an artifact within its store and change its tensors; names, hashes and sizes match the changed files.

    Args:
        artifact: The artifact to copy.
        name: The name of the copy.
        change: Called once per rank, in order, with the rank's tensors.
        every_rank: Whether each call must change a tensor, or at least one of them.
    """
    copy = artifact.with_name(name)
    shutil.copytree(artifact, copy)
    manifest = manifest_of(copy)
    changed = []
    for rank, record in enumerate(manifest["ranks"]):
        tensors = load_file(copy / record["file"])
        before = {key: value.clone() for key, value in tensors.items()}
        change(tensors)
        changed.append(any(not torch.equal(before[key], tensors[key]) for key in before))
        (copy / record["file"]).unlink()
        manifest["ranks"][rank] = save_rank(copy, rank, manifest["tp"], tensors)
    assert all(changed) if every_rank else any(changed), "no tensor changed"
    manifest["digest"] = digest_of(manifest)
    (copy / "manifest.json").write_text(json.dumps(manifest))
    return copy
