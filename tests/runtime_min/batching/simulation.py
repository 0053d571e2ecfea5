"""A batch on a simulated clock, stepped one by one: how policies do, and an oracle that shares no code with them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf

from scute_compile.runtime_min.batching.forecast import Capacity, Running, ServiceTimes, Waiting
from scute_compile.runtime_min.batching.policy import Policy, decide

EVERYONE = 100_000
"""Steps after which a simulation is taken to hang."""


@dataclass(slots=True)
class Outcome:
    """What became of a workload."""

    first_token: dict[int, float] = field(default_factory=dict)
    dropped: dict[int, float] = field(default_factory=dict)
    """Key -> when it was dropped."""
    admitted: list[tuple[float, int]] = field(default_factory=list)
    """Time and key, in order."""
    adapters: list[int] = field(default_factory=list)
    """Distinct ones, per step."""
    most_requests: int = 0
    most_cache: int = 0
    end: float = 0.0

    def attainment(self, workload: Sequence[Waiting]) -> float:
        """The part of all requests whose first token came in time."""
        met = sum(self.first_token.get(one.key, inf) <= one.deadline for one in workload)
        return met / len(workload)

    @property
    def mean_adapters(self) -> float:
        """Distinct adapters of a step, on average."""
        return sum(self.adapters) / len(self.adapters)


@dataclass(slots=True)
class _Inside:
    one: Waiting
    made: int = 0


def simulate(policy: Policy, capacity: Capacity, times: ServiceTimes, workload: Iterable[Waiting]) -> Outcome:
    """Serve a workload to its end; steps take exactly what `times` says."""
    coming = sorted(workload, key=lambda one: (one.arrived, one.key))
    queue: list[Waiting] = []
    inside: list[_Inside] = []
    out = Outcome()
    now = 0.0
    for _ in range(EVERYONE):
        if not (queue or inside):
            if not coming:
                out.end = now
                return out
            now = max(now, coming[0].arrived)
        while coming and coming[0].arrived <= now:
            queue.append(coming.pop(0))
        chosen = decide(policy, capacity, now, queue, [_running(member) for member in inside])
        out.dropped |= {late.key: now for late in chosen.dropped}
        by_key = {one.key: one for one in queue}
        joined = [by_key[key] for key in chosen.admitted]
        gone = {*chosen.admitted, *out.dropped}
        queue = [one for one in queue if one.key not in gone]
        inside += [_Inside(one) for one in joined]
        out.admitted += [(now, one.key) for one in joined]
        if inside:
            now += times.step + times.prompt_token * sum(one.prompt_tokens for one in joined)
            _observe(out, inside)
            inside = [member for member in inside if _makes_a_token(member, now, out)]
    raise AssertionError("somebody waits for ever")


def first_tokens(
    capacity: Capacity, times: ServiceTimes, now: float, queue: Sequence[Waiting], running: Sequence[Running]
) -> dict[int, float]:
    """When each of a queue gets its first token in the order of arrival, step by step: slow, plain, with no policy."""
    inside = [(one.new_left, one.adapter, one.cache_tokens, one.prompt_left) for one in running]
    left, found = list(queue), dict[int, float]()
    while left:
        joined = []
        while left:
            one = left[0]
            names = {row[1] for row in inside} | {one.adapter}
            cache = sum(row[2] for row in inside) + one.cache_tokens
            if (
                len(inside) >= capacity.requests
                or cache > capacity.cache_tokens
                or len(names - {None}) > capacity.max_adapters
            ):
                break
            inside.append((one.new_tokens, one.adapter, one.cache_tokens, one.prompt_tokens))
            joined.append(left.pop(0))
        if not inside:
            return found
        now += times.step + times.prompt_token * sum(row[3] for row in inside)
        found |= {one.key: now for one in joined}
        inside = [(row[0] - 1, row[1], row[2], 0) for row in inside if row[0] > 1]
    return found


def _running(member: _Inside) -> Running:
    one = member.one
    return Running(
        key=one.key,
        adapter=one.adapter,
        prompt_left=0,
        new_left=one.new_tokens - member.made,
        cache_tokens=one.cache_tokens,
    )


def _observe(out: Outcome, inside: Sequence[_Inside]) -> None:
    out.adapters.append(len({member.one.adapter for member in inside} - {None}))
    out.most_requests = max(out.most_requests, len(inside))
    out.most_cache = max(out.most_cache, sum(member.one.cache_tokens for member in inside))


def _makes_a_token(member: _Inside, now: float, out: Outcome) -> bool:
    """Let a request make one, and return whether it stays."""
    out.first_token.setdefault(member.one.key, now)
    member.made += 1
    return member.made < member.one.new_tokens
