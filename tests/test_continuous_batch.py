"""Requests that share a batch get what PEFT gives each alone, whoever else is there, and whenever they join."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from scute_compile.runtime_min.continuous_batch import ContinuousBatch
from scute_compile.runtime_min.requests import Phase, Request, Ticket
from scute_compile.runtime_min.served_model import ServedModel
from tests.bases import load_base
from tests.served import Compiled, Pair, artifact_of, ids_of, peft_model, served

RECIPES = ("lora", "dora", "ia3", "vera", "oft")
Make = Callable[[str, str], Compiled]


@pytest.fixture
def make(pair: Pair, shared_folder: Path) -> Make:
    """Return a compiled adapter by recipe and base."""
    return lambda recipe, base: artifact_of(recipe, base, pair, shared_folder)


class Alone:
    """What PEFT, or the base, says to one prompt with nobody else in the batch."""

    def __init__(self, base: str, made: dict[str, Compiled], folder: Path) -> None:
        self._models: dict[str | None, Any] = {None: load_base(base, folder)}
        self._models |= {name: peft_model(base, one).base_model.model for name, one in made.items()}

    def says(self, request: Request) -> list[int]:
        """The greedy answer, with the token that ends it."""
        ids = torch.tensor([request.prompt])
        out: torch.Tensor = self._models[request.adapter].generate(
            ids, do_sample=False, max_new_tokens=request.max_new_tokens, pad_token_id=0
        )
        return out[0, ids.shape[1] :].tolist()


def opened(base: str, recipes: tuple[str, ...], make: Make, **options: object) -> tuple[ServedModel, Alone]:
    made = {recipe: make(recipe, base) for recipe in recipes}
    folder = next(iter(made.values())).base
    model = served(base, folder, **options)
    for recipe, one in made.items():
        model.load(recipe, one.artifact)
    return model, Alone(base, made, folder)


def request(adapter: str | None, length: int, new: int, *, seed: int = 0, within: float | None = None) -> Request:
    return Request(
        prompt=tuple(ids_of(1, length, seed=seed)[0].tolist()),
        adapter=adapter,
        max_new_tokens=new,
        first_token_within=within,
    )


def serve(batch: ContinuousBatch, arrivals: dict[int, list[Request]]) -> list[Ticket]:
    """Submit requests before the steps of these numbers, and step until all is done."""
    tickets: list[Ticket] = []
    streamed: dict[int, list[int]] = {}
    step = 0
    while batch.open or any(when >= step for when in arrivals):
        tickets += [batch.submit(one) for one in arrivals.get(step, [])]
        for event in batch.step():
            streamed.setdefault(event.ticket.key, []).extend(event.tokens)
        step += 1
    assert streamed == {ticket.key: ticket.tokens for ticket in tickets}
    return tickets


@pytest.mark.parametrize("slots", [12, 2])
def test_requests_that_join_and_leave_get_what_peft_gives_each_alone(slots: int, make: Make) -> None:
    model, alone = opened("llama", RECIPES, make, slots=slots)
    everyone = (*RECIPES, None)
    arrivals = {
        step: [
            request(everyone[(step + n) % 6], 3 + (step * 5 + n) % 9, 2 + (3 * step + n) % 9, seed=step)
            for n in range(2)
        ]
        for step in (0, 1, 2, 4, 7, 8, 20)
    }
    with ContinuousBatch(model, cache_tokens=256, requests=6, step_tokens=48) as batch:
        tickets = serve(batch, arrivals)
    assert len(tickets) == 14
    for ticket in tickets:
        assert ticket.phase is Phase.DONE
        assert ticket.tokens == alone.says(ticket.request), ticket.request
    assert len(model.pool.resident) <= slots
