"""IA3 (`peft_type` IA3; arXiv:2205.05638, PEFT `tuners/ia3/layer.py`).

A vector l of shape `(out, 1)` scales the output with its bias: s = l, b = l * b0. One of shape `(1, in)` scales the
input: R = diag(l). The shape decides; `feedforward_modules` must agree with it.
"""

from __future__ import annotations

from typing import cast

from scute_compile.diagnostics import Code
from scute_compile.ir.expressions import Fill, Multiply, Ref, Reshape, Subtract
from scute_compile.ir.method import Method
from scute_compile.ir.program import Rotation, RotationKind, Site
from scute_compile.passes.parse.front_end import Checkpoint, FrontEnd, Reading, Tensors, require
from scute_compile.passes.parse.keys import Parameter
from scute_compile.passes.parse.patterns import full_match
from scute_compile.passes.parse.settings import Settings


class Ia3Settings(Settings):
    """The fields of an IA3 configuration that change what it computes."""

    feedforward_modules: list[str] | str | None = None


def dimensions(tensors: Tensors) -> tuple[int, int]:
    """Return `(in, 0)` for an input vector, `(0, out)` for an output vector."""
    shape = tensors["ia3_l"].shape if "ia3_l" in tensors else ()
    if len(shape) != 2:
        return 0, 0
    return (shape[1], 0) if shape[0] == 1 else (0, shape[0])


def build(checkpoint: Checkpoint, settings: Settings) -> Reading:
    """Rewrite IA3 modules into sites."""
    ia3 = cast("Ia3Settings", settings)
    sites = [site for path in checkpoint.modules if (site := _site(checkpoint, path, ia3)) is not None]
    inputs = sum(site.rotation is not None for site in sites)
    shown = (("output vectors", str(len(sites) - inputs)), ("input vectors", str(inputs)))
    return Reading(method=Method.IA3, sites=tuple(sites), settings=shown)


def _listed_as_feedforward(ia3: Ia3Settings, path: str) -> bool | None:
    # PEFT compares the names of a list with the end of the path, without a dot: "o" matches "foo" (ia3/model.py)
    modules = ia3.feedforward_modules
    if modules is None:
        return None
    if isinstance(modules, str):
        return full_match(modules, path, where="feedforward_modules")
    return any(path.endswith(name) for name in modules)


def _site(checkpoint: Checkpoint, path: str, ia3: Ia3Settings) -> Site | None:
    if not require(checkpoint, path, "ia3_l"):
        return None
    vector = checkpoint.modules[path]["ia3_l"]
    linear = checkpoint.linear(path)
    if len(vector.shape) != 2 or 1 not in vector.shape:
        checkpoint.findings.error(
            Code.SC307,
            where=path,
            found=f"`{vector.key}` of shape {vector.shape}",
            expected="(out, 1) or (1, in)",
            next="save the adapter again; convolutions are not served",
        )
        return None
    on_input = vector.shape[0] == 1
    feedforward = _listed_as_feedforward(ia3, checkpoint.trained_name(path))
    if feedforward is not None and feedforward != on_input:
        checkpoint.findings.error(
            Code.SC310,
            where=path,
            found=f"`{vector.key}` of shape {vector.shape} scales the {'input' if on_input else 'output'}; "
            f"feedforward_modules says {'input' if feedforward else 'output'}",
            expected="shape and feedforward_modules to agree",
            next="restore feedforward_modules from the training run",
        )
        return None
    flat = Reshape(vector, (max(vector.shape),))
    if on_input:
        delta = Subtract(flat, Fill(1.0, flat.shape))
        return Site(linear=linear, rotation=Rotation(kind=RotationKind.DIAGONAL, delta=delta))
    return Site(linear=linear, s=flat, beta=_scaled(flat, linear.bias))


def _scaled(vector: Reshape, bias: Ref | None) -> Multiply | None:
    return Multiply(vector, bias) if bias is not None else None


IA3 = FrontEnd(
    method=Method.IA3,
    parameters=(Parameter(name="ia3_l", spellings=("ia3_l",), axes=("out or 1", "in or 1")),),
    settings=Ia3Settings,
    inert=frozenset({"init_ia3_weights"}),
    dimensions=dimensions,
    build=build,
)
