"""Rounds values to an artifact's dtype, and checks that they fit it."""

from __future__ import annotations

from typing import NoReturn

import numpy as np
import torch

from scute_compile.diagnostics import Code, fail
from scute_compile.ir.dtypes import DType, torch_dtype
from scute_compile.pack.evaluate import Array


class TooNarrow(Exception):  # noqa: N818 - not an error while a wider dtype can be tried
    """Raised when values overflow the dtype, or are subnormal in it and lose precision."""

    def __init__(self, where: str, found: str, dtype: DType) -> None:
        super().__init__(where)
        self.where, self.found, self.dtype = where, found, dtype

    def refuse(self) -> NoReturn:
        """Raise the fault as a diagnostic: SC320."""
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
        TooNarrow: a value overflows, or subnormals lose more than ordinary rounding can.
        ScuteError: SC309 when a value is infinite or NaN before rounding.
    """
    exact = torch.from_numpy(np.ascontiguousarray(values))
    tensor = exact.to(torch_dtype(dtype.value))
    if tensor.numel() and not all(
        edge.isfinite() for edge in torch.aminmax(tensor)
    ):  # if any value is NaN, both edges are
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
            found=f"{wrong} of {exact.numel()} computed values are NaN or infinity",
            expected="finite numbers",
            next="look for NaN in this layer of the base, and for columns of W + c A B that are zero: DoRA divides by "
            "their norms, and PEFT's answer is NaN as well",
        )
