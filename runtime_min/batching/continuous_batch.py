"""Iteration-level batching: requests for different adapters join and leave between the steps of one batch."""

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
    broken_off,
    check_alone,
    check_batch_sizes,
    check_request,
    check_same,
    refuse_closed,
    too_late,
)
from scute_compile.runtime_min.batching.forecast import Capacity, Running, ServiceTimes, Stopwatch, Waiting
from scute_compile.runtime_min.batching.policy import Decision, Policy, decide
from scute_compile.runtime_min.batching.requests import Event, Phase, Request, Ticket
from scute_compile.runtime_min.batching.transformers_bridge import CacheSize, Progress, TransformersBatch
from scute_compile.runtime_min.model.served_model import ServedModel
from scute_compile.runtime_min.pool.admission import check_known
from scute_compile.runtime_min.step.writer import LoadedFacts

FIRST_COME = Policy()


@dataclass(slots=True, kw_only=True, eq=False)
class _Member:
    """A request that was admitted."""

    ticket: Ticket
    facts: LoadedFacts | None
    """Of its adapter, as it was then."""
    inside: bool = False
    """Whether it takes part in steps."""
    fetched: bool = False
    """Whether its adapter had a step's time to come in."""
    read: int = 0
    """Tokens of its own that steps have read."""


class ContinuousBatch:
    """Serves a changing set of requests, one step after the other.

    `submit` and `cancel` may be called at any time and from any thread; everything else from the model's own thread.
    Adapters are loaded, replaced and unloaded between steps. While a batch is open, nobody else calls the model.
    """

    def __init__(
        self,
        served: ServedModel,
        *,
        cache_tokens: int = 8192,
        requests: int = 32,
        step_tokens: int = 512,
        page: int = 16,
        policy: Policy = FIRST_COME,
        ends: Sequence[int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Allocate the cache.

        Args:
            served: The model with its adapters.
            cache_tokens: Tokens of all requests that run, prompts and answers; allocated at once (`cache_bytes`).
                Without a flash kernel, a mask of `step_tokens x (cache_tokens + step_tokens)` values stands beside it.
            requests: Most requests that run.
            step_tokens: Most tokens of a step; longer prompts are read in several.
            page: Tokens of a page of the cache; a request takes whole pages, for all that it may become.
            policy: Who joins, who is dropped.
            ends: Tokens that end a request; None: the model's own.
            clock: Seconds.

        Raises:
            ScuteError: SC703 (sizes that don't go together, or don't fit the memory; a model that ranks share), SC809
                (a model that can't be batched this way).
        """
        check_alone(served.ranks.size)
        check_batch_sizes(
            cache_tokens=cache_tokens,
            requests=requests,
            step_tokens=step_tokens,
            page=page,
            max_num_batched_tokens=served.max_num_batched_tokens,
        )
        self._served, self._policy, self._clock, self._page = served, policy, clock, page
        size = CacheSize(tokens=cache_tokens, page=page, requests=requests, step_tokens=step_tokens)
        self._steps = TransformersBatch(served, size, _ends(served.model) if ends is None else ends)
        self._capacity = Capacity(
            requests=requests,
            cache_tokens=self._whole_pages(cache_tokens),
            max_adapters=served.pool.stats().max_adapters,
            fits=served.pool.fits,
        )
        self._lock = Lock()
        self._next_key = 1
        self._inbox: deque[Ticket] = deque()
        self._cancelled: set[int] = set()
        self._queue: dict[int, Ticket] = {}
        self._members: dict[int, _Member] = {}
        self._events: list[Event] = []
        self._watch = Stopwatch()
        self._closed = False

    @property
    def cache_bytes(self) -> int:
        """Bytes of the cache, whatever it holds."""
        return self._steps.cache_bytes

    @property
    def longest(self) -> int:
        """Most tokens of one request, prompt and answer."""
        model: Any = self._served.model
        limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        return min(self._steps.longest, limit if isinstance(limit, int) else self._steps.longest)

    @property
    def measured(self) -> ServiceTimes | None:
        """What steps took so far, for early abort; None before there were steps with and without prompts."""
        return self._watch.times

    @property
    def open(self) -> int:
        """Requests that wait or run."""
        return len(self._inbox) + len(self._queue) + len(self._members)

    def submit(self, request: Request) -> Ticket:
        """Take a request; it joins when there is room.

        Raises:
            ScuteError: SC802 (no such adapter), SC807 (it can never be served), SC703 (no request, or the batch was
                closed); nobody else hears of it.
        """
        if self._closed:
            refuse_closed()
        self._check(request)
        with self._lock:
            ticket = Ticket(key=self._next_key, request=request, arrived=self._clock())
            self._next_key += 1
            self._inbox.append(ticket)
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Let a request go before the next step, wherever it is; its tokens so far stay."""
        with self._lock:
            self._cancelled.add(ticket.key)

    def run(self) -> Iterator[Event]:
        """Run steps until nobody waits or runs, and yield what each brings."""
        while self.open:
            yield from self.step()

    def step(self) -> tuple[Event, ...]:
        """Let requests leave and join, run one step, and return what it brought.

        Where the model breaks off a step, the requests that took part fail with what it raised: the cache holds a part
        of what they need. Those that wait are served from the next step on.
        """
        if self._closed:
            refuse_closed()
        self._take_in()
        self._turn_out()
        decision = self._decide()
        self._admit(decision)
        self._join()
        self._hold([member.ticket for member in self._members.values() if member.inside])
        self._run(decision.upcoming)
        events, self._events = tuple(self._events), []
        return events

    def close(self) -> None:
        """Cancel what is left, free the cache, and give the model its attention back."""
        if self._closed:
            return
        self._take_in()
        self._closed = True
        for key in [*self._queue, *self._members]:
            self._end(key, Phase.CANCELLED)
        self._steps.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _whole_pages(self, tokens: int) -> int:
        return -(-tokens // self._page) * self._page

    def _check(self, request: Request) -> None:
        if request.adapter is not None:
            check_known([request.adapter], self._served.loaded)
        check_request(request, longest=self.longest, vocabulary=self._steps.vocabulary)

    def _take_in(self) -> None:
        with self._lock:
            arrived, self._inbox = self._inbox, deque()
            cancelled, self._cancelled = self._cancelled, set()
        self._queue |= {ticket.key: ticket for ticket in arrived}
        for key in cancelled & (self._queue.keys() | self._members.keys()):
            self._end(key, Phase.CANCELLED)

    def _turn_out(self) -> None:
        """End requests whose adapter went away, or was replaced under them."""
        members = [(member.ticket, member.facts) for member in self._members.values()]
        for ticket, facts in [*((ticket, None) for ticket in self._queue.values()), *members]:
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
        waiting = [self._waiting(ticket) for ticket in self._queue.values()]
        running = [self._running(member) for member in self._members.values()]
        capacity = replace(self._capacity, fits=cache(self._served.pool.fits))
        return decide(self._policy, capacity, self._clock(), waiting, running)

    def _waiting(self, ticket: Ticket) -> Waiting:
        request = ticket.request
        within = request.first_token_within
        return Waiting(
            key=ticket.key,
            adapter=request.adapter,
            prompt_tokens=len(request.prompt),
            new_tokens=request.max_new_tokens,
            cache_tokens=self._cache_tokens(request),
            arrived=ticket.arrived,
            deadline=inf if within is None else ticket.arrived + within,
        )

    def _running(self, member: _Member) -> Running:
        ticket, request = member.ticket, member.ticket.request
        return Running(
            key=ticket.key,
            adapter=request.adapter,
            cache_tokens=self._cache_tokens(request),
            prompt_left=0 if ticket.tokens else len(request.prompt) - member.read,
            new_left=request.max_new_tokens - len(ticket.tokens),
        )

    def _admit(self, decision: Decision) -> None:
        for late in decision.dropped:
            self._end(late.key, Phase.DROPPED, too_late(self._queue[late.key], late, len(self._queue) - 1))
        for key in decision.admitted:
            ticket = self._queue.pop(key)
            name = ticket.request.adapter
            self._members[key] = _Member(ticket=ticket, facts=None if name is None else self._served.loaded[name])
            ticket.phase = Phase.RUNNING
        if self._queue and not self._members:
            # nothing runs and still the oldest has no room, so something else holds the pool
            oldest = next(iter(self._queue.values()))
            self._hold([oldest])

    def _join(self) -> None:
        """Let members into the step; an adapter in host memory comes in during a step of the others."""
        resident = self._served.pool.resident
        idle = not any(member.inside for member in self._members.values())
        for key, member in self._members.items():
            request = member.ticket.request
            here = request.adapter is None or request.adapter in resident
            if not member.inside and (here or idle or member.fetched):
                member.inside = True
                self._steps.join(key, request.prompt, request.max_new_tokens)
            member.fetched = True

    def _hold(self, tickets: Sequence[Ticket]) -> None:
        """Bring the adapters of these in; while they don't fit, end the newest."""
        left = list(tickets)
        while left:
            try:
                self._served.pool.ensure(one.request.adapter for one in left if one.request.adapter is not None)
            except ScuteError as error:
                newest = max((one for one in left if one.request.adapter is not None), key=lambda one: one.key)
                left.remove(newest)
                self._end(newest.key, Phase.FAILED, error)
            else:
                return

    def _run(self, upcoming: Sequence[str]) -> None:
        inside = {key: member for key, member in self._members.items() if member.inside}
        if not inside:
            return
        coming = [member.ticket.request.adapter for member in self._members.values() if not member.inside]
        wanted = dict.fromkeys(name for name in (*coming, *upcoming) if name is not None)
        ahead = tuple(wanted)[: self._capacity.max_adapters]
        start = self._clock()
        try:
            progress = self._steps.step(
                {key: member.ticket.request.adapter for key, member in inside.items()},
                lambda: self._served.pool.prefetch(ahead),
            )
        except BaseException as error:
            for key, member in inside.items():
                self._end(key, Phase.FAILED, broken_off(member.ticket.request, error))
            if not isinstance(error, Exception):  # the process is being stopped
                raise
            return
        now = self._clock()
        prompts = sum(one.read for key, one in progress.items() if not inside[key].ticket.tokens)
        self._watch.add(now - start, prompts)
        for key, one in progress.items():
            self._note(inside[key], one, now)

    def _note(self, member: _Member, progress: Progress, now: float) -> None:
        ticket = member.ticket
        member.read += progress.read
        new = progress.tokens[len(ticket.tokens) :]
        if not new:
            return
        ticket.first_token = now if ticket.first_token is None else ticket.first_token
        ticket.tokens.extend(new)
        if progress.finished:
            del self._members[ticket.key]
            ticket.phase = Phase.DONE
        self._events.append(Event(ticket=ticket, tokens=new, phase=ticket.phase))

    def _end(self, key: int, phase: Phase, error: ScuteError | None = None) -> None:
        member = self._members.pop(key, None)
        if member is not None and member.inside:
            self._steps.leave(key)
        ticket = self._queue.pop(key) if member is None else member.ticket
        ticket.phase, ticket.error = phase, error
        self._events.append(Event(ticket=ticket, phase=phase))

    def _cache_tokens(self, request: Request) -> int:
        return self._whole_pages(len(request.prompt) + request.max_new_tokens)


def _ends(model: Any) -> tuple[int, ...]:  # noqa: ANN401 - transformers' own class, unannotated
    """Return the tokens that end an answer, as `generate` takes them."""
    said = model.generation_config.eos_token_id
    return () if said is None else tuple(said) if isinstance(said, (list, tuple)) else (said,)
