"""Requests that share a batch get what PEFT gives each alone, whoever else is there, and whenever they join."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from scute_compile.diagnostics import ScuteError
from scute_compile.runtime_min.batching.continuous_batch import ContinuousBatch
from scute_compile.runtime_min.batching.forecast import ServiceTimes
from scute_compile.runtime_min.batching.policy import Policy
from scute_compile.runtime_min.batching.requests import Phase, Request, Ticket
from scute_compile.runtime_min.model.served_model import ServedModel
from tests.support.bases import load_base
from tests.support.served import Compiled, Pair, artifact_of, ids_of, peft_model, served

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
        model.load_adapter(one.artifact, adapter_name=recipe)
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
    model, alone = opened("llama", RECIPES, make, max_adapters=slots)
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


@pytest.mark.parametrize("base", ["mistral-window", "qwen3", "phi3", "gpt2", "mixtral"])
def test_other_architectures_are_batched_too(base: str, make: Make) -> None:
    model, alone = opened(base, ("lora",), make)
    arrivals = {0: [request("lora", 5, 6), request(None, 9, 3)], 2: [request("lora", 4, 5, seed=1)]}
    with ContinuousBatch(model, cache_tokens=128, requests=4, step_tokens=32) as batch:
        for ticket in serve(batch, arrivals):
            assert ticket.tokens == alone.says(ticket.request)


def test_one_prompt_is_no_other_adapters_prompt(make: Make) -> None:
    """Keys and values of equal prompts are not shared."""
    model, alone = opened("llama", RECIPES, make)
    everyone = [request(name, 24, 4) for name in (*RECIPES, None)]
    with ContinuousBatch(model, cache_tokens=512, requests=6, step_tokens=256, page=4) as batch:
        tickets = serve(batch, {0: everyone[:3], 1: everyone[3:]})
    assert [ticket.tokens for ticket in tickets] == [alone.says(one) for one in everyone]
    assert len({tuple(ticket.tokens) for ticket in tickets}) > 3


def test_long_prompts_are_read_in_several_steps(make: Make) -> None:
    model, alone = opened("llama", ("dora", "oft"), make)
    long, short = request("dora", 40, 4), request("oft", 3, 12)
    with ContinuousBatch(model, cache_tokens=128, requests=2, step_tokens=8) as batch:
        tickets = serve(batch, {0: [short], 2: [long]})
    assert [ticket.tokens for ticket in tickets] == [alone.says(short), alone.says(long)]


def test_a_full_cache_lets_requests_wait(make: Make) -> None:
    model, alone = opened("llama", ("lora",), make)
    with ContinuousBatch(model, cache_tokens=32, requests=4, step_tokens=32) as batch:
        first, second = batch.submit(request("lora", 10, 8)), batch.submit(request(None, 4, 8, seed=1))
        batch.step()
        assert [first.phase, second.phase] == [Phase.RUNNING, Phase.WAITING]
        list(batch.run())
        assert batch.cache_bytes >= 32 * 2 * 2 * 2 * 8 * 4  # tokens, layers, keys and values, heads, width, bytes
    for ticket in (first, second):
        assert ticket.tokens == alone.says(ticket.request)


def test_the_next_requests_adapters_come_in_while_a_step_runs(make: Make) -> None:
    model, alone = opened("llama", RECIPES, make)
    with ContinuousBatch(model, cache_tokens=128, requests=2, step_tokens=32) as batch:
        lora = batch.submit(request("lora", 4, 6))
        batch.step()
        dora, oft = batch.submit(request("dora", 4, 3)), batch.submit(request("oft", 4, 3))
        batch.step()
        assert [len(lora.tokens), len(dora.tokens), len(oft.tokens)] == [2, 0, 0]
        assert dora.phase is Phase.RUNNING  # it has a place, and its adapter is there now
        assert oft.phase is Phase.WAITING
        assert {"dora", "oft"} <= model.pool.resident.keys()
        batch.step()
        assert [len(lora.tokens), len(dora.tokens), len(oft.tokens)] == [3, 1, 0]
        list(batch.run())
    for ticket in (lora, dora, oft):
        assert ticket.tokens == alone.says(ticket.request)


def test_a_cancelled_request_leaves_and_the_others_go_on(make: Make) -> None:
    model, alone = opened("llama", ("lora", "ia3"), make)
    with ContinuousBatch(model, cache_tokens=64, requests=2, step_tokens=32) as batch:
        tickets = [batch.submit(request(name, 5, 9)) for name in ("lora", "ia3", None)]
        batch.step()
        batch.step()
        batch.cancel(tickets[0])
        events = batch.step()
        assert (tickets[0], Phase.CANCELLED) in [(event.ticket, event.phase) for event in events]
        list(batch.run())
        batch.cancel(tickets[1])
        assert batch.step() == ()
    assert tickets[0].tokens == alone.says(tickets[0].request)[:2]
    assert [ticket.tokens for ticket in tickets[1:]] == [alone.says(ticket.request) for ticket in tickets[1:]]
    assert tickets[1].phase is Phase.DONE


def test_requests_come_from_other_threads(make: Make) -> None:
    model, alone = opened("llama", ("lora",), make)
    with ContinuousBatch(model, cache_tokens=256, requests=4, step_tokens=32) as batch:
        with ThreadPoolExecutor(4) as threads:
            waiting = [threads.submit(batch.submit, request("lora", 4, 4, seed=seed)) for seed in range(8)]
            tickets = [one.result() for one in waiting]
        list(batch.run())
    assert len({ticket.key for ticket in tickets}) == 8
    assert [ticket.tokens for ticket in tickets] == [alone.says(ticket.request) for ticket in tickets]


def refused(code: str, says: str, act: Callable[[], object]) -> None:
    with pytest.raises(ScuteError, match=says) as error:
        act()
    assert error.value.diagnostics[0].code.name == code


def failed(ticket: Ticket, code: str, says: str) -> None:
    assert ticket.error is not None
    assert ticket.error.diagnostics[0].code.name == code
    assert says in str(ticket.error)


def test_requests_that_can_never_be_served_are_refused_alone(make: Make) -> None:
    model, alone = opened("llama", ("lora",), make)
    with ContinuousBatch(model, cache_tokens=48, requests=2, step_tokens=32) as batch:
        good = batch.submit(request("lora", 4, 6))
        batch.step()
        assert batch.longest == 48
        refused("SC802", "nobody", lambda: batch.submit(request("nobody", 4, 6)))
        refused("SC807", "41 tokens, and 8 to come", lambda: batch.submit(request("lora", 41, 8)))
        refused("SC807", "0 tokens", lambda: batch.submit(Request(prompt=())))
        refused("SC807", "0 to come", lambda: batch.submit(request("lora", 4, 0)))
        refused("SC807", "among them 128", lambda: batch.submit(Request(prompt=(3, 128))))
        edge = batch.submit(request("lora", 40, 8))
        list(batch.run())
    assert [ticket.tokens for ticket in (good, edge)] == [alone.says(ticket.request) for ticket in (good, edge)]


def test_requests_whose_adapter_goes_away_fail_alone(make: Make) -> None:
    model, alone = opened("llama", ("lora", "dora", "oft"), make)
    with ContinuousBatch(model, cache_tokens=96, requests=3, step_tokens=32) as batch:
        lora, dora, oft = (batch.submit(request(name, 4, 8)) for name in ("lora", "dora", "oft"))
        batch.step()
        late = batch.submit(request("dora", 4, 8))
        model.delete_adapter("dora")
        model.replace_adapter(make("lora", "llama").artifact, adapter_name="oft")
        list(batch.run())
    failed(dora, "SC802", "dora")
    failed(late, "SC802", "dora")
    failed(oft, "SC810", "another artifact")
    assert len(dora.tokens) == len(oft.tokens) == 1
    assert lora.tokens == alone.says(lora.request)


def test_an_adapter_that_finds_no_room_fails_its_requests_alone(make: Make) -> None:
    model, alone = opened("llama", ("lora", "dora", "oft"), make, max_adapters=2)
    with ContinuousBatch(model, cache_tokens=96, requests=3, step_tokens=32) as batch:
        lora, dora = batch.submit(request("lora", 4, 8)), batch.submit(request("dora", 4, 8))
        batch.step()
        model.pool.pin("lora")
        model.pool.evict("dora")
        model.pool.pin("oft")
        base, other = batch.submit(request(None, 4, 8)), batch.submit(request("dora", 4, 8))
        list(batch.run())
    failed(dora, "SC804", "held")
    failed(other, "SC804", "held")
    assert [ticket.tokens for ticket in (lora, base)] == [alone.says(ticket.request) for ticket in (lora, base)]


def test_early_abort_drops_what_comes_too_late(make: Make) -> None:
    model, alone = opened("llama", ("lora",), make)
    now = [0.0]
    policy = Policy(early_abort=ServiceTimes(step=1.0))
    with ContinuousBatch(
        model, cache_tokens=64, requests=1, step_tokens=32, policy=policy, clock=lambda: now[0], ends=()
    ) as batch:
        tickets = [batch.submit(request("lora", 4, 3, seed=seed, within=5.0)) for seed in range(4)]
        while batch.open:
            now[0] += 1.0
            batch.step()
    # two of three tokens each are done by the fifth second, the third would begin in the seventh
    assert [ticket.phase for ticket in tickets] == [Phase.DONE, Phase.DONE, Phase.DROPPED, Phase.DROPPED]
    failed(tickets[2], "SC808", "within 5.0 s")
    assert tickets[2].tokens == []
    assert [len(ticket.tokens) for ticket in tickets[:2]] == [3, 3]
    assert tickets[0].tokens == alone.says(tickets[0].request)[:3]


def test_steps_are_measured_for_the_estimate(make: Make) -> None:
    model, _ = opened("llama", ("lora",), make)
    with ContinuousBatch(model, cache_tokens=64, requests=1, step_tokens=32) as batch:
        assert batch.measured is None
        batch.submit(request("lora", 4, 4))
        list(batch.run())
        assert batch.measured is not None
        assert 0 < batch.measured.step < 10


@pytest.mark.parametrize("base", ["gpt_neox", "opt"])
def test_models_whose_attention_has_no_paged_form_are_refused(base: str, make: Make) -> None:
    model, _ = opened(base, ("lora",), make)
    refused("SC809", "transformers", lambda: ContinuousBatch(model, cache_tokens=64, requests=2, step_tokens=32))


def test_a_softcap_that_paged_attention_leaves_out_is_refused(make: Make) -> None:
    model, _ = opened("gemma2", ("lora",), make)
    refused("SC809", "softcap", lambda: ContinuousBatch(model, cache_tokens=64, requests=2, step_tokens=32))


def test_a_model_that_answers_otherwise_with_the_paged_cache_is_refused(make: Make) -> None:
    model, _ = opened("llama", ("lora",), make)
    attention: Any = model.model.get_submodule("model.layers.0.self_attn")
    forward = attention.forward
    attention.forward = lambda *args, **options: forward(*args, **{**options, "attention_mask": None})
    refused("SC809", "differ by", lambda: ContinuousBatch(model, cache_tokens=64, requests=2, step_tokens=32))


def test_the_model_is_given_back_with_its_attention(make: Make) -> None:
    model, alone = opened("llama", ("lora",), make)
    one: Any = model.model
    one.set_attn_implementation("eager")
    with ContinuousBatch(model, cache_tokens=64, requests=2, step_tokens=32) as batch:
        left = batch.submit(request("lora", 4, 8))
        batch.step()
    assert one.config._attn_implementation == "eager"
    assert left.phase is Phase.CANCELLED
    asked = request("lora", 4, 8)
    out = model.generate(torch.tensor([asked.prompt]), adapter_names=["lora"], do_sample=False, max_new_tokens=8)
    assert out[0, 4:].tolist() == alone.says(asked)


def test_sizes_that_do_not_go_together_are_refused(make: Make) -> None:
    model, _ = opened("llama", ("lora",), make)
    refused("SC703", "at most 512|<= 512", lambda: ContinuousBatch(model, step_tokens=1024))
    refused("SC703", "64 requests", lambda: ContinuousBatch(model, requests=64, step_tokens=32))
    refused("SC703", "fewer cache_tokens", lambda: ContinuousBatch(model, cache_tokens=10**12))
