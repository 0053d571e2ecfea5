"""What a served model refuses before anything runs: models, sizes, and calls of another form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from scute_compile.diagnostics import Code, fail
from scute_compile.formats.artifact import Artifact
from scute_compile.formats.manifest import BaseIdentity
from scute_compile.runtime_min.step.layer import ServedLinear


def check_unwrapped(model: torch.nn.Module) -> None:
    """Refuse a model whose layers another served model has replaced (SC703)."""
    held = sum(isinstance(module, ServedLinear) for module in model.modules())
    if held:
        fail(
            Code.SC703,
            where="the model",
            found=f"{held} layers that another ServedModel serves",
            expected="a model that is served once",
            next="load the adapters into the first one, give the model back with its `remove`, or load a second model",
        )


def check_sizes(least: int, **sizes: int) -> None:
    """Refuse a size below `least`, and what is no whole number (SC703)."""
    odd = [f"{name}={size!r:.40}" for name, size in sizes.items() if not _counts(size, least)]
    if odd:
        fail(
            Code.SC703,
            where="a served model",
            found=", ".join(odd),
            expected=f"whole numbers, at least {least} of each",
            next="choose other sizes",
        )


@contextmanager
def allocating(num_pages: int, shared_pages: int) -> Iterator[None]:
    """Name the pool's sizes where the memory for them isn't there (SC814)."""
    try:
        yield
    except (MemoryError, RuntimeError, TypeError) as error:
        said = " ".join(str(error).split())[:120]
        # torch has no class of its own for a CPU's memory, and a TypeError for a size beyond 64 bits
        if isinstance(error, RuntimeError | TypeError) and not _about_memory(said):
            raise
        fail(
            Code.SC814,
            where="a served model",
            found=f"{num_pages} pages of 2 KiB and {shared_pages} of shared factors: {said}",
            expected="a pool that fits into memory beside the model",
            next="choose fewer pages, or end other programs",
        )


def _about_memory(said: str) -> bool:
    return any(word in said.lower() for word in ("memory", "alloc", "overflow"))


def _counts(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def weight_of(linears: Mapping[str, torch.nn.Module], dtype: torch.dtype | None) -> torch.Tensor:
    """Return the first layer's weight, after checking that the pool can serve all of them.

    Raises:
        ScuteError: SC402 without a linear layer; SC703 for layers on several devices, or of another dtype on a GPU.
    """
    weights = [weight for layer in linears.values() if isinstance(weight := layer.weight, torch.Tensor)]
    devices = sorted({str(weight.device) for weight in weights})
    if len(devices) != 1:
        fail(
            Code.SC402 if not devices else Code.SC703,
            where="the model",
            found=f"linear layers on {len(devices)} devices: {', '.join(devices)}" if devices else "no linear layer",
            expected="linear layers, all of them on one device",
            next="load a causal language model on one device",
        )
    kinds = sorted({str(weight.dtype) for weight in weights})
    if weights[0].is_cuda and (len(kinds) > 1 or dtype not in (None, weights[0].dtype)):
        fail(
            Code.SC703,
            where="dtype",
            found=f"{dtype}, with layers in {', '.join(kinds)}",
            expected="one dtype for the pool and all layers on a GPU",
            next="load the model in the dtype of the artifacts",
        )
    return weights[0]


def shape_of(input_ids: torch.Tensor | None, embeddings: torch.Tensor | None) -> tuple[int, int]:
    """Return rows and tokens per row of one call. Raises SC703 for tensors of another form, and for no token."""
    given = input_ids if input_ids is not None else embeddings
    if given is None:
        fail(
            Code.SC703,
            where="forward",
            found="neither input_ids nor inputs_embeds",
            expected="one of them",
            next="pass the batch's tokens",
        )
    shape = tuple(given.shape) if isinstance(given, torch.Tensor) else ()
    wanted = 2 if given is input_ids else 3
    if len(shape) != wanted or not all(shape[:2]):
        fail(
            Code.SC703,
            where="input_ids" if given is input_ids else "inputs_embeds",
            found=f"a tensor of shape {list(shape)}" if shape else f"a {type(given).__name__}",
            expected="a tensor of rows and tokens, at least one of each",
            next="pass one row per sequence",
        )
    return shape[0], shape[1]


def check_tokens(input_ids: torch.Tensor | None, model: torch.nn.Module) -> None:
    """Refuse tokens that the model doesn't have (SC703): on a GPU, one would end the process's use of it."""
    embeddings: object = getattr(model, "get_input_embeddings", lambda: None)()
    vocabulary = getattr(embeddings, "num_embeddings", None)
    if input_ids is None or vocabulary is None:
        return
    whole = input_ids.dtype in (torch.int32, torch.int64)
    low, high = (int(value) for value in torch.aminmax(input_ids)) if whole else (0, 0)
    if not whole or low < 0 or high >= vocabulary:
        found = f"token {low if low < 0 else high}" if whole else f"values in {input_ids.dtype}"
        fail(
            Code.SC703,
            where="input_ids",
            found=found,
            expected=f"int32 or int64 from 0 to {vocabulary - 1}",
            next="encode the text with the base's own tokenizer",
        )


def check_rows(adapters: Sequence[str | None], rows: int) -> None:
    """Refuse a batch that has not one adapter id per row (SC703)."""
    if not isinstance(adapters, list | tuple):  # a set has no order, and a dict another meaning
        fail(
            Code.SC703,
            where="adapters",
            found=f"a {type(adapters).__name__}",
            expected="a list or tuple of ids",
            next="pass one id per row, in the order of the rows",
        )
    if not adapters or rows != len(adapters):
        fail(
            Code.SC703,
            where="adapters",
            found=f"{len(adapters)} adapter ids for {rows} rows",
            expected="one id per row of the batch",
            next="pass None for rows that the base serves alone",
        )
    odd = [name for name in adapters if not isinstance(name, str | None)]
    if odd:
        fail(
            Code.SC703,
            where="adapters",
            found=f"{odd[0]!r:.80} as an id",
            expected="names, or None",
            next="pass the names under which adapters were loaded",
        )


def check_step(adapters: Sequence[str | None], tokens: Sequence[int]) -> None:
    """Refuse a step that has not one adapter id and a number of tokens per sequence (SC703)."""
    if len(tokens) != len(adapters) or not all(_counts(count, 1) for count in tokens):
        fail(
            Code.SC703,
            where="adapters",
            found=f"{len(adapters)} adapter ids for sequences of {list(tokens)} tokens",
            expected="one id per sequence, of at least one token",
            next="pass None for sequences of the base alone",
        )


def check_source(name: str, source: object) -> None:
    """Refuse what is no artifact and no path of one (SC703)."""
    if not isinstance(source, Artifact | Path | str):
        fail(
            Code.SC703,
            where=name,
            found=f"a {type(source).__name__}",
            expected="an artifact, or the path of one",
            next="pass the folder that `scute compile` wrote",
        )


def check_structure(name: str, recorded: BaseIdentity, served: str | None) -> None:
    """Refuse an artifact for a base of another structure than the one that is served, where that is known (SC608)."""
    if served is not None and recorded.structure != served:
        fail(
            Code.SC608,
            where=name,
            found=f"structure hash {recorded.structure[:12]}, of a {recorded.model_type}",
            expected=f"{served[:12]}, of the model that is served",
            next="serve the base that it was compiled for, or compile the adapter for this one",
        )


def check_options(adapters: Sequence[str | None], options: Mapping[str, object], *, ranks: int) -> None:
    """Refuse options of `generate` by their names (SC703).

    Guidance beside adapters calls the model a second time, for other rows than the step has. Of several ranks, one
    that stops by its own clock leaves the others waiting for ever.
    """

    def given(name: str) -> object:
        return options.get(name, getattr(options.get("generation_config"), name, None))

    scale, limit = given("guidance_scale"), given("max_time")
    if scale not in (None, 1) and any(adapters):
        fail(
            Code.SC703,
            where="guidance_scale",
            found=f"{scale!r:.40} in a batch with adapters",
            expected="none: it calls the model a second time per token, for rows that the step doesn't have",
            next="generate without guidance_scale",
        )
    if limit is not None and ranks > 1:
        fail(
            Code.SC703,
            where="max_time",
            found=f"{limit!r:.40} on {ranks} ranks",
            expected="none: each rank would stop by its own clock",
            next="limit the answers by max_new_tokens",
        )


def check_turn(*, removed: bool, running: bool) -> None:
    """Refuse a step after the model was given back, and one inside another (SC703)."""
    if removed:
        fail(
            Code.SC703,
            where="a served model",
            found="a call after `remove`, which gave the model back",
            expected="a model whose layers are served",
            next="wrap the model again",
        )
    if running:
        fail(
            Code.SC703,
            where="a served model",
            found="a step inside another, whose adapters it would replace",
            expected="one step at a time",
            next="wait until the call before has ended; a streamer or a hook must not call the model",
        )
