"""The reference operations equal the formula in float64, and round as documented."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from scute_compile.ir.program import RotationKind
from scute_compile.runtime_min.reference import SiteTensors, TermTensors, add_terms, apply_site, expand, rotate, shrink

TOKENS, INPUTS, OUTPUTS, RANK, BLOCK = 5, 12, 10, 3, 4
# A sum of n products in float64 errs by at most n eps relative to its absolute terms, which are below 100 here.
CLOSE = 100 * INPUTS * 2.0**-52


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X, W, BETA = drawn(TOKENS, INPUTS), drawn(INPUTS, OUTPUTS, seed=1), drawn(OUTPUTS, seed=2)
BLOCKS, DIAGONAL = drawn(INPUTS // BLOCK, BLOCK, BLOCK, seed=3), drawn(INPUTS, seed=4)
FULL = SiteTensors(
    rotation=RotationKind.BLOCKS,
    delta=BLOCKS,
    ds=drawn(OUTPUTS, seed=5),
    b=drawn(OUTPUTS, seed=6),
    terms=tuple(
        TermTensors(
            a=drawn(RANK + k, INPUTS, seed=7 + k),
            b=drawn(RANK + k, OUTPUTS, seed=9 + k),
            d=drawn(RANK + k, seed=11 + k),
            e=drawn(OUTPUTS, seed=13 + k),
        )
        for k in range(2)
    ),
)


def formula(slots: SiteTensors, x: torch.Tensor = X) -> torch.Tensor:
    """`((x R) W + beta) * s + b + sum_k ((((x A_k) * d_k) B_k) * e_k)`, with every slot spelled out."""
    rotation = torch.eye(INPUTS, dtype=torch.float64)
    if slots.delta is not None:
        blocks = [torch.diag(slots.delta)] if slots.delta.ndim == 1 else list(slots.delta)
        rotation = rotation + torch.block_diag(*blocks)  # type: ignore[no-untyped-call] # PyTorch does not annotate it
    s = 1 if slots.ds is None else 1 + slots.ds
    out = ((x @ rotation) @ W + BETA) * s + (0 if slots.b is None else slots.b)
    for term in slots.terms:
        d, e = (1 if v is None else v for v in (term.d, term.e))
        out = out + (((x @ term.a.T) * d) @ term.b) * e
    return out


def computed(slots: SiteTensors, x: torch.Tensor = X) -> torch.Tensor:
    delta_y = None
    if slots.delta is not None and slots.rotation is not None:
        delta_y = rotate(x, slots.delta, slots.rotation) @ W
    return apply_site(x @ W + BETA, x, delta_y, slots)


WITHOUT = {
    "delta": replace(FULL, delta=None, rotation=None),
    "ds": replace(FULL, ds=None),
    "b": replace(FULL, b=None),
    "term": replace(FULL, terms=FULL.terms[:1]),
    "term d": replace(FULL, terms=(replace(FULL.terms[0], d=None), FULL.terms[1])),
    "term e": replace(FULL, terms=(FULL.terms[0], replace(FULL.terms[1], e=None))),
}


def test_all_slots_together_follow_the_formula() -> None:
    assert (computed(FULL) - formula(FULL)).abs().max() < CLOSE


@pytest.mark.parametrize("slot", WITHOUT)
def test_an_absent_slot_is_the_identity_and_a_dropped_one_changes_the_result(slot: str) -> None:
    less = WITHOUT[slot]
    assert (computed(less) - formula(less)).abs().max() < CLOSE
    assert (computed(less) - formula(FULL)).abs().max() > 0.1


def test_a_diagonal_rotation_scales_the_inputs() -> None:
    slots = SiteTensors(rotation=RotationKind.DIAGONAL, delta=DIAGONAL)
    assert (computed(slots) - formula(slots)).abs().max() < CLOSE


def test_one_stored_block_repeats_along_the_input() -> None:
    one = rotate(X, BLOCKS[:1], RotationKind.BLOCKS)
    assert torch.equal(one, rotate(X, BLOCKS[:1].expand_as(BLOCKS), RotationKind.BLOCKS))


def test_rows_are_multiplied_from_the_left_and_not_from_the_right() -> None:
    out = rotate(X, BLOCKS, RotationKind.BLOCKS)
    assert (out[:, :BLOCK] - X[:, :BLOCK] @ BLOCKS[0]).abs().max() < CLOSE
    assert (out[:, :BLOCK] - X[:, :BLOCK] @ BLOCKS[0].T).abs().max() > 0.1


def test_any_number_of_leading_dimensions_is_the_same_as_rows() -> None:
    stacked = X[:4].reshape(2, 2, INPUTS)
    assert (computed(FULL, stacked).reshape(4, OUTPUTS) - formula(FULL)[:4]).abs().max() < CLOSE


def test_terms_read_the_input_that_is_not_rotated() -> None:
    only = SiteTensors(rotation=RotationKind.BLOCKS, delta=BLOCKS, terms=FULL.terms)
    rotated = X + rotate(X, BLOCKS, RotationKind.BLOCKS)
    wrong = add_terms(rotated @ W + BETA, rotated, FULL.terms)
    assert (computed(only) - formula(only)).abs().max() < CLOSE
    assert (wrong - formula(only)).abs().max() > 0.1


def test_half_precision_inputs_are_computed_wide_and_rounded_once() -> None:
    x = X.to(torch.bfloat16)
    slots = SiteTensors(ds=torch.full((OUTPUTS,), 2.0**-10, dtype=torch.bfloat16))
    y = torch.full((TOKENS, OUTPUTS), 256.0, dtype=torch.float32)
    kept = apply_site(y, x, None, slots, out_dtype=torch.float32)
    # 1 + 2^-10 rounds to 1 in bfloat16: a runtime that forms s there loses it.
    assert torch.equal(kept, torch.full_like(y, 256.25))
    assert apply_site(y, x, None, slots).dtype is torch.bfloat16
    assert rotate(x, BLOCKS.to(torch.bfloat16), RotationKind.BLOCKS).dtype is torch.float32
    assert expand(shrink(x, FULL.terms[0].a.to(x.dtype)), FULL.terms[0].b.to(x.dtype)).dtype is torch.float32


def test_a_term_of_rank_zero_adds_nothing() -> None:
    empty = TermTensors(a=drawn(0, INPUTS), b=drawn(0, OUTPUTS))
    assert torch.equal(add_terms(X @ W, X, (empty,)), X @ W)
