"""Admission and early abort on a simulated clock: no starvation, and no needless drops."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scute_compile.diagnostics import ScuteError
from scute_compile.runtime_min.batching.forecast import (
    BatchLimits,
    QueuedRequest,
    RunningRequest,
    ServiceTimes,
    StepTimer,
)
from scute_compile.runtime_min.batching.policy import Policy, decide
from tests.runtime_min.batching.simulation import first_tokens, simulate

NAMES = ("a", "b", "c", "d", None)
TIMES = ServiceTimes(step=1.0, prompt_token=0.125)
"""Sums of eighths are exact in binary, so that the forecast and the oracle agree to the bit."""


def queued(
    key: int,
    adapter: str | None,
    *,
    arrived: float = 0.0,
    deadline: float = inf,
    prompt: int = 4,
    new: int = 4,
    cache: int = 8,
) -> QueuedRequest:
    return QueuedRequest(
        key=key,
        adapter=adapter,
        prompt_tokens=prompt,
        new_tokens=new,
        cache_tokens=cache,
        arrived=arrived,
        deadline=deadline,
    )


@st.composite
def workloads(draw: st.DrawFn, *, deadlines: bool = True) -> list[QueuedRequest]:
    """Draw up to 14 requests that arrive within ten seconds, each of which fits alone."""
    requests = []
    for key in range(draw(st.integers(1, 14))):
        arrived = draw(st.integers(0, 80)) / 8
        within = draw(st.integers(8, 120)) / 8 if deadlines and draw(st.booleans()) else inf
        prompt, new, cache = draw(st.integers(1, 12)), draw(st.integers(1, 6)), draw(st.integers(1, 16))
        requests.append(
            queued(
                key,
                draw(st.sampled_from(NAMES)),
                arrived=arrived,
                deadline=arrived + within,
                prompt=prompt,
                new=new,
                cache=cache,
            )
        )
    return requests


@st.composite
def limits_of_batches(draw: st.DrawFn) -> BatchLimits:
    """Draw small limits that admit any single request."""
    return BatchLimits(
        max_num_seqs=draw(st.integers(1, 4)),
        cache_tokens=draw(st.integers(16, 40)),
        max_adapters=draw(st.integers(1, 3)),
    )


patiences = st.sampled_from((0.0, 2.0, 8.0, inf))
many_examples = settings(max_examples=300, deadline=None)


@given(workloads(), limits_of_batches(), patiences, st.booleans())
@many_examples
def test_limits_are_kept_and_every_request_is_served_or_dropped(
    workload: list[QueuedRequest], limits: BatchLimits, patience: float, abort: bool
) -> None:
    policy = Policy(patience=patience, early_abort=TIMES if abort else None)
    out = simulate(policy, limits, TIMES, workload)
    assert max(out.adapters, default=0) <= limits.max_adapters
    assert out.most_requests <= limits.max_num_seqs
    assert out.most_cache <= limits.cache_tokens
    assert out.first_token.keys() | out.dropped.keys() == {request.key for request in workload}
    assert not out.first_token.keys() & out.dropped.keys()
    assert abort or not out.dropped


@given(workloads(deadlines=False), limits_of_batches(), patiences)
@many_examples
def test_no_request_is_scheduled_ahead_of_one_that_waited_for_the_patience(
    workload: list[QueuedRequest], limits: BatchLimits, patience: float
) -> None:
    out = simulate(Policy(patience=patience), limits, TIMES, workload)
    by_key = {request.key: request for request in workload}
    when = {key: time for time, key in out.admitted}
    for request in workload:
        for time, other in out.admitted:
            behind = (by_key[other].arrived, other) > (request.arrived, request.key)
            if behind and time < when[request.key]:
                assert time < request.arrived + patience


@given(workloads(), limits_of_batches(), patiences)
@many_examples
def test_with_early_abort_every_served_request_meets_its_deadline(
    workload: list[QueuedRequest], limits: BatchLimits, patience: float
) -> None:
    out = simulate(Policy(patience=patience, early_abort=TIMES), limits, TIMES, workload)
    for request in workload:
        if request.key in out.first_token:
            assert out.first_token[request.key] <= request.deadline


@st.composite
def scenes(draw: st.DrawFn) -> tuple[BatchLimits, list[RunningRequest], list[QueuedRequest]]:
    """Draw a batch within its limits, and a queue."""
    limits = draw(limits_of_batches())
    running: list[RunningRequest] = []
    for key in range(100, 100 + draw(st.integers(0, limits.max_num_seqs))):
        request = RunningRequest(
            key=key,
            adapter=draw(st.sampled_from(NAMES)),
            prompt_left=draw(st.integers(0, 3)),
            new_left=draw(st.integers(1, 8)),
            cache_tokens=draw(st.integers(1, 10)),
        )
        names = {other.adapter for other in [*running, request]} - {None}
        if (
            len(names) <= limits.max_adapters
            and sum(other.cache_tokens for other in [*running, request]) <= limits.cache_tokens
        ):
            running.append(request)
    return limits, running, draw(workloads())


@given(scenes(), patiences)
@many_examples
def test_no_request_is_dropped_needlessly(
    scene: tuple[BatchLimits, list[RunningRequest], list[QueuedRequest]], patience: float
) -> None:
    """Serving a dropped request would make it, or an older request that was kept, miss its deadline."""
    limits, running, queue = scene
    decision = decide(Policy(patience=patience, early_abort=TIMES), limits, 10.0, queue, running)
    gone = {dropped.key for dropped in decision.dropped}
    order = sorted(queue, key=lambda request: (request.arrived, request.key))
    for at, request in enumerate(order):
        if request.key in gone:
            ahead = [other for other in order[:at] if other.key not in gone]
            found = first_tokens(limits, TIMES, 10.0, [*ahead, request], running)
            assert any(found.get(other.key, inf) > other.deadline for other in [*ahead, request])


@given(scenes())
@many_examples
def test_the_oldest_kept_request_meets_its_deadline(
    scene: tuple[BatchLimits, list[RunningRequest], list[QueuedRequest]],
) -> None:
    """The oracle forecasts it, in the order of arrival."""
    limits, running, queue = scene
    decision = decide(Policy(early_abort=TIMES), limits, 10.0, queue, running)
    gone = {dropped.key for dropped in decision.dropped}
    kept = sorted(
        (request for request in queue if request.key not in gone), key=lambda request: (request.arrived, request.key)
    )
    if kept:
        found = first_tokens(limits, TIMES, 10.0, kept[:1], running)
        assert found[kept[0].key] <= kept[0].deadline


def skewed(count: int, adapters: int, gap: float, *, seed: int = 0, within: float = inf) -> list[QueuedRequest]:
    """Return requests with random arrivals, whose adapters follow Zipf's law."""
    draw = random.Random(seed)  # noqa: S311 - a workload, not a secret
    weights = [1 / (1 + rank) for rank in range(adapters)]
    now, requests = 0.0, []
    for key in range(count):
        now += draw.expovariate(1 / gap)
        (rank,) = draw.choices(range(adapters), weights)
        requests.append(
            queued(
                key,
                f"t{rank}",
                arrived=now,
                deadline=now + within,
                prompt=draw.randint(4, 40),
                new=draw.randint(4, 30),
                cache=64,
            )
        )
    return requests


BATCH = BatchLimits(max_num_seqs=8, cache_tokens=8 * 64, max_adapters=8)
REAL = ServiceTimes(step=0.02, prompt_token=0.0002)


def test_clustering_reduces_the_adapters_of_a_step() -> None:
    """Prints the figures, for `pytest -s`."""
    workload = skewed(600, 40, 0.03)
    plain = simulate(Policy(), BATCH, REAL, workload)
    clustered = simulate(Policy(patience=10.0), BATCH, REAL, workload)
    print(f"adapters a step {plain.mean_adapters:.2f} -> {clustered.mean_adapters:.2f}")  # noqa: T201 - the figures
    assert clustered.mean_adapters < 0.6 * plain.mean_adapters
    assert clustered.end < 1.02 * plain.end


def test_clustering_fills_a_batch_of_few_adapters() -> None:
    """In the order of arrival, the first request for a fourth adapter delays all later ones."""
    workload, few = skewed(600, 40, 0.03), dataclasses.replace(BATCH, max_adapters=3)
    plain = simulate(Policy(), few, REAL, workload)
    clustered = simulate(Policy(patience=10.0), few, REAL, workload)
    print(f"3 adapters: 600 requests in {plain.end:.1f} -> {clustered.end:.1f} s")  # noqa: T201 - the figures
    assert clustered.end < 0.75 * plain.end


def test_early_abort_meets_deadlines_under_overload() -> None:
    """In the order of arrival, most requests miss the deadline. Prints the figures, for `pytest -s`."""
    workload = skewed(600, 40, 0.03, within=1.0)
    plain = simulate(Policy(), BATCH, REAL, workload).attainment(workload)
    aborted = simulate(Policy(early_abort=REAL), BATCH, REAL, workload).attainment(workload)
    both = simulate(Policy(patience=1.0, early_abort=REAL), BATCH, REAL, workload).attainment(workload)
    print(f"attainment {plain:.1%} -> {aborted:.1%}, with clustering {both:.1%}")  # noqa: T201 - the figures
    assert aborted > 5 * plain
    assert both > 5 * plain


def test_no_request_is_dropped_without_overload() -> None:
    workload = skewed(200, 40, 0.2, within=1.0)
    assert not simulate(Policy(early_abort=REAL), BATCH, REAL, workload).dropped


def test_the_newest_requests_of_a_burst_are_dropped() -> None:
    burst = [queued(key, "a", deadline=6.0, new=3) for key in range(6)]
    decision = decide(Policy(early_abort=TIMES), dataclasses.replace(BATCH, max_num_seqs=1), 0.0, burst, [])
    assert decision.admitted == (0,)
    # each request takes 3 steps, and half a second for its prompt: first tokens at 1.5, 5.0, 8.5, ...
    assert [dropped.key for dropped in decision.dropped] == [2, 3, 4, 5]
    assert decision.dropped[0].first_token == 8.5


def test_a_request_joins_later_if_an_older_one_would_miss_its_deadline() -> None:
    older, long = queued(0, "a", deadline=1.5), queued(1, "a", prompt=40, deadline=20.0)
    assert decide(Policy(), BATCH, 0.0, [older, long], []).admitted == (0, 1)
    assert decide(Policy(early_abort=TIMES), BATCH, 0.0, [older, long], []).admitted == (0,)


def test_no_request_is_scheduled_ahead_if_another_would_miss_its_deadline() -> None:
    two = dataclasses.replace(BATCH, max_num_seqs=2)
    running = [RunningRequest(key=9, adapter="a", prompt_left=0, new_left=8, cache_tokens=8)]
    queue = [queued(0, "b", deadline=3.0), queued(1, "a", arrived=0.5, new=8)]
    assert decide(Policy(patience=9.0), two, 1.0, queue, running).admitted == (1,)
    assert decide(Policy(patience=9.0, early_abort=TIMES), two, 1.0, queue, running).admitted == (0,)


def test_adapters_that_do_not_fit_together_are_served_in_turn() -> None:
    limits = dataclasses.replace(BATCH, fits=lambda names: len(names & {"a", "b"}) < 2)
    queue = [queued(0, "a"), queued(1, "b", arrived=0.25), queued(2, "c", arrived=0.5)]
    assert decide(Policy(), limits, 1.0, queue, []).admitted == (0,)
    decision = decide(Policy(patience=9.0), limits, 1.0, queue, [])
    assert decision.admitted == (0, 2)
    assert decision.prefetch == ("b",)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Policy(patience=-1.0),
        lambda: Policy(patience=float("nan")),
        lambda: ServiceTimes(step=0.0),
        lambda: ServiceTimes(step=1.0, prompt_token=-1.0),
    ],
)
def test_impossible_times_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ScuteError, match="SC703"):
        make()


def test_the_timer_separates_steps_from_prompts() -> None:
    timer = StepTimer()
    timer.add(1.5, 4)
    assert timer.times is None
    timer.add(1.0, 0)
    assert timer.times == ServiceTimes(step=1.0, prompt_token=0.125)
