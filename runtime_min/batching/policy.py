"""Admission: which queued requests join the next step, and which are dropped.

The decision is a pure function of the queue, the batch, the clock and a forecast. It follows S-LoRA
(arXiv:2311.03285): adapter clustering and early abort.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scute_compile.diagnostics import Code, fail
from scute_compile.runtime_min.batching.forecast import (
    BatchLimits,
    BatchLoad,
    Forecast,
    QueuedRequest,
    RunningRequest,
    ServiceTimes,
    forecast,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Scheduling options of a queue. By default requests are served in the order of arrival, and none is dropped."""

    patience: float = 0.0
    """Clustering: requests whose adapter is in the batch may be scheduled ahead of others for up to that many seconds.
    A request that has waited longer is served before all later ones, so none starves."""
    early_abort: ServiceTimes | None = None
    """Service times by which requests that can't meet their deadline are dropped; None to drop none."""

    def __post_init__(self) -> None:
        if not self.patience >= 0:
            fail(
                Code.SC703,
                where="patience",
                found=f"{self.patience} s",
                expected="at least 0 s",
                next="pass for how many seconds others may be scheduled ahead of a request; 0 for never",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """A request that can't meet its deadline."""

    key: int
    first_token: float
    """Forecast time of its first token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The decision before one step; all other requests stay queued."""

    admitted: tuple[int, ...] = ()
    """Keys, in the order of admission."""
    dropped: tuple[Dropped, ...] = ()
    prefetch: tuple[str, ...] = ()
    """Adapters of the requests that stay queued, each once, in the order of arrival."""


def decide(
    policy: Policy,
    limits: BatchLimits,
    now: float,
    queued: Iterable[QueuedRequest],
    running: Sequence[RunningRequest],
) -> Decision:
    """Decide which requests join the next step, and which are dropped.

    - The batch never exceeds its limits.
    - No request is scheduled ahead of an older one that has waited for the policy's patience. Before that, requests
      whose adapter is in the batch are scheduled first, and requests that fit are scheduled ahead of older requests
      that don't.
    - With early abort, a request is dropped if the forecast of its first token is after its deadline. The forecast
      serves requests in the order of arrival, and dropped requests don't delay later ones; so under overload the
      newest requests are dropped. No request is scheduled ahead of others if any of them would then miss its deadline.

    Args:
        policy: The scheduling options.
        limits: The largest load of the batch.
        now: The clock, seconds.
        queued: The queue, in any order.
        running: The batch, including the requests that already join its next step.
    """
    queue = sorted(queued, key=lambda request: (request.arrived, request.key))
    plan: Forecast | None = None
    dropped: tuple[Dropped, ...] = ()
    if policy.early_abort is not None:
        plan = forecast(policy.early_abort, limits, now, queue, running)
        dropped = tuple(Dropped(key=key, first_token=time) for key, time in plan.late.items())
        queue = [request for request in queue if request.key not in plan.late]
    admitted = _Admission(policy, limits, now, queue, running, plan).run()
    left = [request.adapter for request in queue if request.key not in admitted and request.adapter is not None]
    return Decision(admitted=tuple(admitted), dropped=dropped, prefetch=tuple(dict.fromkeys(left)))


class _Admission:
    """Admits requests to one step."""

    def __init__(
        self,
        policy: Policy,
        limits: BatchLimits,
        now: float,
        queue: Sequence[QueuedRequest],
        running: Sequence[RunningRequest],
        plan: Forecast | None,
    ) -> None:
        self._policy, self._limits, self._now, self._running = policy, limits, now, running
        self._plan = plan
        self._queue = list(queue)
        self._admitted: list[QueuedRequest] = []
        self._load = BatchLoad.of(running)

    def run(self) -> list[int]:
        """Return the keys of the admitted requests."""
        if self._admit_in_order():
            self._admit_clustered()
        return [request.key for request in self._admitted]

    def _admit_in_order(self) -> bool:
        """Admit the requests that have waited at least `patience`, in order; return whether all were admitted."""
        patience = self._policy.patience
        for request in [request for request in self._queue if self._now - request.arrived >= patience]:
            planned = self._plan is None or request.key in self._plan.next_step
            if not (planned and self._limits.admit(self._load, request)):
                return False
            self._admit(request)
        return True

    def _admit_clustered(self) -> None:
        """Admit other requests: those whose adapter is in the batch, then the oldest other one, and so on."""
        skipped: set[int] = set()
        while True:
            candidates = [
                request
                for request in self._queue
                if request.key not in skipped and self._limits.admit(self._load, request)
            ]
            if not candidates:
                return
            clustered = (request for request in candidates if self._load.has(request.adapter))
            request = next(clustered, candidates[0])
            if self._keeps_deadlines(request):
                self._admit(request)
            else:
                skipped.add(request.key)

    def _keeps_deadlines(self, request: QueuedRequest) -> bool:
        """Return whether no request misses its deadline if `request` is admitted now."""
        if self._policy.early_abort is None:
            return True
        admitted = [*self._admitted, request]
        others = [other for other in self._queue if other.key != request.key]
        plan = forecast(self._policy.early_abort, self._limits, self._now, others, self._running, admitted=admitted)
        return not plan.late

    def _admit(self, request: QueuedRequest) -> None:
        self._queue.remove(request)
        self._admitted.append(request)
        self._load.add(request.adapter, request.cache_tokens)
