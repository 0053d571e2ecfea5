"""The normal form and the compiled form by their formulas in float64, with random values by name.

`x` is `(tokens, in)`, a weight is stored `(out, in)`, factors are rank-major.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scute_compile.ir.expressions import Expression, Ref, Source
from scute_compile.ir.linear import Linear
from scute_compile.ir.program import Factor, Owner, Site, Term
from scute_compile.pack.evaluate import evaluate

F64 = npt.NDArray[np.float64]
EXACT = 1e-12
"""Allowed difference relative to the sum of absolute products: a few hundred roundings of float64."""


def value(key: str, *shape: int) -> Ref:
    """Return a reference to a tensor of the adapter's checkpoint."""
    return Ref(Source.ADAPTER, key, shape, "F64")


def linear(inputs: int, outputs: int, *, bias: bool) -> Linear:
    """Return a layer of the base."""
    return Linear(
        name="up",
        in_features=inputs,
        out_features=outputs,
        weight=Ref(Source.BASE, "up.weight", (outputs, inputs), "F64"),
        bias=Ref(Source.BASE, "up.bias", (outputs,), "F64") if bias else None,
    )


def factor(key: str, owner: Owner, rank: int, features: int) -> Factor:
    """Return a factor; a shared factor is a window of itself."""
    whole = value(key, rank, features)
    return Factor(value=whole, owner=owner, shared=whole if owner is Owner.SHARED else None)


def unrounded(values: npt.NDArray[np.floating]) -> npt.NDArray[np.floating]:
    """Round nothing, like an ideal artifact."""
    return values


def coarse(values: npt.NDArray[np.floating]) -> npt.NDArray[np.floating]:
    """Round to multiples of 1/4, which causes large errors."""
    return np.round(values * 4) / 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """Random values for every tensor of a program, by key; their absolute values, for error bounds, with `absolute`."""

    seed: int
    spread: float = 1.0
    """Scales are drawn between `10 ** -spread` and `10 ** spread`."""
    rounding: Callable[[npt.NDArray[np.floating]], npt.NDArray[np.floating]] = unrounded
    absolute: bool = False

    def read(self, ref: Ref) -> F64:
        """Return the values of a tensor, equal at every call."""
        generator = np.random.default_rng([self.seed, zlib.crc32(ref.key.encode())])
        drawn = generator.standard_normal(ref.shape) * 10.0 ** generator.uniform(-self.spread, self.spread)
        return np.asarray(np.abs(drawn) if self.absolute else drawn, np.float64)

    def of(self, x: Expression) -> F64:
        """Return the value of an expression, evaluated as in packing."""
        return evaluate(x, self.read, {}, self.rounding).astype(np.float64)

    def inputs(self, tokens: int, features: int) -> F64:
        """Return `x`."""
        return self.read(value("x", tokens, features))

    def term(self, x: F64, term: Term) -> F64:
        """Return `c * ((((x A) * d) B) * e)`."""
        h = x @ self.of(term.a.value).T
        h = h if term.d is None else h * self.of(term.d)
        out = h @ self.of(term.b.value)
        out = out if term.e is None else out * self.of(term.e)
        return (abs(term.c) if self.absolute else term.c) * out

    def terms(self, x: F64, site: Site) -> F64:
        """Return the sum of all terms."""
        return sum((self.term(x, term) for term in site.terms), np.zeros((x.shape[0], site.linear.out_features)))

    def product(self, x: F64, site: Site) -> F64:
        """Return `x W`."""
        return x @ self.of(site.linear.weight).T

    def normal_form(self, x: F64, site: Site) -> F64:
        """Return `(x W) * s + beta_adapter + terms`: what an adapted layer means before folding."""
        s = 1.0 if site.s is None else self.of(site.s)
        beta = site.beta or site.linear.bias
        return self.product(x, site) * s + (0.0 if beta is None else self.of(beta)) + self.terms(x, site)

    def compiled_form(self, x: F64, site: Site) -> F64:
        """Return `y + y * ds + b + terms` with `ds` as stored: what a runtime computes after folding."""
        y = self.product(x, site) + (0.0 if site.linear.bias is None else self.of(site.linear.bias))
        ds = 0.0 if site.s is None else self.rounding(self.of(site.s) - 1.0).astype(np.float64)
        return y + y * ds + (0.0 if site.b is None else self.of(site.b)) + self.terms(x, site)


def assert_equal(actual: F64, expected: F64, bound: F64) -> None:
    """Assert equality relative to the same sums of absolute values, so that cancellation is not counted as an error."""
    assert actual.shape == expected.shape
    assert np.all(np.abs(actual - expected) <= EXACT * bound + np.finfo(np.float64).tiny)
