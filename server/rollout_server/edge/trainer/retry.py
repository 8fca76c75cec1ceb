"""When a completion is asked for again. One rule for each dialect (D8, http-wire.md)."""

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

    answer: HttpResponse
    attempts: int
    siblings: int = 0


async def fetch_once(client: HttpClient, errand: CompletionFetch) -> Fetched:
    """Asks again only where the request provably was not taken: no connection, or 429 or 503 with Retry-After.

    For trainers that count masks: after a lost reply such a trainer has counted the turn. Raises `RolloutFailed`.
    """
    attempts = refusals = 0
    while True:
        attempts += 1
        try:
            answer = await client.post(errand.request)
        except ConnectionRefused as error:
            refusals += 1
            if refusals >= client.settings.connect_attempts:
                raise RolloutFailed(_unreachable(error, errand, refusals)) from error
            await asyncio.sleep(0.1 * 2**refusals)
            continue
        except ConnectionLost as error:
            once = ". The turn may have been generated, so it is not asked for again"
            # In this protocol a call that timed out is a network error; "timeout" is the rollout's own time limit.
            raise RolloutFailed(replace(_lost(error, errand, once), category=Category.NETWORK)) from error
        except (ResponseTooLarge, TargetForbidden) as error:
            raise RolloutFailed(_unusable(error, errand)) from error
        if not _worth_waiting(answer, errand):
            return Fetched(answer, attempts)
        await asyncio.sleep(pause(answer, attempts))


async def fetch_again(
    client: HttpClient, errand: CompletionFetch, retries: RetryPolicy, remark: Callable[[str, str], None]
) -> Fetched:
    """Asks again after 5xx, timeouts and transport errors, and after 429 or 503 with Retry-After for `retries.refused` seconds.

    For the asynchronous dialect, whose trainers may know a repeated key. `remark` is called, with "resampled" and a text, for
    each attempt that may have been answered before it is made again. Raises `RolloutFailed`.
    """
    attempts = siblings = failures = 0
    patient = None  # the errand with the time until which refusals are waited for, from the first one on
    while True:
        attempts += 1
        got = await _attempt(client, errand, attempts)
        if isinstance(got, HttpResponse):
            if got.retry_after is not None and patient is None:
                patient = replace(errand, deadline=retries.refused_until(errand.deadline))
            if patient is not None and _worth_waiting(got, patient):
                await asyncio.sleep(pause(got, attempts))
                continue
            # A trainer that says when to come back, and says it too late, is not asked before that time either.
            passing = got.status >= 500 or got.status in errand.again_on
            if not passing or got.retry_after is not None or failures >= retries.count:
                return Fetched(got, attempts, siblings)
        elif failures >= retries.count:
            raise RolloutFailed(got.failure)
        if isinstance(got, HttpResponse) or got.taken:
            why = f"status {got.status}" if isinstance(got, HttpResponse) else "no whole answer"
            text = f"turn {errand.turn}: {why} on attempt {attempts}; asked again, so the turn may have been generated twice"
            remark("resampled", text)
            siblings += 1
        await asyncio.sleep(retries.wait(failures))
        failures += 1


@dataclass(frozen=True, slots=True)
class _Missed:
    """No answer came; `taken` says that the request may have been taken nevertheless."""

    failure: Failure
    taken: bool


async def _attempt(client: HttpClient, errand: CompletionFetch, number: int) -> HttpResponse | _Missed:
    try:
        return await client.post(errand.request)
    except ConnectionRefused as error:
        return _Missed(_unreachable(error, errand, number), taken=False)
    except ConnectionLost as error:
        return _Missed(_lost(error, errand, f", on attempt {number}"), taken=True)
    except (ResponseTooLarge, TargetForbidden) as error:
        raise RolloutFailed(_unusable(error, errand)) from error


def pause(answer: HttpResponse, attempts: int) -> float:
    """Seconds until a request that was not taken is sent again: what the trainer says, and a little more each time."""
    return max(answer.retry_after or 0.0, min(1.0, 0.05 * 2.0 ** min(attempts, 8)))


def _worth_waiting(answer: HttpResponse, errand: CompletionFetch) -> bool:
    wait = answer.retry_after
    return wait is not None and (errand.deadline is None or time.monotonic() + wait < errand.deadline)


def _unreachable(error: ConnectionRefused, errand: CompletionFetch, attempts: int) -> Failure:
    text = f"turn {errand.turn}: {errand.who} at {errand.request.host} {error} in {attempts} attempts; {errand.unreachable}"
    return Failure(Category.NETWORK, text, errand.turn)


def _lost(error: ConnectionLost, errand: CompletionFetch, then: str) -> Failure:
    if error.timeout:
        text = f"turn {errand.turn}: timeout: {errand.who}: {error} (HTTP_CLIENT_TIMEOUT){then}"
        return Failure(Category.TIMEOUT, text, errand.turn)
    return Failure(
        Category.NETWORK, f"turn {errand.turn}: {errand.who} at {errand.request.host}: {error}{then}", errand.turn
    )


def _unusable(error: ResponseTooLarge | TargetForbidden, errand: CompletionFetch) -> Failure:
    text = f"turn {errand.turn}: {errand.who} at {errand.request.host}: {error}"
    return Failure(Category.VALIDATION, text, errand.turn)
