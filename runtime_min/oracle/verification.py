"""Verification: comparison of an artifact under the reference operations with its adapter under PEFT."""

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
from scute_compile.ir.dtypes import torch_dtype
from scute_compile.runtime_min.base_model import load_model
from scute_compile.runtime_min.layers import linear_layers, match_sites
from scute_compile.runtime_min.oracle.adapted_model import AdaptedModel
from scute_compile.runtime_min.oracle.peft_model import locate, why_not_comparable, wrap

ROWS = 4
"""Rows of the batch of random tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """Errors of an artifact against PEFT, over the log-probabilities of the whole vocabulary."""

    comparable: bool
    """False when the installed PEFT can't be the oracle for this adapter; the errors are None then."""
    reason: Diagnostic | None = None
    """Why they are not comparable."""
    tokens: int
    tp: int
    dtype: str
    """Storage dtype of the artifact; the arithmetic is float32."""
    max_abs_logprob_error: float | None = None
    mean_abs_logprob_error: float | None = None
    mean_abs_adapter_effect: float | None = None
    """Mean absolute difference of log-probabilities between the base and PEFT's adapted model."""
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
    base_dtype: str | None = None,
) -> Verification:
    """Compare an artifact with its adapter under PEFT, both in float32 on the CPU.

    The base is loaded once. Artifacts for several ranks run on simulated ranks, each with its own file.

    Args:
        artifact: The opened artifact, or its folder.
        adapter: The adapter that it was compiled from, or its folder.
        base: The base's folder, with weights. The caller checks that it is the base of the artifact.
        tokens: Number of random tokens, rounded up to four rows of equal length.
        base_dtype: The dtype that the base is stored in: float32, bfloat16 or float16; None for that of its config.

    Raises:
        ScuteError: faults of the artifact (SC6xx), the adapter (SC1xx, SC2xx) or a base that doesn't fit (SC402).
            An adapter for which PEFT can't be the oracle raises nothing; the result is not comparable.
    """
    opened = artifact if isinstance(artifact, Artifact) else open_artifact(artifact)
    source = adapter if isinstance(adapter, AdapterFolder) else open_adapter(str(adapter))
    model = load_model(Path(base))
    located = locate(source, opened.manifest, _names_in_model(opened, model))
    ids = _random_ids(model, tokens)
    result = partial(Verification, tokens=ids.numel(), tp=opened.manifest.tp, dtype=opened.manifest.dtype.value)
    if reason := why_not_comparable(source, located):
        return result(comparable=False, reason=_not_comparable(source, reason))
    base_logprobs = _logprobs(model, ids)
    with AdaptedModel(model, {opened.manifest.name: opened}) as adapted:
        artifact_logprobs = _logprobs(adapted, ids, adapter_names=[opened.manifest.name] * len(ids))
    try:
        wrapped = wrap(model, source, located, _stored_dtype(Path(base), base_dtype))  # last: it changes the model
    except ScuteError as refusal:
        return result(comparable=False, reason=refusal.diagnostics[0])
    peft_logprobs = _logprobs(wrapped, ids)
    error = (artifact_logprobs - peft_logprobs).abs()
    effect = (peft_logprobs - base_logprobs).abs().mean().item()
    return result(
        comparable=True,
        max_abs_logprob_error=error.max().item(),
        mean_abs_logprob_error=error.mean().item(),
        mean_abs_adapter_effect=effect,
        relative_error=error.mean().item() / effect if effect > 0 else None,
    )


def _names_in_model(artifact: Artifact, model: torch.nn.Module) -> Mapping[str, str]:
    """Return each linear layer's path in the loaded model by its path in files; transformers may change the root."""
    linears = linear_layers(model)
    found = match_sites(artifact, linears)
    if found.identity:
        return {name: name for name in linears}
    inside = [name for name in linears if not found.added or name.startswith(f"{found.added}.")]
    rests = {name: name[len(found.added) + 1 :] if found.added else name for name in inside}
    return {f"{found.dropped}.{rest}" if found.dropped else rest: name for name, rest in rests.items()}


def _random_ids(model: torch.nn.Module, tokens: int) -> torch.Tensor:
    """Return random token ids, `(4, at least tokens / 4)`, the same in every call."""
    config: Any = model.config
    vocabulary = int(config.get_text_config().vocab_size)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, vocabulary, (ROWS, max(2, -(-tokens // ROWS))), generator=generator)


def _logprobs(model: Callable[..., Any], ids: torch.Tensor, **options: object) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids, **options).logits
    return torch.log_softmax(logits.float(), -1)


def _stored_dtype(base: Path, name: str | None) -> torch.dtype:
    """Return the dtype of the base's files: the given one, or that of the configuration, or float32."""
    from transformers import AutoConfig

    stored = name or AutoConfig.from_pretrained(base).get_text_config().dtype
    try:
        return torch_dtype(str(stored))
    except KeyError:
        return torch.float32


def _not_comparable(adapter: AdapterFolder, found: str) -> Diagnostic:
    return Diagnostic(
        code=Code.SC702,
        where=adapter.name,
        found=found,
        expected="an adapter that the installed PEFT computes like the PEFT that wrote it",
        next="verify in an environment with the PEFT version that wrote the adapter",
    )
