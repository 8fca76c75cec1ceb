"""Retries of the asynchronous HTTP API: which completions are retried, under which key, how often, and how this is reported."""

from __future__ import annotations

import asyncio
import email.utils
import itertools
import socket
import time
from collections.abc import Callable

import pytest
from rollout_server.core.outcome import Category
from rollout_server.edge.trainer.http_client import HttpClient, HttpResponse, HttpSettings
from rollout_server.edge.trainer.http_plain_sampler import PlainTrainers
from rollout_server.edge.trainer.retry import RetryPolicy, pause

from tests.edge.trainer.http.asking import Asking
from tests.support.http_trainer import (
    COMPLETION,
    Act,
    HttpTrainer,
    answer,
    closed,
    endless,
    head,
    raw_trainer,
    reset,
    silence,
)

Connect = Callable[[HttpSettings], HttpClient]
one_loop = pytest.mark.asyncio(loop_factories=["asyncio"])

LOST: dict[str, Act] = {
    "reset_at_once": reset(),
    "closed_at_once": closed(),
    "reset_in_the_head": reset(b"HTTP/1.1 200 OK\r\ncontent-le"),
    "closed_in_the_body": closed(head(200, len(COMPLETION)) + COMPLETION[:-1]),
    "truncated_chunks": closed(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\n{}   \r\n"),
    "no_http_at_all": closed(b"SSH-2.0-OpenSSH_9.6\r\n\r\n"),
    "corrupt_gzip": answer(b"not gzip", content_encoding="gzip"),
    "refusal_whose_body_breaks": closed(head(400, 100) + b"{"),
}


def check_repeats(trainer: HttpTrainer, count: int) -> None:
    """Assert that all requests are equal."""
    assert len(trainer.requests) == count
    first = trainer.requests[0]
    assert first.headers["idempotency-key"] == "u1/0/1"
    for again in trainer.requests[1:]:
        assert (again.target, again.body) == (first.target, first.body)
        assert again.headers == first.headers


@pytest.mark.parametrize("act", LOST.values(), ids=LOST.keys())
async def test_a_lost_answer_is_asked_for_again(plain: PlainTrainers, act: Act) -> None:
    async with raw_trainer(act, act, answer()) as trainer:
        asking = Asking(plain, trainer.url, credential="sk-1")
        answered = await asking.turn()
        check_repeats(trainer, 3)
    assert (answered.attempts, answered.message.fields()["content"]) == (3, "8")
    assert [code for code, _ in asking.remarks] == ["resampled", "resampled"]
    assert [code for code, _ in answered.notes].count("resampled") == 1


@pytest.mark.parametrize("act", LOST.values(), ids=LOST.keys())
async def test_not_for_ever(plain: PlainTrainers, act: Act) -> None:
    async with raw_trainer(act) as trainer:
        failure = await Asking(plain, trainer.url).failure()
        check_repeats(trainer, 4)
    assert (failure.category, failure.turn) == (Category.NETWORK, 1)
    assert "on attempt 4" in failure.message


@pytest.mark.parametrize("act", [silence(), endless(b" ", seconds=0.02)], ids=["no_answer", "slow_drip"])
async def test_a_timeout_counts_the_whole_answer_and_is_asked_again(connect: Connect, act: Act) -> None:
    trainers = PlainTrainers(connect(HttpSettings(timeout=0.4)), RetryPolicy(1, 0.0, 0.0))
    async with raw_trainer(act) as trainer:
        failure = await Asking(trainers, trainer.url).failure()
        check_repeats(trainer, 2)
    assert failure.category is Category.TIMEOUT
    assert "timeout" in failure.message
    assert "0.4 s (HTTP_CLIENT_TIMEOUT)" in failure.message
    async with raw_trainer(act, answer()) as trainer:
        assert (await Asking(trainers, trainer.url).turn()).attempts == 2


@one_loop
@pytest.mark.parametrize("status", [500, 501, 502, 503, 504, 507, 599])
async def test_server_errors_are_asked_again(plain: PlainTrainers, status: int) -> None:
    async with raw_trainer(answer(b"no", status), answer(b"no", status), answer()) as trainer:
        asking = Asking(plain, trainer.url)
        answered = await asking.turn()
        check_repeats(trainer, 3)
    assert answered.attempts == 3
    assert [f"status {status}" in text for _, text in asking.remarks] == [True, True]
    (note,) = (text for code, text in answered.notes if code == "resampled")
    assert "turn 1" in note
    assert "asked for 3 times" in note
    async with raw_trainer(answer(b'{"detail": "out of order"}', status)) as trainer:
        failure = await Asking(plain, trainer.url).failure()
        check_repeats(trainer, 4)
    assert (failure.category, failure.http_status) == (Category.TRAINER_SERVER, status)
    assert "out of order" in failure.message


@one_loop
@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 408, 409, 413, 422, 425, 429, 451, 499])
async def test_client_errors_are_final(plain: PlainTrainers, status: int) -> None:
    async with raw_trainer(answer(b"no", status), answer()) as trainer:
        asking = Asking(plain, trainer.url, deadline=time.monotonic() + 60)
        failure = await asking.failure()
        check_repeats(trainer, 1)
    assert failure.category is (Category.RATE_LIMITED if status == 429 else Category.TRAINER_CLIENT)
    assert failure.http_status == status
    assert asking.remarks == []


@one_loop
@pytest.mark.parametrize("status", [201, 202, 204, 206, 300, 301, 302, 303, 304, 307, 308])
async def test_only_200_is_an_answer_and_nothing_is_followed(plain: PlainTrainers, status: int) -> None:
    async with raw_trainer() as elsewhere, raw_trainer(answer(b"", status, location=elsewhere.url)) as trainer:
        failure = await Asking(plain, trainer.url, credential="sk-1").failure()
        check_repeats(trainer, 1)
        assert elsewhere.connections == 0
    assert (failure.category, failure.http_status) == (Category.VALIDATION, status)


BROKEN = [b"", b"{", b"[]", b"null", b"<html>", b'{"choices": []}', b'{"choices": [{"message": null}]}', b"\xff\xfe"]


@one_loop
@pytest.mark.parametrize("body", BROKEN)
async def test_broken_json_is_final(plain: PlainTrainers, body: bytes) -> None:
    async with raw_trainer(answer(body), answer()) as trainer:
        asking = Asking(plain, trainer.url)
        failure = await asking.failure()
        check_repeats(trainer, 1)
    assert (failure.category, asking.remarks) == (Category.VALIDATION, [])
    assert failure.message.startswith("turn 1: the trainer's answer is malformed: ")


@one_loop
@pytest.mark.parametrize("status", [429, 503])
async def test_a_refusal_with_a_time_is_waited_for_and_no_resampling(plain: PlainTrainers, status: int) -> None:
    """More often than any other failure is retried, because the trainer did not process such a request."""
    refusals = [answer(b"busy", status, retry_after="0")] * 5
    async with raw_trainer(*refusals, answer()) as trainer:
        asking = Asking(plain, trainer.url, deadline=time.monotonic() + 60)
        answered = await asking.turn()
        check_repeats(trainer, 6)
    assert (answered.attempts, asking.remarks) == (6, [])
    assert "resampled" not in dict(answered.notes)


@one_loop
@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("wait", ["30", "9" * 40, 3600], ids=str)
async def test_never_beyond_the_time_of_the_rollout(plain: PlainTrainers, status: int, wait: str | int) -> None:
    said = wait if isinstance(wait, str) else email.utils.formatdate(time.time() + wait, usegmt=True)
    async with raw_trainer(answer(b'{"detail": "come back later"}', status, retry_after=said), answer()) as trainer:
        failure = await Asking(plain, trainer.url, deadline=time.monotonic() + 20).failure()
        check_repeats(trainer, 1)
    assert failure.http_status == status
    assert "come back later" in failure.message


@one_loop
@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize(
    ("retries", "wait"), [(RetryPolicy(), 301), (RetryPolicy(refused=20), 21)], ids=["default", "set"]
)
async def test_minutes_at_most_where_the_rollout_has_a_day(
    client: HttpClient, status: int, retries: RetryPolicy, wait: int
) -> None:
    async with raw_trainer(answer(b"come back later", status, retry_after=str(wait)), answer()) as trainer:
        failure = await Asking(
            PlainTrainers(client, retries), trainer.url, deadline=time.monotonic() + 86_400
        ).failure()
        check_repeats(trainer, 1)
    assert failure.http_status == status


@one_loop
async def test_refusals_are_waited_for_from_the_first_of_them_on(client: HttpClient) -> None:
    """Other failures before it use none of that time."""
    trainers = PlainTrainers(client, RetryPolicy(first=0.3, refused=0.2))
    async with raw_trainer(answer(b"", 500), answer(b"", 503, retry_after="0"), answer()) as trainer:
        assert (await Asking(trainers, trainer.url).turn()).attempts == 3


async def test_a_trainer_that_is_down_for_a_moment_costs_no_sibling(connect: Connect) -> None:
    trainers = PlainTrainers(connect(HttpSettings()), RetryPolicy(count=20, first=0.02, most=0.1))
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # nothing listens yet
        asking = Asking(trainers, f"http://127.0.0.1:{bound.getsockname()[1]}")
        turn = asyncio.create_task(asking.turn())
        await asyncio.sleep(0.1)
        assert not turn.done()
        async with raw_trainer(listener=bound) as trainer:
            answered = await turn
            assert len(trainer.requests) == 1
    assert answered.attempts >= 2
    assert asking.remarks == []
    assert "resampled" not in dict(answered.notes)


async def test_a_trainer_that_stays_away_is_named(plain: PlainTrainers) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        asking = Asking(plain, f"http://127.0.0.1:{port}")
        failure = await asking.failure()
    assert failure.category is Category.NETWORK
    assert f"the trainer at 127.0.0.1:{port} could not be reached" in failure.message
    assert "in 4 attempts" in failure.message
    assert asking.remarks == []


@one_loop
async def test_a_trainer_that_answers_with_the_key_replays_it(plain: PlainTrainers) -> None:
    async with raw_trainer(answer(b"", 500), answer(idempotency_key="u1/0/1")) as trainer:
        assert "resampled" not in dict((await Asking(plain, trainer.url).turn()).notes)
    async with raw_trainer(answer(b"", 500), answer(idempotency_key="u1/0/2")) as trainer:
        assert "resampled" in dict((await Asking(plain, trainer.url).turn()).notes)


@one_loop
async def test_a_trainer_that_declares_to_replay_is_believed(plain: PlainTrainers) -> None:
    async with raw_trainer(answer(b"", 500), reset(), answer()) as trainer:
        asking = Asking(plain, trainer.url, replays=True)
        answered = await asking.turn()
        check_repeats(trainer, 3)
    assert (answered.attempts, asking.remarks) == (3, [])
    assert "resampled" not in dict(answered.notes)


@one_loop
async def test_each_turn_has_a_key_of_its_own(plain: PlainTrainers) -> None:
    error = answer(b"", 502)
    async with raw_trainer(error, answer(), answer(), error, error, answer()) as trainer:
        asking = Asking(plain, trainer.url)
        assert [(await asking.turn()).attempts for _ in range(3)] == [2, 1, 3]
        keys = [each.headers["idempotency-key"] for each in trainer.requests]
    assert keys == ["u1/0/1", "u1/0/1", "u1/0/2", "u1/0/3", "u1/0/3", "u1/0/3"]


@one_loop
async def test_no_retries_at_all_can_be_wished_for(client: HttpClient) -> None:
    async with raw_trainer(answer(b"", 500), answer()) as trainer:
        failure = await Asking(PlainTrainers(client, RetryPolicy(0)), trainer.url).failure()
        check_repeats(trainer, 1)
    assert failure.http_status == 500


async def test_a_turn_that_is_cancelled_between_two_attempts_asks_no_more(client: HttpClient) -> None:
    asked = asyncio.Event()

    async def fail(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await answer(b"", 500)(reader, writer)
        asked.set()

    async with raw_trainer(fail) as trainer:
        turn = asyncio.create_task(
            Asking(PlainTrainers(client, RetryPolicy(first=3600, most=3600)), trainer.url).turn()
        )
        await asked.wait()
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn
        assert len(trainer.requests) == 1


def test_waits_double_up_to_the_longest() -> None:
    assert [RetryPolicy().wait(failures) for failures in range(7)] == [1, 2, 4, 8, 16, 30, 30]
    assert [RetryPolicy(first=0.5, most=1.5).wait(failures) for failures in range(4)] == [0.5, 1.0, 1.5, 1.5]
    assert RetryPolicy(count=100, first=0.0).wait(99) == 0.0
    assert RetryPolicy(count=100).wait(99) == 30.0


@pytest.mark.parametrize("said", [None, 0.0, 0.3, 7.0])
def test_however_often_a_request_was_not_taken_the_pause_is_bounded(said: float | None) -> None:
    pauses = [pause(HttpResponse(429, b"", said), attempts) for attempts in (1, 2, 3, 10, 1000, 100_000)]
    assert all(earlier <= later for earlier, later in itertools.pairwise(pauses))
    assert pauses[0] > 0
    assert pauses[-1] == max(said or 0.0, 1.0)
