"""The place pass: moves slots to layers where an engine can compute them.

An input vector l of a layer that reads an element-wise product, `down(act(gate) * up)`, scales the output of `up`,
since element-wise products commute. It then multiplies the `s`, the bias and every `e_k` of that layer. Where it can't
move (a plain MLP, an attention output) it stays a diagonal R of its site.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from scute_compile.ir.expressions import Add, Concatenate, Expression, Fill, Multiply, Subtract
from scute_compile.ir.linear import Linear
from scute_compile.ir.program import Action, Note, Owner, Program, RotationKind, Site, Stage, Term
from scute_compile.passes.context import Context
from scute_compile.passes.obstacles import find_obstacles

RULE = "input vector of a product -> output vector of its plain factor"


def place(program: Program, context: Context) -> Program:
    """Move input vectors through element-wise products, and check the cuts again when a slot has moved."""
    linears = context.base.linears
    sites = {site.name: site for site in program.sites}
    notes = []
    for site in program.sites:
        target = _target(site, linears)
        if target is None:
            continue
        moved = sites.get(target.name) or Site(linear=target)
        sites[target.name] = scale_output(moved, _widened(site, target))
        rest = replace(sites[site.name], rotation=None)
        if rest.empty:
            del sites[site.name]
        else:
            sites[site.name] = rest
        notes.append(
            Note(
                site=site.name,
                slot="R",
                action=Action.MOVED,
                rule=RULE,
                neighbours=(("W", Owner.BASE),),
                why=f"computed as s of {target.name}: (g * u) * l = g * (u * l)",
            )
        )
    ordered = tuple(sites[name] for name in linears if name in sites)
    if notes:
        find_obstacles(ordered, program.target.tp, context.findings)
    return replace(program, sites=ordered, notes=program.notes + tuple(notes), stage=Stage.PLACED)


def _target(site: Site, linears: Mapping[str, Linear]) -> Linear | None:
    # a low-rank term of this site reads the unscaled x, so x must not be scaled in the layer before
    movable = site.rotation is not None and site.rotation.kind is RotationKind.DIAGONAL and not site.terms
    product = site.linear.input_product
    return linears[product.site] if movable and product is not None else None


def _widened(site: Site, target: Linear) -> Expression:
    """Return l over all outputs of the target: ones outside the part that is the product's plain factor."""
    if site.rotation is None or site.linear.input_product is None:
        raise AssertionError(site)
    delta = site.rotation.delta
    vector: Expression = (
        delta.x
        if isinstance(delta, Subtract) and delta.y == Fill(1.0, delta.shape)
        else Add(delta, Fill(1.0, delta.shape))
    )
    if len(target.parts) < 2:
        return vector
    parts: list[Expression] = [Fill(1.0, (part.size,)) for part in target.parts]
    parts[site.linear.input_product.part] = vector
    return Concatenate(tuple(parts))


def scale_output(site: Site, vector: Expression) -> Site:
    """Return the site with its whole output, bias and terms included, multiplied by `vector`."""
    bias = site.linear.bias
    s = Multiply(site.s, vector) if site.s is not None else vector
    beta: Expression | None = None
    if site.beta is not None and not (bias is not None and site.s is not None and site.beta == Multiply(site.s, bias)):
        beta = Multiply(site.beta, vector)
    elif bias is not None:
        # written as s * beta again, so that the compiled form recognises that it cancels
        beta = Multiply(s, bias) if site.s is None or site.beta is not None else Multiply(bias, vector)
    return replace(site, s=s, beta=beta, terms=tuple(_scaled(term, vector) for term in site.terms))


def _scaled(term: Term, vector: Expression) -> Term:
    return replace(term, e=Multiply(term.e, vector) if term.e is not None else vector)
