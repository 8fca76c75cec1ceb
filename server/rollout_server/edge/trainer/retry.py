"""Retry rules for completion requests over HTTP: one function per HTTP API (docs/design.md, D8)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from rollout_server.core.outcome import Category, Failure, FailureClass
from rollout_server.edge.trainer.http_client import (
    ConnectionLost,
    ConnectionRefused,
    HttpClient,
    HttpRequest,
    HttpResponse,
    ResponseTooLarge,
    TargetForbidden,
)
from rollout_server.runtime.errors import RolloutFailed
from rollout_server.runtime.policy import SamplingGate


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Number and timing of retries. All times are in seconds.

    Args:
        count: retries after failures.
        first: delay before the first retry. It doubles with each retry.
        most: maximum delay.
        refused: total time to wait for a completion that is refused with 429 or 503 and Retry-After.
    """

    count: int = 3
    first: float = 1.0
    most: float = 30.0
    refused: float = 300.0

    def wait(self, failures: int) -> float:
        """Return the delay in seconds before the next retry, after `failures` earlier failures."""
        return min(self.most, self.first * 2.0**failures)

    def refused_until(self, deadline: float | None) -> float:
        """Return the monotonic time at which retries after refusals end, if the first refusal is now."""
        until = time.monotonic() + self.refused
        return until if deadline is None else min(deadline, until)


@dataclass(frozen=True, slots=True)
class CompletionFetch:
    """A completion request with its retry limits and the texts for its errors.

    Args:
        request: the HTTP request.
        turn: the turn's number, for messages.
        deadline: the last useful time for a response, on the monotonic clock; None: no limit.
        who: the target's name in messages.
        source: the class of its failures.
        unreachable: advice in the message if the target cannot be reached.
        again_on: further statuses that are retried like 5xx.
        gate: where each request waits while sampling is paused.
    """

    request: HttpRequest
    turn: int
    deadline: float | None = None
    who: str = "the trainer"
    source: FailureClass = FailureClass.TRAINER
    unreachable: str = (
        "check that it is running, and that its URL (server_url, completions.url) names its host and port"
    )
    again_on: tuple[int, ...] = ()
    gate: SamplingGate = field(default_factory=SamplingGate, repr=False)


@dataclass(frozen=True, slots=True)
class Fetched:
    """A response, the number of requests sent for it, and how many earlier ones may have generated a completion too."""

    response: HttpResponse
    attempts: int
    siblings: int = 0


async def fetch_once(client: HttpClient, fetch: CompletionFetch) -> Fetched:
    """Repeat a request only if it provably was not processed: no connection, or 429 or 503 with Retry-After.

    For trainers that verify masks: if a reply is lost, the trainer has already counted the turn. Raises `RolloutFailed`.
    """
    attempts = refusals = 0
    while True:
        attempts += 1
        await fetch.gate.wait()
        try:
            response = await client.post(fetch.request)
        except ConnectionRefused as error:
            refusals += 1
            if refusals >= client.settings.connect_attempts:
                raise RolloutFailed(_unreachable_failure(error, fetch, refusals)) from error
            await asyncio.sleep(0.1 * 2**refusals)
            continue
        except ConnectionLost as error:
            once = ". The turn may have been generated, so it is not retried"
            # In this protocol a timed-out call is a network error; "timeout" means the rollout's own time limit.
            raise RolloutFailed(replace(_lost_failure(error, fetch, once), category=Category.NETWORK)) from error
        except (ResponseTooLarge, TargetForbidden) as error:
            raise RolloutFailed(_unusable_failure(error, fetch)) from error
        if not _is_worth_waiting(response, fetch):
            return Fetched(response, attempts)
        await asyncio.sleep(pause(response, attempts))


async def fetch_with_retries(
    client: HttpClient, fetch: CompletionFetch, retries: RetryPolicy, warn: Callable[[str, str], None] | None = None
) -> Fetched:
    """Retry after 5xx, timeouts and transport errors; also after 429 or 503 with Retry-After, for up to `retries.refused` seconds.

    For the asynchronous HTTP API, whose trainers may recognise a repeated Idempotency-Key. Before each retry of a request that
    may have been processed, `warn` is called with "resampled" and a text. Raises `RolloutFailed`.
    """
    attempts = siblings = failures = 0
    deferred = None  # the fetch, with the deadline for retries after refusals; it starts at the first refusal
    while True:
        attempts += 1
        if await fetch.gate.wait():
            deferred = None  # after a pause, refused requests have all of their time again
        response = await _attempt(client, fetch, attempts)
        if isinstance(response, HttpResponse):
            if response.retry_after is not None and deferred is None:
                deferred = replace(fetch, deadline=retries.refused_until(fetch.deadline))
            if deferred is not None and _is_worth_waiting(response, deferred):
                await asyncio.sleep(pause(response, attempts))
                continue
            # A Retry-After beyond the deadline ends the fetch: the request is not repeated before that time.
            passing = response.status >= 500 or response.status in fetch.again_on
            if not passing or response.retry_after is not None or failures >= retries.count:
                return Fetched(response, attempts, siblings)
        elif failures >= retries.count:
            raise RolloutFailed(response.failure)
        if isinstance(response, HttpResponse) or response.taken:
            why = f"status {response.status}" if isinstance(response, HttpResponse) else "no complete response"
            text = f"turn {fetch.turn}: {why} on attempt {attempts}; retrying, so the turn may be generated twice"
            if warn is not None:
                warn("resampled", text)
            siblings += 1
        await asyncio.sleep(retries.wait(failures))
        failures += 1


@dataclass(frozen=True, slots=True)
class _FailedAttempt:
    """An attempt without a response. `taken` is True if the request may have been processed."""

    failure: Failure
    taken: bool


async def _attempt(client: HttpClient, fetch: CompletionFetch, number: int) -> HttpResponse | _FailedAttempt:
    try:
        return await client.post(fetch.request)
    except ConnectionRefused as error:
        return _FailedAttempt(_unreachable_failure(error, fetch, number), taken=False)
    except ConnectionLost as error:
        return _FailedAttempt(_lost_failure(error, fetch, f", on attempt {number}"), taken=True)
    except (ResponseTooLarge, TargetForbidden) as error:
        raise RolloutFailed(_unusable_failure(error, fetch)) from error


def pause(response: HttpResponse, attempts: int) -> float:
    """Return the seconds until a refused request is sent again: Retry-After, or a minimum that grows with each attempt."""
    return max(response.retry_after or 0.0, min(1.0, 0.05 * 2.0 ** min(attempts, 8)))


def _is_worth_waiting(response: HttpResponse, fetch: CompletionFetch) -> bool:
    wait = response.retry_after
    return wait is not None and (fetch.deadline is None or time.monotonic() + wait < fetch.deadline)


def _unreachable_failure(error: ConnectionRefused, fetch: CompletionFetch, attempts: int) -> Failure:
    text = f"turn {fetch.turn}: {fetch.who} at {fetch.request.host} {error} in {attempts} attempts; {fetch.unreachable}"
    return Failure(Category.NETWORK, text, fetch.turn, source=fetch.source)


def _lost_failure(error: ConnectionLost, fetch: CompletionFetch, then: str) -> Failure:
    if error.timeout:
        text = f"turn {fetch.turn}: timeout: {fetch.who}: {error} (HTTP_CLIENT_TIMEOUT){then}"
        return Failure(Category.TIMEOUT, text, fetch.turn, source=fetch.source)
    text = f"turn {fetch.turn}: {fetch.who} at {fetch.request.host}: {error}{then}"
    return Failure(Category.NETWORK, text, fetch.turn, source=fetch.source)


def _unusable_failure(error: ResponseTooLarge | TargetForbidden, fetch: CompletionFetch) -> Failure:
    text = f"turn {fetch.turn}: {fetch.who} at {fetch.request.host}: {error}"
    return Failure(Category.VALIDATION, text, fetch.turn, source=fetch.source)
