"""VeRA (`peft_type` VERA; arXiv:2310.11454, PEFT `tuners/vera`).

F = xW + b0 + (((x A) * lambda_d) B) * lambda_b, where A and B are one pair for all layers, and for all tenants with the
same key; a layer uses their first `in` columns and first `out` rows. There is no alpha.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from scute_compile.diagnostics import Code
from scute_compile.ir.expressions import Expression, Take, Transpose, VeraProjection
from scute_compile.ir.method import Method
from scute_compile.ir.program import Factor, Owner, Site, Term
from scute_compile.passes.parse.front_end import Checkpoint, FrontEnd, Reading, Tensors, require
from scute_compile.passes.parse.keys import Parameter
from scute_compile.passes.parse.settings import Bias, Settings
from scute_compile.passes.parse.targets import Targets


class VeraSettings(Settings):
    """The fields of a VeRA configuration that change what it computes."""

    r: int | None = None
    projection_prng_key: int = 0
    save_projection: bool = True
    bias: Bias = "none"


def dimensions(tensors: Tensors) -> tuple[int, int]:
    """Return `(0, out)`: the vectors don't give the input's size."""
    return 0, tensors["lambda_b"].shape[0] if "lambda_b" in tensors else 0


def build(checkpoint: Checkpoint, settings: Settings) -> Reading:
    """Rewrite VeRA modules into sites over one shared pair."""
    vera = cast("VeraSettings", settings)
    ranks = {t["lambda_d"].shape[0] for t in checkpoint.modules.values() if "lambda_d" in t}
    if len(ranks) != 1 or (vera.r is not None and vera.r not in ranks):
        checkpoint.findings.error(
            Code.SC310,
            where="r",
            found=f"ranks {sorted(ranks)} in the tensors, {vera.r} in the configuration",
            expected="one rank for every module",
        )
        return Reading(method=Method.VERA, sites=())
    pair = _pair(checkpoint, vera, ranks.pop())
    if pair is None:
        return Reading(method=Method.VERA, sites=())
    sites = [site for path in checkpoint.modules if (site := _site(checkpoint, path, *pair)) is not None]
    shown = (("rank", str(pair[0].shape[0])), ("projections", "saved" if vera.save_projection else "regenerated"))
    return Reading(method=Method.VERA, sites=tuple(sites), settings=shown)


def _pair(checkpoint: Checkpoint, vera: VeraSettings, rank: int) -> tuple[Expression, Expression] | None:
    """Return A `(rank, max_in)` and B `(rank, max_out)`."""
    a, b = checkpoint.shared.get("vera_A"), checkpoint.shared.get("vera_B")
    if not vera.save_projection:
        return _regenerated(checkpoint, vera, rank)
    if a is None or b is None:
        checkpoint.findings.error(
            Code.SC305,
            where="base_model",
            found="save_projection = true without `vera_A` and `vera_B`",
            expected="both shared projections in the checkpoint",
            next="save the adapter again, or set save_projection to false if the key was projection_prng_key",
        )
        return None
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != rank or b.shape[1] != rank:
        checkpoint.findings.error(
            Code.SC307,
            where="base_model",
            found=f"vera_A {a.shape}, vera_B {b.shape}, vectors of rank {rank}",
            expected=f"vera_A ({rank}, max in) and vera_B (max out, {rank})",
            next="save the adapter again",
        )
        return None
    largest = _largest(checkpoint)
    if largest[0] not in (0, a.shape[1]) or largest[1] not in (0, b.shape[0]):
        checkpoint.findings.error(
            Code.SC307,
            where="base_model",
            found=f"vera_A {a.shape}, vera_B {b.shape}",
            expected=f"vera_A ({rank}, {largest[0]}) and vera_B ({largest[1]}, {rank}), the targeted layers' largest "
            "sizes",
            next="check that the base is the one the adapter was trained on; PEFT refuses these tensors as well",
        )
        return None
    return a, Transpose(b)


def _regenerated(checkpoint: Checkpoint, vera: VeraSettings, rank: int) -> tuple[Expression, Expression]:
    max_in, max_out = _largest(checkpoint)
    saved = " (saved ones are ignored, as PEFT ignores them)" if checkpoint.shared else ""
    checkpoint.findings.note(
        Code.SC316,
        where="base_model",
        found=f"A ({rank}, {max_in}) and B ({max_out}, {rank}) regenerated from the key {vera.projection_prng_key} "
        f"and rounded to the base's {checkpoint.structure.dtype}{saved}",
        expected="saved projections, which need no regeneration",
    )
    projection = {
        which: VeraProjection(
            which=which,
            seed=vera.projection_prng_key,
            rank=rank,
            max_in=max_in,
            max_out=max_out,
            rounding=checkpoint.structure.dtype,
        )
        for which in "AB"
    }
    return projection["A"], Transpose(projection["B"])


def _largest(checkpoint: Checkpoint) -> tuple[int, int]:
    """Return the most inputs and the most outputs of the targeted layers; 0 where they are unknown."""
    targets = Targets(checkpoint.config)
    matched = [
        linear for path, linear in checkpoint.structure.linears.items() if targets.match(checkpoint.trained_name(path))
    ]
    matched = matched or [checkpoint.linear(path) for path in checkpoint.modules]
    return max(linear.in_features for linear in matched), max(linear.out_features for linear in matched)


def _site(checkpoint: Checkpoint, path: str, a: Expression, b: Expression) -> Site | None:
    if not require(checkpoint, path, "lambda_d", "lambda_b"):
        return None
    linear = checkpoint.linear(path)
    width = linear.in_features or a.shape[1]  # unknown when no base was given
    if width > a.shape[1] or linear.out_features > b.shape[1]:
        checkpoint.findings.error(
            Code.SC307,
            where=path,
            found=f"shared pair for {a.shape[1]} inputs and {b.shape[1]} outputs",
            expected=f"at least {width} and {linear.out_features}",
        )
        return None
    tensors: Mapping[str, Expression] = checkpoint.modules[path]
    term = Term(
        a=Factor(value=Take(a, 1, ((0, width),)), owner=Owner.SHARED, shared=a),
        b=Factor(value=Take(b, 1, ((0, linear.out_features),)), owner=Owner.SHARED, shared=b),
        d=tensors["lambda_d"],
        e=tensors["lambda_b"],
    )
    return Site(linear=linear, terms=(term,))


VERA = FrontEnd(
    method=Method.VERA,
    parameters=(
        Parameter(name="lambda_d", spellings=("vera_lambda_d",), axes=("rank",)),
        Parameter(name="lambda_b", spellings=("vera_lambda_b",), axes=("out",)),
    ),
    shared=(
        Parameter(name="vera_A", spellings=("vera_A",), axes=("rank", "most in")),
        Parameter(name="vera_B", spellings=("vera_B",), axes=("most out", "rank")),
    ),
    settings=VeraSettings,
    inert=frozenset({"vera_dropout", "d_initial", "init_weights"}),
    dimensions=dimensions,
    build=build,
)
