"""Failed steps, closed batches and invalid requests do not affect other requests."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from scute_compile.runtime_min.batching.continuous_batch import ContinuousBatch
from scute_compile.runtime_min.batching.requests import Phase, Request
from scute_compile.runtime_min.model.served_model import ServedModel
from tests.runtime_min.batching.test_continuous_batch import assert_failed, assert_refused, opened, request
from tests.support.served import Make


class RaisesOnce:
    """Makes the model raise in the middle of one step."""

    def __init__(self, model: ServedModel, error: BaseException) -> None:
        self._errors: list[BaseException] = [error]
        layer: Any = model.model.get_submodule("model.layers.1")
        self.handle = layer.register_forward_hook(self._raise)

    def _raise(self, *_: object) -> None:
        if self._errors:
            raise self._errors.pop()


def test_a_failed_step_fails_its_requests_and_queued_ones_are_served(make: Make) -> None:
    model, alone = opened("llama", ("lora", "oft"), make)
    with ContinuousBatch(model, cache_tokens=96, max_num_seqs=2, max_num_batched_tokens=32) as batch:
        running = [batch.submit(request(name, 5, 8, seed=1)) for name in ("lora", None)]
        waiting = batch.submit(request("oft", 6, 8))
        batch.step()
        raises = RaisesOnce(model, RuntimeError("in the device"))
        events = batch.step()
        raises.handle.remove()
        assert [(event.ticket, event.phase) for event in events] == [(ticket, Phase.FAILED) for ticket in running]
        later = batch.submit(request("lora", 5, 8, seed=1))
        list(batch.run())
    for ticket in running:
        assert_failed(ticket, "SC813", "RuntimeError: in the device")
        assert ticket.tokens == alone.answer(ticket.request)[:1]
    for ticket in (waiting, later):
        assert ticket.tokens == alone.answer(ticket.request)
    model.pool.evict("lora")


def test_an_interrupt_in_a_step_is_raised_and_releases_its_adapters(make: Make) -> None:
    model, alone = opened("llama", ("lora",), make)
    with ContinuousBatch(model, cache_tokens=96, max_num_seqs=2, max_num_batched_tokens=32) as batch:
        ticket = batch.submit(request("lora", 5, 8))
        raises = RaisesOnce(model, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            batch.step()
        raises.handle.remove()
        assert ticket.phase is Phase.FAILED
        again = batch.submit(request("lora", 5, 8))
        list(batch.run())
    assert again.tokens == alone.answer(again.request)
    model.pool.evict("lora")


def test_a_closed_batch_refuses_calls(make: Make) -> None:
    model, _ = opened("llama", ("lora",), make)
    batch = ContinuousBatch(model, cache_tokens=64, max_num_seqs=2, max_num_batched_tokens=32)
    waiting = batch.submit(request("lora", 4, 4))
    batch.close()
    batch.close()
    assert waiting.phase is Phase.CANCELLED
    assert batch.num_unfinished == 0
    assert batch.cache_bytes > 0
    assert_refused("SC703", "after `close`", lambda: batch.submit(request("lora", 4, 4)))
    assert_refused("SC703", "after `close`", batch.step)


def test_invalid_requests_are_refused_and_others_are_served(make: Make) -> None:
    model, alone = opened("llama", ("lora",), make)
    with ContinuousBatch(model, cache_tokens=96, max_num_seqs=2, max_num_batched_tokens=32) as batch:
        good = batch.submit(request("lora", 4, 6))
        invalid: Any
        for invalid in (
            Request(prompt="abc"),  # type: ignore[arg-type] # what is refused
            Request(prompt=(3, 4.0)),  # type: ignore[arg-type] # likewise
            Request(prompt=(3,), max_new_tokens=2.5),  # type: ignore[arg-type] # likewise
            Request(prompt=(3,), first_token_within=float("nan")),
        ):
            assert_refused("SC703", "whole numbers", partial(batch.submit, invalid))
        list(batch.run())
    assert good.tokens == alone.answer(good.request)
