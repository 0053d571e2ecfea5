"""The fold pass: merges slots into owned factors, drops identities, and brings biases into the compiled form."""

from __future__ import annotations

from dataclasses import replace

from scute_compile.diagnostics import Code
from scute_compile.ir.expressions import Add, AsStored, Expression, Multiply, Ref, Subtract
from scute_compile.ir.program import Action, Note, Owner, Program, Site, Stage, Term
from scute_compile.passes.context import Context
from scute_compile.passes.rewrites import TERM_REWRITES
from scute_compile.passes.values import Facts, is_ones, is_zero


def fold(program: Program, context: Context) -> Program:
    """Apply the fold rule to every site. Sites without effect vanish; SC314 notes when none is left.

    Args:
        program: A placed program, or a parsed one that is planned without its base.
        context: Its facts tell identities and zeros.
    """
    facts = context.facts
    sites, notes = [], list(program.notes)
    for site in program.sites:
        folded = compile_bias(_fold_slots(_fold_terms(site, facts, notes), facts, notes), notes)
        if not folded.empty:
            sites.append(folded)
    if program.sites and not sites:
        context.findings.note(
            Code.SC314,
            where="adapter",
            found="every B (or every slot) is zero or the identity: no effect",
            expected="a trained adapter",
        )
    return replace(program, sites=tuple(sites), notes=tuple(notes), stage=Stage.FOLDED)


def _fold_terms(site: Site, facts: Facts, notes: list[Note]) -> Site:
    kept: list[Term] = []
    for number, term in enumerate(site.terms):
        suffix = f".{number}" if len(site.terms) > 1 else ""
        if _is_zero_term(term, facts):
            notes.append(_note(site, "A,B" + suffix, Action.DROPPED, "zero term", term, "a factor is zero"))
            continue
        kept.append(fold_term(_without_identities(term, facts, site, suffix, notes), site, suffix, notes))
    return replace(site, terms=tuple(kept))


def _is_zero_term(term: Term, facts: Facts) -> bool:
    return term.c == 0 or any(is_zero(x, facts) for x in (term.a.value, term.b.value, term.d, term.e))


def _without_identities(term: Term, facts: Facts, site: Site, suffix: str, notes: list[Note]) -> Term:
    if is_ones(term.d, facts):
        notes.append(_note(site, "d" + suffix, Action.DROPPED, "identity", term, "every entry is 1"))
        term = replace(term, d=None)
    if is_ones(term.e, facts):
        notes.append(_note(site, "e" + suffix, Action.DROPPED, "identity", term, "every entry is 1"))
        term = replace(term, e=None)
    return term


def fold_term(term: Term, site: Site, suffix: str, notes: list[Note]) -> Term:
    """Apply every row of the table once; add a note for each row that applies."""
    for rewrite in TERM_REWRITES:
        rewritten = rewrite.apply(term)
        if rewritten is not None:
            notes.append(_note(site, rewrite.slot + suffix, Action.MERGED, rewrite.name, term, rewrite.algebra))
            term = rewritten
    return term


def _note(site: Site, slot: str, action: Action, rule: str, term: Term, why: str) -> Note:
    return Note(
        site=site.name,
        slot=slot,
        action=action,
        rule=rule,
        why=why,
        neighbours=(("A", term.a.owner), ("B", term.b.owner)),
    )


def _fold_slots(site: Site, facts: Facts, notes: list[Note]) -> Site:
    if site.s is not None and is_ones(site.s, facts):
        notes.append(_site_note(site, "s", Action.DROPPED, "identity", "every entry is 1"))
        beta = None if site.linear.bias is not None and site.beta == Multiply(site.s, site.linear.bias) else site.beta
        site = replace(site, s=None, beta=beta)
    if site.rotation is not None and is_zero(site.rotation.delta, facts):
        notes.append(_site_note(site, "R", Action.DROPPED, "identity", "R - I is zero"))
        site = replace(site, rotation=None)
    return site


def _site_note(site: Site, slot: str, action: Action, rule: str, why: str) -> Note:
    return Note(site=site.name, slot=slot, action=action, rule=rule, neighbours=(("W", Owner.BASE),), why=why)


def compile_bias(site: Site, notes: list[Note]) -> Site:
    """Turn the adapter's bias into the shift of the compiled form: `b = beta_adapter - s * beta`.

    `s` is taken as the artifact stores it, so that the shift corrects its rounding too. `y` already includes `beta`.
    """
    base_bias, s, beta = site.linear.bias, site.s, site.beta
    if beta is None and (base_bias is None or s is None):
        return site
    b, why = _shift(base_bias, s, beta)
    action = Action.PLANNED if b is not None else Action.DROPPED
    notes.append(_site_note(site, "b", action, "compiled form of the bias", why))
    return replace(site, beta=None, b=b)


def _shift(base_bias: Ref | None, s: Expression | None, beta: Expression | None) -> tuple[Expression | None, str]:
    if base_bias is None:
        return beta, "the base has no bias: b is the adapter's bias"
    if s is not None and beta == Multiply(s, base_bias):
        return None, "s scales the bias too: s * beta - s * beta = 0"
    if s is None:
        if isinstance(beta, Add) and beta.x == base_bias:
            return beta.y, "beta + extra - beta = extra"
        return (Subtract(beta, base_bias), "b = beta_adapter - beta") if beta is not None else (None, "")
    shift = Subtract(beta or base_bias, Multiply(AsStored(s), base_bias))
    return shift, "b = beta_adapter - s * beta, with s as stored"
