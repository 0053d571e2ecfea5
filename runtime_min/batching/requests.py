"""Requests of a continuous batch, and what their owners hear of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from scute_compile.diagnostics import ScuteError


class Phase(StrEnum):
    """Where a request is."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    CANCELLED = "cancelled"
    DROPPED = "dropped"
    """It would have missed its deadline."""
    FAILED = "failed"

    @property
    def is_last(self) -> bool:
        """Whether nothing more comes."""
        return self not in {Phase.WAITING, Phase.RUNNING}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a caller asks for; tokens are chosen greedily."""

    prompt: tuple[int, ...]
    """Token ids, at least one."""
    adapter: str | None = None
    """None: the base alone."""
    max_new_tokens: int = 64
    first_token_within: float | None = None
    """Seconds from `submit`; heeded where early abort is on."""


@dataclass(slots=True, kw_only=True, eq=False)
class Ticket:
    """A request that was submitted; the batch keeps it up to date."""

    key: int
    request: Request
    arrived: float
    """On the batch's clock."""
    phase: Phase = Phase.WAITING
    tokens: list[int] = field(default_factory=list)
    """Made so far; one that ends the request is the last of them."""
    first_token: float | None = None
    """When it came, on the batch's clock."""
    error: ScuteError | None = None
    """Why it was dropped or failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """What one step brought to one request."""

    ticket: Ticket
    tokens: tuple[int, ...] = ()
    """The new ones."""
    phase: Phase
    """After the step."""
