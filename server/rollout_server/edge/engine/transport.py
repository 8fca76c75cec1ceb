"""Send requests to an engine, with retries.

An engine keeps no state between requests. A repeated request generates a second completion and has no other side effect: the
last completion counts, and no later turn builds on a discarded one. Retries follow the rule of the asynchronous HTTP API,
without its warning (D8). A completion that the engine aborted is requested again too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol, TypeVar

from rollout_server.core.outcome import Category, Failure, FailureClass
from rollout_server.edge.engine.errors import (
    COMPLETIONS,
    EndpointNames,
    abort_failure,
    context_lengths,
    engine_failure,
    exceeds_context,
    exceeds_limit,
    is_error,
    refuses_request,
)
from rollout_server.edge.engine.request import LimitNames
from rollout_server.edge.offload import offload_response
from rollout_server.edge.trainer.aborted_parts import ABORTED
from rollout_server.edge.trainer.http_client import HttpClient, HttpRequest, turn_headers
from rollout_server.edge.trainer.retry import CompletionFetch, Fetched, RetryPolicy, fetch_with_retries
from rollout_server.edge.trainer.sampling_parameters import WrongParameter
from rollout_server.runtime.errors import LimitTooLarge, PromptTooLong, RequestRefused, RolloutFailed
from rollout_server.runtime.ports import CompletionRequest

_BROKEN_OFF: Final = (ABORTED, "error")
"""Finish reasons of vLLM and SGLang for an incomplete completion: the engine was paused, updated or had an error."""

_PASSING: Final = (408, 429)


class _ParsedResponse(Protocol):
    @property
    def finish_reason(self) -> str:
        """The engine's `finish_reason`, such as "stop", "length" or "abort"."""


_A = TypeVar("_A", bound=_ParsedResponse)


@dataclass(frozen=True, slots=True)
class Access:
    """The shared HTTP client, retry policy and known parameter names of all engines, and the names for their error messages."""

    client: HttpClient
    retries: RetryPolicy
    limits: LimitNames = field(default_factory=LimitNames)
    names: EndpointNames = COMPLETIONS


async def post(access: Access, url: str, body: bytes, request: CompletionRequest) -> Fetched:
    """Post with retries and return the response, of any status. Raises `RolloutFailed` if there is none."""
    fetch = CompletionFetch(
        HttpRequest(url, body, turn_headers(request), is_known=request.last is not None),
        request.asked.turn,
        request.deadline,
        who="the engine",
        source=FailureClass.ENGINE,
        unreachable=f"check that it is running, and that {access.names.url.strip('`')} names its host and port",
        again_on=_PASSING,
        gate=request.gate,
    )
    return await fetch_with_retries(access.client, fetch, access.retries)


def response_body(
    fetched: Fetched, request: CompletionRequest, hint: str = "", names: EndpointNames = COMPLETIONS
) -> bytes:
    """Return the body of a successful response. Raises `RolloutFailed` for an error; `hint` says what to do about it.

    The error is `PromptTooLong` if the conversation exceeds the model's context, `LimitTooLarge` if `max_tokens` is too large, and
    `RequestRefused` if the engine may accept another request.
    """
    if fetched.response.status != 200 or is_error(fetched.response):
        failure = engine_failure(fetched.response, request.asked.turn, request.credentials.secrets(), hint, names)
        if exceeds_context(fetched.response):
            raise PromptTooLong(failure, *context_lengths(fetched.response))
        if exceeds_limit(fetched.response):
            raise LimitTooLarge(failure)
        raise RequestRefused(failure) if refuses_request(fetched.response) else RolloutFailed(failure)
    return fetched.response.body


async def finished_response(
    access: Access,
    request: CompletionRequest,
    fetch: Callable[[], Awaitable[Fetched]],
    read: Callable[[bytes, int], _A],
    *,
    resumes: bool = False,
) -> tuple[_A, bytes, int]:
    """Return a completion, its body, and the number of requests sent for it. Raises `RolloutFailed`.

    A completion that was aborted is requested again; with `resumes` it is returned.
    """
    turn, attempts, failures = request.asked.turn, 0, 0
    while True:
        fetched = await fetch()
        attempts += fetched.attempts
        body = response_body(fetched, request, names=access.names)
        parsed = await offload_response(partial(read, body, turn), len(body))
        if parsed.finish_reason not in _BROKEN_OFF or (resumes and parsed.finish_reason == ABORTED):
            return parsed, body, attempts
        if failures >= access.retries.count:
            raise RolloutFailed(abort_failure(turn, parsed.finish_reason, attempts))
        await asyncio.sleep(access.retries.wait(failures))
        failures += 1


def encode_request(turn: int, write: Callable[[], bytes]) -> bytes:
    """Return the body that `write` makes. Raises `RolloutFailed` for a parameter of the wrong type."""
    try:
        return write()
    except WrongParameter as error:
        text = f"turn {turn}: {error}; nothing was sent"
        raise RolloutFailed(Failure(Category.VALIDATION, text, turn, source=FailureClass.ENVIRONMENT)) from None
