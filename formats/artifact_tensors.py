"""Loading an artifact's tensors into torch; kept apart so that everything else about artifacts works without torch.

A file is read into memory once, and what is there is hashed: whatever happens to the file afterwards, a tensor is what
the manifest promised. A memory map would follow the file, and reading it after a truncation ends the process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch

from scute_compile.diagnostics import Code, ScuteError, fail
from scute_compile.formats.artifact import FACTOR_TENSOR, Artifact, factor_hash_prefix
from scute_compile.formats.layout import SAFETENSORS_NAMES
from scute_compile.formats.reading import file_size, opened
from scute_compile.formats.safetensors import header_length, parse_header, read_exactly
from scute_compile.ir.dtypes import DType

TORCH_DTYPES: Mapping[DType, torch.dtype] = {
    DType.FLOAT32: torch.float32,
    DType.BFLOAT16: torch.bfloat16,
    DType.FLOAT16: torch.float16,
}
_EXPONENTS = {
    torch.float32: (np.uint32, np.uint32(0x7F800000)),
    torch.bfloat16: (np.uint16, np.uint16(0x7F80)),
    torch.float16: (np.uint16, np.uint16(0x7C00)),
}
"""By dtype: an unsigned integer as wide, and the bits of its exponent, all ones in infinity and NaN."""
_BLOCK = 1 << 18
"""Values that are looked at together: their copies stay in the cache."""
_STORED = {SAFETENSORS_NAMES[dtype]: torch_dtype for dtype, torch_dtype in TORCH_DTYPES.items()}


def load_rank(artifact: Artifact, rank: int) -> Mapping[str, torch.Tensor]:
    """Return the tensors of a rank's file by name, on the CPU; `scute_compile.formats.layout` gives their shapes.

    Raises:
        ScuteError: SC603 when the file isn't the manifest's (any more), or when another artifact has taken the name
            since this one was opened; SC309 when a number isn't finite.
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
        ScuteError: SC606 when the file isn't the factor of that hash (any more); SC309 when a number isn't finite.
    """
    path = artifact.factor_path(digest)
    record = next(factor for factor in artifact.manifest.factors if factor.hash == digest)
    try:
        factor = _tensors(_read(path), path)[FACTOR_TENSOR]
    except ScuteError as error:
        _refuse_other(artifact, Code.SC606, path, error.diagnostics[0].found)
    except KeyError:
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
    """Return the tensors of a file that lies in memory, without a copy where they are aligned."""
    length = header_length(bytes(raw[:64].numpy()), len(raw), str(path))
    tensors = {}
    for key, entry in parse_header(raw[8 : 8 + length].numpy().tobytes(), len(raw), str(path)).items():
        dtype = _STORED[entry.dtype]
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
    """Return whether no exponent is all ones.

    In numpy, on one core: PyTorch spreads every tensor over all of them, and waits for each where others use them too.
    Loading an adapter of 84 MB beside two busy cores took 3 to 14 s, and takes 0.3.
    """
    unsigned, ones = _EXPONENTS[tensor.dtype]
    bits = tensor.reshape(-1).contiguous().view(torch.uint8).numpy().view(unsigned)
    blocks = (bits[start : start + _BLOCK] for start in range(0, len(bits), _BLOCK))
    return not any(bool(((block & ones) == ones).any()) for block in blocks)


def _refuse_other(artifact: Artifact, code: Code, path: Path, found: str, *, expected: str = "") -> NoReturn:
    """Say that a file isn't what the manifest promises, and why that may be."""
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
