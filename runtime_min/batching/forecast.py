"""Forecast of each queued request's first token, which early abort relies on.

The model of time: a step takes a fixed time, and more for each prompt token that it reads. Requests join in the order
of arrival as soon as the batch has room, generate as many tokens as they may, and leave. All times are seconds on one
clock.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

from scute_compile.diagnostics import Code, fail


def _always(names: frozenset[str]) -> bool:
    del names
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceTimes:
    """Durations of steps."""

    step: float
    """Seconds of a step that reads no prompt."""
    prompt_token: float = 0.0
    """Additional seconds per prompt token."""

    def __post_init__(self) -> None:
        if not (self.step > 0 and self.prompt_token >= 0):
            fail(
                Code.SC703,
                where="service times",
                found=f"{self.step} s, and {self.prompt_token} s per token",
                expected="more than 0 s, and at least 0 s",
                next="measure a few steps, and pass their durations",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedRequest:
    """A request in the queue."""

    key: int
    """Unique; of two requests with the same arrival time, the smaller key is the older request."""
    adapter: str | None
    prompt_tokens: int
    new_tokens: int
    """Largest number of tokens that it may generate."""
    cache_tokens: int
    """Cache positions that are reserved for it, for its greatest length."""
    arrived: float
    deadline: float = inf
    """Deadline of its first token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningRequest:
    """A request in the batch."""

    key: int
    adapter: str | None
    prompt_left: int
    """Prompt tokens that steps have not read yet."""
    new_left: int
    """Tokens that it may still generate."""
    cache_tokens: int


@dataclass(slots=True)
class BatchLoad:
    """The requests, cache positions and adapters of a batch."""

    requests: int = 0
    cache_tokens: int = 0
    adapters: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, running: Sequence[RunningRequest]) -> BatchLoad:
        """Return the load of running requests."""
        load = cls()
        for request in running:
            load.add(request.adapter, request.cache_tokens)
        return load

    def add(self, adapter: str | None, cache_tokens: int, sign: int = 1) -> None:
        """Add a request, or remove it with a sign of -1."""
        self.requests += sign
        self.cache_tokens += sign * cache_tokens
        if adapter is not None:
            self.adapters[adapter] += sign
            if not self.adapters[adapter]:
                del self.adapters[adapter]

    def has(self, adapter: str | None) -> bool:
        """Return whether a request for `adapter` adds no adapter to the batch."""
        return adapter is None or adapter in self.adapters

    def copy(self) -> BatchLoad:
        """Return an independent copy."""
        return BatchLoad(self.requests, self.cache_tokens, Counter(self.adapters))


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """The largest load of a batch."""

    max_num_seqs: int
    cache_tokens: int
    max_adapters: int
    """Distinct adapters."""
    fits: Callable[[frozenset[str]], bool] = _always
    """Whether these adapters fit on the device together; called with at most `max_adapters`."""

    def admit(self, load: BatchLoad, request: QueuedRequest) -> bool:
        """Return whether a batch of this load has room for one more request."""
        if load.requests >= self.max_num_seqs or load.cache_tokens + request.cache_tokens > self.cache_tokens:
            return False
        if request.adapter is None or request.adapter in load.adapters:
            return True
        names = frozenset(load.adapters) | {request.adapter}
        return len(names) <= self.max_adapters and self.fits(names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The forecast of a queue."""

    late: dict[int, float]
    """Time of the first token by key, of requests that would miss their deadline."""
    next_step: frozenset[int]
    """Keys of the requests that join the next step."""


def forecast(
    times: ServiceTimes,
    limits: BatchLimits,
    now: float,
    queue: Sequence[QueuedRequest],
    running: Sequence[RunningRequest],
    *,
    admitted: Sequence[QueuedRequest] = (),
) -> Forecast:
    """Forecast which requests of a queue would miss their deadlines.

    A request that would miss its deadline does not delay later ones. A request whose prompt would make an older request
    of the same step miss its deadline joins a later step.

    Args:
        times: Durations of steps.
        limits: The largest load of the batch.
        now: The start of the next step.
        queue: In the order in which it is served.
        running: The batch.
        admitted: Requests that join the next step before those of the queue, even if any of them is late.
    """
    timeline = _Timeline(times, limits, now, running)
    late: dict[int, float] = {}
    for request in admitted:
        timeline.join(request)
    if timeline.end > timeline.earliest_deadline:
        late.update({request.key: timeline.end for request in admitted if request.deadline < timeline.end})
    next_step = {request.key for request in admitted}
    for request in queue:
        steps, end = timeline.find_step(request)
        if request.deadline < end:
            late[request.key] = end
        if steps is None or request.deadline < end:
            continue
        timeline.advance(steps)
        timeline.join(request)
        if timeline.step == 0:
            next_step.add(request.key)
    return Forecast(late=late, next_step=frozenset(next_step))


class _Timeline:
    """Simulates the batch step by step, at the step that requests currently join."""

    def __init__(self, times: ServiceTimes, limits: BatchLimits, now: float, running: Sequence[RunningRequest]) -> None:
        self._times, self._limits = times, limits
        self.step = 0
        self._start = now
        self._load = BatchLoad.of(running)
        # the first number is the step before which a request leaves
        self._departures = sorted(
            (request.new_left, request.key, request.adapter, request.cache_tokens) for request in running
        )
        self._prompt_tokens = sum(request.prompt_left for request in running)
        self.earliest_deadline = inf
        """Earliest deadline of the requests that join this step."""

    @property
    def end(self) -> float:
        """When the step ends with the requests that joined it so far."""
        return self._end(self._start, self._prompt_tokens)

    def _end(self, start: float, prompt_tokens: int) -> float:
        return start + self._times.step + self._times.prompt_token * prompt_tokens

    def find_step(self, request: QueuedRequest) -> tuple[int | None, float]:
        """Return after how many steps a request can join, None for never, and when the step that it joins ends."""
        load, departures = self._load.copy(), iter(self._departures)
        steps = 0
        while not self._limits.admit(load, request):
            departure = next(departures, None)
            if departure is None:
                return None, inf
            step, _, adapter, cache_tokens = departure
            load.add(adapter, cache_tokens, sign=-1)
            steps = max(steps, step - self.step)
        if steps == 0:
            end = self._end(self._start, self._prompt_tokens + request.prompt_tokens)
            if end <= self.earliest_deadline or request.deadline < end:
                return 0, end
            steps = 1
        # this step with its present requests, then steps without prompts
        start = self.end + (steps - 1) * self._times.step
        return steps, self._end(start, request.prompt_tokens)

    def advance(self, steps: int) -> None:
        """Advance by a number of steps that no request joins."""
        if not steps:
            return
        self._start = self.end + (steps - 1) * self._times.step
        self.step += steps
        self._prompt_tokens, self.earliest_deadline = 0, inf
        while self._departures and self._departures[0][0] <= self.step:
            _, _, adapter, cache_tokens = self._departures.pop(0)
            self._load.add(adapter, cache_tokens, sign=-1)

    def join(self, request: QueuedRequest) -> None:
        """Add a request to the step."""
        self._load.add(request.adapter, request.cache_tokens)
        self._prompt_tokens += request.prompt_tokens
        self.earliest_deadline = min(self.earliest_deadline, request.deadline)
        insort(self._departures, (self.step + request.new_tokens, request.key, request.adapter, request.cache_tokens))


class StepTimer:
    """Estimates service times from the durations of steps with and without prompts."""

    def __init__(self) -> None:
        self._decode_seconds, self._decode_steps = 0.0, 0
        self._prompt_seconds, self._prompt_steps, self._prompt_tokens = 0.0, 0, 0

    def add(self, seconds: float, prompt_tokens: int) -> None:
        """Count a step."""
        if prompt_tokens:
            self._prompt_seconds += seconds
            self._prompt_steps += 1
            self._prompt_tokens += prompt_tokens
        else:
            self._decode_seconds += seconds
            self._decode_steps += 1

    @property
    def times(self) -> ServiceTimes | None:
        """Means over all steps; None before there were steps of both kinds."""
        if not self._decode_seconds > 0 or not self._prompt_tokens:
            return None
        step = self._decode_seconds / self._decode_steps
        additional = (self._prompt_seconds - step * self._prompt_steps) / self._prompt_tokens
        return ServiceTimes(step=step, prompt_token=max(0.0, additional))
