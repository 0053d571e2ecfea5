"""The checks that a served model makes before anything runs: of models, sizes, names and calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from scute_compile.diagnostics import Code, fail
from scute_compile.formats.artifact import Artifact
from scute_compile.formats.manifest import BaseIdentity
from scute_compile.runtime_min.step.layer import ServedLinear

BASE = "__base__"
"""PEFT's name for the base model in `adapter_names`; None means the same."""


def check_unwrapped(model: torch.nn.Module) -> None:
    """Refuse a model whose layers another served model has replaced (SC703)."""
    replaced = sum(isinstance(module, ServedLinear) for module in model.modules())
    if replaced:
        fail(
            Code.SC703,
            where="the model",
            found=f"{replaced} layers that another ServedModel has replaced",
            expected="a model that no ServedModel wraps",
            next="load the adapters into the first ServedModel, call its `remove`, or load a second model",
        )


def check_counts(least: int, **counts: int) -> None:
    """Refuse arguments that are not whole numbers of at least `least` (SC703)."""
    invalid = [f"{name}={count!r:.40}" for name, count in counts.items() if not _is_count(count, least)]
    if invalid:
        fail(
            Code.SC703,
            where="a served model",
            found=", ".join(invalid),
            expected=f"whole numbers, each at least {least}",
            next="choose other sizes",
        )


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


@contextmanager
def allocating(pool_bytes: int, shared_bytes: int) -> Iterator[None]:
    """Report failed allocations inside the block, with the requested sizes (SC814)."""
    try:
        yield
    except (MemoryError, RuntimeError, TypeError) as error:
        message = " ".join(str(error).split())[:120]
        # for CPU memory torch raises a plain RuntimeError, and for a size beyond 64 bits a TypeError
        if isinstance(error, RuntimeError | TypeError) and not _is_about_memory(message):
            raise
        fail(
            Code.SC814,
            where="a served model",
            found=f"pool_bytes={pool_bytes} and shared_bytes={shared_bytes}: {message}",
            expected="a pool that fits into memory beside the model",
            next="choose a smaller pool, or end other programs",
        )


def _is_about_memory(message: str) -> bool:
    return any(word in message.lower() for word in ("memory", "alloc", "overflow"))


def weight_of(linears: Mapping[str, torch.nn.Module], dtype: torch.dtype | None) -> torch.Tensor:
    """Return the first layer's weight after checking that one pool can serve all layers.

    Args:
        linears: The model's linear layers by path.
        dtype: The pool's dtype; None for that of the layers.

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
    dtypes = sorted({str(weight.dtype) for weight in weights})
    if weights[0].is_cuda and (len(dtypes) > 1 or dtype not in (None, weights[0].dtype)):
        fail(
            Code.SC703,
            where="dtype",
            found=f"{dtype}, with layers in {', '.join(dtypes)}",
            expected="one dtype for the pool and all layers on a GPU",
            next="load the model in the dtype of the artifacts",
        )
    return weights[0]


def shape_of(input_ids: torch.Tensor | None, embeddings: torch.Tensor | None) -> tuple[int, int]:
    """Return rows and tokens per row of a call. Raises SC703 for another number of dimensions, or no token."""
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
    dimensions = 2 if given is input_ids else 3
    if len(shape) != dimensions or not all(shape[:2]):
        fail(
            Code.SC703,
            where="input_ids" if given is input_ids else "inputs_embeds",
            found=f"a tensor of shape {list(shape)}" if shape else f"a {type(given).__name__}",
            expected="a tensor of rows and tokens, at least one of each",
            next="pass one row per sequence",
        )
    return shape[0], shape[1]


def check_tokens(input_ids: torch.Tensor | None, model: torch.nn.Module) -> None:
    """Refuse token ids outside the vocabulary (SC703): a GPU asserts on them, and the process loses the device."""
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


def names_per_row(adapter_names: Sequence[str | None], rows: int) -> tuple[str | None, ...]:
    """Return the adapter of each row, with None for the base.

    Args:
        adapter_names: A list or tuple: a name, None or `BASE` per row.
        rows: Rows of the batch.

    Raises:
        ScuteError: SC703 for another type, another length, or an entry that is not a name.
    """
    if not isinstance(adapter_names, list | tuple):  # a set has no order, and a string would be read as its characters
        fail(
            Code.SC703,
            where="adapter_names",
            found=f"a {type(adapter_names).__name__}",
            expected="a list or tuple of names",
            next="pass one name per row, in the order of the rows",
        )
    if not adapter_names or rows != len(adapter_names):
        fail(
            Code.SC703,
            where="adapter_names",
            found=f"{len(adapter_names)} adapter names for {rows} rows",
            expected="one name per row of the batch",
            next="pass None for rows that the base serves alone",
        )
    invalid = [name for name in adapter_names if not isinstance(name, str | None)]
    if invalid:
        fail(
            Code.SC703,
            where="adapter_names",
            found=f"{invalid[0]!r:.80} as a name",
            expected=f"names of adapters, None or '{BASE}'",
            next="pass the names under which adapters were loaded",
        )
    return tuple(None if name == BASE else name for name in adapter_names)


def names_per_token(adapter_names: Sequence[str | None], tokens: Sequence[int]) -> tuple[str | None, ...]:
    """Return the adapter of each token of a flattened batch, given each sequence's adapter and number of tokens.

    Raises:
        ScuteError: SC703 for a sequence without tokens, and as `names_per_row`.
    """
    if not all(_is_count(count, 1) for count in tokens):
        fail(
            Code.SC703,
            where="tokens",
            found=f"sequences of {list(tokens)} tokens",
            expected="whole numbers, at least one token per sequence",
            next="pass how many tokens of the batch belong to each sequence",
        )
    names = names_per_row(adapter_names, len(tokens))
    return tuple(name for name, count in zip(names, tokens, strict=True) for _ in range(count))


def check_adapter(name: str, source: object) -> None:
    """Refuse the base's name for an adapter, and a source that is neither an artifact nor a path (SC703)."""
    if name == BASE:
        fail(
            Code.SC703,
            where="adapter_name",
            found=f"'{BASE}'",
            expected="another name: this one stands for the base in `adapter_names`",
            next="load the adapter under another name",
        )
    if not isinstance(source, Artifact | Path | str):
        fail(
            Code.SC703,
            where=f"{name!s:.80}",
            found=f"a {type(source).__name__}",
            expected="an artifact, or the path of one",
            next="pass the folder that `scute compile` wrote",
        )


def check_structure(name: str, recorded: BaseIdentity, served: str | None) -> None:
    """Refuse an artifact for a base whose structure differs from that of the served base, if known (SC608)."""
    if served is not None and recorded.structure != served:
        fail(
            Code.SC608,
            where=name,
            found=f"structure hash {recorded.structure[:12]}, of a {recorded.model_type}",
            expected=f"{served[:12]}, of the model that is served",
            next="serve the base that it was compiled for, or compile the adapter for this one",
        )


def check_options(names: Sequence[str | None], options: Mapping[str, object], *, tp: int) -> None:
    """Refuse options of `generate` that don't work here (SC703).

    Guidance calls the model a second time per token, with other rows than the step was written for. `max_time` stops
    each rank by its own clock, and the other ranks would wait in a collective.
    """

    def given(name: str) -> object:
        return options.get(name, getattr(options.get("generation_config"), name, None))

    scale, limit = given("guidance_scale"), given("max_time")
    if scale not in (None, 1) and any(names):
        fail(
            Code.SC703,
            where="guidance_scale",
            found=f"{scale!r:.40} in a batch with adapters",
            expected="none: it calls the model a second time per token, for rows that the step doesn't have",
            next="generate without guidance_scale",
        )
    if limit is not None and tp > 1:
        fail(
            Code.SC703,
            where="max_time",
            found=f"{limit!r:.40} on {tp} ranks",
            expected="none: each rank would stop by its own clock",
            next="limit the answers by max_new_tokens",
        )


def check_usable(*, removed: bool, running: bool) -> None:
    """Refuse calls after `remove`, and a step inside another (SC703)."""
    if removed:
        fail(
            Code.SC703,
            where="a served model",
            found="a call after `remove`, which put the model's own layers back",
            expected="a model whose layers are served",
            next="wrap the model again",
        )
    if running:
        fail(
            Code.SC703,
            where="a served model",
            found="a step inside another, whose adapters it would replace",
            expected="one step at a time",
            next="call the model after the running step has ended, not from a streamer or a hook",
        )
