"""Requests in a shared batch get the tokens that PEFT generates for each request alone, in every mix and order."""

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
from tests.support.served import Compiled, Make, ids_of, peft_model, served

RECIPES = ("lora", "dora", "ia3", "vera", "oft")


class Alone:
    """Answers one prompt at a time with PEFT, or with the base."""

    def __init__(self, base: str, made: dict[str, Compiled], folder: Path) -> None:
        self._models: dict[str | None, Any] = {None: load_base(base, folder)}
        self._models |= {name: peft_model(base, adapter).base_model.model for name, adapter in made.items()}

    def answer(self, request: Request) -> list[int]:
        """Return the greedy answer, with the token that ends it."""
        ids = torch.tensor([request.prompt])
        out: torch.Tensor = self._models[request.adapter_name].generate(
            ids, do_sample=False, max_new_tokens=request.max_new_tokens, pad_token_id=0
        )
        return out[0, ids.shape[1] :].tolist()


def opened(base: str, recipes: tuple[str, ...], make: Make, **options: object) -> tuple[ServedModel, Alone]:
    made = {recipe: make(recipe, base) for recipe in recipes}
    folder = next(iter(made.values())).base
    model = served(base, folder, **options)
    for recipe, adapter in made.items():
        model.load_adapter(adapter.artifact, adapter_name=recipe)
    return model, Alone(base, made, folder)


def request(adapter_name: str | None, length: int, new: int, *, seed: int = 0, within: float | None = None) -> Request:
    return Request(
        prompt=tuple(ids_of(1, length, seed=seed)[0].tolist()),
        adapter_name=adapter_name,
        max_new_tokens=new,
        first_token_within=within,
    )


def serve(batch: ContinuousBatch, arrivals: dict[int, list[Request]]) -> list[Ticket]:
    """Submit requests before the steps of these numbers, and step until all are done."""
    tickets: list[Ticket] = []
    streamed: dict[int, list[int]] = {}
    step = 0
    while batch.num_unfinished or any(when >= step for when in arrivals):
        tickets += [batch.submit(item) for item in arrivals.get(step, [])]
        for event in batch.step():
            streamed.setdefault(event.ticket.key, []).extend(event.tokens)
        step += 1
    assert streamed == {ticket.key: ticket.tokens for ticket in tickets}
    return tickets


@pytest.mark.parametrize("max_adapters", [12, 2])
def test_requests_that_join_and_leave_equal_peft_alone(max_adapters: int, make: Make) -> None:
    model, alone = opened("llama", RECIPES, make, max_adapters=max_adapters)
    names = (*RECIPES, None)
    arrivals = {
        step: [
            request(names[(step + n) % 6], 3 + (step * 5 + n) % 9, 2 + (3 * step + n) % 9, seed=step) for n in range(2)
        ]
        for step in (0, 1, 2, 4, 7, 8, 20)
    }
    with ContinuousBatch(model, cache_tokens=256, max_num_seqs=6, max_num_batched_tokens=48) as batch:
        tickets = serve(batch, arrivals)
    assert len(tickets) == 14
    for ticket in tickets:
        assert ticket.phase is Phase.DONE
        assert ticket.tokens == alone.answer(ticket.request), ticket.request
    assert len(model.pool.resident) <= max_adapters


@pytest.mark.parametrize("base", ["mistral-window", "qwen3", "phi3", "gpt2", "mixtral"])
def test_other_architectures_are_batched(base: str, make: Make) -> None:
    model, alone = opened(base, ("lora",), make)
    arrivals = {0: [request("lora", 5, 6), request(None, 9, 3)], 2: [request("lora", 4, 5, seed=1)]}
    with ContinuousBatch(model, cache_tokens=128, max_num_seqs=4, max_num_batched_tokens=32) as batch:
        for ticket in serve(batch, arrivals):
            assert ticket.tokens == alone.answer(ticket.request)


def test_equal_prompts_of_different_adapters_share_no_cache(make: Make) -> None:
    """Keys and values depend on the adapter."""
    model, alone = opened("llama", RECIPES, make)
    requests = [request(name, 24, 4) for name in (*RECIPES, None)]
    with ContinuousBatch(model, cache_tokens=512, max_num_seqs=6, max_num_batched_tokens=256, page_size=4) as batch:
        tickets = serve(batch, {0: requests[:3], 1: requests[3:]})
    assert [ticket.tokens for ticket in tickets] == [alone.answer(item) for item in requests]
    assert len({tuple(ticket.tokens) for ticket in tickets}) > 3


def test_pefts_name_of_the_base_serves_the_base(make: Make) -> None:
    model, alone = opened("llama", ("lora",), make)
    named, plain = request("__base__", 5, 4), request(None, 5, 4)
    with ContinuousBatch(model, cache_tokens=128, max_num_seqs=2, max_num_batched_tokens=32) as batch:
        tickets = serve(batch, {0: [named]})
    assert tickets[0].tokens == alone.answer(plain)


def test_long_prompts_are_read_in_several_steps(make: Make) -> None:
    model, alone = opened("llama", ("dora", "oft"), make)
    long, short = request("dora", 40, 4), request("oft", 3, 12)
    with ContinuousBatch(model, cache_tokens=128, max_num_seqs=2, max_num_batched_tokens=8) as batch:
        tickets = serve(batch, {0: [short], 2: [long]})
    assert [ticket.tokens for ticket in tickets] == [alone.answer(short), alone.answer(long)]


def test_requests_wait_while_the_cache_is_full(make: Make) -> None:
    model, alone = opened("llama", ("lora",), make)
    with ContinuousBatch(model, cache_tokens=32, max_num_seqs=4, max_num_batched_tokens=32) as batch:
        first, second = batch.submit(request("lora", 10, 8)), batch.submit(request(None, 4, 8, seed=1))
        batch.step()
        assert [first.phase, second.phase] == [Phase.RUNNING, Phase.WAITING]
        list(batch.run())
        assert batch.cache_bytes >= 32 * 2 * 2 * 2 * 8 * 4  # tokens, layers, keys and values, heads, width, bytes
    for ticket in (first, second):
        assert ticket.tokens == alone.answer(ticket.request)


def test_adapters_of_the_next_requests_are_prefetched_during_a_step(make: Make) -> None:
    model, alone = opened("llama", RECIPES, make)
    with ContinuousBatch(model, cache_tokens=128, max_num_seqs=2, max_num_batched_tokens=32) as batch:
        lora = batch.submit(request("lora", 4, 6))
        batch.step()
        dora, oft = batch.submit(request("dora", 4, 3)), batch.submit(request("oft", 4, 3))
        batch.step()
        assert [len(lora.tokens), len(dora.tokens), len(oft.tokens)] == [2, 0, 0]
        assert dora.phase is Phase.RUNNING  # admitted, and its adapter is resident now
        assert oft.phase is Phase.WAITING
        assert {"dora", "oft"} <= model.pool.resident.keys()
        batch.step()
        assert [len(lora.tokens), len(dora.tokens), len(oft.tokens)] == [3, 1, 0]
        list(batch.run())
    for ticket in (lora, dora, oft):
        assert ticket.tokens == alone.answer(ticket.request)


def test_a_cancelled_request_leaves_and_others_continue(make: Make) -> None:
    model, alone = opened("llama", ("lora", "ia3"), make)
    with ContinuousBatch(model, cache_tokens=64, max_num_seqs=2, max_num_batched_tokens=32) as batch:
        tickets = [batch.submit(request(name, 5, 9)) for name in ("lora", "ia3", None)]
        batch.step()
        batch.step()
        batch.cancel(tickets[0])
        events = batch.step()
        assert (tickets[0], Phase.CANCELLED) in [(event.ticket, event.phase) for event in events]
        list(batch.run())
        batch.cancel(tickets[1])
        assert batch.step() == ()
    assert tickets[0].tokens == alone.answer(tickets[0].request)[:2]
    assert [ticket.tokens for ticket in tickets[1:]] == [alone.answer(ticket.request) for ticket in tickets[1:]]
    assert tickets[1].phase is Phase.DONE


def test_requests_are_submitted_from_other_threads(make: Make) -> None:
    model, alone = opened("llama", ("lora",), make)
    with ContinuousBatch(model, cache_tokens=256, max_num_seqs=4, max_num_batched_tokens=32) as batch:
        with ThreadPoolExecutor(4) as threads:
            futures = [threads.submit(batch.submit, request("lora", 4, 4, seed=seed)) for seed in range(8)]
            tickets = [future.result() for future in futures]
        list(batch.run())
    assert len({ticket.key for ticket in tickets}) == 8
    assert [ticket.tokens for ticket in tickets] == [alone.answer(ticket.request) for ticket in tickets]


def assert_refused(code: str, text: str, call: Callable[[], object]) -> None:
    with pytest.raises(ScuteError, match=text) as error:
        call()
    assert error.value.diagnostics[0].code.name == code


def assert_failed(ticket: Ticket, code: str, text: str) -> None:
    assert ticket.error is not None
    assert ticket.error.diagnostics[0].code.name == code
    assert text in str(ticket.error)


def test_requests_that_can_never_be_served_are_refused(make: Make) -> None:
    model, alone = opened("llama", ("lora",), make)
    with ContinuousBatch(model, cache_tokens=48, max_num_seqs=2, max_num_batched_tokens=32) as batch:
        good = batch.submit(request("lora", 4, 6))
        batch.step()
        assert batch.max_request_tokens == 48
        assert_refused("SC802", "unknown", lambda: batch.submit(request("unknown", 4, 6)))
        assert_refused("SC807", "41 prompt tokens and 8 new tokens", lambda: batch.submit(request("lora", 41, 8)))
        assert_refused("SC807", "0 prompt tokens", lambda: batch.submit(Request(prompt=())))
        assert_refused("SC807", "0 new tokens", lambda: batch.submit(request("lora", 4, 0)))
        assert_refused("SC807", "among them token 128", lambda: batch.submit(Request(prompt=(3, 128))))
        longest = batch.submit(request("lora", 40, 8))
        list(batch.run())
    assert [ticket.tokens for ticket in (good, longest)] == [alone.answer(ticket.request) for ticket in (good, longest)]


def test_requests_of_a_deleted_or_replaced_adapter_fail(make: Make) -> None:
    model, alone = opened("llama", ("lora", "dora", "oft"), make)
    with ContinuousBatch(model, cache_tokens=96, max_num_seqs=3, max_num_batched_tokens=32) as batch:
        lora, dora, oft = (batch.submit(request(name, 4, 8)) for name in ("lora", "dora", "oft"))
        batch.step()
        queued = batch.submit(request("dora", 4, 8))
        model.delete_adapter("dora")
        model.replace_adapter(make("lora", "llama").artifact, adapter_name="oft")
        list(batch.run())
    assert_failed(dora, "SC802", "dora")
    assert_failed(queued, "SC802", "dora")
    assert_failed(oft, "SC810", "another artifact")
    assert len(dora.tokens) == len(oft.tokens) == 1
    assert lora.tokens == alone.answer(lora.request)


def test_requests_whose_adapter_has_no_room_fail(make: Make) -> None:
    model, alone = opened("llama", ("lora", "dora", "oft"), make, max_adapters=2)
    with ContinuousBatch(model, cache_tokens=96, max_num_seqs=3, max_num_batched_tokens=32) as batch:
        lora, dora = batch.submit(request("lora", 4, 8)), batch.submit(request("dora", 4, 8))
        batch.step()
        lease = model.pool.acquire(["lora", "oft"])
        base, other = batch.submit(request(None, 4, 8)), batch.submit(request("dora", 4, 8))
        list(batch.run())
    model.pool.release(lease)
    assert_failed(dora, "SC804", "held")
    assert_failed(other, "SC804", "held")
    assert [ticket.tokens for ticket in (lora, base)] == [alone.answer(ticket.request) for ticket in (lora, base)]


def test_early_abort_drops_requests_that_would_miss_their_deadline(make: Make) -> None:
    model, alone = opened("llama", ("lora",), make)
    now = [0.0]
    policy = Policy(early_abort=ServiceTimes(step=1.0))
    with ContinuousBatch(
        model,
        cache_tokens=64,
        max_num_seqs=1,
        max_num_batched_tokens=32,
        policy=policy,
        clock=lambda: now[0],
        eos_token_ids=(),
    ) as batch:
        tickets = [batch.submit(request("lora", 4, 3, seed=seed, within=5.0)) for seed in range(4)]
        while batch.num_unfinished:
            now[0] += 1.0
            batch.step()
    # two requests of three tokens are done by the sixth second, and the third would begin in the seventh
    assert [ticket.phase for ticket in tickets] == [Phase.DONE, Phase.DONE, Phase.DROPPED, Phase.DROPPED]
    assert_failed(tickets[2], "SC808", "within 5.0 s")
    assert tickets[2].tokens == []
    assert [len(ticket.tokens) for ticket in tickets[:2]] == [3, 3]
    assert tickets[0].tokens == alone.answer(tickets[0].request)[:3]


def test_service_times_are_measured(make: Make) -> None:
    model, _ = opened("llama", ("lora",), make)
    with ContinuousBatch(model, cache_tokens=64, max_num_seqs=1, max_num_batched_tokens=32) as batch:
        assert batch.service_times is None
        batch.submit(request("lora", 4, 4))
        list(batch.run())
        assert batch.service_times is not None
        assert 0 < batch.service_times.step < 10


@pytest.mark.parametrize("base", ["gpt_neox", "opt"])
def test_models_without_paged_attention_are_refused(base: str, make: Make) -> None:
    model, _ = opened(base, ("lora",), make)
    assert_refused(
        "SC809",
        "transformers",
        lambda: ContinuousBatch(model, cache_tokens=64, max_num_seqs=2, max_num_batched_tokens=32),
    )


def test_a_softcap_that_paged_attention_drops_is_refused(make: Make) -> None:
    model, _ = opened("gemma2", ("lora",), make)
    assert_refused(
        "SC809", "softcap", lambda: ContinuousBatch(model, cache_tokens=64, max_num_seqs=2, max_num_batched_tokens=32)
    )


def test_a_model_with_other_logits_under_the_paged_cache_is_refused(make: Make) -> None:
    model, _ = opened("llama", ("lora",), make)
    attention: Any = model.model.get_submodule("model.layers.0.self_attn")
    forward = attention.forward
    attention.forward = lambda *args, **options: forward(*args, **{**options, "attention_mask": None})
    assert_refused(
        "SC809", "differ by", lambda: ContinuousBatch(model, cache_tokens=64, max_num_seqs=2, max_num_batched_tokens=32)
    )


def test_close_restores_the_attention(make: Make) -> None:
    model, alone = opened("llama", ("lora",), make)
    inner: Any = model.model
    inner.set_attn_implementation("eager")
    with ContinuousBatch(model, cache_tokens=64, max_num_seqs=2, max_num_batched_tokens=32) as batch:
        unfinished = batch.submit(request("lora", 4, 8))
        batch.step()
    assert inner.config._attn_implementation == "eager"
    assert unfinished.phase is Phase.CANCELLED
    again = request("lora", 4, 8)
    out = model.generate(torch.tensor([again.prompt]), adapter_names=["lora"], do_sample=False, max_new_tokens=8)
    assert out[0, 4:].tolist() == alone.answer(again)


def test_contradicting_sizes_are_refused(make: Make) -> None:
    model, _ = opened("llama", ("lora",), make)
    assert_refused("SC703", "<= 512", lambda: ContinuousBatch(model, max_num_batched_tokens=1024))
    assert_refused(
        "SC703", "max_num_seqs 64", lambda: ContinuousBatch(model, max_num_seqs=64, max_num_batched_tokens=32)
    )
    assert_refused("SC703", "fewer cache_tokens", lambda: ContinuousBatch(model, cache_tokens=10**12))
