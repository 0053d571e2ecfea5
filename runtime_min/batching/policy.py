"""Who joins the next step and who is told no: a pure function of the queue, the batch, the clock and an estimate.

After S-LoRA (arXiv:2311.03285): adapter clustering and early abort. Nothing here knows of models or of torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scute_compile.diagnostics import Code, fail
from scute_compile.runtime_min.batching.forecast import (
    Batch,
    Capacity,
    Forecast,
    Running,
    ServiceTimes,
    Waiting,
    forecast,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How a queue is served. As it stands: in the order of arrival, and nobody is dropped."""

    patience: float = 0.0
    """Seconds for which a request may be overtaken by later ones whose adapter is in the batch already (clustering).
    Whoever waits longer is served before all later ones, so nobody starves."""
    early_abort: ServiceTimes | None = None
    """Drop requests that can't meet their deadline by this estimate; None: never."""

    def __post_init__(self) -> None:
        if not self.patience >= 0:
            fail(
                Code.SC703,
                where="patience",
                found=f"{self.patience} s",
                expected="at least 0 s",
                next="pass the seconds for which a request may be overtaken; 0 for the order of arrival",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """A request that can't meet its deadline."""

    key: int
    expected: float
    """When its first token would have come; on the clock of `now`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What becomes of the queue before one step; who isn't named waits on."""

    admitted: tuple[int, ...] = ()
    """Keys, in the order in which they were chosen."""
    dropped: tuple[Dropped, ...] = ()
    upcoming: tuple[str, ...] = ()
    """Adapters of those that wait on, each once, in the order of arrival: what to prefetch."""


def decide(
    policy: Policy, capacity: Capacity, now: float, waiting: Iterable[Waiting], running: Sequence[Running]
) -> Decision:
    """Choose from a queue.

    - Nothing is admitted beyond the capacity.
    - A request that has waited for the policy's patience is never overtaken. The others may be, by those whose adapter
      is in the batch, and by those that fit where an older one doesn't.
    - With early abort, a request is dropped exactly if the forecast, in the order of arrival, gives it its first token
      after its deadline, though only older ones that meet theirs are ahead of it: under overload the newest go first.
      Nobody overtakes at the price of another's deadline.

    Args:
        policy: The options.
        capacity: What the batch can hold.
        now: The clock, seconds.
        waiting: The queue, in any order.
        running: The batch, with those that will join its next step.
    """
    queue = sorted(waiting, key=lambda one: (one.arrived, one.key))
    plan: Forecast | None = None
    dropped: tuple[Dropped, ...] = ()
    if policy.early_abort is not None:
        plan = forecast(policy.early_abort, capacity, now, queue, running)
        dropped = tuple(Dropped(key=key, expected=time) for key, time in plan.late.items())
        queue = [one for one in queue if one.key not in plan.late]
    choice = _Choice(policy, capacity, now, queue, running, plan)
    admitted = choice.made()
    left = [one.adapter for one in queue if one.key not in admitted and one.adapter is not None]
    return Decision(admitted=tuple(admitted), dropped=dropped, upcoming=tuple(dict.fromkeys(left)))


class _Choice:
    """One step's admissions."""

    def __init__(
        self,
        policy: Policy,
        capacity: Capacity,
        now: float,
        queue: Sequence[Waiting],
        running: Sequence[Running],
        plan: Forecast | None,
    ) -> None:
        self._policy, self._capacity, self._now, self._running = policy, capacity, now, running
        self._plan = plan
        self._left = list(queue)
        self._joined: list[Waiting] = []
        self._batch = Batch.of(running)

    def made(self) -> list[int]:
        """Return the keys of those that are admitted."""
        if self._old_join():
            self._young_join()
        return [one.key for one in self._joined]

    def _old_join(self) -> bool:
        """Admit those whom nobody may overtake; return whether all of them are in."""
        patience = self._policy.patience
        for one in [one for one in self._left if self._now - one.arrived >= patience]:
            on_time = self._plan is None or one.key in self._plan.first
            if not (on_time and self._capacity.holds(self._batch, one)):
                return False
            self._join(one)
        return True

    def _young_join(self) -> None:
        """Admit the others: first those whose adapter is in the batch, then the oldest that brings a new one."""
        out: set[int] = set()
        while True:
            candidates = [one for one in self._left if one.key not in out and self._capacity.holds(self._batch, one)]
            if not candidates:
                return
            known = (one for one in candidates if self._batch.knows(one.adapter))
            one = next(known, candidates[0])
            if self._harms_nobody(one):
                self._join(one)
            else:
                out.add(one.key)

    def _harms_nobody(self, one: Waiting) -> bool:
        if self._policy.early_abort is None:
            return True
        joined = [*self._joined, one]
        others = [other for other in self._left if other.key != one.key]
        then = forecast(self._policy.early_abort, self._capacity, self._now, others, self._running, joined=joined)
        return not then.late

    def _join(self, one: Waiting) -> None:
        self._left.remove(one)
        self._joined.append(one)
        self._batch.add(one.adapter, one.cache_tokens)
