"""LoRA, rsLoRA and DoRA (`peft_type` LORA).

F = xW + b0 + c (x A) B, c = alpha / r or alpha / sqrt(r) (arXiv:2106.09685, arXiv:2312.03732; PEFT
`tuners/lora/layer.py`). DoRA scales the weight path: s = m / colnorm(W + c A B), e = s (arXiv:2402.09353; PEFT
`tuners/lora/dora.py`), with the bias outside.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import cast

from pydantic import Field

from scute_compile.diagnostics import Code
from scute_compile.ir.expressions import Add, ColumnNorm, Divide, Expression, Fill, Ref, Reshape, Scale, Transpose
from scute_compile.ir.method import Method
from scute_compile.ir.program import Factor, Site, Term
from scute_compile.passes.parse.front_end import Checkpoint, FrontEnd, Reading, Tensors, require
from scute_compile.passes.parse.keys import Parameter
from scute_compile.passes.parse.patterns import Patterns, Value
from scute_compile.passes.parse.settings import Bias, Rule, Settings
from scute_compile.passes.parse.targets import some

CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Prefixes of initialisations that train against a changed base. PEFT's conversion on saving writes `true` instead."""
KEEPS_BASE = frozenset({"gaussian", "orthogonal", "eva", "mica", "true", "false"})
"""Initialisations that leave the base as it is (PEFT `tuners/lora/layer.py`)."""


class LoraSettings(Settings):
    """The fields of a LoRA configuration that change what it computes."""

    r: int | None = None
    lora_alpha: float | None = None
    use_rslora: bool = False
    use_dora: bool = False
    lora_bias: bool = False
    bias: Bias = "none"
    rank_pattern: dict[str, int] = Field(default_factory=dict)
    alpha_pattern: dict[str, float] = Field(default_factory=dict)
    init_lora_weights: bool | str = True


RULES = (
    Rule(name="alora_invocation_tokens", code=Code.SC204, why="the adapter applies to the tokens after a trigger only"),
    Rule(name="arrow_config", code=Code.SC204, why="routes every token through several adapters"),
    Rule(name="use_bdlora", code=Code.SC204, why="its factors are block-diagonal"),
    Rule(name="kasa_config", code=Code.SC206, why="truncates the base weights when it loads"),
    Rule(name="layer_replication", code=Code.SC204, why="builds a model with repeated layers"),
    Rule(name="megatron_config", code=Code.SC204, why="each process may have saved its shard separately"),
    Rule(name="enable_lora", code=Code.SC204, why="the merged projections of PEFT 0.2 and older have grouped factors"),
)

INERT = frozenset(
    {
        "lora_dropout",
        "loftq_config",
        "eva_config",
        "corda_config",
        "lora_ga_config",
        "velora_config",
        "monteclora_config",
        "use_qalora",
        "qalora_group_size",
        "megatron_core",
        "ensure_weight_tying",
        "merge_weights",
    }
)


def dimensions(tensors: Tensors) -> tuple[int, int]:
    """Return `(in, out)` from A's width and B's height."""
    a, b, m = tensors.get("lora_A"), tensors.get("lora_B"), tensors.get("magnitude")
    out = b.shape[0] if b and len(b.shape) == 2 else m.shape[-1] if m else 0
    return (a.shape[1] if a and len(a.shape) == 2 else 0), out


def build(checkpoint: Checkpoint, settings: Settings) -> Reading:
    """Rewrite LoRA and DoRA modules into sites."""
    lora = cast("LoraSettings", settings)
    ranks_by_pattern = Patterns(lora.rank_pattern, where="rank_pattern")
    alphas = Patterns(lora.alpha_pattern, where="alpha_pattern")
    _check_settings(checkpoint, lora)
    _check_patterns(checkpoint, lora.rank_pattern, ranks_by_pattern, "rank_pattern")
    _check_patterns(checkpoint, lora.alpha_pattern, alphas, "alpha_pattern")
    _check_order(checkpoint, lora, alphas)
    made = (_site(checkpoint, path, lora, ranks_by_pattern, alphas) for path in checkpoint.modules)
    sites = [site for site in made if site is not None]
    ranks = sorted({site.terms[0].rank for site in sites})
    listed = (("ranks", " ".join(map(str, ranks))), ("alpha", f"{lora.lora_alpha:g}")) if lora.lora_alpha else ()
    scaling = (("scaling", "alpha / sqrt(r)" if lora.use_rslora else "alpha / r"),)
    method = Method.DORA if lora.use_dora else Method.LORA
    return Reading(method=method, sites=tuple(sites), settings=(*listed, *scaling))


def _check_settings(checkpoint: Checkpoint, lora: LoraSettings) -> None:
    init = lora.init_lora_weights
    if isinstance(init, str) and init.lower().startswith(CHANGES_BASE):
        checkpoint.findings.error(
            Code.SC206,
            where="init_lora_weights",
            found=f"init_lora_weights = {init!r}: training started from a changed base",
            expected="an initialisation that leaves the base as it is",
            next="save it again with save_pretrained(..., path_initial_model_for_weight_conversion=...), which "
            "converts it to plain LoRA on the original base",
        )
    elif isinstance(init, str) and init.lower() not in KEEPS_BASE:
        checkpoint.findings.error(
            Code.SC206,
            where="init_lora_weights",
            found=f"init_lora_weights = {init!r}, an unknown initialisation that may have changed the base",
            expected=f"true, false, or one of {', '.join(sorted(KEEPS_BASE - {'true', 'false'}))}",
            next="convert the adapter to plain LoRA when saving, after which PEFT writes true",
        )
    if lora.use_dora and lora.lora_bias:
        checkpoint.findings.error(
            Code.SC204,
            where="lora_bias",
            found="lora_bias with use_dora",
            expected="one of the two",
            next="PEFT refuses the pair as well; correct the configuration",
        )
    if lora.r is None:
        checkpoint.findings.note(
            Code.SC315,
            where="r",
            found="no rank r in the configuration; the tensors' ranks count",
            expected="the rank of the training run",
            next="the scale follows from the tensors' ranks",
        )
    if lora.lora_alpha is None or not math.isfinite(lora.lora_alpha):
        checkpoint.findings.error(
            Code.SC207,
            where="lora_alpha",
            found=f"lora_alpha = {lora.lora_alpha}",
            expected="a finite number",
        )
    elif lora.lora_alpha == 0 and not lora.alpha_pattern and not _untrained(checkpoint):
        checkpoint.findings.error(
            Code.SC207,
            where="lora_alpha",
            found="lora_alpha = 0 on a trained adapter: its scale is lost",
            expected="the alpha of the training run",
            next="restore lora_alpha from the training run; some exporters write 0",
        )


def _untrained(checkpoint: Checkpoint) -> bool:
    return all(checkpoint.facts[t["lora_B"].key].zero for t in checkpoint.modules.values() if "lora_B" in t)


def _check_patterns(checkpoint: Checkpoint, listed: Iterable[str], patterns: Patterns[Value], field: str) -> None:
    found = (patterns.matching(checkpoint.trained_name(path)) for path in checkpoint.modules)
    used = {pattern for entries in found for pattern, _ in entries}
    if idle := [pattern for pattern in listed if pattern not in used]:
        checkpoint.findings.note(
            Code.SC208,
            where=field,
            found=f"{some(idle)} {'match' if len(idle) > 1 else 'matches'} no module, without effect",
            expected="patterns that match the end of a module path",
            next="PEFT ignores them as well; if they were meant to apply, the training run ignored them too",
        )


def _check_order(checkpoint: Checkpoint, lora: LoraSettings, alphas: Patterns[float]) -> None:
    """Note modules whose alpha depends on the order of patterns, which PEFT sorts when it saves them."""
    if list(lora.alpha_pattern) != sorted(lora.alpha_pattern):
        return
    several = {}
    for path in checkpoint.modules:
        found = alphas.matching(checkpoint.trained_name(path))
        if len({value for _, value in found}) > 1:
            several[path] = ", ".join(f"`{pattern}` ({value:g})" for pattern, value in found)
    if several:
        first, patterns = next(iter(several.items()))
        checkpoint.findings.note(
            Code.SC213,
            where=first,
            found=f"{patterns} match it; so for {len(several)} of {len(checkpoint.modules)} modules",
            expected="one alpha for each module: PEFT sorts the patterns when it saves them, so the training run's "
            "order is lost",
            next="the first in the file counts, as when PEFT loads it; give each module one pattern if that is wrong",
        )


def scaling(alpha: float, rank: int, *, rslora: bool) -> float:
    """Return c.

    >>> scaling(16, 4, rslora=False), scaling(16, 4, rslora=True)
    (4.0, 8.0)
    """
    return alpha / math.sqrt(rank) if rslora else alpha / rank


def _site(
    checkpoint: Checkpoint, path: str, lora: LoraSettings, ranks: Patterns[int], alphas: Patterns[float]
) -> Site | None:
    tensors = checkpoint.modules[path]
    if "magnitude" in tensors and not lora.use_dora:
        checkpoint.findings.error(
            Code.SC310,
            where=path,
            found=f"`{tensors['magnitude'].key}` with use_dora = false",
            expected="magnitude tensors and use_dora to agree",
            next="set use_dora to true if it was trained so; PEFT would drop the magnitudes silently",
        )
        return None
    if "lora_B.bias" in tensors and not lora.lora_bias:
        checkpoint.findings.error(
            Code.SC310,
            where=path,
            found=f"`{tensors['lora_B.bias'].key}` with lora_bias = false",
            expected="biases on B and lora_bias to agree",
            next="set lora_bias to true if it was trained so; PEFT would drop the biases silently",
        )
        return None
    wanted = ("lora_A", "lora_B") + (("magnitude",) if lora.use_dora else ())
    wanted += ("lora_B.bias",) if lora.lora_bias else ()
    if not require(checkpoint, path, *wanted) or not _matching_ranks(checkpoint, path, lora, ranks):
        return None
    a, b = tensors["lora_A"], Transpose(tensors["lora_B"])
    patterns = alphas.matching(checkpoint.trained_name(path))
    alpha = patterns[0][1] if patterns else lora.lora_alpha
    c = scaling(alpha or 0.0, a.shape[0], rslora=lora.use_rslora)
    site = Site(linear=checkpoint.linear(path), terms=(Term(a=Factor(value=a), b=Factor(value=b), c=c),))
    if lora.use_dora:
        site = _with_magnitude(site, tensors["magnitude"], c)
    if "lora_B.bias" in tensors:
        site = replace(site, beta=_with_lora_bias(site, tensors["lora_B.bias"], c))
    return site


def _matching_ranks(checkpoint: Checkpoint, path: str, lora: LoraSettings, ranks: Patterns[int]) -> bool:
    a, b = (checkpoint.modules[path][name] for name in ("lora_A", "lora_B"))
    rank = a.shape[0]
    if b.shape[1] != rank:
        checkpoint.findings.error(
            Code.SC307,
            where=path,
            found=f"A {a.shape} of rank {rank}, B {b.shape} of rank {b.shape[1]}",
            expected="equal ranks",
            next="save the adapter again",
        )
        return False
    patterns = ranks.matching(checkpoint.trained_name(path))
    configured = [value for _, value in patterns] or ([lora.r] if lora.r is not None else [])
    if configured and rank not in configured:
        checkpoint.findings.error(
            Code.SC310,
            where=path,
            found=f"rank {rank} in the tensors, {configured[0]} in the configuration",
            expected="rank_pattern or r to give the tensors' rank, since the scale follows from it",
        )
        return False
    return True


def _with_magnitude(site: Site, m: Ref, c: float) -> Site:
    term, linear = site.terms[0], site.linear
    norm = ColumnNorm(linear.weight, linear.transposed, term.a.value, term.b.value, c)
    magnitude: Expression = m if len(m.shape) == 1 else Reshape(m, (linear.out_features,))
    s = Divide(magnitude, norm)
    return replace(site, s=s, terms=(replace(term, e=s),))


def _with_lora_bias(site: Site, bias: Ref, c: float) -> Expression:
    base_bias: Expression = site.linear.bias or Fill(0.0, (site.linear.out_features,))
    return Add(base_bias, Scale(bias, c))


LORA = FrontEnd(
    method=Method.LORA,
    parameters=(
        Parameter(name="lora_A", spellings=("lora_A.weight",), axes=("rank", "in")),
        Parameter(name="lora_B", spellings=("lora_B.weight",), axes=("out", "rank")),
        Parameter(name="lora_B.bias", spellings=("lora_B.bias",), axes=("out",)),
        Parameter(name="magnitude", spellings=("lora_magnitude_vector", "lora_magnitude_vector.weight"), axes=("out",)),
    ),
    settings=LoraSettings,
    inert=INERT,
    rules=RULES,
    inert_keys=("lora_velora_embed", "lora_monteclora_sampler"),
    dimensions=dimensions,
    build=build,
)
