"""Continues prompts in one batch, each with its adapter, by greedy decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from scute_compile.diagnostics import Code, fail
from scute_compile.formats.artifact import Artifact
from scute_compile.ir.dtypes import torch_dtype
from scute_compile.runtime_min.base_model import load_model
from scute_compile.runtime_min.model.served_model import ServedModel

OnToken = Callable[[Sequence[str]], None]
"""Called after each step with the text of every row so far."""
SPARE_BYTES = 128 << 10
"""Bytes that are reserved beyond the tensors, for the ends of pages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedBase:
    """A base model to load."""

    source: str
    """The folder or Hub id, as the user named it."""
    folder: Path
    """The folder with its configuration and weights."""
    dtype: str
    """The dtype of its weights."""
    structure: str
    """The structure hash."""


def continue_prompts(
    base: ServedBase,
    artifacts: Mapping[str, Artifact],
    prompts: Sequence[tuple[str | None, str]],
    *,
    max_new_tokens: int,
    on_token: OnToken,
) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Continue every prompt in one batch, on the GPU if there is one.

    The base is loaded in the dtype of the first artifact; without artifacts in the dtype of its weights.

    Args:
        base: The base to load.
        artifacts: Artifacts by adapter name, compiled for this base.
        prompts: For each row the adapter's name, None for the base alone, and the text.
        max_new_tokens: Largest number of tokens per row. A row ends earlier with an end token.
        on_token: Called after each step.

    Returns:
        For each row the text and the token ids of the continuation, without the end token.

    Raises:
        ScuteError: SC107 without a tokenizer, SC402 when the model can't be loaded, SC703 for prompts that are too
            long or hold tokens that the model doesn't have, SC814 when the device's memory is too small, and what
            `ServedModel.load_adapter` raises.
    """
    try:
        return _continue(base, artifacts, prompts, max_new_tokens=max_new_tokens, on_token=on_token)
    except torch.OutOfMemoryError as error:
        fail(
            Code.SC814,
            where=base.source,
            found=" ".join(str(error).split())[:200],
            expected="room for the base, its adapters and the batch",
            next="end other programs on the device, run fewer or shorter prompts, or hide the device to run on the CPU",
        )


def _continue(
    base: ServedBase,
    artifacts: Mapping[str, Artifact],
    prompts: Sequence[tuple[str | None, str]],
    *,
    max_new_tokens: int,
    on_token: OnToken,
) -> tuple[tuple[str, tuple[int, ...]], ...]:
    tokenizer = _tokenizer(base)
    tokens = [_encoded(tokenizer, text) for _, text in prompts]
    first = next(iter(artifacts.values()), None)
    dtype = torch_dtype(first.manifest.dtype if first else base.dtype)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_model(base.folder, dtype=dtype).to(device)
    _check_tokens(base, model, tokens, max_new_tokens)
    served = ServedModel(
        model,
        max_adapters=max(1, len(artifacts)),
        pool_bytes=_room(rank.bytes for artifact in artifacts.values() for rank in artifact.manifest.ranks),
        shared_bytes=_room(factor.bytes for artifact in artifacts.values() for factor in artifact.manifest.factors),
        max_num_batched_tokens=len(tokens) * max(map(len, tokens)),
        max_num_seqs=len(tokens),
        base_structure=base.structure,
    )
    for name, artifact in artifacts.items():
        served.load_adapter(artifact, adapter_name=name)
    ends, pad = _ends(model, tokenizer), _pad(model, tokenizer)
    model.generation_config = _greedy(ends)
    ids, mask = _padded(tokens, pad)
    stream = _Stream(tokenizer, rows=len(tokens), ends=ends, on_token=on_token)
    served.generate(
        ids.to(device),
        adapter_names=[name for name, _ in prompts],
        attention_mask=mask.to(device),
        max_new_tokens=max_new_tokens,
        pad_token_id=pad,
        streamer=stream,
    )
    return tuple((text, tuple(row)) for text, row in zip(stream.texts, stream.tokens, strict=True))


class _Stream:
    """Collects the tokens of all rows during `generate`. The streamers of transformers take a single row."""

    def __init__(self, tokenizer: Any, *, rows: int, ends: Sequence[int], on_token: OnToken) -> None:  # noqa: ANN401 - transformers' class, unannotated
        self._tokenizer, self._ends, self._on_token = tokenizer, frozenset(ends), on_token
        self.tokens: list[list[int]] = [[] for _ in range(rows)]
        self._ended = [False] * rows
        self._began = False

    @property
    def texts(self) -> list[str]:
        """The text of every row so far."""
        return [self._tokenizer.decode(row, skip_special_tokens=True) for row in self.tokens]

    def put(self, value: torch.Tensor) -> None:
        """Take the prompts on the first call, and one token per row on each later call."""
        if not self._began:
            self._began = True
            return
        for row, token in enumerate(value.flatten().tolist()):
            self._ended[row] |= token in self._ends
            if not self._ended[row]:
                self.tokens[row].append(token)
        self._on_token(self.texts)

    def end(self) -> None:
        """Do nothing: every token was passed on."""


def _tokenizer(base: ServedBase) -> Any:  # noqa: ANN401 - likewise
    from transformers import AutoTokenizer

    local = Path(base.source).is_dir()
    try:
        return AutoTokenizer.from_pretrained(base.source)
    except Exception as error:  # noqa: BLE001 - a damaged file can raise anything
        fail(
            Code.SC107,
            where=base.source,
            found=f"no tokenizer that transformers can load: {' '.join(str(error).split())[:200]}",
            expected="tokenizer.json, or another tokenizer's files, beside the model",
            next="copy the tokenizer's files into the folder"
            if local
            else "download the whole model, and pass its folder",
        )


def _encoded(tokenizer: Any, text: str) -> list[int]:  # noqa: ANN401 - likewise
    tokens: list[int] = tokenizer(text)["input_ids"]
    if not tokens:
        fail(
            Code.SC703,
            where="--prompt",
            found=f"`{text}`, which has no tokens",
            expected="at least 1 token",
            next="write a longer prompt",
        )
    return tokens


def _check_tokens(base: ServedBase, model: Any, tokens: Sequence[Sequence[int]], new: int) -> None:  # noqa: ANN401 - likewise
    if not model.can_generate():
        fail(
            Code.SC402,
            where=base.source,
            found=f"a {type(model).__name__}, which generates no text",
            expected="a causal language model",
            next="pass the model with its output head",
        )
    vocabulary = _vocabulary(model)
    if (largest := max(map(max, tokens))) >= vocabulary:
        fail(
            Code.SC703,
            where=base.source,
            found=f"a tokenizer that gives token {largest} for a prompt",
            expected=f"tokens below {vocabulary}, the model's vocabulary",
            next="put the model's tokenizer into its folder",
        )
    length = max(map(len, tokens)) + new
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if isinstance(limit, int) and length > limit:
        fail(
            Code.SC703,
            where="--prompt",
            found=f"{length} tokens, prompt and answer together",
            expected=f"at most {limit}, the model's context",
            next="shorten the longest prompt, or ask for fewer tokens with --max-new-tokens",
        )


def _room(sizes: Iterable[int]) -> int:
    """Return the bytes to reserve for tensors of these sizes: twice their sum, since short rows are padded."""
    return SPARE_BYTES + 2 * sum(sizes)


def _vocabulary(model: Any) -> int:  # noqa: ANN401 - likewise
    size: int = model.get_input_embeddings().weight.shape[0]
    return size


def _ends(model: Any, tokenizer: Any) -> list[int]:  # noqa: ANN401 - likewise
    """Return the end tokens: the model's, or else the tokenizer's."""
    ends = model.generation_config.eos_token_id
    ends = tokenizer.eos_token_id if ends is None else ends
    ends = ends if isinstance(ends, (list, tuple)) else [ends]
    return [token for token in ends if isinstance(token, int) and 0 <= token < _vocabulary(model)]


def _pad(model: Any, tokenizer: Any) -> int:  # noqa: ANN401 - likewise
    """Return the padding token. Some tokenizers pad with a token that the model lacks; then it is 0."""
    pad = tokenizer.pad_token_id
    return pad if isinstance(pad, int) and 0 <= pad < _vocabulary(model) else 0


def _greedy(ends: Sequence[int]) -> Any:  # noqa: ANN401 - likewise
    """Return greedy settings in place of the base's, which may ask for beams, sampling or penalties."""
    from transformers import GenerationConfig

    return GenerationConfig(do_sample=False, num_beams=1, eos_token_id=list(ends) or None)


def _padded(tokens: Sequence[Sequence[int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and mask `(rows, longest)`, padded on the left."""
    longest = max(map(len, tokens))
    ids = torch.full((len(tokens), longest), pad)
    mask = torch.zeros(len(tokens), longest, dtype=torch.long)
    for row, prompt in enumerate(tokens):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    return ids, mask
