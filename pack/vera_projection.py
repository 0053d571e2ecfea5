"""Draws VeRA's projections from their key, with the bits that PEFT draws (`tuners/vera/model.py`)."""

from __future__ import annotations

import math

import numpy as np
import torch

from scute_compile.ir.dtypes import torch_dtype
from scute_compile.ir.expressions import VeraProjection
from scute_compile.pack.evaluate import Array


def draw(x: VeraProjection) -> Array:
    """Return A `(rank, max_in)` or B `(max_out, rank)` in float32, rounded through the base's dtype.

    One CPU generator draws A first and B after it, each uniform within sqrt(6 / fan_in).
    """
    generator = torch.Generator(device="cpu").manual_seed(x.seed)
    drawn = {
        name: torch.empty(shape).uniform_(-bound(shape[1]), bound(shape[1]), generator=generator)
        for name, shape in (("A", (x.rank, x.max_in)), ("B", (x.max_out, x.rank)))
    }
    rounded = drawn[x.which].to(torch_dtype(x.rounding)).float()
    return np.asarray(rounded.numpy())


def bound(fan_in: int) -> float:
    """Return the Kaiming-uniform bound for a gain of sqrt(2)."""
    return math.sqrt(2.0) / math.sqrt(fan_in) * math.sqrt(3.0)
