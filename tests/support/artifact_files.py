"""Reads an artifact's files and changes them on purpose, with every hash made right again."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


def manifest_of(artifact: Path) -> dict[str, Any]:
    """The manifest as plain values."""
    manifest: dict[str, Any] = json.loads((artifact / "manifest.json").read_text())
    return manifest


def digest_of(manifest: dict[str, Any]) -> str:
    """The content digest: sha256 of the canonical JSON of everything but the digest."""
    body = {key: value for key, value in manifest.items() if key != "digest"}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def rank_tensors(artifact: Path) -> list[Tensors]:
    """Every rank's tensors."""
    return [load_file(artifact / rank["file"]) for rank in manifest_of(artifact)["ranks"]]


def tampered(artifact: Path, name: str, change: Callable[[Tensors], None], *, every_rank: bool = True) -> Path:
    """Copy an artifact within its store, change the tensors of every rank, and make its hashes and sizes right.

    Args:
        artifact: What is copied.
        name: Of the copy.
        change: Called once per rank, in order.
        every_rank: Whether each call must change something, or one of them at least.
    """
    copy = artifact.with_name(name)
    shutil.copytree(artifact, copy)
    manifest = manifest_of(copy)
    changed = []
    for rank in manifest["ranks"]:
        file = copy / rank["file"]
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata()
        tensors = load_file(file)
        before = {key: value.clone() for key, value in tensors.items()}
        change(tensors)
        changed.append(any(not torch.equal(before[key], tensors[key]) for key in before))
        save_file(tensors, file, metadata=metadata)
        rank["sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
        rank["bytes"] = file.stat().st_size
    assert all(changed) if every_rank else any(changed), "the change changes nothing"
    manifest["digest"] = digest_of(manifest)
    (copy / "manifest.json").write_text(json.dumps(manifest, ensure_ascii=False))
    return copy
