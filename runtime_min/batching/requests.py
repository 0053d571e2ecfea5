"""Requests of a continuous batch: what a caller submits, and the states and events that it gets back."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from scute_compile.diagnostics import ScuteError
from scute_compile.runtime_min.model.checks import BASE


class Phase(StrEnum):
    """The phase of a request."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    CANCELLED = "cancelled"
    DROPPED = "dropped"
    """Dropped by early abort, because it would have missed its deadline."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt to continue, with greedy decoding."""

    prompt: tuple[int, ...]
    """Token ids, at least one."""
    adapter_name: str | None = None
    """The name of a loaded adapter; None or `"__base__"` for the base alone."""
    max_new_tokens: int = 64
    first_token_within: float | None = None
    """Deadline of the first token, in seconds from `submit`; only early abort uses it."""

    @property
    def adapter(self) -> str | None:
        """The name of the adapter; None for the base."""
        return None if self.adapter_name == BASE else self.adapter_name


@dataclass(slots=True, kw_only=True, eq=False)
class Ticket:
    """The state of a submitted request, which the batch updates."""

    key: int
    """Unique in the batch; requests that were submitted earlier have smaller keys."""
    request: Request
    arrived: float
    """Time of `submit` on the batch's clock."""
    phase: Phase = Phase.WAITING
    tokens: list[int] = field(default_factory=list)
    """Generated tokens so far; a token that ends the request is the last one."""
    first_token: float | None = None
    """Time of the first token on the batch's clock."""
    error: ScuteError | None = None
    """Why the request was dropped or failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """The result of one step for one request."""

    ticket: Ticket
    tokens: tuple[int, ...] = ()
    """The tokens that the step generated."""
    phase: Phase
    """The phase after the step."""
