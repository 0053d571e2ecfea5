"""Iteration-level batching: requests for different adapters join and leave one batch between its steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import inf
from threading import Lock
from typing import Any, Self

from scute_compile.diagnostics import ScuteError
from scute_compile.runtime_min.batching.checks import (
    check_request,
    check_same,
    check_single_rank,
    check_sizes,
    late_error,
    refuse_closed,
    step_error,
)
from scute_compile.runtime_min.batching.forecast import (
    BatchLimits,
    QueuedRequest,
    RunningRequest,
    ServiceTimes,
    StepTimer,
)
from scute_compile.runtime_min.batching.policy import Decision, Policy, decide
from scute_compile.runtime_min.batching.requests import Event, Phase, Request, Ticket
from scute_compile.runtime_min.batching.transformers_bridge import CacheSize, Progress, TransformersBatch
from scute_compile.runtime_min.model.served_model import ServedModel
from scute_compile.runtime_min.pool.admission import check_known
from scute_compile.runtime_min.step.layer import LoadedFacts

_DEFAULT_POLICY = Policy()


@dataclass(slots=True, kw_only=True, eq=False)
class _Admitted:
    """An admitted request."""

    ticket: Ticket
    facts: LoadedFacts | None
    """Facts about its adapter when it was admitted; None for the base."""
    in_steps: bool = False
    """Whether it takes part in steps."""
    prefetched: bool = False
    """Whether a step has run since it was admitted, during which its adapter was prefetched."""
    read: int = 0
    """Number of its tokens that steps have read."""


class ContinuousBatch:
    """Serves a changing set of requests, step by step.

    `submit` and `cancel` may be called at any time from any thread; all other methods, only from the model's thread.
    Adapters may be loaded, replaced and deleted between steps. While a batch is open, the model must not be called
    in any other way.

    Args:
        served: The model with its adapters.
        cache_tokens: Positions of the KV cache, for the prompts and answers of all running requests; allocated at once
            (`cache_bytes`). Without a flash kernel, steps also need a mask of
            `max_num_batched_tokens x (cache_tokens + max_num_batched_tokens)` values.
        max_num_seqs: Largest number of running requests.
        max_num_batched_tokens: Largest number of tokens of a step; longer prompts are read in several steps.
        page_size: Tokens of a page of the cache; whole pages are reserved for the greatest length of a request.
        policy: Scheduling options.
        eos_token_ids: Tokens that end a request; None for those of the model's generation config.
        clock: Returns seconds.

    Raises:
        ScuteError: SC703 (sizes that contradict each other or don't fit into memory, or a model that ranks share),
            SC809 (a model that transformers can't batch this way).
    """

    def __init__(
        self,
        served: ServedModel,
        *,
        cache_tokens: int = 8192,
        max_num_seqs: int = 32,
        max_num_batched_tokens: int = 512,
        page_size: int = 16,
        policy: Policy = _DEFAULT_POLICY,
        eos_token_ids: Sequence[int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_single_rank(served.ranks.size)
        check_sizes(
            cache_tokens=cache_tokens,
            page_size=page_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            model_tokens=served.max_num_batched_tokens,
        )
        self._served, self._policy, self._clock, self._page_size = served, policy, clock, page_size
        size = CacheSize(
            tokens=cache_tokens,
            page_size=page_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
        )
        eos = _eos_token_ids(served.model) if eos_token_ids is None else eos_token_ids
        self._steps = TransformersBatch(served, size, eos)
        self._limits = BatchLimits(
            max_num_seqs=max_num_seqs,
            cache_tokens=self._whole_pages(cache_tokens),
            max_adapters=served.pool.stats().max_adapters,
            fits=served.pool.fits,
        )
        self._lock = Lock()
        self._next_key = 1
        self._submitted: deque[Ticket] = deque()
        self._cancelled: set[int] = set()
        self._queue: dict[int, Ticket] = {}
        self._admitted: dict[int, _Admitted] = {}
        self._events: list[Event] = []
        self._timer = StepTimer()
        self._closed = False

    @property
    def cache_bytes(self) -> int:
        """Bytes of the KV cache."""
        return self._steps.cache_bytes

    @property
    def max_request_tokens(self) -> int:
        """Largest number of tokens of one request, prompt and answer together."""
        model: Any = self._served.model
        positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        cached = self._steps.max_request_tokens
        return min(cached, positions if isinstance(positions, int) else cached)

    @property
    def service_times(self) -> ServiceTimes | None:
        """Measured service times, for early abort; None before there were steps with and without prompts."""
        return self._timer.times

    @property
    def num_unfinished(self) -> int:
        """Number of requests that wait or run."""
        return len(self._submitted) + len(self._queue) + len(self._admitted)

    def submit(self, request: Request) -> Ticket:
        """Queue a request; it joins the batch when the policy admits it.

        Raises:
            ScuteError: SC802 (no such adapter), SC807 (it can never be served), SC703 (fields of other types, or a
                closed batch). Other requests are not affected.
        """
        if self._closed:
            refuse_closed()
        self._check(request)
        with self._lock:
            ticket = Ticket(key=self._next_key, request=request, arrived=self._clock())
            self._next_key += 1
            self._submitted.append(ticket)
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """End a request before the next step; its tokens so far stay."""
        with self._lock:
            self._cancelled.add(ticket.key)

    def run(self) -> Iterator[Event]:
        """Run steps until no request waits or runs, and yield the events of each."""
        while self.num_unfinished:
            yield from self.step()

    def step(self) -> tuple[Event, ...]:
        """Admit and end requests, run one step, and return its events.

        Where the model raises in a step, the requests of the step fail with that error, because their tokens in the
        cache are incomplete. Queued requests are served from the next step on.
        """
        if self._closed:
            refuse_closed()
        self._collect()
        self._fail_changed_adapters()
        decision = self._decide()
        self._admit(decision)
        self._join()
        self._ensure_adapters([admitted.ticket for admitted in self._admitted.values() if admitted.in_steps])
        self._run(decision.prefetch)
        events, self._events = tuple(self._events), []
        return events

    def close(self) -> None:
        """Cancel all requests, free the cache, and restore the model's attention."""
        if self._closed:
            return
        self._collect()
        self._closed = True
        for key in [*self._queue, *self._admitted]:
            self._end(key, Phase.CANCELLED)
        self._steps.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _whole_pages(self, tokens: int) -> int:
        return -(-tokens // self._page_size) * self._page_size

    def _check(self, request: Request) -> None:
        if request.adapter is not None:
            check_known([request.adapter], self._served.loaded)
        check_request(request, max_request_tokens=self.max_request_tokens, vocabulary=self._steps.vocabulary)

    def _collect(self) -> None:
        """Queue the requests that were submitted since the last step, and end those that were cancelled."""
        with self._lock:
            submitted, self._submitted = self._submitted, deque()
            cancelled, self._cancelled = self._cancelled, set()
        self._queue |= {ticket.key: ticket for ticket in submitted}
        for key in cancelled & (self._queue.keys() | self._admitted.keys()):
            self._end(key, Phase.CANCELLED)

    def _fail_changed_adapters(self) -> None:
        """Fail requests whose adapter was deleted, or was replaced after they were admitted."""
        admitted = [(member.ticket, member.facts) for member in self._admitted.values()]
        for ticket, facts in [*((ticket, None) for ticket in self._queue.values()), *admitted]:
            name = ticket.request.adapter
            if name is None:
                continue
            try:
                check_known([name], self._served.loaded)
                if facts is not None:
                    check_same(name, facts, self._served.loaded[name])
            except ScuteError as error:
                self._end(ticket.key, Phase.FAILED, error)

    def _decide(self) -> Decision:
        if not self._queue:
            return Decision()
        queued = [self._queued(ticket) for ticket in self._queue.values()]
        running = [self._running(admitted) for admitted in self._admitted.values()]
        limits = replace(self._limits, fits=cache(self._served.pool.fits))
        return decide(self._policy, limits, self._clock(), queued, running)

    def _queued(self, ticket: Ticket) -> QueuedRequest:
        request = ticket.request
        within = request.first_token_within
        return QueuedRequest(
            key=ticket.key,
            adapter=request.adapter,
            prompt_tokens=len(request.prompt),
            new_tokens=request.max_new_tokens,
            cache_tokens=self._cache_tokens(request),
            arrived=ticket.arrived,
            deadline=inf if within is None else ticket.arrived + within,
        )

    def _running(self, admitted: _Admitted) -> RunningRequest:
        ticket, request = admitted.ticket, admitted.ticket.request
        return RunningRequest(
            key=ticket.key,
            adapter=request.adapter,
            cache_tokens=self._cache_tokens(request),
            prompt_left=0 if ticket.tokens else len(request.prompt) - admitted.read,
            new_left=request.max_new_tokens - len(ticket.tokens),
        )

    def _admit(self, decision: Decision) -> None:
        for dropped in decision.dropped:
            error = late_error(self._queue[dropped.key], dropped, len(self._queue) - 1)
            self._end(dropped.key, Phase.DROPPED, error)
        for key in decision.admitted:
            ticket = self._queue.pop(key)
            name = ticket.request.adapter
            self._admitted[key] = _Admitted(ticket=ticket, facts=None if name is None else self._served.loaded[name])
            ticket.phase = Phase.RUNNING
        if self._queue and not self._admitted:
            # nothing runs, but the oldest request has no room: other leases hold adapters in the pool
            oldest = next(iter(self._queue.values()))
            self._ensure_adapters([oldest])

    def _join(self) -> None:
        """Add admitted requests to the steps; an adapter in host memory is first prefetched during a step of others."""
        resident = self._served.pool.resident
        idle = not any(admitted.in_steps for admitted in self._admitted.values())
        for key, admitted in self._admitted.items():
            request = admitted.ticket.request
            on_device = request.adapter is None or request.adapter in resident
            if not admitted.in_steps and (on_device or idle or admitted.prefetched):
                admitted.in_steps = True
                self._steps.join(key, request.prompt, request.max_new_tokens)
            admitted.prefetched = True

    def _ensure_adapters(self, tickets: Sequence[Ticket]) -> None:
        """Make the adapters of these requests resident; while they don't fit, fail the newest request."""
        remaining = list(tickets)
        while remaining:
            with_adapter = [ticket for ticket in remaining if ticket.request.adapter is not None]
            try:
                self._served.pool.ensure(
                    ticket.request.adapter for ticket in with_adapter if ticket.request.adapter is not None
                )
            except ScuteError as error:
                newest = max(with_adapter, key=lambda ticket: ticket.key)
                remaining.remove(newest)
                self._end(newest.key, Phase.FAILED, error)
            else:
                return

    def _run(self, prefetch: Sequence[str]) -> None:
        in_steps = {key: admitted for key, admitted in self._admitted.items() if admitted.in_steps}
        if not in_steps:
            return
        joining = [admitted.ticket.request.adapter for admitted in self._admitted.values() if not admitted.in_steps]
        wanted = dict.fromkeys(name for name in (*joining, *prefetch) if name is not None)
        names = tuple(wanted)[: self._limits.max_adapters]
        start = self._clock()
        try:
            progress = self._steps.step(
                {key: admitted.ticket.request.adapter for key, admitted in in_steps.items()},
                lambda: self._served.pool.prefetch(names),
            )
        except BaseException as error:
            for key, admitted in in_steps.items():
                self._end(key, Phase.FAILED, step_error(admitted.ticket.request, error))
            if not isinstance(error, Exception):  # the process is being stopped
                raise
            return
        now = self._clock()
        self._timer.add(
            now - start, sum(step.read for key, step in progress.items() if not in_steps[key].ticket.tokens)
        )
        for key, step in progress.items():
            self._record(in_steps[key], step, now)

    def _record(self, admitted: _Admitted, progress: Progress, now: float) -> None:
        ticket = admitted.ticket
        admitted.read += progress.read
        new = progress.tokens[len(ticket.tokens) :]
        if not new:
            return
        ticket.first_token = now if ticket.first_token is None else ticket.first_token
        ticket.tokens.extend(new)
        if progress.finished:
            del self._admitted[ticket.key]
            ticket.phase = Phase.DONE
        self._events.append(Event(ticket=ticket, tokens=new, phase=ticket.phase))

    def _end(self, key: int, phase: Phase, error: ScuteError | None = None) -> None:
        admitted = self._admitted.pop(key, None)
        if admitted is not None and admitted.in_steps:
            self._steps.leave(key)
        ticket = self._queue.pop(key) if admitted is None else admitted.ticket
        ticket.phase, ticket.error = phase, error
        self._events.append(Event(ticket=ticket, phase=phase))

    def _cache_tokens(self, request: Request) -> int:
        return self._whole_pages(len(request.prompt) + request.max_new_tokens)


def _eos_token_ids(model: Any) -> tuple[int, ...]:  # noqa: ANN401 - transformers' own class, unannotated
    """Return the tokens that end an answer in `generate`."""
    eos = model.generation_config.eos_token_id
    return () if eos is None else tuple(eos) if isinstance(eos, (list, tuple)) else (eos,)
