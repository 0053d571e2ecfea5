"""transformers' continuous batching, one step at a time, with an adapter per request.

Its paged cache, its packing of prompts and single tokens into one row, and its attention are used as they are; the
thread and the queue that it comes with are not. This is the one file that knows its inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from scute_compile.diagnostics import Code, ScuteError, fail
from scute_compile.runtime_min.model.served_model import ServedModel

FOREIGN = (TypeError, AttributeError, ValueError, KeyError, IndexError, NotImplementedError, ImportError, RuntimeError)
"""What transformers raises where an architecture and its continuous batching don't know each other."""
PROBE = 12
"""Tokens of the prompt by which a model is tried."""
AGREEMENT = 16
"""Roundings, of the size of the logits' spread, by which two orders of summation may differ; a lost softcap or position
differs by more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSize:
    """How much the batch may hold; everything is allocated at once."""

    tokens: int
    """Of all requests together, prompts and answers."""
    page: int = 16
    """Tokens of a page; a request takes whole pages."""
    requests: int = 32
    step_tokens: int = 512
    """Most tokens of a step; longer prompts are read in several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What a step brought to one request that took part."""

    read: int
    """How many of its tokens the step read."""
    tokens: tuple[int, ...] = ()
    """All that were made so far, if the step made one."""
    finished: bool = False


class TransformersBatch:
    """The requests that run, and their cache."""

    def __init__(self, served: ServedModel, size: CacheSize, ends: Sequence[int]) -> None:
        """Allocate the cache and try the model.

        Args:
            served: The model; its layers stay as they are.
            size: The cache.
            ends: Tokens that end a request.

        Raises:
            ScuteError: SC809 when this model, or the installed transformers, can't be driven; SC703 when the cache
                doesn't fit.
        """
        self._served, self._ends = served, list(ends) or -1
        model: Any = served.model
        self._model = model
        self._engine: Any = None
        self._processor: Any = None
        self._attention: str = model.config._attn_implementation  # noqa: SLF001 - there is no public name for it
        self.vocabulary: int = model.get_input_embeddings().weight.shape[0]
        """Token ids are below it."""
        self._refuse_softcap()
        prompt = [token % self.vocabulary for token in range(1, PROBE + 1)]
        with torch.no_grad():
            own = model(input_ids=torch.tensor([prompt], device=model.device), use_cache=False).logits[0, -1].float()
        try:
            with self._foreign():
                self._engine, self._processor = self._made(size)
                self.longest = _longest(self._processor.cache)
                self.cache_bytes: int = self._processor.cache.cache_tensor.nbytes
                paged = self._probe(prompt[: self.longest - 1])
            if len(prompt) < self.longest:
                self._compare(paged, own)
        except ScuteError:
            self.close()
            raise

    def _made(self, size: CacheSize) -> tuple[Any, Any]:
        from transformers import GenerationConfig
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        config = ContinuousBatchingConfig(
            page_size=size.page,
            num_blocks=-(-size.tokens // size.page),
            max_batch_tokens=size.step_tokens,
            max_requests_per_batch=size.requests,
            safety_margin=0.0,
            # keys and values depend on the adapter, so requests with equal prompts may not share them
            allow_block_sharing=False,
            # the host decides between steps, and the adapters' metadata is written for each step anew
            use_async_batching=False,
            use_cuda_graph=False,
            auto_switch_to_flash=False,
        )
        engine = self._model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=self._ends),
            continuous_batching_config=config,
        )
        processor = engine._create_batch_processor()  # noqa: SLF001 - its own thread would drive it otherwise
        engine.batch_processor = processor
        return engine, processor

    def join(self, key: int, prompt: Sequence[int], max_new_tokens: int) -> None:
        """Let a request take part from the next step on."""
        self._engine.add_request(
            list(prompt), request_id=str(key), max_new_tokens=max_new_tokens, streaming=True, eos_token_id=self._ends
        )

    def leave(self, key: int) -> None:
        """Take a request out before the next step, and free its pages."""
        self._engine.cancel_request(str(key))

    def step(self, adapters: Mapping[int, str | None], ahead: Callable[[], object]) -> dict[int, Progress]:
        """Run one step of all requests, each with its adapter.

        Args:
            adapters: By key, at least those that take part.
            ahead: Called when the step's adapters are held and before its kernels are launched: what it gives to other
                streams runs beside them.

        Returns:
            Those that took part; a request whose prompt is long may make no token.

        Raises:
            ScuteError: SC802 and SC804. After any exception the requests of the step must `leave`: what their tokens
                left in the cache is incomplete.
        """
        if not self._processor.prepare_next_batch():
            return {}
        batch = self._processor.inputs_and_outputs.requests_in_batch
        rows = [adapters[int(one.state.request_id)] for one in batch]
        with self._on_stream(), self._served.step(rows, [one.query_length for one in batch]):
            ahead()
            self._processor._generation_step(self._model)  # noqa: SLF001 - as above
        self._processor.update_batch()
        progress = {int(one.state.request_id): Progress(read=one.query_length) for one in batch}
        while (output := self._engine.get_result()) is not None:
            key = int(output.request_id)
            if key in progress:  # else it is left of a step that broke off
                progress[key] = replace(
                    progress[key], tokens=tuple(output.generated_tokens), finished=output.is_finished()
                )
        return progress

    def close(self) -> None:
        """Free the cache and give the model its attention back."""
        self._engine = self._processor = None
        if self._model.config._attn_implementation != self._attention:  # noqa: SLF001 - as above
            self._model.set_attn_implementation(self._attention)

    def _on_stream(self) -> Any:  # noqa: ANN401 - torch's own class is untyped
        """Write a step's metadata on the stream that its kernels are launched on, after the inputs."""
        stream = self._processor.inputs_and_outputs.compute_stream
        if stream is None:
            return nullcontext()
        stream.wait_stream(torch.cuda.current_stream(self._model.device))
        return torch.cuda.stream(stream)

    def _probe(self, prompt: Sequence[int]) -> torch.Tensor:
        """Return the logits after a prompt, read with the paged cache."""
        seen: list[torch.Tensor] = []
        hook = self._model.register_forward_hook(lambda _, __, out: seen.append(out.logits[0, -1].float()))
        try:
            self.join(0, prompt, 1)
            while not self.step({0: None}, lambda: None)[0].finished:
                pass
        finally:
            hook.remove()
        return seen[-1]

    def _compare(self, paged: torch.Tensor, own: torch.Tensor) -> None:
        error, spread = (paged - own).abs().mean().item(), own.std().item()
        allowed = AGREEMENT * torch.finfo(self._model.dtype).eps
        if not error <= allowed * spread:
            self._refuse(
                "the paged cache",
                f"logits that differ by {error / spread:.2%} of their spread",
                f"at most {allowed:.2%}: what rounding explains",
            )

    def _refuse_softcap(self) -> None:
        """Paged attention leaves a softcap out without a word, unless a flash kernel computes it."""
        cap = getattr(self._model.config.get_text_config(), "attn_logit_softcapping", None)
        if cap is not None and "flash" not in self._attention:
            self._refuse(
                f"`{self._attention}` attention",
                f"a softcap of {cap}, which its paged form leaves out",
                "attention without a softcap, or a flash kernel",
            )

    @contextmanager
    def _foreign(self) -> Iterator[None]:
        try:
            yield
        except (MemoryError, torch.OutOfMemoryError) as error:
            fail(
                Code.SC703,
                where="cache_tokens",
                found=" ".join(str(error).split())[:200],
                expected="a cache that fits beside the model",
                next="choose fewer cache_tokens, or step_tokens",
            )
        except FOREIGN as error:
            import transformers

            said = " ".join(str(error).split())[:200]
            self._refuse(
                "continuous batching",
                f"transformers {transformers.__version__} says: {said}",
                "a decoder that its continuous batching can drive",
            )

    def _refuse(self, where: str, found: str, expected: str) -> None:
        fail(
            Code.SC809,
            where=f"{type(self._model).__name__}, {where}",
            found=found,
            expected=expected,
            next="pip install --upgrade transformers, or serve fixed batches with ServedModel.generate",
        )


def _longest(cache: Any) -> int:  # noqa: ANN401 - transformers' own class, unannotated
    """Return the most tokens that one request can have in an empty cache."""
    from transformers.generation.continuous_batching.model_runner import infer_max_single_request_tokens

    longest: int = infer_max_single_request_tokens(cache)
    return longest
