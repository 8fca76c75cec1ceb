"""Requests of the asynchronous HTTP API: no mask, no nulls, verbatim `completion_params`, append-only history."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_server.core.message import Message
from rollout_server.core.outcome import Category
from rollout_server.core.spec import Sampling
from rollout_server.edge.trainer.chat_completion import RequestWriter
from rollout_server.edge.trainer.http_plain_sampler import PlainTrainers
from rollout_server.edge.trainer.sampling_parameters import WrongParameter, plain_parameters

from tests.edge.trainer.http.asking import MORE, QUESTION, Asking
from tests.edge.trainer.http.test_chat_requests import JSON_VALUES, TEXTS, messages, parsed
from tests.support.http_trainer import answer, raw_trainer

# Loops differ in how connections break; these tests need only one loop.
one_loop = pytest.mark.asyncio(loop_factories=["asyncio"])

PROTECTED = ("rollout_id", "messages", "response_mask", "stream")
RIGHT = {"temperature": 0.25, "top_p": 1, "max_tokens": 7, "stop": ["x"], "logprobs": False}
DEFAULTS = Sampling(temperature=1.0, top_p=1.0, max_tokens=512, logprobs=True)


def written(sampling: Sampling, *texts: str) -> dict[str, Any]:
    """The body for sampling parameters and messages."""
    return parsed(RequestWriter("r1").plain(messages(*texts or TEXTS[:1]), plain_parameters(sampling)))


def test_a_body_has_no_mask_and_nothing_that_is_null() -> None:
    expected = {"rollout_id": "r1", "model": "default", "messages": [json.loads(TEXTS[0])]}
    assert written(Sampling()) == expected
    assert written(DEFAULTS) == expected | {"temperature": 1.0, "top_p": 1.0, "max_tokens": 512, "logprobs": True}
    assert written(Sampling(stop=("\n",)))["stop"] == ["\n"]


def test_a_conversation_may_begin_with_nothing() -> None:
    writer, parameters = RequestWriter("r1"), plain_parameters(Sampling())
    assert parsed(writer.plain([], parameters))["messages"] == []
    assert parsed(writer.plain(messages(*TEXTS), parameters))["messages"] == [json.loads(text) for text in TEXTS]


def test_messages_go_out_to_the_byte() -> None:
    body = RequestWriter("r1").plain(messages(*TEXTS), plain_parameters(Sampling()))
    assert b'"messages":[' + ",".join(TEXTS).encode() + b"]}" in body


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from([*PROTECTED, "model", "n", "seed", ""]) | st.text(), JSON_VALUES, max_size=6))
def test_other_parameters_pass_through_and_the_protocol_keeps_its_own(extra: dict[str, Any]) -> None:
    extra = {key: value for key, value in extra.items() if key not in RIGHT}
    body = written(Sampling(temperature=0.5, extra_json=json.dumps(extra)))
    passed = {key: value for key, value in extra.items() if key not in PROTECTED}
    assert body == {"model": "default"} | passed | {
        "rollout_id": "r1",
        "temperature": 0.5,
        "messages": [json.loads(TEXTS[0])],
    }


@pytest.mark.parametrize("name", RIGHT)
def test_a_named_parameter_among_the_extras_stands_where_it_is_unset(name: str) -> None:
    extra = json.dumps({name: RIGHT[name]})
    assert written(Sampling(extra_json=extra))[name] == RIGHT[name]


@pytest.mark.parametrize("name", ["temperature", "top_p", "max_tokens", "logprobs"])
def test_and_replaces_nothing_that_is_set(name: str) -> None:
    sampling = Sampling(
        DEFAULTS.temperature, DEFAULTS.top_p, DEFAULTS.max_tokens, (), DEFAULTS.logprobs, json.dumps(RIGHT)
    )
    assert written(sampling)[name] == getattr(DEFAULTS, name)


WRONG = [
    ("temperature", '"hot"'),
    ("temperature", "null"),
    ("top_p", "[1]"),
    ("max_tokens", "1.5"),
    ("max_tokens", "true"),
    ("stop", '"x"'),
    ("stop", "[1]"),
    ("logprobs", "1"),
    ("logprobs", '"true"'),
]


@one_loop
@pytest.mark.parametrize(("name", "text"), WRONG)
async def test_a_parameter_that_no_trainer_could_read_ends_the_rollout_before_anything_is_sent(
    plain: PlainTrainers, name: str, text: str
) -> None:
    sampling = Sampling(extra_json=f'{{"{name}": {text}}}')
    with pytest.raises(WrongParameter, match=f"`{name}` must be"):
        plain_parameters(sampling)
    async with raw_trainer() as trainer:
        failure = await Asking(plain, trainer.url, sampling=sampling).failure()
        assert trainer.connections == 0
    assert (failure.category, failure.turn) == (Category.VALIDATION, 1)
    assert f"`{name}`" in failure.message
    assert "nothing was sent" in failure.message


@pytest.mark.parametrize("text", ['{"seed": 18446744073709551617}', '{"seed": 1.10}', '{"n": "\\u00fc"}'])
def test_extras_go_out_as_they_were_written(text: str) -> None:
    body = RequestWriter("r1").plain(messages(TEXTS[0]), plain_parameters(Sampling(extra_json=text)))
    assert text[1:-1].encode() in body
    assert json.loads(text).items() <= parsed(body).items()


@one_loop
async def test_over_the_wire(plain: PlainTrainers) -> None:
    """The trainer receives in three turns its own messages verbatim; nothing else changes."""
    said = '{ "role":"assistant", "content":"\\u0038", "vendor":18446744073709551617 }'
    sampling = Sampling(temperature=0.5, extra_json='{"top_k": 40, "response_mask": [1], "messages": []}')
    async with raw_trainer(answer(f'{{"choices": [{{"message": {said}}}]}}'.encode())) as trainer:
        asking = Asking(plain, trainer.url, credential="sk-1", sampling=sampling)
        for _ in range(3):
            await asking.turn()
        requests = trainer.requests
    bodies = [each.body for each in requests]
    assert {each.target for each in requests} == {"/v1/chat/completions"}
    assert {each.headers["content-type"] for each in requests} == {"application/json"}
    assert {each.headers["authorization"] for each in requests} == {"Bearer sk-1"}
    assert [body.count(said.encode()) for body in bodies] == [0, 1, 2]
    for earlier, later in itertools.pairwise(bodies):
        assert later.startswith(earlier.removesuffix(b"]}") + b",")
    histories = [parsed(body).pop("messages") for body in bodies]
    assert histories[0] == [QUESTION.fields()]
    assert histories[2] == [
        QUESTION.fields(),
        *(each.fields() for each in (Message.parse(said), MORE)),
        *(each.fields() for each in (Message.parse(said), MORE)),
    ]
    others = [{key: value for key, value in parsed(body).items() if key != "messages"} for body in bodies]
    assert others == [{"rollout_id": "r1", "model": "default", "temperature": 0.5, "top_k": 40}] * 3


IDS = {"token_ids": [5, 6], "prompt_token_ids": [1, 2, 3], "logprobs": [-0.5, -0.25]}
USAGE = {"prompt_tokens": 11, "completion_tokens": 13, "total_tokens": 24}


@one_loop
@pytest.mark.parametrize("left_out", [set(), {"logprobs"}, {"prompt_token_ids"}, {"token_ids"}, set(IDS)])
async def test_ids_are_taken_where_the_trainer_sends_them(plain: PlainTrainers, left_out: set[str]) -> None:
    fields = {name: value for name, value in IDS.items() if name not in left_out}
    body = {"choices": [{"message": {"role": "assistant", "content": "8"}, "finish_reason": "length"}], "usage": USAGE}
    async with raw_trainer(answer(json.dumps(body | fields).encode())) as trainer:
        answered = await Asking(plain, trainer.url).turn()
    got = {"token_ids": answered.token_ids, "prompt_token_ids": answered.reported}
    for name, value in got.items():
        assert (None if value is None else list(value)) == fields.get(name)
    logprobs = None if answered.logprobs is None else list(answered.logprobs)
    assert logprobs == (fields.get("logprobs") if "token_ids" in fields else None)
    assert (answered.usage, answered.finish_reason) == ((11, 13), "length")
    assert answered.mask_length is None
    assert answered.predicted is None
    assert ("logprobs_missing" in dict(answered.notes)) == ("token_ids" in fields and "logprobs" not in fields)
