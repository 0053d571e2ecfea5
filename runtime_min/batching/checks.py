"""What a continuous batch refuses, and what it says of requests that end before they are done."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import NoReturn

from scute_compile.diagnostics import Code, Diagnostic, ScuteError, fail
from scute_compile.runtime_min.batching.policy import Dropped
from scute_compile.runtime_min.batching.requests import Request, Ticket
from scute_compile.runtime_min.step.layer import LoadedFacts


def check_request(request: Request, *, longest: int, vocabulary: int) -> None:
    """Refuse a request that can never be served (SC807), and one of another form than `Request` says (SC703)."""
    _check_form(request)
    prompt, new = len(request.prompt), request.max_new_tokens
    foreign = [token for token in request.prompt if not 0 <= token < vocabulary]
    if not prompt or new < 1 or prompt + new > longest or foreign:
        fail(
            Code.SC807,
            where=_about(request),
            found=f"{prompt} tokens, and {new} to come" + (f"; among them {foreign[0]}" if foreign else ""),
            expected=f"at least one of each, {longest} at most together, each below {vocabulary}",
            next="shorten the prompt, ask for fewer tokens, or open the batch with more cache_tokens",
        )


def _check_form(request: Request) -> None:
    within = request.first_token_within
    odd: list[object] = [token for token in request.prompt if not isinstance(token, Integral)]
    if not isinstance(request.max_new_tokens, Integral):
        odd.append(request.max_new_tokens)
    if within is not None and (not isinstance(within, Real) or math.isnan(within)):
        odd.append(within)
    if odd:
        fail(
            Code.SC703,
            where=_about(request),
            found=f"{odd[0]!r:.40}",
            expected="token ids, counts and seconds",
            next="pass whole numbers as tokens and as max_new_tokens, and a number of seconds or None",
        )


def check_same(name: str, then: LoadedFacts, now: LoadedFacts) -> None:
    """Refuse to go on with an adapter that was replaced since a request began (SC810)."""
    if then is not now:
        fail(
            Code.SC810,
            where=name,
            found="another artifact under this name than when the request began",
            expected="the same adapter from its first token to its last",
            next="send the request again",
        )


def check_alone(ranks: int) -> None:
    """Refuse a model that several ranks share (SC703): who joins depends on each rank's clock."""
    if ranks > 1:
        fail(
            Code.SC703,
            where="a continuous batch",
            found=f"a model that {ranks} ranks share",
            expected="a model of one rank: requests join by the clock, and ranks' clocks differ",
            next="give all ranks the same batches by `forward`, `generate` or `step`",
        )


def check_batch_sizes(
    *, cache_tokens: int, requests: int, step_tokens: int, page: int, max_num_batched_tokens: int
) -> None:
    """Refuse sizes that don't go together (SC703); `max_num_batched_tokens` is the served model's."""
    if not (1 <= requests <= step_tokens <= max_num_batched_tokens and 4 <= page <= cache_tokens):
        fail(
            Code.SC703,
            where="a continuous batch",
            found=f"{requests} requests, {step_tokens} tokens a step, {cache_tokens} tokens of cache, {page} a page",
            expected=f"requests <= step_tokens <= {max_num_batched_tokens}, and 4 <= page <= cache_tokens",
            next="choose other sizes, or wrap the model with a larger max_num_batched_tokens",
        )


def refuse_closed() -> NoReturn:
    """Refuse requests and steps of a batch that was closed (SC703)."""
    fail(
        Code.SC703,
        where="a continuous batch",
        found="a call after `close`",
        expected="an open batch",
        next="open another one",
    )


def too_late(ticket: Ticket, late: Dropped, others: int) -> ScuteError:
    """Say that a request was dropped, with how many others wait (SC808)."""
    within, wait = ticket.request.first_token_within, late.expected - ticket.arrived
    return ScuteError(
        [
            Diagnostic(
                code=Code.SC808,
                where=_about(ticket.request),
                found=f"a first token after {wait:.3f} s, with {others} others waiting",
                expected=f"one within {within} s",
                next="send fewer requests, allow more time, or serve on more devices",
            )
        ]
    )


def broken_off(request: Request, error: BaseException) -> ScuteError:
    """Say that a request ended with the step that it was in (SC813, or what refused the step)."""
    if isinstance(error, ScuteError):
        return error
    broken = ScuteError(
        [
            Diagnostic(
                code=Code.SC813,
                where=_about(request),
                found=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}",
                expected="a step that ends",
                next="send the request again; report the fault where it comes back",
            )
        ]
    )
    broken.__cause__ = error
    return broken


def _about(request: Request) -> str:
    return f"a request for {request.adapter or 'the base'}"
