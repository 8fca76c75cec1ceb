"""Responses of trainers: parsed values, and the texts of refusals."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from rollout_server.core.ledger import MAX_TOKEN_ID
from rollout_server.core.outcome import Category, FailureClass
from rollout_server.edge.trainer.chat_completion import ChatCompletion
from rollout_server.edge.trainer.http_masked_sampler import MaskedTrainers
from rollout_server.edge.trainer.http_plain_sampler import PlainTrainers

from tests.edge.trainer.http.answers import GOOD, check, with_text
from tests.edge.trainer.http.asking import Asking
from tests.support.http_trainer import answer, raw_trainer

IDS = ("token_ids", "prompt_token_ids")


@pytest.mark.parametrize("field", IDS)
@pytest.mark.parametrize(
    "wrong", ["-1", "2147483648", "1" + "0" * 30, "1" + "0" * 5000, "1.5", '"1"', "true", "null", "[1]"]
)
def test_an_id_that_is_none_is_named(field: str, wrong: str) -> None:
    said = check(with_text((field, 1), wrong))
    assert isinstance(said, str)
    assert f"{field}[" in said


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_a_number_that_json_does_not_have_is_named(number: str) -> None:
    said = check(with_text(("logprobs", 0), number))
    assert isinstance(said, str)
    assert said.endswith(f", which is {number.lstrip('-')}: JSON has finite numbers only; send null")


def test_an_empty_answer_is_told() -> None:
    assert check(b"") == "turn 7: the trainer's completion is malformed: it is empty"


@pytest.mark.parametrize("field", IDS)
def test_the_largest_id_is_one(field: str) -> None:
    assert isinstance(check(with_text((field, 1), str(MAX_TOKEN_ID))), ChatCompletion)


@pytest.mark.parametrize(
    ("path", "text", "named"),
    [
        (("choices",), "null", "choices"),
        (("choices",), "[]", "`choices` is empty"),
        (("choices",), "{}", "choices"),
        (("choices", 0), "null", "choices[0]"),
        (("choices", 0, "message"), "null", "`choices[0].message` is missing"),
        (("choices", 0, "message"), '"hello"', "choices[0].message"),
        (("choices", 0, "message", "role"), "null", "role"),
        (("choices", 0, "message", "role"), '" "', "role"),
        (("choices", 0, "message", "content"), "5", "content"),
        (("choices", 0, "message", "tool_calls"), "{}", "tool_calls"),
        (("choices", 0, "message", "tool_calls", 0), "null", "tool_calls[0]"),
        (("choices", 0, "message", "tool_calls", 0, "id"), "7", "tool_calls[0].id"),
        (("choices", 0, "message", "tool_calls", 0, "function"), "null", "tool_calls[0].function"),
        (("choices", 0, "message", "tool_calls", 0, "function", "name"), "null", "tool_calls[0].function.name"),
        (
            ("choices", 0, "message", "tool_calls", 0, "function", "arguments"),
            "[1]",
            "tool_calls[0].function.arguments",
        ),
        (("choices", 0, "finish_reason"), "1", "finish_reason"),
        (("choices", 0, "finish_reason"), f'"{"x" * 257}"', "finish_reason"),
        (("token_ids",), "null", "`token_ids` is missing"),
        (("token_ids",), '"1,2"', "token_ids"),
        (("prompt_token_ids",), "{}", "prompt_token_ids"),
    ],
)
def test_what_is_wrong_is_named(path: tuple[Any, ...], text: str, named: str) -> None:
    said = check(with_text(path, text))
    assert isinstance(said, str)
    assert named in said


@pytest.mark.parametrize(
    "text", ["null", "[]", "[-0.5]", "[-0.5, -0.25, 0, 0]", '[-0.5, "x", 0]', '"no"', "{}", "5", "[null, 0, 0]"]
)
def test_logprobs_that_do_not_fit_are_none(text: str) -> None:
    read = check(with_text(("logprobs",), text))
    assert isinstance(read, ChatCompletion)
    assert read.logprobs is None


@pytest.mark.parametrize(
    "text",
    [
        "[1e300, 0, 0]",
        "[-1e999, 0, 0]",
        "[-" + "9" * 400 + ", 0, 0]",
    ],
    ids=["beyond_32_bits", "beyond_64_bits", "huge_integer"],
)
def test_logprobs_are_finite_or_none(text: str) -> None:
    said = check(with_text(("logprobs",), text))
    if isinstance(said, ChatCompletion):
        assert said.logprobs is None or all(math.isfinite(value) for value in said.logprobs)


@pytest.mark.parametrize("usage", ['{"prompt_tokens": null}', '{"prompt_tokens": 2.0}', "[]", '"none"'])
def test_usage_is_not_needed_and_so_never_wrong(usage: str) -> None:
    assert isinstance(check(with_text(("usage",), usage)), ChatCompletion)


def test_absent_extensions() -> None:
    body = {key: GOOD[key] for key in ("choices", "token_ids")}
    read = check(json.dumps(body).encode())
    assert isinstance(read, ChatCompletion)
    assert (read.reported, read.logprobs) == (None, None)


BODIES = {
    "empty": b"",
    "blank": b" \n",
    "bom": b"\xef\xbb\xbf" + json.dumps(GOOD).encode(),
    "utf16": json.dumps(GOOD).encode("utf-16"),
    "html": b"<html>502</html>",
    "list": b"[]",
    "null": b"null",
    "string": b'"choices"',
    "two": json.dumps(GOOD).encode() * 2,
    "cut": json.dumps(GOOD).encode()[:-1],
    "deep": b"[" * 100_000,
    "deep_in_an_unknown_key": b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"," + json.dumps(GOOD).encode()[1:],
    "invalid_utf8_in_the_message": json.dumps(GOOD).encode().replace(b"Adding.", b"Adding \xff\xfe"),
    "invalid_utf8_in_a_key": json.dumps(GOOD).encode().replace(b'"content"', b'"conte\xff"'),
    "invalid_utf8_elsewhere": json.dumps(GOOD).encode().replace(b'"stop"', b'"\xc3\x28"'),
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
def test_bodies_that_are_no_answers(body: bytes) -> None:
    assert isinstance(check(body), str)


MESSAGES = [
    '{"role":"assistant","content":"a\\u00fc\\ud83d\\ude00"}',
    '{ "content" : null ,\t"role":"assistant", "x":18446744073709551617, "y": 1.10 }',
    '{"role":"assistant","role":"assistant","content":"twice","content":"and again"}',
    '{"role":"assistant","content":[{"type":"text","text":"part"}],"reasoning_content":""}',
    '{"role":"assistant"}',
    '{"role":"assistant","content":"","tool_calls":[]}',
    '{"role":"assistant","tool_calls":[{"id":"","function":{"name":"f","arguments":{"b":1,"a":2}},"extra":null}]}',
]


@pytest.mark.parametrize("message", MESSAGES)
def test_messages_are_kept_to_the_byte(message: str) -> None:
    read = check(with_text(("choices", 0, "message"), message))
    assert isinstance(read, ChatCompletion)
    assert read.message.text == message


async def test_a_large_answer_is_read_and_a_large_wrong_one_refused(trainers: MaskedTrainers) -> None:
    """10 MB: parsed in a thread, with the same rules."""
    ids = [7] * 2_000_000
    large = json.dumps({**GOOD, "token_ids": ids, "logprobs": None}).encode()
    wrong = large.replace(b"7]", b"-7]")
    assert len(large) > 6_000_000
    async with raw_trainer(answer(large), answer(wrong)) as trainer:
        assert len((await Asking(trainers, trainer.url).turn()).token_ids or ()) == len(ids)
        failure = await Asking(trainers, trainer.url).failure()
        assert failure.category is Category.VALIDATION
        assert "token_ids[" in failure.message


@pytest.mark.parametrize("masked", [True, False])
async def test_a_part_of_a_completion_trains_nothing(
    trainers: MaskedTrainers, plain: PlainTrainers, masked: bool
) -> None:
    """The HTTP APIs cannot request the rest, and the model did not end there."""
    part = with_text(("choices", 0, "finish_reason"), '"abort"')
    async with raw_trainer(answer(part)) as trainer:
        failure = await Asking(trainers if masked else plain, trainer.url).failure()
    assert (failure.category, failure.failure_class) == (Category.TRAINER_SERVER, FailureClass.TRAINER)
    assert "turn 1: the trainer aborted the completion" in failure.message
    assert len(trainer.requests) == 1
