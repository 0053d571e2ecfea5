"""Loads an artifact's tensors into torch; the only module of this room that imports torch.

A file is read into memory once and hashed there, so later changes of the file don't reach the tensors. A memory map
would show these changes, and reading it after a truncation ends the process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import torch

from scute_compile.diagnostics import Code, ScuteError, fail
from scute_compile.formats.artifact import FACTOR_TENSOR, Artifact, factor_hash_prefix
from scute_compile.formats.reading import file_size, opened
from scute_compile.formats.safetensors import header_length, parse_header, read_exactly
from scute_compile.ir.dtypes import DType, format_named, torch_dtype

_BLOCK = 1 << 18
"""Values per block of the check for NaN and infinity: its copies stay in the cache."""


def load_rank(artifact: Artifact, rank: int) -> Mapping[str, torch.Tensor]:
    """Return the tensors of a rank's file by name, on the CPU; `scute_compile.formats.layout` gives their shapes.

    Raises:
        ScuteError: SC603 when the file differs from the manifest, or when the artifact was replaced since it was
            opened; SC309 when a number isn't finite.
    """
    record, path = artifact.manifest.ranks[rank], artifact.rank_path(rank)
    try:
        raw = _read(path)
    except ScuteError as error:
        _refuse_other(artifact, Code.SC603, path, error.diagnostics[0].found)
    digest = hashlib.sha256(raw.numpy().data).hexdigest()
    if digest != record.sha256 or artifact.replaced():
        _refuse_other(artifact, Code.SC603, path, f"sha256 {digest}", expected=f"sha256 {record.sha256}")
    return _finite(artifact, _tensors(raw, path))


def load_factor(artifact: Artifact, digest: str) -> torch.Tensor:
    """Return a whole shared factor: shape `(rank, features)`, on the CPU.

    Raises:
        ScuteError: SC606 when the file doesn't hold the factor of that hash; SC603 when the artifact was replaced
            since it was opened; SC309 when a number isn't finite.
    """
    path = artifact.factor_path(digest)
    record = next(factor for factor in artifact.manifest.factors if factor.hash == digest)
    try:
        factor = _tensors(_read(path), path)[FACTOR_TENSOR]
    except ScuteError as error:
        _refuse_other(artifact, Code.SC606, path, error.diagnostics[0].found)
    except KeyError:  # another tensor name, or a dtype that no factor has
        _refuse_other(artifact, Code.SC606, path, f"no tensor `{FACTOR_TENSOR}` in a floating-point dtype")
    found = factor_digest(factor, record.dtype, record.rank, record.features)
    if found != digest or factor.shape != (record.rank, record.features):
        _refuse_other(artifact, Code.SC606, path, f"a factor of hash {found}", expected=f"hash {digest}")
    _finite(artifact, {path.name: factor})
    return factor


def factor_digest(tensor: torch.Tensor, dtype: DType, rank: int, features: int) -> str:
    """Return the hash that names a shared factor `(rank, features)`, over its dtype, shape and bytes."""
    digest = hashlib.sha256(factor_hash_prefix(dtype.value, rank, features))
    digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _read(path: Path) -> torch.Tensor:
    """Return a file's bytes: 1-D uint8."""
    with opened(path) as file:
        raw = torch.empty(file_size(file), dtype=torch.uint8)
        read_exactly(file, raw.numpy(), path)
    return raw


def _tensors(raw: torch.Tensor, path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a file in memory; aligned ones are views."""
    length = header_length(bytes(raw[:64].numpy()), len(raw), str(path))
    tensors = {}
    for key, entry in parse_header(raw[8 : 8 + length].numpy().tobytes(), len(raw), str(path)).items():
        dtype = torch_dtype(entry.dtype)
        part = raw[entry.begin : entry.end]
        tensors[key] = (part.clone() if entry.begin % dtype.itemsize else part).view(dtype).reshape(entry.shape)
    return tensors


def _finite(artifact: Artifact, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    for key, tensor in tensors.items():
        if not _all_finite(tensor):
            low, high = (float(bound) for bound in torch.aminmax(tensor))
            fail(
                Code.SC309,
                where=f"{artifact.manifest.name}: {key}",
                found=f"values from {low} to {high}",
                expected="finite numbers",
                next="compile the adapter again; don't load artifacts of unknown origin",
            )
    return tensors


def _all_finite(tensor: torch.Tensor) -> bool:
    """Return whether no value is infinity or NaN, whose exponents are all ones.

    numpy does this on one core. PyTorch splits every tensor among all cores and waits for each: with two busy cores,
    it took 3 to 14 s for an adapter of 84 MB, and numpy takes 0.3 s.
    """
    stored = format_named(str(tensor.dtype))
    bits = tensor.reshape(-1).contiguous().view(torch.uint8).numpy().view(stored.word)
    ones = bits.dtype.type(stored.infinity)
    blocks = (bits[start : start + _BLOCK] for start in range(0, len(bits), _BLOCK))
    return not any(bool(((block & ones) == ones).any()) for block in blocks)


def _refuse_other(artifact: Artifact, code: Code, path: Path, found: str, *, expected: str = "") -> NoReturn:
    """Report a file that differs from the manifest, or the replacement of the artifact that explains it."""
    if artifact.replaced():
        fail(
            Code.SC603,
            where=str(artifact.path),
            found="an artifact that was replaced after it was opened",
            expected=f"the artifact of digest {artifact.manifest.digest}",
            next="load the artifact again",
        )
    fail(
        code,
        where=f"{artifact.manifest.name}: {path.name}",
        found=found,
        expected=expected or "the file that the manifest describes",
        next="the file was changed or damaged: copy the store again, or compile the adapter again",
    )
