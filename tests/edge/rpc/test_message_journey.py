"""Messages through whole rollouts are returned byte for byte."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from osmosis.rollout.v1 import event_pb2, message_pb2, outcome_pb2
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from rollout_server.calculator import Calculator

from tests.edge.rpc.json_texts import message_texts, values
from tests.edge.rpc.text_trainer import TextTrainer
from tests.support.agents import Idle
from tests.support.server_client import Caller, serving
from tests.support.start_requests import HELLO, chat, json_message, start, target

NASTY = (
    '{"role":"user"}',
    '{"role":"user","content":null}',
    '{"role":"user","content":""}',
    '{"content":[],"role":"user","content":"the later one"}',
    f'{{"role":"user","content":"x","n":[{2**64 + 1},-{2**64 + 1},{10**300}]}}',
    '{"role":"user","content":"x","n":[1.10,1E5,-0.0,1e400,0.1000000000000000055511151231257827]}',
    '{"role":"user","content":"x","n":-' + "7" * 5000 + "}",
    ' {\r\n\t"vendor" : { "z":1,"a":{} } , "role"  :  "user" }\n',
    '{"role":"\\u0075ser","content":"\\u00e9 \\/ \\ud83d\\ude00 \\ud800 \\u0000"}',
    '{"role":"tool","content":"é 😀 \u2028","tool_call_id":""}',
    '{"role":"assistant","tool_calls":[{"function":{"arguments":{"b":1,"a":2}}}],"content":null}',
)


async def echoed(texts: list[str], caller: Caller) -> None:
    """Assert that outcomes and specs hold the messages as they were sent."""
    rollout = await caller.play(start(messages=[json_message(text) for text in texts]), pb.ROLLOUT_VIEW_MESSAGES)
    assert [message.json for message in rollout.outcome.messages] == texts
    assert [message.json for message in rollout.spec.messages] == texts
    [event] = await caller.events(rollout.uid, detail=event_pb2.EVENT_DETAIL_OUTCOME)
    assert [message.json for message in event.finished.outcome.messages] == texts


async def test_every_nasty_message_comes_out_as_it_went_in(caller: Caller) -> None:
    await echoed(list(NASTY), caller)
    for text in NASTY:
        await echoed([text], caller)


@settings(max_examples=5, deadline=None)
@given(st.lists(message_texts(), min_size=1, max_size=20))
def test_whatever_the_messages_are_they_come_out_as_they_went_in(texts: list[str]) -> None:
    async def journey() -> None:
        async with serving(Idle()) as caller:
            await echoed(texts, caller)

    asyncio.run(journey())


@settings(max_examples=5, deadline=None)
@given(st.lists(values().filter(lambda text: "\\ud800" not in text), min_size=1, max_size=5))
def test_a_trainers_answer_comes_out_as_the_trainer_wrote_it(vendor: list[str]) -> None:
    keys = ", ".join(f'"vendor_{n}" :{value}' for n, value in enumerate(vendor))
    text = f'{{ "content":"8" ,"role": "assistant",{keys}}}'

    async def journey() -> None:
        async with serving(Calculator()) as caller, TextTrainer([text]) as trainer:
            rollout = await caller.play(start(completions=target(trainer.url)))
            assert [message.json for message in rollout.outcome.messages] == [HELLO, text]
            events = await caller.events(rollout.uid, detail=event_pb2.EVENT_DETAIL_MESSAGES)
            assert [event.answered.message.json for event in events if event.WhichOneof("event") == "answered"] == [
                text
            ]

    asyncio.run(journey())


async def test_an_answer_with_half_a_surrogate_pair_is_malformed(caller: Caller) -> None:
    for answer in ('{"role":"assistant","content":"\\ud800"}', '{"role":"assistant","vendor":"\\udc00"}'):
        async with TextTrainer([answer]) as trainer:
            outcome = (await caller.play(start(agent="calculator", completions=target(trainer.url)))).outcome
        assert outcome.failure.category == outcome_pb2.FAILURE_CATEGORY_VALIDATION
        assert "turn 1" in outcome.failure.message


async def test_an_answer_goes_back_to_its_trainer_as_it_was_written(caller: Caller) -> None:
    call = '{ "id":"c","index":0, "function":{"arguments": "{\\"a\\":1.10,\\"b\\":2}" ,"name":"add"}}'
    texts = [
        f'{{"vendor":1e2,"role":"assistant", "content":"x","tool_calls":[{call}]}}',
        '{"role":"assistant","content":"y"}',
    ]
    async with TextTrainer(texts) as trainer:
        rollout = await caller.play(start(agent="calculator", completions=target(trainer.url)))
        assert rollout.outcome.stop.reason == "stop"
        messages = [message.json for message in rollout.outcome.messages]
        assert messages[:2] == [HELLO, texts[0]]
        assert messages[3:] == [texts[1]]
        assert json.loads(messages[2])["tool_call_id"] == "c"
        assert f"{HELLO},{texts[0]},{messages[2]}" in trainer.seen[1]


async def test_a_part_in_json_with_half_a_surrogate_pair_comes_back(caller: Caller) -> None:
    message = chat("user", message_pb2.ContentPart(json='{"text": "\\ud800"}'))
    rollout = await caller.play(start(messages=[message]))
    assert rollout.outcome.messages == rollout.spec.messages
    assert b'{"text": "\\ud800"}' in rollout.outcome.messages[0].SerializeToString()


async def test_a_typed_rollout_is_answered_typed_where_it_can_be(caller: Caller) -> None:
    vendor = '{"role":"assistant","content":"8","vendor_score":0.5}'
    for answer, form in (('{"role":"assistant","content":"8"}', "chat"), (vendor, "json")):
        async with TextTrainer([answer]) as trainer:
            request = start(agent="calculator", messages=[chat("user", "Hi.")], completions=target(trainer.url))
            rollout = await caller.play(request)
        assert list(rollout.spec.messages) == [chat("user", "Hi.")]
        asked, answered = rollout.outcome.messages
        assert asked == chat("user", "Hi.")
        assert answered == (chat("assistant", "8") if form == "chat" else json_message(vendor))


@pytest.mark.parametrize("text", ['{"a" :1.10, "a": 2 }', f'{{"n":{2**64 + 1}}}', " {} "])
async def test_other_json_of_a_spec_is_shown_as_it_was_sent(caller: Caller, text: str) -> None:
    shown = (await caller.start(start(metadata_json=text, sampling={"extra_json": text}))).rollout.spec
    assert (shown.metadata_json, shown.sampling.extra_json) == (text, text)
