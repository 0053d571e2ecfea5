"""A simulated batch on a simulated clock, and an oracle for the forecast that shares no code with it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf

from scute_compile.runtime_min.batching.forecast import BatchLimits, QueuedRequest, RunningRequest, ServiceTimes
from scute_compile.runtime_min.batching.policy import Policy, decide

MAX_STEPS = 100_000
"""Steps after which a simulation counts as hanging."""


@dataclass(slots=True)
class Outcome:
    """The outcome of a workload."""

    first_token: dict[int, float] = field(default_factory=dict)
    """Time of the first token, by key."""
    dropped: dict[int, float] = field(default_factory=dict)
    """Time at which a request was dropped, by key."""
    admitted: list[tuple[float, int]] = field(default_factory=list)
    """Time and key of each admission, in order."""
    adapters: list[int] = field(default_factory=list)
    """Number of distinct adapters of each step."""
    most_requests: int = 0
    most_cache: int = 0
    end: float = 0.0

    def attainment(self, workload: Sequence[QueuedRequest]) -> float:
        """Return the fraction of requests whose first token met the deadline."""
        met = sum(self.first_token.get(request.key, inf) <= request.deadline for request in workload)
        return met / len(workload)

    @property
    def mean_adapters(self) -> float:
        """Mean number of distinct adapters per step."""
        return sum(self.adapters) / len(self.adapters)


@dataclass(slots=True)
class _Member:
    request: QueuedRequest
    generated: int = 0


def simulate(policy: Policy, limits: BatchLimits, times: ServiceTimes, workload: Iterable[QueuedRequest]) -> Outcome:
    """Serve a workload to its end; steps take exactly as long as `times` predicts."""
    arrivals = sorted(workload, key=lambda request: (request.arrived, request.key))
    queue: list[QueuedRequest] = []
    batch: list[_Member] = []
    out = Outcome()
    now = 0.0
    for _ in range(MAX_STEPS):
        if not (queue or batch):
            if not arrivals:
                out.end = now
                return out
            now = max(now, arrivals[0].arrived)
        while arrivals and arrivals[0].arrived <= now:
            queue.append(arrivals.pop(0))
        decision = decide(policy, limits, now, queue, [_running(member) for member in batch])
        out.dropped |= {dropped.key: now for dropped in decision.dropped}
        by_key = {request.key: request for request in queue}
        joined = [by_key[key] for key in decision.admitted]
        gone = {*decision.admitted, *out.dropped}
        queue = [request for request in queue if request.key not in gone]
        batch += [_Member(request) for request in joined]
        out.admitted += [(now, request.key) for request in joined]
        if batch:
            now += times.step + times.prompt_token * sum(request.prompt_tokens for request in joined)
            _observe(out, batch)
            batch = [member for member in batch if _generate(member, now, out)]
    raise AssertionError("a request waits forever")


def first_tokens(
    limits: BatchLimits,
    times: ServiceTimes,
    now: float,
    queue: Sequence[QueuedRequest],
    running: Sequence[RunningRequest],
) -> dict[int, float]:
    """Return when each request of a queue gets its first token in the order of arrival, by plain simulation."""
    batch = [(request.new_left, request.adapter, request.cache_tokens, request.prompt_left) for request in running]
    left, found = list(queue), dict[int, float]()
    while left:
        joined = []
        while left:
            request = left[0]
            names = {adapter for _, adapter, _, _ in batch} | {request.adapter}
            cache = sum(cache_tokens for _, _, cache_tokens, _ in batch) + request.cache_tokens
            if (
                len(batch) >= limits.max_num_seqs
                or cache > limits.cache_tokens
                or len(names - {None}) > limits.max_adapters
            ):
                break
            batch.append((request.new_tokens, request.adapter, request.cache_tokens, request.prompt_tokens))
            joined.append(left.pop(0))
        if not batch:
            return found
        now += times.step + times.prompt_token * sum(prompt for _, _, _, prompt in batch)
        found |= {request.key: now for request in joined}
        batch = [(new - 1, adapter, cache, 0) for new, adapter, cache, _ in batch if new > 1]
    return found


def _running(member: _Member) -> RunningRequest:
    request = member.request
    return RunningRequest(
        key=request.key,
        adapter=request.adapter,
        prompt_left=0,
        new_left=request.new_tokens - member.generated,
        cache_tokens=request.cache_tokens,
    )


def _observe(out: Outcome, batch: Sequence[_Member]) -> None:
    out.adapters.append(len({member.request.adapter for member in batch} - {None}))
    out.most_requests = max(out.most_requests, len(batch))
    out.most_cache = max(out.most_cache, sum(member.request.cache_tokens for member in batch))


def _generate(member: _Member, now: float, out: Outcome) -> bool:
    """Generate a token, and return whether the request stays in the batch."""
    out.first_token.setdefault(member.request.key, now)
    member.generated += 1
    return member.generated < member.request.new_tokens
