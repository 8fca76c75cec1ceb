"""The trainer's key goes out with each call and shows up nowhere else; of the trainer's own words at most 500 characters."""

from __future__ import annotations

import json
import logging

import pytest
from rollout_server.core.outcome import Category
from rollout_server.edge.trainer.client import HttpRequest
from rollout_server.edge.trainer.masked import MaskedTrainers
from rollout_server.edge.trainer.refusal import TRAINER_TEXT
from rollout_server.runtime.port import Credentials

from tests.trainer.asking import Asking
from tests.trainer.raw_trainer import answer, closed, raw_trainer

# Loops differ in how connections break; these need one loop only.
pytestmark = pytest.mark.asyncio(loop_factories=["asyncio"])

SECRET = "sk-live-0123456789abcdefghijklmnopqrstuvwxyz"
QUOTED = 'sk-"quoted"-\\0123456789'


async def test_sent_with_each_call(trainers: MaskedTrainers) -> None:
    async with raw_trainer(answer(b"", 429, retry_after="0"), answer()) as trainer:
        asking = Asking(trainers, trainer.url, credential=SECRET)
        await asking.turn(), await asking.turn()
        assert [each.headers["authorization"] for each in trainer.requests] == [f"Bearer {SECRET}"] * 3


async def test_without_a_key_no_header(trainers: MaskedTrainers) -> None:
    async with raw_trainer() as trainer:
        await Asking(trainers, trainer.url).turn()
        assert "authorization" not in trainer.requests[0].headers


async def test_two_rollouts_keep_their_keys_apart(trainers: MaskedTrainers) -> None:
    async with raw_trainer() as trainer:
        one, other = (Asking(trainers, trainer.url, credential=key) for key in ("one", "other"))
        for asking in (one, other, one, other):
            await asking.turn()
        assert [each.headers["authorization"][7:] for each in trainer.requests] == ["one", "other", "one", "other"]


ECHOES = {
    "plain": f"key {SECRET} is not one",
    "header": f"headers: {{'authorization': 'Bearer {SECRET}'}}",
    "across_the_cut": "x" * (TRAINER_TEXT - 10) + SECRET,
    "json": json.dumps({"detail": f"Invalid key: {SECRET}"}),
}


@pytest.mark.parametrize("text", ECHOES.values(), ids=ECHOES.keys())
@pytest.mark.parametrize("status", [200, 302, 401, 403, 429, 500])
async def test_an_echo_never_gets_into_the_failure(
    trainers: MaskedTrainers, text: str, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with raw_trainer(answer(text.encode(), status)) as trainer:
        failure = await Asking(trainers, trainer.url, credential=SECRET).failure()
    assert SECRET[:12] not in failure.message
    assert SECRET[:12] not in caplog.text
    assert str(status) in failure.message or status == 200


LEAKS = {
    # What is shown is cut off a part of the body that ends within a key, once the keys before it got shorter.
    "often": (f"{SECRET} " * 200, SECRET),
    # 4 bytes a character: the part of the body that is looked at ends within the key.
    "behind_wide_characters": ("\N{GRINNING FACE}" * 490 + SECRET, SECRET),
    "escaped_as_json": (json.dumps({"detail": f"no such key: {QUOTED}"}), QUOTED),
}


@pytest.mark.parametrize(("text", "key"), LEAKS.values(), ids=LEAKS.keys())
async def test_an_echo_in_another_form_does_not_either(trainers: MaskedTrainers, text: str, key: str) -> None:
    async with raw_trainer(answer(text.encode(), 401)) as trainer:
        failure = await Asking(trainers, trainer.url, credential=key).failure()
    assert key[:3] in text
    assert "0123456789" not in failure.message
    assert key[:4] not in failure.message


async def test_an_echo_in_a_broken_answer_does_not_either(trainers: MaskedTrainers) -> None:
    echo = f"HTTP/1.1 200 {SECRET}\r\n{SECRET}\r\n\r\n".encode()
    async with raw_trainer(closed(echo)) as trainer:
        failure = await Asking(trainers, trainer.url, credential=SECRET).failure()
    assert failure.category is Category.NETWORK
    assert SECRET not in failure.message


async def test_no_repr_shows_it(trainers: MaskedTrainers) -> None:
    async with raw_trainer() as trainer:
        asking = Asking(trainers, trainer.url, credential=SECRET)
        answered = await asking.turn()
        assert SECRET not in repr((answered, asking.asks, asking.sampler, Credentials(SECRET, SECRET, SECRET)))


async def test_no_repr_of_a_request_shows_it_either() -> None:
    request = HttpRequest("http://t/", b"{}", {"authorization": f"Bearer {SECRET}"})
    assert SECRET not in repr(request)


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        (b"y" * TRAINER_TEXT, "y" * TRAINER_TEXT),
        (b"y" * 10_000, "y" * TRAINER_TEXT),
        ("ü".encode() * 10_000, "ü" * TRAINER_TEXT),
        ("\N{GRINNING FACE}".encode() * 10_000, "\N{GRINNING FACE}" * TRAINER_TEXT),
        (b" \r\n no such route \n", "no such route"),
        (b"\xff\xfe broken", "\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER} broken"),
        (b"", ""),
        (b" \n", ""),
    ],
    ids=["just_500", "long", "two_bytes", "four_bytes", "white_space", "no_utf8", "empty", "blank"],
)
async def test_of_its_words_500_characters(trainers: MaskedTrainers, body: bytes, shown: str) -> None:
    async with raw_trainer(answer(body, 422)) as trainer:
        failure = await Asking(trainers, trainer.url).failure()
    assert (failure.category, failure.http_status) == (Category.TRAINER_CLIENT, 422)
    expected = "turn 1: the trainer answered 422"
    assert failure.message == (f"{expected}: {shown}" if shown else expected)
