"""What `scute run` does: all prompts in one batch, each with its adapter, greedily, token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from scute_compile.cli.run.request import Answer, Prompt
from scute_compile.diagnostics import Code, fail
from scute_compile.formats.artifact import Artifact
from scute_compile.ir.dtypes import torch_dtype
from scute_compile.runtime_min.base_model import load_model
from scute_compile.runtime_min.model.served_model import ServedModel

Say = Callable[[Sequence[str]], None]
"""Takes the text of every row so far, after each token."""
SPARE_BYTES = 128 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseModel:
    """The base as `scute run` needs it."""

    source: str
    """As the user named it: a folder or a Hub id."""
    folder: Path
    """Its configuration and weights."""
    dtype: str
    structure: str
    """Its structure hash."""


def run(
    base: BaseModel, artifacts: Mapping[str, Artifact], prompts: Sequence[Prompt], *, max_new_tokens: int, say: Say
) -> tuple[Answer, ...]:
    """Continue every prompt, all of them in one batch, on the GPU if there is one.

    The base is loaded in the artifacts' dtype; the first one's decides.

    Args:
        base: The base.
        artifacts: By name; each was compiled for this base.
        prompts: Rows of the batch.
        max_new_tokens: Most tokens per row; a row ends early with the model's own end.
        say: Hears of every token.

    Raises:
        ScuteError: SC107 without a tokenizer, SC402 when the model can't be loaded, SC703 for prompts that are too
            long or hold tokens that the model doesn't have, SC814 when the device's memory is too small, and what
            `ServedModel.load_adapter` raises.
    """
    try:
        return _run(base, artifacts, prompts, max_new_tokens=max_new_tokens, say=say)
    except torch.OutOfMemoryError as error:
        fail(
            Code.SC814,
            where=base.source,
            found=" ".join(str(error).split())[:200],
            expected="room for the base, its adapters and the batch",
            next="end other programs on the device, run fewer or shorter prompts, or hide the device to run on the CPU",
        )


def _run(
    base: BaseModel, artifacts: Mapping[str, Artifact], prompts: Sequence[Prompt], *, max_new_tokens: int, say: Say
) -> tuple[Answer, ...]:
    tokenizer = _tokenizer(base)
    tokens = [_encoded(tokenizer, prompt) for prompt in prompts]
    first = next(iter(artifacts.values()), None)
    dtype = torch_dtype(first.manifest.dtype.value if first else base.dtype)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_model(base.folder, dtype=dtype).to(device)
    _check_tokens(base, model, tokens, max_new_tokens)
    served = ServedModel(
        model,
        max_adapters=max(1, len(artifacts)),
        pool_bytes=_room(rank.bytes for one in artifacts.values() for rank in one.manifest.ranks),
        shared_bytes=_room(factor.bytes for one in artifacts.values() for factor in one.manifest.factors),
        max_num_batched_tokens=len(tokens) * max(map(len, tokens)),
        max_num_seqs=len(tokens),
        base_structure=base.structure,
    )
    for name, artifact in artifacts.items():
        served.load_adapter(artifact, adapter_name=name)
    ends, pad = _ends(model, tokenizer), _pad(model, tokenizer)
    model.generation_config = _greedy(ends)
    ids, mask = _padded(tokens, pad)
    stream = _Stream(tokenizer, rows=len(tokens), ends=ends, say=say)
    served.generate(
        ids.to(device),
        adapter_names=[prompt.adapter for prompt in prompts],
        attention_mask=mask.to(device),
        max_new_tokens=max_new_tokens,
        pad_token_id=pad,
        streamer=stream,
    )
    return tuple(
        Answer(prompt=prompt, text=text, tokens=tuple(made))
        for prompt, text, made in zip(prompts, stream.texts, stream.tokens, strict=True)
    )


class _Stream:
    """Gathers the tokens of all rows as `generate` gives them; transformers' own streamers take one row alone."""

    def __init__(self, tokenizer: Any, *, rows: int, ends: Sequence[int], say: Say) -> None:  # noqa: ANN401 - transformers' own
        self._tokenizer, self._ends, self._say = tokenizer, frozenset(ends), say
        self.tokens: list[list[int]] = [[] for _ in range(rows)]
        self._ended = [False] * rows
        self._began = False

    @property
    def texts(self) -> list[str]:
        """The text of every row so far."""
        return [self._tokenizer.decode(made, skip_special_tokens=True) for made in self.tokens]

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt, which comes first, and then one token per row."""
        if not self._began:
            self._began = True
            return
        for row, token in enumerate(value.flatten().tolist()):
            self._ended[row] |= token in self._ends
            if not self._ended[row]:
                self.tokens[row].append(token)
        self._say(self.texts)

    def end(self) -> None:
        """Nothing is held back."""


def _tokenizer(base: BaseModel) -> Any:  # noqa: ANN401 - transformers' own class, unannotated
    from transformers import AutoTokenizer

    local = Path(base.source).is_dir()
    try:
        return AutoTokenizer.from_pretrained(base.source)
    except Exception as error:  # noqa: BLE001 - a damaged file can lead to any
        fail(
            Code.SC107,
            where=base.source,
            found=f"no tokenizer that transformers can load: {' '.join(str(error).split())[:200]}",
            expected="tokenizer.json, or another tokenizer's files, beside the model",
            next="copy the tokenizer's files into the folder"
            if local
            else "download the whole model, and pass its folder",
        )


def _encoded(tokenizer: Any, prompt: Prompt) -> list[int]:  # noqa: ANN401 - likewise
    tokens: list[int] = tokenizer(prompt.text)["input_ids"]
    if not tokens:
        fail(
            Code.SC703,
            where="--prompt",
            found=f"`{prompt.text}`, which is no token",
            expected="at least one token",
            next="write a longer prompt",
        )
    return tokens


def _check_tokens(base: BaseModel, model: Any, tokens: Sequence[Sequence[int]], new: int) -> None:  # noqa: ANN401 - likewise
    if not model.can_generate():
        fail(
            Code.SC402,
            where=base.source,
            found=f"a {type(model).__name__}, which continues no text",
            expected="a causal language model",
            next="name the model with its head",
        )
    vocabulary = _vocabulary(model)
    if (largest := max(map(max, tokens))) >= vocabulary:
        fail(
            Code.SC703,
            where=base.source,
            found=f"a tokenizer whose token {largest} stands in a prompt",
            expected=f"tokens below {vocabulary}, which the model knows",
            next="put the model's own tokenizer beside it",
        )
    length = max(map(len, tokens)) + new
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if isinstance(limit, int) and length > limit:
        fail(
            Code.SC703,
            where="--prompt",
            found=f"{length} tokens with those to come",
            expected=f"at most {limit}",
            next="shorten the longest prompt, or ask for fewer tokens with --max-new-tokens",
        )


def _room(sizes: Iterable[int]) -> int:
    """Return the bytes to reserve for tensors of these sizes: twice their sum, since short rows are padded."""
    return SPARE_BYTES + 2 * sum(sizes)


def _vocabulary(model: Any) -> int:  # noqa: ANN401 - likewise
    size: int = model.get_input_embeddings().weight.shape[0]
    return size


def _ends(model: Any, tokenizer: Any) -> list[int]:  # noqa: ANN401 - likewise
    """Return the tokens that end a row: the model's own, else the tokenizer's."""
    said = model.generation_config.eos_token_id
    said = tokenizer.eos_token_id if said is None else said
    named = said if isinstance(said, (list, tuple)) else [said]
    return [token for token in named if isinstance(token, int) and 0 <= token < _vocabulary(model)]


def _pad(model: Any, tokenizer: Any) -> int:  # noqa: ANN401 - likewise
    """Return a token for the places that the mask hides; some tokenizers pad with one that the model doesn't have."""
    said = tokenizer.pad_token_id
    return said if isinstance(said, int) and 0 <= said < _vocabulary(model) else 0


def _greedy(ends: Sequence[int]) -> Any:  # noqa: ANN401 - likewise
    """Return settings of our own: the base's may ask for beams, samples, penalties, or a stop that needs more."""
    from transformers import GenerationConfig

    return GenerationConfig(do_sample=False, num_beams=1, eos_token_id=list(ends) or None)


def _padded(tokens: Sequence[Sequence[int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and mask `(rows, longest)`, padded on the left."""
    longest = max(map(len, tokens))
    ids = torch.full((len(tokens), longest), pad)
    mask = torch.zeros(len(tokens), longest, dtype=torch.long)
    for row, held in enumerate(tokens):
        ids[row, longest - len(held) :] = torch.tensor(held)
        mask[row, longest - len(held) :] = 1
    return ids, mask
