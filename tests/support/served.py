"""Tiny served models, compiled adapters, and PEFT's answers for the same rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from scute_compile.formats.artifact import open_artifact
from scute_compile.formats.peft_folder import open_adapter
from scute_compile.runtime_min.layers import linear_layers
from scute_compile.runtime_min.model.served_model import ServedModel
from scute_compile.runtime_min.oracle.peft_model import locate, wrap
from tests.support.bases import load_base, made_once
from tests.support.commands import compiled

Pair = Callable[[str, str], tuple[Path, Path]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """An adapter, its base, and its artifact."""

    adapter: Path
    base: Path
    artifact: Path


Make = Callable[[str, str], Compiled]
"""Returns a compiled adapter, by recipe and base."""


def artifact_of(recipe: str, base: str, pair: Pair, shared: Path, *, dtype: str = "float32", tp: int = 1) -> Compiled:
    """Compile an adapter for the runtime, once per session."""
    adapter, where = pair(recipe, base)
    kept = shared / "runtime-stores" / f"{base}-{recipe}-{dtype}-{tp}"
    store = made_once(kept, lambda folder: _compile(adapter, where, folder, "--dtype", dtype, "--tp", tp))
    return Compiled(adapter=adapter, base=where, artifact=store / adapter.name)


def _compile(adapter: Path, base: Path, store: Path, *options: object) -> None:
    compiled(adapter, base, store, *options)


def served(base: str, folder: Path, **options: object) -> ServedModel:
    """Return a tiny base in float32 as a served model."""
    chosen: dict[str, Any] = {
        "max_adapters": 12,
        "pool_bytes": "8MiB",
        "shared_bytes": "512KiB",
        "max_num_batched_tokens": 512,
        **options,
    }
    return ServedModel(load_base(base, folder), **chosen)


def peft_model(base: str, chosen: Compiled) -> Any:  # noqa: ANN401 - PEFT's class, unannotated
    """Return the base with the adapter as PEFT applies it."""
    model = load_base(base, chosen.base)
    names = {name: name for name in linear_layers(model)}
    adapter, manifest = open_adapter(str(chosen.adapter)), open_artifact(chosen.artifact).manifest
    return wrap(model, adapter, locate(adapter, manifest, names), torch.float32)


def ids_of(rows: int, length: int, *, seed: int = 0) -> torch.Tensor:
    """Return random tokens of the tiny vocabulary, none of which ends a sequence."""
    return torch.randint(3, 128, (rows, length), generator=torch.Generator().manual_seed(seed))


def logprobs(model: Callable[..., Any], ids: torch.Tensor, **options: object) -> torch.Tensor:
    """Return log-probabilities of all tokens of the vocabulary."""
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids, **options).logits
    return torch.log_softmax(logits.float(), -1)


def relative_error(ours: torch.Tensor, theirs: torch.Tensor, base: torch.Tensor) -> float:
    """Return the mean error of log-probabilities over the mean effect of the adapter."""
    return ((ours - theirs).abs().mean() / (theirs - base).abs().mean()).item()


def logits_of(model: ServedModel, ids: torch.Tensor, adapter_names: Sequence[str | None]) -> torch.Tensor:
    """Return the logits of one batch."""
    out: torch.Tensor = model.forward(ids, adapter_names=adapter_names).logits
    return out
