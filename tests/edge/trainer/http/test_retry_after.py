"""429 and 503 with Retry-After: retried later under the same key, but never beyond the rollout's time limit."""

from __future__ import annotations

import asyncio
import email.utils
import time
from collections.abc import Callable

import pytest
from rollout_server.core.outcome import Category
from rollout_server.edge.trainer.http_masked_sampler import MaskedTrainers

from tests.edge.trainer.http.asking import Asking
from tests.support.http_trainer import Act, answer, raw_trainer

# Loops differ in how connections break; these tests need only one loop.
pytestmark = pytest.mark.asyncio(loop_factories=["asyncio"])

CATEGORIES = {429: Category.RATE_LIMITED, 503: Category.TRAINER_SERVER}


def later(seconds: float) -> str:
    return email.utils.formatdate(time.time() + seconds, usegmt=True)


def busy_until(rung: asyncio.Event, seconds: float, refusal: Callable[[], Act], early: list[bool]) -> Act:
    """Refuse requests for this long; record for each whether it came too early."""

    async def noted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not early:
            asyncio.get_running_loop().call_later(seconds, rung.set)
        early.append(not rung.is_set())
        await (answer() if rung.is_set() else refusal())(reader, writer)

    return noted


async def test_waited_for_and_asked_again_with_the_same_key(trainers: MaskedTrainers) -> None:
    # A date has whole seconds, so a date two seconds ahead is at least one second away.
    forms: list[Callable[[], str]] = [lambda: "1", lambda: "0.95", lambda: later(2)]
    await asyncio.gather(*(ask_twice(trainers, status, form) for status in CATEGORIES for form in forms))


async def ask_twice(trainers: MaskedTrainers, status: int, said: Callable[[], str]) -> None:
    rung, early = asyncio.Event(), list[bool]()
    async with raw_trainer(
        busy_until(rung, 0.9, lambda: answer(b"busy", status, retry_after=said()), early)
    ) as trainer:
        answered = await Asking(trainers, trainer.url, deadline=time.monotonic() + 60).turn()
        assert early == [True, False]
        assert answered.attempts == 2
        assert [each.headers["idempotency-key"] for each in trainer.requests] == ["u1/0/1", "u1/0/1"]
        assert trainer.requests[0].body == trainer.requests[1].body


@pytest.mark.parametrize("said", ["0", "00", "Mon, 01 Jan 1990 00:00:00 GMT", "Monday, 01-Jan-90 00:00:00 GMT"])
async def test_a_time_that_is_over_is_asked_again_at_once(trainers: MaskedTrainers, said: str) -> None:
    async with raw_trainer(answer(b"", 429, retry_after=said), answer(b"", 503, retry_after=said), answer()) as trainer:
        assert (await Asking(trainers, trainer.url).turn()).attempts == 3


@pytest.mark.parametrize("status", CATEGORIES)
@pytest.mark.parametrize("wait", ["30", "999999999", "9" * 40, 60, 10**9], ids=str)
async def test_never_beyond_the_time_of_the_rollout(trainers: MaskedTrainers, status: int, wait: str | int) -> None:
    said = wait if isinstance(wait, str) else later(wait)
    async with raw_trainer(answer(b'{"detail": "come back later"}', status, retry_after=said), answer()) as trainer:
        failure = await Asking(trainers, trainer.url, deadline=time.monotonic() + 20).failure()
        assert (failure.category, failure.http_status) == (CATEGORIES[status], status)
        assert "come back later; its Retry-After of " in failure.message
        assert failure.message.endswith(" s is more than the time that is left")
        assert len(trainer.requests) == 1


@pytest.mark.parametrize("status", CATEGORIES)
@pytest.mark.parametrize("said", [None, "", "soon", "-1", "1.5s", ".5", "1e3", "²", "Mon, 99 Foo 2026", "+3", "٣"])
async def test_without_a_time_to_wait_it_is_final(trainers: MaskedTrainers, status: int, said: str | None) -> None:
    refusal = answer(b"no", status) if said is None else answer(b"no", status, retry_after=said)
    async with raw_trainer(refusal, answer()) as trainer:
        failure = await Asking(trainers, trainer.url, deadline=time.monotonic() + 60).failure()
        assert (failure.category, failure.http_status) == (CATEGORIES[status], status)
        assert ("it has no Retry-After in seconds or as a date" in failure.message) == (status == 429)
        assert len(trainer.requests) == 1


@pytest.mark.parametrize("status", [400, 408, 413, 422, 425, 500, 502, 504])
async def test_other_refusals_may_have_been_taken(trainers: MaskedTrainers, status: int) -> None:
    async with raw_trainer(answer(b"no", status, retry_after="0"), answer()) as trainer:
        failure = await Asking(trainers, trainer.url).failure()
        expected = Category.TRAINER_SERVER if status >= 500 else Category.TRAINER_CLIENT
        assert (failure.category, failure.http_status) == (expected, status)
        assert len(trainer.requests) == 1


async def test_each_turn_has_a_key_of_its_own(trainers: MaskedTrainers) -> None:
    busy = answer(b"", 503, retry_after="0")
    async with raw_trainer(busy, answer(), busy, answer(), answer()) as trainer:
        asking = Asking(trainers, trainer.url)
        assert [(await asking.turn()).attempts for _ in range(3)] == [2, 2, 1]
        keys = [each.headers["idempotency-key"] for each in trainer.requests]
        assert keys == ["u1/0/1", "u1/0/1", "u1/0/2", "u1/0/2", "u1/0/3"]
