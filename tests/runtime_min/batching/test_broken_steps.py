"""A step that breaks off, a batch that was closed, and requests of another form harm nobody else."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from scute_compile.runtime_min.batching.continuous_batch import ContinuousBatch
from scute_compile.runtime_min.batching.requests import Phase, Request
from scute_compile.runtime_min.model.served_model import ServedModel
from tests.runtime_min.batching.test_continuous_batch import Make, failed, opened, refused, request
from tests.support.served import Pair, artifact_of


@pytest.fixture
def make(pair: Pair, shared_folder: Path) -> Make:
    """Return a compiled adapter by recipe and base."""
    return lambda recipe, base: artifact_of(recipe, base, pair, shared_folder)


class OnceBroken:
    """Lets the model raise in the middle of one step."""

    def __init__(self, model: ServedModel, error: BaseException) -> None:
        self._left: list[BaseException] = [error]
        layer: Any = model.model.get_submodule("model.layers.1")
        self.handle = layer.register_forward_hook(self._break)

    def _break(self, *_: object) -> None:
        if self._left:
            raise self._left.pop()


def test_a_step_that_breaks_off_ends_its_requests_and_the_others_are_served(make: Make) -> None:
    model, alone = opened("llama", ("lora", "oft"), make)
    with ContinuousBatch(model, cache_tokens=96, requests=2, step_tokens=32) as batch:
        inside = [batch.submit(request(name, 5, 8, seed=1)) for name in ("lora", None)]
        waiting = batch.submit(request("oft", 6, 8))
        batch.step()
        broken = OnceBroken(model, RuntimeError("of the device"))
        events = batch.step()
        broken.handle.remove()
        assert [(event.ticket, event.phase) for event in events] == [(one, Phase.FAILED) for one in inside]
        late = batch.submit(request("lora", 5, 8, seed=1))
        list(batch.run())
    for ticket in inside:
        failed(ticket, "SC813", "RuntimeError: of the device")
        assert ticket.tokens == alone.says(ticket.request)[:1]
    for ticket in (waiting, late):
        assert ticket.tokens == alone.says(ticket.request)
    model.pool.evict("lora")


def test_an_interrupt_in_a_step_is_raised_and_holds_nothing(make: Make) -> None:
    model, alone = opened("llama", ("lora",), make)
    with ContinuousBatch(model, cache_tokens=96, requests=2, step_tokens=32) as batch:
        ticket = batch.submit(request("lora", 5, 8))
        broken = OnceBroken(model, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            batch.step()
        broken.handle.remove()
        assert ticket.phase is Phase.FAILED
        again = batch.submit(request("lora", 5, 8))
        list(batch.run())
    assert again.tokens == alone.says(again.request)
    model.pool.evict("lora")


def test_a_closed_batch_says_so(make: Make) -> None:
    model, _ = opened("llama", ("lora",), make)
    batch = ContinuousBatch(model, cache_tokens=64, requests=2, step_tokens=32)
    unheard = batch.submit(request("lora", 4, 4))
    batch.close()
    batch.close()
    assert unheard.phase is Phase.CANCELLED
    assert batch.open == 0
    assert batch.cache_bytes > 0
    refused("SC703", "after `close`", lambda: batch.submit(request("lora", 4, 4)))
    refused("SC703", "after `close`", batch.step)


def test_requests_of_another_form_are_refused_alone(make: Make) -> None:
    model, alone = opened("llama", ("lora",), make)
    with ContinuousBatch(model, cache_tokens=96, requests=2, step_tokens=32) as batch:
        good = batch.submit(request("lora", 4, 6))
        odd: Any
        for odd in (
            Request(prompt="abc"),  # type: ignore[arg-type] # what is refused
            Request(prompt=(3, 4.0)),  # type: ignore[arg-type] # likewise
            Request(prompt=(3,), max_new_tokens=2.5),  # type: ignore[arg-type] # likewise
            Request(prompt=(3,), first_token_within=float("nan")),
        ):
            refused("SC703", "whole numbers", partial(batch.submit, odd))
        list(batch.run())
    assert good.tokens == alone.says(good.request)
