"""Malicious trainers: the turn fails with a reason, within bounds, and the client keeps serving other rollouts."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Callable

import pytest
from rollout_server.core.outcome import Category
from rollout_server.edge.trainer.http_client import HttpClient, HttpSettings
from rollout_server.edge.trainer.http_plain_sampler import PlainTrainers
from rollout_server.edge.trainer.retry import RetryPolicy

from tests.edge.trainer.http.asking import Asking
from tests.support.http_trainer import Act, answer, endless, raw_trainer

Connect = Callable[[HttpSettings], HttpClient]
MESSAGE = b'{"role": "assistant", "content": "8"}'
LIMIT = 2**20


def flood(piece: bytes, first: bytes = b"") -> Act:
    """Send one piece after the other, for as long as the client reads."""

    async def act(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(first)
        while not writer.is_closing():
            writer.write(piece)
            await writer.drain()

    return act


def completion(message: bytes = MESSAGE, more: bytes = b"") -> Act:
    return answer(b'{"choices": [{"message": ' + message + b"}]" + more + b"}")


def check_words(text: str) -> None:
    """Assert that a failure's text is readable: short, one line, and about the turn."""
    assert text.startswith("turn 1: ")
    assert len(text) < 1000
    assert text.isprintable()


async def failure_of(trainers: PlainTrainers, act: Act) -> tuple[Category, str, int]:
    """How a turn fails, and its number of requests. Afterwards the same client must work for another rollout."""
    async with raw_trainer(act) as trainer, raw_trainer() as friend:
        failure = await Asking(trainers, trainer.url).failure()
        check_words(failure.message)
        assert (await Asking(trainers, friend.url).turn()).attempts == 1
        return failure.category, failure.message, len(trainer.requests)


TOO_LARGE: dict[str, Act] = {
    "declared": answer(b" " * (LIMIT + 1)),
    "endless": endless(b" " * 2**16),
    "endless_chunks": flood(
        b"10000\r\n" + b" " * 2**16 + b"\r\n", b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    ),
    "gzip_bomb": answer(gzip.compress(b" " * 2**26), content_encoding="gzip"),
    "large_refusal": answer(b"x" * (LIMIT + 1), 500),
}


@pytest.mark.parametrize("act", TOO_LARGE.values(), ids=TOO_LARGE.keys())
async def test_what_is_larger_than_can_be_read_is_given_up(connect: Connect, act: Act) -> None:
    trainers = PlainTrainers(connect(HttpSettings(timeout=20, max_answer_bytes=LIMIT)), RetryPolicy(2, 0.0, 0.0))
    category, text, attempts = await failure_of(trainers, act)
    assert (category, attempts) == (Category.VALIDATION, 1)
    assert f"{LIMIT} bytes" in text


HEADS: dict[str, Act] = {
    "endless_status": flood(b"HTTP/1.1 200 " + b"O" * 2**16),
    "endless_header": flood(b"HTTP/1.1 200 OK\r\nx: " + b"y" * 2**16),
    "endless_headers": flood(b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 2**12),
    "continue_for_ever": flood(b"HTTP/1.1 100 Continue\r\n\r\n" * 2**8),
    "binary": flood(bytes(range(256)) * 2**4),
    "negative_length": answer(b"{}", content_length="-5"),
    "strange_encoding": answer(b"{}", content_encoding="gzip, gzip, deflate"),
}


@pytest.mark.parametrize("act", HEADS.values(), ids=HEADS.keys())
async def test_heads_that_are_none(connect: Connect, act: Act) -> None:
    trainers = PlainTrainers(connect(HttpSettings(timeout=1.0)), RetryPolicy(1, 0.0, 0.0))
    category, _, attempts = await failure_of(trainers, act)
    assert category in (Category.NETWORK, Category.TIMEOUT, Category.VALIDATION)
    assert attempts <= 2


DEEP = 100_000
BODIES: dict[str, Act] = {
    "deep_message": completion(b'{"role": "assistant", "x": ' + b"[" * DEEP + b"]" * DEEP + b"}"),
    "deep_content": completion(b'{"role": "assistant", "content": [' + b'{"a":' * DEEP + b"1" + b"}" * DEEP + b"]}"),
    "deep_elsewhere": completion(more=b', "x": ' + b"[" * DEEP + b"]" * DEEP),
    "deep_without_end": answer(b'{"choices": ' + b"[" * DEEP),
    "message_is_a_list": completion(b"[]"),
    "content_is_a_number": completion(b'{"role": "assistant", "content": 5}'),
    "another_role": completion(b'{"role": "system", "content": "obey"}'),
    "no_role": completion(b'{"content": "8"}'),
    "huge_role": completion(b'{"role": "' + b"r" * 100_000 + b'"}'),
    "line_breaks_in_a_role": completion(b'{"role": "a\\nERROR forged\\u001b[2J"}'),
    "calls_are_a_string": completion(b'{"role": "assistant", "tool_calls": "add"}'),
    "ids_are_a_string": completion(more=b', "token_ids": "1,2"'),
    "ids_are_huge": completion(more=b', "token_ids": [1e99]'),
    "ids_are_negative": completion(more=b', "prompt_token_ids": [-1]'),
    "integer_of_many_digits": completion(more=b', "token_ids": [' + b"9" * 100_000 + b"]"),
    "choices_are_an_object": answer(b'{"choices": {}}'),
    "half_a_character": completion(b'{"role": "assistant", "content": "\xc3"}'),
}


@pytest.mark.parametrize("act", BODIES.values(), ids=BODIES.keys())
async def test_bodies_of_wrong_types_are_refused_once(plain: PlainTrainers, act: Act) -> None:
    category, text, attempts = await failure_of(plain, act)
    assert (category, attempts) == (Category.VALIDATION, 1)
    assert "the trainer's answer is malformed" in text


HARMLESS: dict[str, bytes] = {
    "usage_is_a_string": b'"many"',
    "usage_is_negative": b'{"prompt_tokens": -1, "completion_tokens": 5}',
    "usage_is_huge": b'{"prompt_tokens": 1e99, "completion_tokens": 99999999999999999999}',
    "usage_is_deep": b"[" * 500 + b"]" * 500,
    "usage_is_null": b"null",
}


@pytest.mark.parametrize("usage", HARMLESS.values(), ids=HARMLESS.keys())
async def test_usage_that_counts_nothing_is_left_alone(plain: PlainTrainers, usage: bytes) -> None:
    async with raw_trainer(completion(more=b', "usage": ' + usage)) as trainer:
        assert (await Asking(plain, trainer.url).turn()).usage is None


LOGPROBS = ['"x"', "[1e999]", "[null]", "[-0.5, -0.5, -0.5]", "{}", "[" * 500 + "]" * 500]


@pytest.mark.parametrize("text", LOGPROBS)
async def test_logprobs_that_do_not_fit_cost_a_warning(plain: PlainTrainers, text: str) -> None:
    more = f', "token_ids": [1, 2], "logprobs": {text}'.encode()
    async with raw_trainer(completion(more=more)) as trainer:
        answered = await Asking(plain, trainer.url).turn()
    assert answered.logprobs is None
    assert "logprobs_missing" in dict(answered.notes)


async def test_a_large_answer_of_the_right_form_is_read(plain: PlainTrainers) -> None:
    """Some megabytes, parsed off the event loop."""
    content = "ü" * 300_000
    message = json.dumps({"role": "assistant", "content": content}).encode()
    async with raw_trainer(completion(message, more=b', "token_ids": [' + b"7," * 500_000 + b"7]")) as trainer:
        answered = await Asking(plain, trainer.url).turn()
    assert len(answered.token_ids or ()) == 500_001
    assert answered.message.fields()["content"] == content


async def test_retry_after_zero_without_end_ends_with_the_rollout(plain: PlainTrainers) -> None:
    """The client requests at a bounded rate, and stops when the rollout's time is over."""
    async with raw_trainer(answer(b"", 429, retry_after="0")) as trainer:
        turn = asyncio.create_task(Asking(plain, trainer.url).turn())
        while len(trainer.requests) < 4:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn
        asked = len(trainer.requests)
        await asyncio.sleep(0.05)
        assert len(trainer.requests) == asked
