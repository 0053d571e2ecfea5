"""When each waiting request would get its first token: the estimate behind early abort, stated as arithmetic.

A step takes a fixed time, and more for each token of a prompt that it reads. Requests join in the order of arrival as
soon as there is room, make all the tokens that they asked for, and then leave. All times are seconds on one clock.
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
    """How long steps take."""

    step: float
    """Seconds of a step that reads no prompt."""
    prompt_token: float = 0.0
    """Seconds more per token of a prompt."""

    def __post_init__(self) -> None:
        if not (self.step > 0 and self.prompt_token >= 0):
            fail(
                Code.SC703,
                where="service times",
                found=f"{self.step} s, and {self.prompt_token} s per token",
                expected="more than 0 s, and at least 0 s",
                next="measure a few steps, and pass what they took",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A request in the queue."""

    key: int
    """Unique; of two that arrived at once, the smaller one is the older."""
    adapter: str | None
    prompt_tokens: int
    new_tokens: int
    """Most tokens that it may make."""
    cache_tokens: int
    """Places of the cache that it takes, at its longest."""
    arrived: float
    deadline: float = inf
    """For its first token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A request in the batch."""

    key: int
    adapter: str | None
    prompt_left: int
    """Tokens of its prompt that are still to be read."""
    new_left: int
    """Tokens that it may still make."""
    cache_tokens: int


@dataclass(slots=True)
class Batch:
    """What a batch holds."""

    requests: int = 0
    cache_tokens: int = 0
    adapters: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, running: Sequence[Running]) -> Batch:
        """Count what is there."""
        batch = cls()
        for one in running:
            batch.add(one.adapter, one.cache_tokens)
        return batch

    def add(self, adapter: str | None, cache_tokens: int, sign: int = 1) -> None:
        """Let a request in, or out with a sign of -1."""
        self.requests += sign
        self.cache_tokens += sign * cache_tokens
        if adapter is not None:
            self.adapters[adapter] += sign
            if not self.adapters[adapter]:
                del self.adapters[adapter]

    def knows(self, adapter: str | None) -> bool:
        """Whether a request with this adapter brings no new one."""
        return adapter is None or adapter in self.adapters

    def copy(self) -> Batch:
        """Return one that changes on its own."""
        return Batch(self.requests, self.cache_tokens, Counter(self.adapters))


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What a batch can hold."""

    requests: int
    cache_tokens: int
    max_adapters: int
    """Distinct adapters."""
    fits: Callable[[frozenset[str]], bool] = _always
    """Whether these adapters can be on the device together; asked within `max_adapters` only."""

    def holds(self, batch: Batch, one: Waiting) -> bool:
        """Whether one more fits."""
        if batch.requests >= self.requests or batch.cache_tokens + one.cache_tokens > self.cache_tokens:
            return False
        if one.adapter is None or one.adapter in batch.adapters:
            return True
        names = frozenset(batch.adapters) | {one.adapter}
        return len(names) <= self.max_adapters and self.fits(names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What would become of a queue."""

    late: dict[int, float]
    """Key -> when the first token would come, of those that would miss their deadline."""
    first: frozenset[int]
    """Who joins the very next step."""


def forecast(
    times: ServiceTimes,
    capacity: Capacity,
    now: float,
    queue: Sequence[Waiting],
    running: Sequence[Running],
    *,
    joined: Sequence[Waiting] = (),
) -> Forecast:
    """Look ahead. Whoever is late takes no place of anybody behind.

    Someone who would make an older one of the same step late joins a later step.

    Args:
        times: How long steps take.
        capacity: What the batch can hold.
        now: The start of the next step.
        queue: In the order in which it is served.
        running: The batch.
        joined: Who joins the next step ahead of the queue, whatever comes of it.
    """
    line = _Line(times, capacity, now, running)
    late: dict[int, float] = {}
    for one in joined:
        line.join(one)
    if line.end > line.strictest:
        late.update({one.key: line.end for one in joined if one.deadline < line.end})
    first = {one.key for one in joined}
    for one in queue:
        steps, end = line.place(one)
        if one.deadline < end:
            late[one.key] = end
        if steps is None or one.deadline < end:
            continue
        line.advance(steps)
        line.join(one)
        if line.step == 0:
            first.add(one.key)
    return Forecast(late=late, first=frozenset(first))


class _Line:
    """The batch as time goes on, at the step that is being filled."""

    def __init__(self, times: ServiceTimes, capacity: Capacity, now: float, running: Sequence[Running]) -> None:
        self._times, self._capacity = times, capacity
        self.step = 0
        self._start = now
        self._batch = Batch.of(running)
        # a request frees its place before the step of this number
        self._ends = sorted((one.new_left, one.key, one.adapter, one.cache_tokens) for one in running)
        self._prompts = sum(one.prompt_left for one in running)
        self.strictest = inf
        """The earliest deadline of those that join this step."""

    @property
    def end(self) -> float:
        """When the step is done, as it is filled now."""
        return self._end(self._start, self._prompts)

    def _end(self, start: float, prompts: int) -> float:
        return start + self._times.step + self._times.prompt_token * prompts

    def place(self, one: Waiting) -> tuple[int | None, float]:
        """Return how many steps from here one more can join, and when that step ends; None: never."""
        batch, ends = self._batch.copy(), iter(self._ends)
        steps = 0
        while not self._capacity.holds(batch, one):
            gone = next(ends, None)
            if gone is None:
                return None, inf
            batch.add(gone[2], gone[3], sign=-1)
            steps = max(steps, gone[0] - self.step)
        if steps == 0:
            end = self._end(self._start, self._prompts + one.prompt_tokens)
            if end <= self.strictest or one.deadline < end:
                return 0, end
            steps = 1
        # this step as it is filled, then steps without prompts
        start = self.end + (steps - 1) * self._times.step
        return steps, self._end(start, one.prompt_tokens)

    def advance(self, steps: int) -> None:
        """Go on by some steps, during which nobody joins."""
        if not steps:
            return
        self._start = self.end + (steps - 1) * self._times.step
        self.step += steps
        self._prompts, self.strictest = 0, inf
        while self._ends and self._ends[0][0] <= self.step:
            _, _, adapter, tokens = self._ends.pop(0)
            self._batch.add(adapter, tokens, sign=-1)

    def join(self, one: Waiting) -> None:
        """Let a request into the step."""
        self._batch.add(one.adapter, one.cache_tokens)
        self._prompts += one.prompt_tokens
        self.strictest = min(self.strictest, one.deadline)
        insort(self._ends, (self.step + one.new_tokens, one.key, one.adapter, one.cache_tokens))


class Stopwatch:
    """What steps with and without prompts took."""

    def __init__(self) -> None:
        self._plain, self._plain_steps = 0.0, 0
        self._reading, self._reading_steps, self._prompt_tokens = 0.0, 0, 0

    def add(self, seconds: float, prompt_tokens: int) -> None:
        """Count a step."""
        if prompt_tokens:
            self._reading += seconds
            self._reading_steps += 1
            self._prompt_tokens += prompt_tokens
        else:
            self._plain += seconds
            self._plain_steps += 1

    @property
    def times(self) -> ServiceTimes | None:
        """Means of all steps."""
        if not self._plain > 0 or not self._prompt_tokens:
            return None
        step = self._plain / self._plain_steps
        more = (self._reading - step * self._reading_steps) / self._prompt_tokens
        return ServiceTimes(step=step, prompt_token=max(0.0, more))
