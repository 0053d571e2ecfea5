"""Verification: an artifact through the reference execution against its adapter through PEFT, on the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from scute_compile.diagnostics import Code, Diagnostic, ScuteError
from scute_compile.formats.artifact import Artifact, open_artifact
from scute_compile.formats.peft_folder import AdapterFolder, open_adapter
from scute_compile.runtime_min.base_model import load_model
from scute_compile.runtime_min.layers import linear_layers, match_sites
from scute_compile.runtime_min.oracle.adapted_model import AdaptedModel
from scute_compile.runtime_min.oracle.peft_model import locate, why_not_comparable, wrap

ROWS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """How far an artifact is from PEFT, over the log-probabilities of all tokens of the vocabulary."""

    comparable: bool
    """False when the installed PEFT is no oracle for this adapter; the measures are None then."""
    reason: Diagnostic | None = None
    """Why it isn't comparable."""
    tokens: int
    tp: int
    dtype: str
    """Storage dtype of the artifact; the arithmetic is float32."""
    max_abs_logprob_error: float | None = None
    mean_abs_logprob_error: float | None = None
    mean_abs_adapter_effect: float | None = None
    """Mean absolute change of the log-probabilities from the base alone to PEFT's adapted model."""
    relative_error: float | None = None
    """Mean error over mean effect; None when the adapter has no effect."""

    def to_json(self) -> dict[str, object]:
        """Return plain JSON values."""
        fields = {name: value for name, value in asdict(self).items() if name != "reason"}
        return {**fields, "reason": self.reason.to_json() if self.reason else None}


def verify(
    artifact: Artifact | Path | str,
    adapter: AdapterFolder | Path | str,
    base: Path | str,
    *,
    tokens: int = 64,
    seed: int = 0,
    base_dtype: str | None = None,
) -> Verification:
    """Compare an artifact with its adapter under PEFT, both in float32 on the CPU.

    The base is loaded once. At several ranks the files are never joined: every rank runs with its own.

    Args:
        artifact: The artifact, or its folder.
        adapter: The adapter that it was compiled from, or its folder.
        base: The base's folder, with weights. Whether it is the artifact's own base is for the caller to check.
        tokens: How many random tokens to run, at least; they are spread over four rows.
        seed: Seed of the tokens.
        base_dtype: The dtype in which the base is stored: float32, bfloat16 or float16. None: as its config says.

    Raises:
        ScuteError: faults of the artifact (SC6xx), the adapter (SC1xx, SC2xx) or a base that doesn't fit (SC402).
            An adapter that PEFT can't be the oracle of is no fault: the result says so.
    """
    opened = artifact if isinstance(artifact, Artifact) else open_artifact(artifact)
    source = adapter if isinstance(adapter, AdapterFolder) else open_adapter(str(adapter))
    model = load_model(Path(base))
    located = locate(source, opened.manifest, _names_in_model(opened, model))
    ids = _random_ids(model, tokens, seed)
    measured = partial(Verification, tokens=ids.numel(), tp=opened.manifest.tp, dtype=opened.manifest.dtype.value)
    if reason := why_not_comparable(source, located):
        return measured(comparable=False, reason=_not_comparable(source, reason))
    base_logprobs = _logprobs(model, ids)
    with AdaptedModel(model, {opened.manifest.name: opened}) as adapted:
        ours = _logprobs(adapted, ids, adapter_names=[opened.manifest.name] * len(ids))
    try:
        wrapped = wrap(model, source, located, _stored_dtype(Path(base), base_dtype))  # last: it changes the model
    except ScuteError as refusal:
        return measured(comparable=False, reason=refusal.diagnostics[0])
    theirs = _logprobs(wrapped, ids)
    error, effect = (ours - theirs).abs(), (theirs - base_logprobs).abs().mean().item()
    return measured(
        comparable=True,
        max_abs_logprob_error=error.max().item(),
        mean_abs_logprob_error=error.mean().item(),
        mean_abs_adapter_effect=effect,
        relative_error=error.mean().item() / effect if effect > 0 else None,
    )


def _names_in_model(artifact: Artifact, model: torch.nn.Module) -> Mapping[str, str]:
    """Return module path in the base's files -> path in the loaded model: transformers may load under another root."""
    linears = linear_layers(model)
    found = match_sites(artifact, linears)
    if found.identity:
        return {name: name for name in linears}
    inside = [name for name in linears if not found.added or name.startswith(f"{found.added}.")]
    rests = {name: name[len(found.added) + 1 :] if found.added else name for name in inside}
    return {f"{found.dropped}.{rest}" if found.dropped else rest: name for name, rest in rests.items()}


def _random_ids(model: torch.nn.Module, tokens: int, seed: int) -> torch.Tensor:
    """Return random token ids, `(4, at least tokens / 4)`."""
    config: Any = model.config
    vocabulary = int(config.get_text_config().vocab_size)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocabulary, (ROWS, max(2, -(-tokens // ROWS))), generator=generator)


def _logprobs(model: Callable[..., Any], ids: torch.Tensor, **options: object) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids, **options).logits
    return torch.log_softmax(logits.float(), -1)


def _stored_dtype(base: Path, name: str | None) -> torch.dtype:
    """Return the dtype of the base's files: as told, or as its configuration says."""
    from transformers import AutoConfig

    said = name or AutoConfig.from_pretrained(base).get_text_config().dtype
    dtype = getattr(torch, str(said).removeprefix("torch."), None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def _not_comparable(adapter: AdapterFolder, found: str) -> Diagnostic:
    return Diagnostic(
        code=Code.SC702,
        where=adapter.name,
        found=found,
        expected="an adapter that the installed PEFT computes as the PEFT that wrote it",
        next="verify in an environment with the PEFT version that wrote the adapter",
    )
