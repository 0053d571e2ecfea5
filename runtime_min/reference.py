"""Reference operations: the meaning of every kernel as plain PyTorch, for all devices and dtypes.

Each kernel is tested against the function of its name. All compute in float32, or wider where an input is wider; only
`apply_site` rounds, once, at the end.

Shape suffixes: T tokens (any number of leading dimensions), K inputs, N outputs, R rank, G blocks, S block width.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from scute_compile.ir.expressions import Ranges
from scute_compile.ir.program import RotationKind


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TermTensors:
    """Tensors of one low-rank term; None stands for the identity."""

    a: torch.Tensor
    """`(R, K)`."""
    b: torch.Tensor
    """`(R, N)`."""
    d: torch.Tensor | None = None
    """`(R,)`."""
    e: torch.Tensor | None = None
    """`(N,)`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SiteTensors:
    """Tensors of one site, or of one rank's part of it; None stands for the identity."""

    rotation: RotationKind | None = None
    delta: torch.Tensor | None = None
    """`R - I`: `(G, S, S)`, `(1, S, S)` for one block that repeats, or `(K,)` for a diagonal."""
    ds: torch.Tensor | None = None
    """`s - 1`: `(N,)`."""
    b: torch.Tensor | None = None
    """`(N,)`: the shift, added to a `y` that includes the base's bias."""
    terms: tuple[TermTensors, ...] = ()


def wide(*tensors: torch.Tensor) -> torch.dtype:
    """Return the dtype to compute in: float32, or float64 when an operand is float64.

    >>> wide(torch.zeros(1, dtype=torch.bfloat16))
    torch.float32
    """
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def rotate(x_TK: torch.Tensor, dR: torch.Tensor, kind: RotationKind) -> torch.Tensor:
    """Return the delta rows `x (R - I)`.

    **Semantics**: with `R - I` block-diagonal, `out[:, gS:(g+1)S] = x[:, gS:(g+1)S] @ dR[g]` for each block g, where
    one stored block is used for all; with a diagonal, `out = x * dR`.

    Args:
        x_TK: Inputs `(..., K)`.
        dR: `(G, S, S)` with `G S = K`, `(1, S, S)`, or `(K,)`.
        kind: The form of `dR`.

    Returns:
        `(..., K)`, in the wide dtype; rounding to half precision would lose small rotations.
    """
    dtype = wide(x_TK, dR)
    x, delta = x_TK.to(dtype), dR.to(dtype)
    if kind is RotationKind.DIAGONAL:
        return x * delta
    size = delta.shape[-1]
    x_TGS = x.reshape(*x.shape[:-1], x.shape[-1] // size, size)
    return (x_TGS.unsqueeze(-2) @ delta).reshape(x.shape)


def shrink(x_TK: torch.Tensor, a_RK: torch.Tensor, d_R: torch.Tensor | None = None) -> torch.Tensor:
    """Return the low-rank activations of one term.

    **Semantics**: `out = (x @ a.T) * d`.

    Args:
        x_TK: Inputs `(..., K)`, never rotated.
        a_RK: The factor A, rank-major.
        d_R: Slot d; None stands for ones.

    Returns:
        `(..., R)`, in the wide dtype.
    """
    dtype = wide(x_TK, a_RK)
    h_TR = x_TK.to(dtype) @ a_RK.to(dtype).T
    return h_TR if d_R is None else h_TR * d_R.to(dtype)


def expand(h_TR: torch.Tensor, b_RN: torch.Tensor, e_N: torch.Tensor | None = None) -> torch.Tensor:
    """Return the contribution of one term to the output.

    **Semantics**: `out = (h @ b) * e`.

    Args:
        h_TR: Low-rank activations, as `shrink` returns them.
        b_RN: The factor B, rank-major.
        e_N: Slot e; None stands for ones.

    Returns:
        `(..., N)`, in the wide dtype.
    """
    dtype = wide(h_TR, b_RN)
    out_TN = h_TR.to(dtype) @ b_RN.to(dtype)
    return out_TN if e_N is None else out_TN * e_N.to(dtype)


def apply_site(
    y_TN: torch.Tensor,
    x_TK: torch.Tensor,
    delta_y_TN: torch.Tensor | None,
    tensors: SiteTensors,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return the output of an adapted layer.

    **Semantics**: `z = y + delta_y; out = z + z * ds + b + sum_k expand(shrink(x, a_k, d_k), b_k, e_k)`, rounded once.

    Args:
        y_TN: The base layer's output for `x`, with its bias.
        x_TK: The layer's input, not rotated.
        delta_y_TN: `rotate(x, dR) @ W`, without bias; None where the site has no R.
        tensors: The site's tensors.
        out_dtype: Dtype of the result; None for that of `x`. Ranks pass a wide dtype, since they round
            after partial sums are added.

    Returns:
        `(..., N)` in `out_dtype`.
    """
    dtype = wide(y_TN, x_TK)
    z = y_TN.to(dtype) if delta_y_TN is None else y_TN.to(dtype) + delta_y_TN.to(dtype)
    out = z if tensors.ds is None else z + z * tensors.ds.to(dtype)
    if tensors.b is not None:
        out = out + tensors.b.to(dtype)
    out = add_terms(out, x_TK, tensors.terms)
    return out.to(x_TK.dtype if out_dtype is None else out_dtype)


def add_terms(y_TN: torch.Tensor, x_TK: torch.Tensor, terms: Iterable[TermTensors]) -> torch.Tensor:
    """Return `y` plus all low-rank terms of `x`.

    **Semantics**: `out = y + sum_k expand(shrink(x, a_k, d_k), b_k, e_k)`, added in the order of the terms.
    """
    for term in terms:
        y_TN = y_TN + expand(shrink(x_TK, term.a, term.d), term.b, term.e)
    return y_TN


def take(tensor: torch.Tensor, axis: int, ranges: Ranges) -> torch.Tensor:
    """Return the entries of one axis that lie in `ranges`; a view where there is a single range."""
    if len(ranges) == 1:
        return tensor.narrow(axis, ranges[0][0], ranges[0][1] - ranges[0][0])
    return torch.cat([tensor.narrow(axis, start, stop - start) for start, stop in ranges], axis)
