"""When a completion is asked for again. One rule for each dialect (D8, docs/design.md)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from rollout_server.core.outcome import Category, Failure
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


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and how fast a completion is asked for again; seconds.

    Args:
        count: retries after failures.
        first, most: the wait before the first retry, which doubles with each one, and the longest wait.
        refused: how long a completion is waited for that is refused with 429 or 503 and Retry-After, all of its refusals together.
    """

    count: int = 3
    first: float = 1.0
    most: float = 30.0
    refused: float = 300.0

    def wait(self, failures: int) -> float:
        """Seconds to wait after a failure that has so many before it."""
        return min(self.most, self.first * 2.0**failures)

    def refused_until(self, deadline: float | None) -> float:
        """Until when (monotonic seconds) a completion that is refused now for the first time is waited for."""
        until = time.monotonic() + self.refused
        return until if deadline is None else min(deadline, until)


@dataclass(frozen=True, slots=True)
class CompletionFetch:
    """A completion to fetch: for which turn, and until when (monotonic seconds) waiting for the trainer makes sense.

    `who` and `unreachable` are for messages: who is asked, and what to look at where nobody answers. `again_on` are statuses as
    passing as 5xx.
    """

    request: HttpRequest
    turn: int
    deadline: float | None = None
    who: str = "the trainer"
    unreachable: str = "is it running, and does server_url name its host and port?"
    again_on: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Fetched:
    """An answer, the requests that were sent for it, and how many of the earlier ones may have been answered as well."""

    response: HttpResponse
    attempts: int
    siblings: int = 0


async def fetch_once(client: HttpClient, fetch: CompletionFetch) -> Fetched:
    """Asks again only where the request provably was not taken: no connection, or 429 or 503 with Retry-After.

    For trainers that count masks: after a lost reply such a trainer has counted the turn. Raises `RolloutFailed`.
    """
    attempts = refusals = 0
    while True:
        attempts += 1
        try:
            response = await client.post(fetch.request)
        except ConnectionRefused as error:
            refusals += 1
            if refusals >= client.settings.connect_attempts:
                raise RolloutFailed(_unreachable_failure(error, fetch, refusals)) from error
            await asyncio.sleep(0.1 * 2**refusals)
            continue
        except ConnectionLost as error:
            once = ". The turn may have been generated, so it is not asked for again"
            # In this protocol a call that timed out is a network error; "timeout" is the rollout's own time limit.
            raise RolloutFailed(replace(_lost_failure(error, fetch, once), category=Category.NETWORK)) from error
        except (ResponseTooLarge, TargetForbidden) as error:
            raise RolloutFailed(_unusable_failure(error, fetch)) from error
        if not _is_worth_waiting(response, fetch):
            return Fetched(response, attempts)
        await asyncio.sleep(pause(response, attempts))


async def fetch_with_retries(
    client: HttpClient, fetch: CompletionFetch, retries: RetryPolicy, warn: Callable[[str, str], None] | None = None
) -> Fetched:
    """Asks again after 5xx, timeouts and transport errors, and after 429 or 503 with Retry-After for `retries.refused` seconds.

    For the asynchronous dialect, whose trainers may know a repeated key. `warn` is called, with "resampled" and a text, for
    each attempt that may have been answered before it is made again. Raises `RolloutFailed`.
    """
    attempts = siblings = failures = 0
    patient = None  # the errand with the time until which refusals are waited for, from the first one on
    while True:
        attempts += 1
        response = await _attempt(client, fetch, attempts)
        if isinstance(response, HttpResponse):
            if response.retry_after is not None and patient is None:
                patient = replace(fetch, deadline=retries.refused_until(fetch.deadline))
            if patient is not None and _is_worth_waiting(response, patient):
                await asyncio.sleep(pause(response, attempts))
                continue
            # A trainer that says when to come back, and says it too late, is not asked before that time either.
            passing = response.status >= 500 or response.status in fetch.again_on
            if not passing or response.retry_after is not None or failures >= retries.count:
                return Fetched(response, attempts, siblings)
        elif failures >= retries.count:
            raise RolloutFailed(response.failure)
        if isinstance(response, HttpResponse) or response.taken:
            why = f"status {response.status}" if isinstance(response, HttpResponse) else "no whole answer"
            text = f"turn {fetch.turn}: {why} on attempt {attempts}; asked again, so the turn may have been generated twice"
            if warn is not None:
                warn("resampled", text)
            siblings += 1
        await asyncio.sleep(retries.wait(failures))
        failures += 1


@dataclass(frozen=True, slots=True)
class _FailedAttempt:
    """No answer came; `taken` says that the request may have been taken nevertheless."""

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
    """Seconds until a request that was not taken is sent again: what the trainer says, and a little more each time."""
    return max(response.retry_after or 0.0, min(1.0, 0.05 * 2.0 ** min(attempts, 8)))


def _is_worth_waiting(response: HttpResponse, fetch: CompletionFetch) -> bool:
    wait = response.retry_after
    return wait is not None and (fetch.deadline is None or time.monotonic() + wait < fetch.deadline)


def _unreachable_failure(error: ConnectionRefused, fetch: CompletionFetch, attempts: int) -> Failure:
    text = f"turn {fetch.turn}: {fetch.who} at {fetch.request.host} {error} in {attempts} attempts; {fetch.unreachable}"
    return Failure(Category.NETWORK, text, fetch.turn)


def _lost_failure(error: ConnectionLost, fetch: CompletionFetch, then: str) -> Failure:
    if error.timeout:
        text = f"turn {fetch.turn}: timeout: {fetch.who}: {error} (HTTP_CLIENT_TIMEOUT){then}"
        return Failure(Category.TIMEOUT, text, fetch.turn)
    return Failure(
        Category.NETWORK, f"turn {fetch.turn}: {fetch.who} at {fetch.request.host}: {error}{then}", fetch.turn
    )


def _unusable_failure(error: ResponseTooLarge | TargetForbidden, fetch: CompletionFetch) -> Failure:
    text = f"turn {fetch.turn}: {fetch.who} at {fetch.request.host}: {error}"
    return Failure(Category.VALIDATION, text, fetch.turn)
