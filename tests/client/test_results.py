"""Outcomes as plain values."""

from __future__ import annotations

import pickle

import pytest
from osmosis.rollout.v1 import message_pb2, outcome_pb2, spec_pb2, token_pb2
from rollout_client import TrainingSample, messages, samples
from rollout_server.edge.wire.message import message_from_proto

SAMPLE = token_pb2.Sample(
    segment_id="0",
    prompt_ids=[1, 2],
    response_ids=[3, 4, 2**31 - 1],
    response_mask=b"\x01\x00\x01",
    logprobs=token_pb2.Logprobs(values=[-0.5, 0.0, -1.5]),
)


def test_a_sample_is_lists() -> None:
    (sample,) = samples(outcome_pb2.Outcome(samples=[SAMPLE]))
    assert sample == TrainingSample("0", [1, 2], [3, 4, 2**31 - 1], [1, 0, 1], [-0.5, 0.0, -1.5])
    assert pickle.loads(pickle.dumps(sample)) == sample


def test_logprobs_that_did_not_come_are_none_and_not_empty() -> None:
    bare = token_pb2.Sample(response_ids=[1], response_mask=b"\x01")
    assert samples(outcome_pb2.Outcome(samples=[bare]))[0].logprobs is None
    assert samples(outcome_pb2.Outcome()) == []


def test_a_segment_in_which_the_model_wrote_nothing_is_no_sample() -> None:
    silent = token_pb2.Sample(prompt_ids=[1, 2], logprobs=token_pb2.Logprobs())
    assert samples(outcome_pb2.Outcome(samples=[silent])) == []


@pytest.mark.parametrize(
    "wrong",
    [
        token_pb2.Sample(response_ids=[1, 2], response_mask=b"\x01"),
        token_pb2.Sample(response_ids=[1], response_mask=b"\x01\x00"),
        token_pb2.Sample(response_ids=[1], response_mask=b"\x01", logprobs=token_pb2.Logprobs()),
    ],
)
def test_a_sample_that_does_not_fit_is_refused(wrong: token_pb2.Sample) -> None:
    with pytest.raises(ValueError, match="length"):
        samples(outcome_pb2.Outcome(samples=[wrong]))


def part(**fields: object) -> message_pb2.ContentPart:
    return message_pb2.ContentPart(**fields)  # type: ignore[arg-type]


def blob(**fields: object) -> message_pb2.ContentPart:
    return part(blob=message_pb2.Blob(**fields))  # type: ignore[arg-type]


TYPED = [
    message_pb2.ChatMessage(role="assistant"),
    message_pb2.ChatMessage(role="user", parts=[part(text="one")], name="me"),
    message_pb2.ChatMessage(
        role="user", parts=[part(text="one"), part(json='{"type": "x", "n": 18446744073709551616}')]
    ),
    message_pb2.ChatMessage(role="tool", parts=[part(text="8")], tool_call_id="c"),
    message_pb2.ChatMessage(
        role="assistant",
        reasoning="hm",
        tool_calls=[message_pb2.ToolCall(id="c", name="add", arguments_json='{"a": ')],
    ),
    message_pb2.ChatMessage(
        role="user",
        parts=[
            blob(media_type="image/png", inline=b"\x89"),
            blob(media_type="image/png", uri="https://x/y.png", sha256=b"\x01" * 32),
            blob(media_type="audio/wav", inline=b"RIFF"),
            blob(media_type="application/pdf", inline=b"%PDF"),
        ],
    ),
]


@pytest.mark.parametrize("chat", TYPED)
def test_a_typed_message_reads_as_the_server_reads_it(chat: message_pb2.ChatMessage) -> None:
    proto = message_pb2.Message(chat=chat)
    assert messages([proto]) == [message_from_proto(proto).fields()]


def test_messages_of_a_spec_an_outcome_and_a_list() -> None:
    proto = message_pb2.Message(json='{"role": "user", "content": null, "n": 18446744073709551616}')
    expected = [{"role": "user", "content": None, "n": 2**64}]
    assert messages([proto]) == expected
    assert messages(spec_pb2.RolloutSpec(messages=[proto])) == expected
    assert messages(outcome_pb2.Outcome(messages=[proto])) == expected


@pytest.mark.parametrize("text", ["", "[1]", '"x"', "{"])
def test_what_is_no_message(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        messages([message_pb2.Message(json=text)])
