"""AdaLoRA (`peft_type` ADALORA; arXiv:2303.10512, PEFT `tuners/adalora/layer.py`).

F = xW + b0 + c ((x A) * E) B, so E is the slot d between two owned factors. The scale divides by the rank at the
*start* of training plus 1e-5, not by the remaining rank or the field `r`.
"""

from __future__ import annotations

from typing import cast

from scute_compile.diagnostics import Code
from scute_compile.ir.expressions import Reshape, Transpose
from scute_compile.ir.method import Method
from scute_compile.ir.program import Factor, Site, Term
from scute_compile.passes.parse.front_end import Checkpoint, FrontEnd, Reading, Tensors, require
from scute_compile.passes.parse.keys import Parameter
from scute_compile.passes.parse.lora import INERT as LORA_INERT
from scute_compile.passes.parse.lora import RULES as LORA_RULES
from scute_compile.passes.parse.settings import Bias, Settings

RANK_GUARD = 1e-5
"""PEFT adds this to the rank in the denominator."""


class AdaLoraSettings(Settings):
    """The fields of an AdaLoRA configuration that change what it computes."""

    init_r: int = 12
    lora_alpha: float | None = None
    rank_pattern: dict[str, list[bool]] | None = None
    """For each `MODULE.lora_E`, which of the initial ranks remain; null before the first pruning."""
    bias: Bias = "none"


def dimensions(tensors: Tensors) -> tuple[int, int]:
    """Return `(in, out)` from A's width and B's height."""
    a, b = tensors.get("lora_A"), tensors.get("lora_B")
    return (a.shape[1] if a and len(a.shape) == 2 else 0), (b.shape[0] if b and len(b.shape) == 2 else 0)


def build(checkpoint: Checkpoint, settings: Settings) -> Reading:
    """Rewrite AdaLoRA modules into sites."""
    ada = cast("AdaLoraSettings", settings)
    alpha = ada.lora_alpha if ada.lora_alpha is not None else 8.0  # PEFT's default
    c = (alpha if alpha > 0 else float(ada.init_r)) / (ada.init_r + RANK_GUARD)
    if not _is_initial_rank(checkpoint, ada):
        return Reading(method=Method.ADALORA, sites=())
    sites = [site for path in checkpoint.modules if (site := _site(checkpoint, path, c)) is not None]
    kept = sorted({site.terms[0].rank for site in sites if site.terms})
    settings_shown = (
        ("initial rank", str(ada.init_r)),
        ("kept ranks", " ".join(map(str, kept))),
        ("alpha", f"{alpha:g}"),
    )
    return Reading(method=Method.ADALORA, sites=tuple(sites), settings=settings_shown)


def _is_initial_rank(checkpoint: Checkpoint, ada: AdaLoraSettings) -> bool:
    """Return whether init_r can be the initial rank. The scale divides by it, and no tensor shows it."""
    masks = {len(mask) for mask in (ada.rank_pattern or {}).values()}
    ranks = {t["lora_A"].shape[0] for t in checkpoint.modules.values() if "lora_A" in t}
    kept = all(rank <= ada.init_r for rank in ranks) if masks else ranks <= {ada.init_r}
    if ada.init_r > 0 and masks <= {ada.init_r} and kept:
        return True
    listed = " ".join(map(str, sorted(ranks)))
    checkpoint.findings.error(
        Code.SC310,
        where="init_r",
        found=f"init_r = {ada.init_r}, ranks {listed} in the tensors, "
        + (f"masks of {' '.join(map(str, sorted(masks)))} in rank_pattern" if masks else "no rank_pattern"),
        expected="the rank at the start of training, from which rank_pattern leads to the tensors' ranks",
        next="restore the configuration of the training run: the scale divides by init_r",
    )
    return False


def _site(checkpoint: Checkpoint, path: str, c: float) -> Site | None:
    if not require(checkpoint, path, "lora_A", "lora_B", "lora_E"):
        return None
    a, b, e = (checkpoint.modules[path][name] for name in ("lora_A", "lora_B", "lora_E"))
    rank = a.shape[0]
    if b.shape[1] != rank or e.shape not in ((rank, 1), (rank,)):
        checkpoint.findings.error(
            Code.SC307,
            where=path,
            found=f"A {a.shape}, E {e.shape}, B {b.shape}",
            expected="one rank for all three",
            next="save the adapter again",
        )
        return None
    if rank == 0:  # pruned completely in training: the layer computes what the base computes
        return Site(linear=checkpoint.linear(path))
    term = Term(a=Factor(value=a), b=Factor(value=Transpose(b)), d=Reshape(e, (rank,)), c=c)
    return Site(linear=checkpoint.linear(path), terms=(term,))


ADALORA = FrontEnd(
    method=Method.ADALORA,
    parameters=(
        Parameter(name="lora_A", spellings=("lora_A",), axes=("rank", "in")),
        Parameter(name="lora_B", spellings=("lora_B",), axes=("out", "rank")),
        Parameter(name="lora_E", spellings=("lora_E",), axes=("rank", "1")),
    ),
    settings=AdaLoraSettings,
    inert=LORA_INERT
    | {"r", "target_r", "tinit", "tfinal", "deltaT", "beta1", "beta2", "orth_reg_weight", "total_step", "use_rslora"}
    | {"alpha_pattern", "init_lora_weights", "use_dora", "lora_bias"},
    rules=LORA_RULES,
    may_be_empty=frozenset({"lora_A", "lora_B", "lora_E"}),
    inert_keys=("ranknum",),
    dimensions=dimensions,
    build=build,
)
