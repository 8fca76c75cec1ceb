"""Whole rollouts on a stream: token mode, message mode, groups, events, and views."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from osmosis.rollout.v1 import completion_service_pb2 as cpb
from osmosis.rollout.v1 import event_pb2, message_pb2, spec_pb2, token_pb2
from osmosis.rollout.v1 import rollout_service_pb2 as rpb
from osmosis.rollout.v1 import trainer_service_pb2 as pb
from rollout_client import samples

from tests.edge.stream.conftest import TURNS, StreamServer
from tests.edge.stream.trainer import FULL, Book, Trainer, kind, start

pytestmark = pytest.mark.asyncio(loop_scope="module")


def ended(count: int) -> Callable[[Trainer], bool]:
    return lambda trainer: len(trainer.outcomes) == count


def asked(count: int) -> Callable[[Trainer], bool]:
    return lambda trainer: len(trainer.asks) == count


async def test_token_mode_both_sides_hold_the_same(place: StreamServer) -> None:
    trainer = place.trainer()
    await trainer.put(start=start("r"))
    await trainer.until(ended(1))
    (rollout,) = trainer.outcomes
    assert rollout.outcome.stop.reason == "stop"
    assert [w.code for w in rollout.outcome.warnings] == []
    (sample,) = samples(rollout.outcome)
    assert sample.prompt_ids + sample.response_ids == trainer.books[rollout.uid].ids()
    assert sample.verified
    assert [ask.HasField("base") for ask in trainer.asks] == [False] + [True] * (TURNS - 1)
    assert set(trainer.generated.values()) == {1}
    await trainer.acknowledge()


async def test_message_mode_takes_the_trainers_prompt(place: StreamServer, toy: Any) -> None:
    trainer = place.trainer()
    trainer.automatic = False
    await trainer.put(start=start("r", token_mode=spec_pb2.TOKEN_MODE_MESSAGES))
    messages: list[dict[str, Any]] = []
    for turn in range(1, TURNS + 1):
        await trainer.until(asked(turn))
        ask = trainer.asks[-1]
        assert not ask.HasField("new_tokens")
        messages += [json.loads(m.json) for m in ask.new_messages if json.loads(m.json)["role"] != "assistant"]
        ids = toy.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        said = {"role": "assistant", "content": "Yes."}
        response = cpb.CompleteResponse(
            message=message_pb2.Message(json=json.dumps(said)),
            finish_reason="stop",
            token_ids=place.answer,
            logprobs=token_pb2.Logprobs(values=[-0.25] * len(place.answer)),
            prompt_ids=token_pb2.TokenIds(values=ids),
        )
        await trainer.put(answer=pb.TrainAnswer(turn_key=ask.turn_key, response=response))
        messages.append(said)
    await trainer.until(ended(1))
    (sample,) = samples(trainer.outcomes[0].outcome)
    assert sample.prompt_ids + sample.response_ids == [*ids, *place.answer]
    assert sum(sample.response_mask) == TURNS * len(place.answer)


async def test_a_group_is_announced_in_order_and_answered_in_any(place: StreamServer) -> None:
    trainer = place.trainer()
    trainer.automatic = False
    await trainer.put(start=start("g", count=3, request_id="k", group_id="p"))
    for _ in range(TURNS):
        before = len(trainer.asks)
        await trainer.until(asked(before + 3))
        for ask in reversed(trainer.asks[before:]):
            await trainer.complete(ask)
    await trainer.until(ended(3))
    assert [rollout.spec.rollout_id for rollout in trainer.started] == ["g/0", "g/1", "g/2"]
    assert {rollout.spec.group_id for rollout in trainer.started} == {"p"}
    for rollout in trainer.outcomes:
        (sample,) = samples(rollout.outcome)
        assert sample.prompt_ids + sample.response_ids == trainer.books[rollout.uid].ids()


@pytest.mark.parametrize("detail", [event_pb2.EVENT_DETAIL_BASIC, FULL, event_pb2.EVENT_DETAIL_OUTCOME])
async def test_events_come_in_order_and_before_the_outcome(place: StreamServer, detail: int) -> None:
    trainer = place.trainer(detail=detail)
    await trainer.put(start=start("r", count=2))
    await trainer.until(ended(2))
    for rollout in trainer.outcomes:
        mine = [item for item in trainer.items if _uid(item) == rollout.uid]
        assert kind(mine[0]) == "started"
        assert kind(mine[-1]) == "outcome"
        numbers = [item.event.event.sequence for item in mine if kind(item) == "event"]
        every = list(range(1, rollout.last_sequence + 1))
        assert numbers == (every[-1:] if detail == event_pb2.EVENT_DETAIL_OUTCOME else every)


def _uid(item: pb.TrainResponse) -> str:
    told = {
        "started": item.started.rollout.uid,
        "ask": item.ask.uid,
        "event": item.event.uid,
        "outcome": item.outcome.rollout.uid,
    }
    return told.get(kind(item) or "", "")


async def test_it_is_shown_as_any_rollout_and_received_when_acknowledged(place: StreamServer) -> None:
    trainer = place.trainer()
    trainer.automatic = False
    memory = rpb.REQUEST_MEMORY_UNTIL_RECEIVED
    wanted = start("r", request_id="k")
    wanted.rollout.request_memory = memory
    await trainer.put(start=wanted)
    for turn in range(1, TURNS + 1):
        await trainer.until(asked(turn))
        await trainer.complete(trainer.asks[-1])
    await trainer.until(ended(1))
    shown = await place.get(trainer.outcomes[0].uid)
    assert shown.spec.completions.dialect == spec_pb2.DIALECT_STREAM
    assert shown.spec.completions.url == ""
    await trainer.put(start=wanted)  # the outcome is not acknowledged yet: the same rollout
    await trainer.until(lambda t: len(t.started) == 2)
    await trainer.acknowledge()
    await trainer.put(start=wanted)
    await trainer.until(lambda t: len(t.started) == 3)
    first, same, other = [rollout.uid for rollout in trainer.started]
    assert first == same != other


async def test_a_trainer_that_forgot_is_sent_what_it_lacks(place: StreamServer) -> None:
    trainer = place.trainer()
    trainer.automatic = False
    await trainer.put(start=start("r"))
    await trainer.until(asked(1))
    await trainer.complete(trainer.asks[0])
    await trainer.until(asked(2))
    await trainer.reject(trainer.asks[1], grpc.StatusCode.FAILED_PRECONDITION, reason="BASE_UNKNOWN")
    await trainer.until(asked(3))
    refused, whole = trainer.asks[1:]
    assert whole.turn_key == refused.turn_key
    assert (refused.HasField("base"), whole.HasField("base")) == (True, False)
    assert [tool.name for tool in whole.tools.tools] == ["noop"]
    await trainer.complete(whole)
    await trainer.until(asked(4))
    await trainer.reject(trainer.asks[3], grpc.StatusCode.FAILED_PRECONDITION, reason="TOOLS_UNKNOWN")
    await trainer.until(asked(5))
    assert not trainer.asks[3].tools.tools
    assert [tool.name for tool in trainer.asks[4].tools.tools] == ["noop"]
    await trainer.complete(trainer.asks[4])
    await trainer.until(ended(1))
    assert trainer.outcomes[0].outcome.stop.reason == "stop"


async def test_a_mismatch_is_named_by_the_ledger_that_is_shown(place: StreamServer) -> None:
    trainer = place.trainer()
    trainer.automatic = False
    await trainer.put(start=start("r"))
    await trainer.until(asked(1))
    await trainer.complete(trainer.asks[0])
    await trainer.until(asked(2))
    ask = trainer.asks[1]
    book = trainer.books[ask.uid]
    other = len(book.spans[0].token_ids) // 2
    book.spans[0].token_ids[other] += 1
    await trainer.reject(ask, grpc.StatusCode.ABORTED, message="differs", mismatch=cpb.LedgerMismatch())
    await trainer.until(lambda t: kind(t.items[-1]) == "read_ledger")
    assert trainer.line is not None
    ledger = pb.TrainLedger(uid=ask.uid, segment_id=ask.segment_id, ledger=cpb.ReadLedgerResponse(spans=book.spans))
    await trainer.line.send(ledger=ledger)
    await trainer.until(ended(1))
    assert f"since turn 1, from token {other} on" in trainer.outcomes[0].outcome.failure.message


async def test_a_lie_ends_its_rollout_only(place: StreamServer) -> None:
    trainer = place.trainer()
    trainer.automatic = False
    await trainer.put(start=start("r", count=2))
    await trainer.until(asked(2))
    bad, good = trainer.asks
    response = Book(place.answer).complete(bad)
    response.message.json = "no JSON"
    await trainer.put(answer=pb.TrainAnswer(turn_key=bad.turn_key, response=response))
    trainer.automatic = True
    await trainer.complete(good)
    await trainer.until(ended(2))
    assert "answer is malformed" in trainer.rollout(bad.uid).outcome.failure.message
    assert trainer.rollout(good.uid).outcome.stop.reason == "stop"


async def test_late_double_and_strange_answers_are_ignored(place: StreamServer) -> None:
    trainer = place.trainer()
    trainer.automatic = False
    await trainer.put(start=start("r"))
    await trainer.until(asked(1))
    ask = trainer.asks[0]
    await trainer.put(answer=pb.TrainAnswer(turn_key="nobody/0/1", response=cpb.CompleteResponse()))
    await trainer.complete(ask)
    await trainer.put(answer=pb.TrainAnswer(turn_key=ask.turn_key, response=cpb.CompleteResponse()))
    trainer.automatic = True
    await trainer.until(ended(1))
    assert trainer.outcomes[0].outcome.stop.reason == "stop"
    await trainer.complete(ask)
    await trainer.until(lambda t: not t.kept)
    assert b"rollout_stream_answers_ignored_total 3.0\n" in place.server.exposition()


async def test_an_answer_for_a_turn_of_another_stream_is_nobodys(place: StreamServer) -> None:
    """Turn keys are not secret among trainers and authorize nothing."""
    owner, other = place.trainer(), place.trainer()
    owner.automatic = False
    await owner.put(start=start("r"))
    await owner.until(asked(1))
    await other.connect()
    await other.put(answer=pb.TrainAnswer(turn_key=owner.asks[0].turn_key, response=cpb.CompleteResponse()))
    await other.reject(owner.asks[0], grpc.StatusCode.INTERNAL)
    await other.until(lambda t: not t.kept)
    owner.automatic = True
    await owner.complete(owner.asks[0])
    await owner.until(ended(1))
    assert owner.outcomes[0].outcome.stop.reason == "stop"
    assert set(owner.generated.values()) == {1}
