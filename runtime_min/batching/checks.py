"""Checks of a continuous batch's arguments, and the errors of requests that end before they are done."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import NoReturn

from scute_compile.diagnostics import Code, Diagnostic, ScuteError, fail
from scute_compile.runtime_min.batching.policy import Dropped
from scute_compile.runtime_min.batching.requests import Request, Ticket
from scute_compile.runtime_min.step.layer import LoadedFacts


def check_request(request: Request, *, max_request_tokens: int, vocabulary: int) -> None:
    """Refuse a request that can never be served (SC807), or whose fields have other types (SC703)."""
    _check_types(request)
    prompt, new = len(request.prompt), request.max_new_tokens
    outside = [token for token in request.prompt if not 0 <= token < vocabulary]
    if not prompt or new < 1 or prompt + new > max_request_tokens or outside:
        fail(
            Code.SC807,
            where=_name(request),
            found=f"{prompt} prompt tokens and {new} new tokens"
            + (f", among them token {outside[0]}" if outside else ""),
            expected=f"at least 1 of each, at most {max_request_tokens} together, each token below {vocabulary}",
            next="shorten the prompt, request fewer tokens, or open the batch with more cache_tokens",
        )


def _check_types(request: Request) -> None:
    within = request.first_token_within
    invalid: list[object] = [token for token in request.prompt if not isinstance(token, Integral)]
    if not isinstance(request.max_new_tokens, Integral):
        invalid.append(request.max_new_tokens)
    if within is not None and (not isinstance(within, Real) or math.isnan(within)):
        invalid.append(within)
    if invalid:
        fail(
            Code.SC703,
            where=_name(request),
            found=f"{invalid[0]!r:.40}",
            expected="token ids, counts and seconds",
            next="pass whole numbers as tokens and as max_new_tokens, and a number of seconds or None",
        )


def check_same(name: str, admitted: LoadedFacts, loaded: LoadedFacts) -> None:
    """Refuse to continue a request whose adapter was replaced since it was admitted (SC810)."""
    if admitted is not loaded:
        fail(
            Code.SC810,
            where=name,
            found="another artifact under this name than when the request began",
            expected="the same adapter from its first token to its last",
            next="send the request again",
        )


def check_single_rank(ranks: int) -> None:
    """Refuse a model that several ranks share (SC703): admission depends on each rank's clock."""
    if ranks > 1:
        fail(
            Code.SC703,
            where="a continuous batch",
            found=f"a model that {ranks} ranks share",
            expected="a model on 1 rank: requests are admitted by the clock, and the clocks of ranks differ",
            next="give all ranks the same batches by `forward`, `generate` or `step`",
        )


def check_sizes(
    *, cache_tokens: int, page_size: int, max_num_seqs: int, max_num_batched_tokens: int, model_tokens: int
) -> None:
    """Refuse sizes that contradict each other (SC703); `model_tokens` is the served model's max_num_batched_tokens."""
    if not (1 <= max_num_seqs <= max_num_batched_tokens <= model_tokens and 4 <= page_size <= cache_tokens):
        fail(
            Code.SC703,
            where="a continuous batch",
            found=f"max_num_seqs {max_num_seqs}, max_num_batched_tokens {max_num_batched_tokens}, "
            f"cache_tokens {cache_tokens}, page_size {page_size}",
            expected=f"max_num_seqs <= max_num_batched_tokens <= {model_tokens}, and 4 <= page_size <= cache_tokens",
            next="choose other sizes, or serve the model with a larger max_num_batched_tokens",
        )


def refuse_closed() -> NoReturn:
    """Refuse requests and steps after `close` (SC703)."""
    fail(
        Code.SC703,
        where="a continuous batch",
        found="a call after `close`",
        expected="an open batch",
        next="open another batch",
    )


def late_error(ticket: Ticket, dropped: Dropped, queued: int) -> ScuteError:
    """Return the error of a request that early abort dropped, with `queued` others in the queue (SC808)."""
    within, wait = ticket.request.first_token_within, dropped.first_token - ticket.arrived
    return ScuteError(
        [
            Diagnostic(
                code=Code.SC808,
                where=_name(ticket.request),
                found=f"a first token after {wait:.3f} s, with {queued} others queued",
                expected=f"a first token within {within} s",
                next="send fewer requests, allow more time, or serve on more devices",
            )
        ]
    )


def step_error(request: Request, error: BaseException) -> ScuteError:
    """Return the error of a request whose step raised: the step's own error, or SC813 with it as the cause."""
    if isinstance(error, ScuteError):
        return error
    failed = ScuteError(
        [
            Diagnostic(
                code=Code.SC813,
                where=_name(request),
                found=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}",
                expected="a step without errors",
                next="send the request again; report the error if it comes back",
            )
        ]
    )
    failed.__cause__ = error
    return failed


def _name(request: Request) -> str:
    return f"a request for {request.adapter or 'the base'}"
