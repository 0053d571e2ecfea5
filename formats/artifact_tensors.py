"""Loading an artifact's tensors into torch; kept apart so that everything else about artifacts works without torch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from safetensors.torch import load_file

from scute_compile.formats.artifact import FACTOR_TENSOR, Artifact
from scute_compile.target import DType

TORCH_DTYPES: Mapping[DType, torch.dtype] = {
    DType.FLOAT32: torch.float32,
    DType.BFLOAT16: torch.bfloat16,
    DType.FLOAT16: torch.float16,
}


def load_rank(artifact: Artifact, rank: int) -> Mapping[str, torch.Tensor]:
    """Return the tensors of a rank's file by name, on the CPU; `scute_compile.formats.layout` gives their shapes."""
    return load_file(artifact.rank_path(rank))


def load_factor(artifact: Artifact, digest: str) -> torch.Tensor:
    """Return a shared factor whole: shape `(rank, features)`, on the CPU."""
    return load_file(artifact.factor_path(digest))[FACTOR_TENSOR]
