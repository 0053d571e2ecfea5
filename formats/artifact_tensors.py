"""Loading an artifact's tensors into torch; kept apart so that everything else about artifacts works without torch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from safetensors.torch import load_file

from scute_compile.codes import Code
from scute_compile.diagnostics import fail
from scute_compile.formats.artifact import FACTOR_TENSOR, Artifact
from scute_compile.target import DType

TORCH_DTYPES: Mapping[DType, torch.dtype] = {
    DType.FLOAT32: torch.float32,
    DType.BFLOAT16: torch.bfloat16,
    DType.FLOAT16: torch.float16,
}


def load_rank(artifact: Artifact, rank: int) -> Mapping[str, torch.Tensor]:
    """Return the tensors of a rank's file by name, on the CPU; `scute_compile.formats.layout` gives their shapes.

    Raises:
        ScuteError: SC603 when another artifact has taken the name since this one was opened.
    """
    try:
        tensors = load_file(artifact.rank_path(rank))
    except Exception:  # the library's own kinds of fault, when the file changes under it
        if not artifact.replaced():
            raise
    if artifact.replaced():
        fail(
            Code.SC603, where=str(artifact.path), found="another artifact under this name than the one that was opened",
            expected=f"the artifact of digest {artifact.manifest.digest}", next="load the artifact again",
        )  # fmt: skip
    return tensors


def load_factor(artifact: Artifact, digest: str) -> torch.Tensor:
    """Return a shared factor whole: shape `(rank, features)`, on the CPU."""
    return load_file(artifact.factor_path(digest))[FACTOR_TENSOR]
