"""Completion requests: verbatim messages, protected protocol keys, masks of the right length."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_server.core.message import Message
from rollout_server.core.spec import Sampling
from rollout_server.edge.trainer.chat_completion import RequestWriter
from rollout_server.edge.trainer.http_masked_sampler import MaskedTrainers
from rollout_server.edge.trainer.sampling_parameters import masked_parameters

from tests.edge.trainer.http.asking import Asking
from tests.support.http_trainer import answer, raw_trainer

OWN = ("model", "rollout_id", "messages", "temperature", "top_p", "max_tokens", "stop", "logprobs", "response_mask")
TEXTS = (
    '{"role":"user","content":"5 plus 3?"}',
    '{ "content" : null ,\t"role":"assistant", "x":18446744073709551617, "y": 1.10, "z": 1E2 }',
    '{"role":"tool","content":"\\u00fc\\ud83d\\ude00 ü\N{GRINNING FACE}","tool_call_id":"a/b"}',
    '{"role":"assistant","a":1,"a":2,"tool_calls":[{"id":"1","function":{"name":"f","arguments":{"b":1,"a":2}}}]}',
    '\n{"role":"function"}\n',
)
SAMPLING = Sampling(temperature=0.5, top_p=1.0, max_tokens=64, stop=("\n", "ü"), logprobs=True)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


def parsed(body: bytes) -> dict[str, Any]:
    """The parsed body, which must be JSON with unique keys and without NaN."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if "response_mask" in dict(pairs):
            assert len({key for key, _ in pairs}) == len(pairs)
        return dict(pairs)

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    found: dict[str, Any] = json.loads(body, object_pairs_hook=unique, parse_constant=refuse)
    return found


class Writing:
    """Write the requests of a rollout, all with the same sampling parameters."""

    def __init__(self, sampling: Sampling, rollout_id: str) -> None:
        self.writer = RequestWriter(rollout_id)
        self.parameters = masked_parameters(sampling)

    def masked(self, history: list[Message], length: int | None) -> bytes:
        return self.writer.masked(history, self.parameters, length)


def writing(sampling: Sampling, rollout_id: str = "r1") -> Writing:
    return Writing(sampling, rollout_id)


def messages(*texts: str) -> list[Message]:
    return [Message.parse(text) for text in texts]


def test_messages_go_out_to_the_byte() -> None:
    body = writing(SAMPLING).masked(messages(*TEXTS), None)
    spliced = ",".join(TEXTS).encode()
    assert b'"messages":[' + spliced + b"]," in body
    assert parsed(body) == {
        "model": "default",
        "rollout_id": "r1",
        "messages": [json.loads(text) for text in TEXTS],
        "temperature": 0.5,
        "top_p": 1.0,
        "max_tokens": 64,
        "logprobs": True,
        "stop": ["\n", "ü"],
        "response_mask": None,
    }


def test_a_body_grows_by_what_is_new() -> None:
    """The second of two consecutive bodies equals the first plus the new messages and another mask."""
    writer, history, before = writing(SAMPLING), messages(TEXTS[0]), b""
    for count, text in enumerate(TEXTS[1:], start=1):
        body = writer.masked(history, count if count > 1 else None)
        kept = body[: body.index(b'],"response_mask"')]
        assert kept == before + history[-1].text.encode() if before else kept.endswith(history[-1].text.encode())
        before = kept + b","
        history = [*history, Message.parse(text)]


def test_many_new_messages_at_once_and_none() -> None:
    writer = writing(SAMPLING)
    writer.masked(messages(TEXTS[0]), None)
    again = writer.masked(messages(*TEXTS), 3)
    assert again == writing(SAMPLING).masked(messages(*TEXTS), 3)
    assert writer.masked(messages(*TEXTS), 3) == again


def test_a_turn_may_be_sampled_in_another_way() -> None:
    writing_ = writing(SAMPLING)
    bodies = [
        writing_.writer.masked(messages(*TEXTS[:count]), masked_parameters(sampling), None)
        for count, sampling in ((1, SAMPLING), (3, Sampling(max_tokens=5)), (5, SAMPLING))
    ]
    assert [parsed(body).get("temperature") for body in bodies] == [0.5, None, 0.5]
    assert bodies[2] == writing(SAMPLING).masked(messages(*TEXTS), None)


@pytest.mark.parametrize("length", [1, 2, 17, 40_000])
def test_a_mask_is_as_many_zeros(length: int) -> None:
    body = writing(SAMPLING).masked(messages(TEXTS[0]), length)
    assert parsed(body)["response_mask"] == [0] * length


@pytest.mark.parametrize("length", [None, 0])
def test_no_mask_is_null(length: int | None) -> None:
    assert parsed(writing(SAMPLING).masked(messages(TEXTS[0]), length))["response_mask"] is None


def test_what_is_unset_is_left_to_the_trainer() -> None:
    body = parsed(writing(Sampling()).masked(messages(TEXTS[0]), None))
    assert body == {
        "model": "default",
        "rollout_id": "r1",
        "messages": [json.loads(TEXTS[0])],
        "stop": None,
        "response_mask": None,
    }


@pytest.mark.parametrize(
    "rollout_id", ['"', "a/b\\c", "\x00\n", "ü\N{GRINNING FACE}", '],"response_mask":[1]', "x" * 256]
)
def test_any_id_is_one_string(rollout_id: str) -> None:
    body = parsed(writing(SAMPLING, rollout_id).masked(messages(TEXTS[0]), 2))
    assert (body["rollout_id"], body["response_mask"]) == (rollout_id, [0, 0])


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from([*OWN, "top_k", "seed", "", "Model"]) | st.text(), JSON_VALUES, max_size=5))
def test_extras_never_replace_a_key_of_the_protocol(extra: dict[str, Any]) -> None:
    sampling = Sampling(temperature=0.5, extra_json=json.dumps(extra))
    body = parsed(writing(sampling).masked(messages(TEXTS[0]), 2))
    plain = parsed(writing(Sampling(temperature=0.5)).masked(messages(TEXTS[0]), 2))
    assert body == {**{key: value for key, value in extra.items() if key not in OWN}, **plain}


@pytest.mark.parametrize(
    "text", ['{"response_mask": [1], "response_mask": [1]}', '{"\\u006dodel": "x"}', '{"seed": 1, "seed": 2}']
)
def test_extras_written_strangely_neither(text: str) -> None:
    body = parsed(writing(Sampling(extra_json=text)).masked(messages(TEXTS[0]), 2))
    assert (body["model"], body["response_mask"]) == ("default", [0, 0])


def test_a_large_integer_among_the_extras_stays_one() -> None:
    sampling = Sampling(extra_json='{"seed": 18446744073709551617}')
    assert b'"seed": 18446744073709551617' in writing(sampling).masked(messages(TEXTS[0]), None)


def test_a_number_beyond_all_floats_among_the_extras_leaves_the_body_json() -> None:
    parsed(writing(Sampling(extra_json='{"penalty": 1e999}')).masked(messages(TEXTS[0]), None))


async def test_over_the_wire(trainers: MaskedTrainers) -> None:
    """The trainer receives in three turns its own messages verbatim, and masks from the second turn on."""
    said = '{ "role":"assistant", "content":"\\u0038", "vendor":18446744073709551617 }'
    body = f'{{"choices": [{{"message": {said}}}], "token_ids": [5], "prompt_token_ids": null}}'
    async with raw_trainer(answer(body.encode())) as trainer:
        asking = Asking(trainers, trainer.url)
        masks = [(await asking.turn()).mask_length for _ in range(3)]
        bodies = [each.body for each in trainer.requests]
    assert [each.target for each in trainer.requests] == ["/v1/chat/completions"] * 3
    assert {each.headers["content-type"] for each in trainer.requests} == {"application/json"}
    assert [sent.count(said.encode()) for sent in bodies] == [0, 1, 2]
    for earlier, later in itertools.pairwise(bodies):
        assert later.startswith(earlier[: earlier.index(b'],"response_mask"')] + b",")
    assert [parsed(sent)["response_mask"] for sent in bodies] == [
        None if length is None else [0] * length for length in masks
    ]
    assert masks[0] is None
    assert all(masks[1:])
    assert not any(re.search(rb"Infinity|NaN", sent) for sent in bodies)
