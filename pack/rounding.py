"""Rounding to an artifact's dtype, once, with a check that the values survive it."""

from __future__ import annotations

import hashlib
from typing import NoReturn

import numpy as np
import torch

from scute_compile.diagnostics import Code, fail
from scute_compile.formats.artifact import factor_hash_prefix
from scute_compile.ir.dtypes import DType, torch_dtype
from scute_compile.pack.evaluate import Array


class TooNarrow(Exception):  # noqa: N818 - a wider dtype is tried first; an error only for the last one
    """Values overflow the dtype, or lose digits as subnormals."""

    def __init__(self, where: str, found: str, dtype: DType) -> None:
        super().__init__(where)
        self.where, self.found, self.dtype = where, found, dtype

    def refuse(self) -> NoReturn:
        """Raise it as a diagnostic: SC320."""
        fail(
            Code.SC320,
            where=self.where,
            found=self.found,
            expected=f"values that {self.dtype} holds: at most {self.dtype.largest:.6g}, with full precision above "
            f"{self.dtype.smallest_normal:.3g}",
            next="restore lora_alpha and the tensors of the training run: no dtype of artifacts is wider"
            if self.dtype is DType.FLOAT32
            else "compile with --dtype auto, bfloat16 or float32",
        )


def rounded(values: Array, dtype: DType, where: str) -> torch.Tensor:
    """Return `values` in `dtype`, rounded to nearest once.

    Raises:
        TooNarrow: A value overflows, or subnormals lose more than ordinary rounding can.
        ScuteError: SC309 when a value is infinite or NaN before rounding.
    """
    exact = torch.from_numpy(np.ascontiguousarray(values))
    tensor = exact.to(torch_dtype(dtype.value))
    if tensor.numel() and not all(
        edge.isfinite() for edge in torch.aminmax(tensor)
    ):  # a NaN anywhere becomes both edges
        _refuse_non_finite(exact, where)
        raise TooNarrow(where, f"largest value {float(exact.abs().max()):.6g}", dtype)
    if dtype is DType.FLOAT16:
        wide = exact.double()
        lost, size = (tensor.double() - wide).norm().item(), wide.norm().item()
        if lost > 2 * dtype.epsilon * size:
            raise TooNarrow(where, f"rounding loses {lost / size:.2%} of the tensor", dtype)
    return tensor


def _refuse_non_finite(exact: torch.Tensor, where: str) -> None:
    wrong = int((~exact.isfinite()).sum())
    if wrong:
        fail(
            Code.SC309,
            where=where,
            found=f"{wrong} of {exact.numel()} values come out as NaN or infinity",
            expected="finite numbers",
            next="look for NaN in this layer of the base, and for columns of W + c A B that are zero: DoRA divides by "
            "their norms, and PEFT's answer is NaN as well",
        )


def factor_digest(tensor: torch.Tensor, dtype: DType) -> str:
    """Return the hash that names a shared factor `(rank, features)`, over its dtype, shape and bytes."""
    rank, features = tensor.shape
    digest = hashlib.sha256(factor_hash_prefix(dtype.value, rank, features))
    digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
