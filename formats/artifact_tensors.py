"""Loading an artifact's tensors into torch: the only module about artifacts that needs torch.

A file is read into memory once and hashed there, so that later changes of the file don't reach the tensors. A memory
map would follow the file, and reading it after a truncation ends the process.
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
from scute_compile.ir.dtypes import format_named, torch_dtype

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
    """Return a shared factor whole: shape `(rank, features)`, on the CPU.

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
        _refuse_other(artifact, Code.SC606, path, "other tensors than a factor's")
    found = hashlib.sha256(factor_hash_prefix(record.dtype.value, record.rank, record.features))
    found.update(factor.contiguous().view(torch.uint8).numpy().data)
    if found.hexdigest() != digest or factor.shape != (record.rank, record.features):
        _refuse_other(artifact, Code.SC606, path, f"a factor of hash {found.hexdigest()}", expected=f"hash {digest}")
    _finite(artifact, {path.name: factor})
    return factor


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
    """Return whether no exponent is all ones, as in infinity and NaN.

    Computed by numpy on one core: PyTorch splits every tensor among all cores and waits for each. Beside two busy
    cores, an adapter of 84 MB took 3 to 14 s with PyTorch and takes 0.3 s with numpy.
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
            found="another artifact under this name than the one that was opened",
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
