"""transformers' continuous batching, driven step by step, with an adapter per request.

Its paged cache, its packing of prompts and single tokens into one row, and its attention are used; its thread and its
queue are not. No other file depends on its internals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from scute_compile.diagnostics import Code, ScuteError, fail
from scute_compile.runtime_min.model.served_model import ServedModel

_UNSUPPORTED = (
    TypeError,
    AttributeError,
    ValueError,
    KeyError,
    IndexError,
    NotImplementedError,
    ImportError,
    RuntimeError,
)
"""Errors that transformers raises where its continuous batching doesn't support an architecture."""
PROBE_TOKENS = 12
"""Length of the prompt that tests a model."""
ALLOWED_ROUNDINGS = 16
"""Allowed mean difference of the probe's logits, in roundings of their standard deviation: another order of
summation causes differences of this size. A missing softcap or a wrong position causes larger ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSize:
    """The sizes of the cache and of steps; the cache is allocated at once."""

    tokens: int
    """Positions for the prompts and answers of all requests."""
    page_size: int = 16
    """Tokens of a page; a request takes whole pages."""
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    """Largest number of tokens of a step; longer prompts are read in several steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The result of a step for one of its requests."""

    read: int
    """Number of the request's tokens that the step read."""
    tokens: tuple[int, ...] = ()
    """All tokens generated so far, if the step generated one."""
    finished: bool = False


class TransformersBatch:
    """The running requests and their KV cache.

    The constructor allocates the cache, and compares the logits of a short prompt with those of the plain model.

    Args:
        served: The model; its layers are not changed.
        size: Sizes of the cache and of steps.
        eos_token_ids: Tokens that end a request.

    Raises:
        ScuteError: SC809 when the installed transformers can't batch this model; SC703 when the cache doesn't fit.
    """

    def __init__(self, served: ServedModel, size: CacheSize, eos_token_ids: Sequence[int]) -> None:
        self._served, self._eos = served, list(eos_token_ids) or -1
        model: Any = served.model
        self._model = model
        self._engine: Any = None
        self._processor: Any = None
        self._attention: str = model.config._attn_implementation  # noqa: SLF001 - it has no public name
        self.vocabulary: int = model.get_input_embeddings().weight.shape[0]
        """Number of token ids."""
        self._refuse_softcap()
        prompt = [token % self.vocabulary for token in range(1, PROBE_TOKENS + 1)]
        with torch.no_grad():
            plain = model(input_ids=torch.tensor([prompt], device=model.device), use_cache=False).logits[0, -1].float()
        try:
            with self._translated_errors():
                self._engine, self._processor = self._make_engine(size)
                self.max_request_tokens = _max_request_tokens(self._processor.cache)
                self.cache_bytes: int = self._processor.cache.cache_tensor.nbytes
                paged = self._probe(prompt[: self.max_request_tokens - 1])
            if len(prompt) < self.max_request_tokens:
                self._compare(paged, plain)
        except ScuteError:
            self.close()
            raise

    def _make_engine(self, size: CacheSize) -> tuple[Any, Any]:
        from transformers import GenerationConfig
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        config = ContinuousBatchingConfig(
            page_size=size.page_size,
            num_blocks=-(-size.tokens // size.page_size),
            max_batch_tokens=size.max_num_batched_tokens,
            max_requests_per_batch=size.max_num_seqs,
            safety_margin=0.0,
            # keys and values depend on the adapter, so requests with equal prompts may not share them
            allow_block_sharing=False,
            # requests are admitted between steps, and the adapters' metadata is written before each step
            use_async_batching=False,
            use_cuda_graph=False,
            auto_switch_to_flash=False,
        )
        engine = self._model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=self._eos),
            continuous_batching_config=config,
        )
        processor = engine._create_batch_processor()  # noqa: SLF001 - the public way starts a thread
        engine.batch_processor = processor
        return engine, processor

    def join(self, key: int, prompt: Sequence[int], max_new_tokens: int) -> None:
        """Add a request to the steps, from the next one on."""
        self._engine.add_request(
            list(prompt), request_id=str(key), max_new_tokens=max_new_tokens, streaming=True, eos_token_id=self._eos
        )

    def leave(self, key: int) -> None:
        """Remove a request from the steps, and free its pages."""
        self._engine.cancel_request(str(key))

    def step(self, adapters: Mapping[int, str | None], prefetch: Callable[[], object]) -> dict[int, Progress]:
        """Run one step of the requests, each with its adapter.

        Args:
            adapters: The adapter of each request by key.
            prefetch: Called after the step's adapters are held and before its kernels are launched, so that its copies
                on other streams overlap the kernels.

        Returns:
            Progress by key of the requests that took part; a long prompt may generate no token.

        Raises:
            ScuteError: SC802 and SC804. After any exception the requests of the step must `leave`, since their tokens
                in the cache are incomplete.
        """
        if not self._processor.prepare_next_batch():
            return {}
        batch = self._processor.inputs_and_outputs.requests_in_batch
        names = [adapters[int(member.state.request_id)] for member in batch]
        with self._on_stream(), self._served.step(names, [member.query_length for member in batch]):
            prefetch()
            self._processor._generation_step(self._model)  # noqa: SLF001 - as above
        self._processor.update_batch()
        progress = {int(member.state.request_id): Progress(read=member.query_length) for member in batch}
        while (output := self._engine.get_result()) is not None:
            key = int(output.request_id)
            if key in progress:  # other outputs are from a step that raised
                progress[key] = replace(
                    progress[key], tokens=tuple(output.generated_tokens), finished=output.is_finished()
                )
        return progress

    def close(self) -> None:
        """Free the cache and restore the model's attention."""
        self._engine = self._processor = None
        if self._model.config._attn_implementation != self._attention:  # noqa: SLF001 - as above
            self._model.set_attn_implementation(self._attention)

    def _on_stream(self) -> Any:  # noqa: ANN401 - torch's own class is untyped
        """Return a context that writes the step's metadata on the stream of its kernels, after the inputs."""
        stream = self._processor.inputs_and_outputs.compute_stream
        if stream is None:
            return nullcontext()
        stream.wait_stream(torch.cuda.current_stream(self._model.device))
        return torch.cuda.stream(stream)

    def _probe(self, prompt: Sequence[int]) -> torch.Tensor:
        """Return the logits after a prompt that was read with the paged cache."""
        logits: list[torch.Tensor] = []
        hook = self._model.register_forward_hook(lambda _, __, out: logits.append(out.logits[0, -1].float()))
        try:
            self.join(0, prompt, 1)
            while not self.step({0: None}, lambda: None)[0].finished:
                pass
        finally:
            hook.remove()
        return logits[-1]

    def _compare(self, paged: torch.Tensor, plain: torch.Tensor) -> None:
        error, spread = (paged - plain).abs().mean().item(), plain.std().item()
        allowed = ALLOWED_ROUNDINGS * torch.finfo(self._model.dtype).eps
        if not error <= allowed * spread:
            self._refuse(
                "the paged cache",
                f"logits that differ by {error / spread:.2%} of their standard deviation",
                f"at most {allowed:.2%}, which rounding explains",
            )

    def _refuse_softcap(self) -> None:
        """Refuse a softcap, which paged attention drops silently unless a flash kernel computes it (SC809)."""
        cap = getattr(self._model.config.get_text_config(), "attn_logit_softcapping", None)
        if cap is not None and "flash" not in self._attention:
            self._refuse(
                f"`{self._attention}` attention",
                f"a softcap of {cap}, which the paged form of this attention drops",
                "attention without a softcap, or a flash kernel",
            )

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        """Raise errors of transformers inside the block as SC703 (memory) or SC809 (an unsupported model)."""
        try:
            yield
        except (MemoryError, torch.OutOfMemoryError) as error:
            fail(
                Code.SC703,
                where="cache_tokens",
                found=" ".join(str(error).split())[:200],
                expected="a cache that fits beside the model",
                next="choose fewer cache_tokens, or fewer max_num_batched_tokens",
            )
        except _UNSUPPORTED as error:
            import transformers

            text = " ".join(str(error).split())[:200]
            self._refuse(
                "continuous batching",
                f"an error of transformers {transformers.__version__}: {text}",
                "a decoder that its continuous batching supports",
            )

    def _refuse(self, where: str, found: str, expected: str) -> None:
        fail(
            Code.SC809,
            where=f"{type(self._model).__name__}, {where}",
            found=found,
            expected=expected,
            next="pip install --upgrade transformers, or serve fixed batches with ServedModel.generate",
        )


def _max_request_tokens(cache: Any) -> int:  # noqa: ANN401 - transformers' own class, unannotated
    """Return the most tokens that one request can have in an empty cache."""
    from transformers.generation.continuous_batching.model_runner import infer_max_single_request_tokens

    tokens: int = infer_max_single_request_tokens(cache)
    return tokens
