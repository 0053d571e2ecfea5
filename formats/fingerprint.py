"""The two fingerprints of a base model: of its structure, and of samples of its weights.

Neither depends on how the weights are split over files. docs/format.md describes both algorithms.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from scute_compile.formats.base_checkpoint import BaseCheckpoint
from scute_compile.formats.safetensors import TensorEntry, read_spans
from scute_compile.formats.samples import sample_spans
from scute_compile.ir.expressions import Shape


def structure_hash(model_type: str, parameters: Mapping[str, object], tensors: Mapping[str, tuple[str, Shape]]) -> str:
    """Return the SHA-256 over model type, parameters, and the tensors' names and shapes.

    Dtypes don't count: a base in another precision has the same structure.

    Args:
        model_type: The configuration's `model_type`.
        parameters: Configuration fields, JSON values.
        tensors: Name -> (dtype, shape).
    """
    return _digest(
        {
            "model_type": model_type,
            "parameters": _plain(parameters),
            "tensors": {name: list(shape) for name, (_, shape) in tensors.items()},
        }
    )


def content_hash(checkpoint: BaseCheckpoint) -> str | None:
    """Return the SHA-256 over every tensor's name, dtype, shape and samples; None without weights.

    The samples are the first, middle and last 4096 bytes of each tensor, or all of it when it isn't longer.

    Raises:
        ScuteError: SC104 or SC109 when a file can't be read.
    """
    if not checkpoint.has_weights:
        return None
    samples = checkpoint.samples or sample_hashes(checkpoint)
    return _digest(
        [
            [key, stored.entry.dtype, list(stored.entry.shape), samples[key]]
            for key, stored in sorted(checkpoint.tensors.items())
        ]
    )


def sample_hashes(checkpoint: BaseCheckpoint) -> Mapping[str, str]:
    """Return the SHA-256 of each tensor's samples by key.

    Raises:
        ScuteError: SC104 or SC109 when a file can't be read.
    """
    samples: dict[str, str] = {}
    # File by file in byte order, for sequential reads.
    by_file: dict[Path, list[tuple[str, TensorEntry]]] = {}
    for key, stored in checkpoint.tensors.items():
        if stored.file is not None:
            by_file.setdefault(stored.file, []).append((key, stored.entry))
    for file, entries in sorted(by_file.items()):
        inside = sorted(entries, key=lambda item: item[1].begin)
        spans = [(entry.begin + offset, length) for _, entry in inside for offset, length in sample_spans(entry)]
        blocks = read_spans(file, spans)
        for key, entry in inside:
            digest = hashlib.sha256()
            for _ in sample_spans(entry):
                digest.update(next(blocks))
            samples[key] = digest.hexdigest()
    return samples


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()
