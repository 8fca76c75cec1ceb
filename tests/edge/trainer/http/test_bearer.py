"""The trainer's key is sent with each call and appears nowhere else; at most 500 characters of the trainer's error are shown."""

from __future__ import annotations

import json
import logging

import pytest
from rollout_server.core.outcome import Category
from rollout_server.edge.trainer.http_client import HttpRequest
from rollout_server.edge.trainer.http_errors import TRAINER_TEXT
from rollout_server.edge.trainer.http_masked_sampler import MaskedTrainers
from rollout_server.runtime.ports import Credentials

from tests.edge.trainer.http.asking import Asking
from tests.support.http_trainer import answer, closed, raw_trainer

# Loops differ in how connections break; these tests need only one loop.
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
    "json_across_the_cut": json.dumps({"detail": "x" * (TRAINER_TEXT - 10) + SECRET}),
    "json_of_a_header": json.dumps({"error": {"message": f"authorization: Bearer {SECRET}"}}),
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
    # The text is cut within a key, after the keys before it were shortened.
    "often": (json.dumps({"detail": f"{SECRET} " * 200}), SECRET),
    "behind_wide_characters": (json.dumps({"detail": "\N{GRINNING FACE}" * 490 + SECRET}), SECRET),
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
    ("detail", "shown"),
    [
        ("y" * TRAINER_TEXT, "y" * TRAINER_TEXT),
        ("y" * 10_000, "y" * TRAINER_TEXT),
        ("\N{GRINNING FACE}" * 10_000, "\N{GRINNING FACE}" * TRAINER_TEXT),
        (" \r\n no such route \n", "no such route"),
        ([{"loc": ["body"], "msg": "too long", "input": "y"}, {"msg": "no mask"}], "too long; no mask"),
    ],
    ids=["just_500", "long", "four_bytes", "white_space", "fastapi"],
)
async def test_of_its_words_500_characters(trainers: MaskedTrainers, detail: object, shown: str) -> None:
    async with raw_trainer(answer(json.dumps({"detail": detail}).encode(), 422)) as trainer:
        failure = await Asking(trainers, trainer.url).failure()
    assert (failure.category, failure.http_status) == (Category.TRAINER_CLIENT, 422)
    assert failure.message == f"turn 1: the trainer answered 422: {shown}"


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        (b"", ""),
        (b" \n", ""),
        (b"ami-id\nhostname\n", ": 16 bytes of type application/json that are no JSON error, and are not shown"),
        (b'{"AccessKeyId": "AKIA"}', ": 23 bytes of type application/json that are no JSON error, and are not shown"),
        (
            b'{"detail": {"key": "AKIA"}}',
            ": 27 bytes of type application/json that are no JSON error, and are not shown",
        ),
        (b'{"message": "AKIA"}', ": 19 bytes of type application/json that are no JSON error, and are not shown"),
        (b'["AKIA"]', ": 8 bytes of type application/json that are no JSON error, and are not shown"),
        (b"\xff\xfe broken", ": 9 bytes of type application/json that are no JSON error, and are not shown"),
    ],
    ids=["empty", "blank", "text", "other_json", "no_text", "no_error", "list", "no_utf8"],
)
async def test_what_is_no_error_of_a_trainers_is_not_shown(trainers: MaskedTrainers, body: bytes, shown: str) -> None:
    """A caller that names a target may not be allowed to read its responses."""
    async with raw_trainer(answer(body, 422)) as trainer:
        failure = await Asking(trainers, trainer.url).failure()
    assert failure.message.removeprefix("turn 1: the trainer answered 422") == shown
