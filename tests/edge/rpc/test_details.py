"""The exact contents of each event detail and each view of a rollout."""

from __future__ import annotations

import pytest
from osmosis.rollout.v1 import event_pb2, outcome_pb2
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from rollout_server.calculator import Calculator
from rollout_server.testing.script import Script, ScriptedReply, tool_call
from rollout_server.testing.trainer import StrictTrainer

from tests.edge.rpc.conftest import OpenServer
from tests.support.agents import Gated, Quoting
from tests.support.server_client import Caller, View, kinds
from tests.support.start_requests import json_message, metadata, start, target

SCRIPT = Script(
    (
        ScriptedReply(
            content="melon", reasoning="plum", tool_calls=(tool_call("call_1", "add", '{"a": 70001, "b": 1}'),)
        ),
        ScriptedReply(content="cherry", finish_reason="stop"),
    )
)
CONTENTS = (b"apple", b"melon", b"plum", b"cherry", b"70001", b"70002")
TELLING = ("answered", "tool_returned")
NAMES = (b"call_1", b"add", b"calculator", b"stop")
BASIC, MESSAGES, FULL, OUTCOME = (
    event_pb2.EVENT_DETAIL_BASIC,
    event_pb2.EVENT_DETAIL_MESSAGES,
    event_pb2.EVENT_DETAIL_FULL,
    event_pb2.EVENT_DETAIL_OUTCOME,
)


@pytest.fixture
async def uid(caller: Caller, trainer: StrictTrainer) -> str:
    """A finished rollout with recognizable content."""
    await trainer.put_script("r", SCRIPT)
    message = json_message('{"role": "user", "content": "apple"}')
    request = start(agent="calculator", messages=[message], completions=target(trainer.url))
    return (await caller.play(request)).uid


def without_tokens(outcome: outcome_pb2.Outcome) -> outcome_pb2.Outcome:
    """An outcome without its segments and samples."""
    copy = outcome_pb2.Outcome()
    copy.CopyFrom(outcome)
    del copy.segments[:], copy.samples[:]
    return copy


def reduced(event: event_pb2.RolloutEvent, detail: int) -> event_pb2.RolloutEvent:
    """A full event, reduced to a lower detail."""
    copy = event_pb2.RolloutEvent()
    copy.CopyFrom(event)
    if copy.WhichOneof("event") == "finished":
        copy.finished.outcome.CopyFrom(without_tokens(copy.finished.outcome))
    if copy.WhichOneof("event") == "answered":
        del copy.answered.spans[:]
    if detail == BASIC:
        _forget_messages(copy)
    return copy


def _forget_messages(event: event_pb2.RolloutEvent) -> None:
    match event.WhichOneof("event"):
        case "answered" | "tool_returned" as kind:
            getattr(event, kind).ClearField("message")
        case "appended":
            del event.appended.messages[:]
        case "finished":
            del event.finished.outcome.messages[:]


async def test_basic_events_hold_names_and_counts_and_no_content(caller: Caller, uid: str) -> None:
    events = await caller.events(uid, detail=BASIC)
    written = b"".join(event.SerializeToString() for event in events)
    assert [content for content in CONTENTS if content in written] == []
    assert [name for name in NAMES if name not in written] == []
    assert events == await caller.events(uid, detail=event_pb2.EVENT_DETAIL_UNSPECIFIED)
    answered = [event.answered for event in events if event.WhichOneof("event") == "answered"]
    assert [(a.tool_calls, a.verified, a.attempts, a.finish_reason) for a in answered] == [
        (1, True, 1, "stop"),
        (0, True, 1, "stop"),
    ]
    assert [a.HasField("mask_length") for a in answered] == [False, True]
    assert all(a.generated_tokens > 0 and a.elapsed_ms > 0 for a in answered)


async def test_details_differ_in_nothing_but_what_they_say(caller: Caller, uid: str) -> None:
    full = await caller.events(uid, detail=FULL)
    assert await caller.events(uid, detail=MESSAGES) == [reduced(event, MESSAGES) for event in full]
    assert await caller.events(uid, detail=BASIC) == [reduced(event, BASIC) for event in full]
    assert await caller.events(uid, detail=OUTCOME) == [reduced(full[-1], MESSAGES)]


async def test_events_with_messages_hold_the_conversation(caller: Caller, uid: str) -> None:
    events = await caller.events(uid, detail=MESSAGES)
    messages = (await caller.get(uid, pb.ROLLOUT_VIEW_MESSAGES)).outcome.messages
    told = [getattr(event, kind).message for event in events if (kind := str(event.WhichOneof("event"))) in TELLING]
    assert told == list(messages[1:])
    assert list(events[-1].finished.outcome.messages) == list(messages)


async def test_full_events_hold_the_ledger_turn_by_turn(caller: Caller, uid: str) -> None:
    events = await caller.events(uid, detail=FULL)
    rollout = await caller.get(uid, pb.ROLLOUT_VIEW_FULL)
    answered = [event for event in events if event.WhichOneof("event") == "answered"]
    assert [span for event in answered for span in event.answered.spans] == list(rollout.outcome.segments[0].spans)
    for event in answered:
        spans = event.answered.spans
        assert {span.turn for span in spans} == {event.turn}
        assert len(spans[-1].token_ids) == event.answered.generated_tokens
    assert sum(event.answered.prompt_tokens for event in answered) == rollout.metrics.prompt_tokens
    assert events[-1].finished.outcome == rollout.outcome


async def test_the_outcome_alone_comes_at_the_end(caller: Caller, uid: str) -> None:
    [event] = await caller.events(uid, detail=OUTCOME)
    outcome = event.finished.outcome
    assert len(outcome.messages) == 4
    assert not outcome.segments
    assert not outcome.samples
    assert await caller.events(uid, after=event.sequence, detail=OUTCOME) == []
    assert await caller.events(uid, after=event.sequence - 1, detail=OUTCOME) == [event]


async def test_messages_of_an_agent_are_counted_or_told(caller: Caller, gated: Gated) -> None:
    gated.gate.set()
    uid = (await caller.play(start(agent="gated", metadata_json=metadata(before=1)))).uid
    for detail in (BASIC, FULL):
        events = await caller.events(uid, detail=detail)
        assert kinds(events) == ["accepted", "note", "finished"]
        assert (events[0].accepted.messages, events[0].accepted.agent) == (1, "gated")


@pytest.mark.parametrize("by", ["note", "finish"])
async def test_half_a_surrogate_pair_in_an_agents_words_is_told_as_a_question_mark(
    open_server: OpenServer, by: str
) -> None:
    caller = await open_server(Quoting())
    message = json_message('{"role": "user", "content": "<\\ud800>"}')
    rollout = await caller.play(start(messages=[message], metadata_json=metadata(by=by)))
    events = await caller.events(rollout.uid)
    assert (events[1].note.text if by == "note" else rollout.outcome.stop.reason) == "<?>"
    await caller.stub.ListRollouts(pb.ListRolloutsRequest())


async def test_views_hold_what_their_names_say(caller: Caller, uid: str) -> None:
    full = await caller.get(uid, pb.ROLLOUT_VIEW_FULL)
    assert full.outcome.segments
    assert full.outcome.samples
    assert len(full.outcome.messages) == 4
    assert len(full.spec.messages) == 1
    expected = pb.Rollout()
    expected.CopyFrom(full)
    del expected.outcome.segments[:]
    assert await caller.get(uid, pb.ROLLOUT_VIEW_SAMPLES) == expected
    del expected.outcome.samples[:]
    assert await caller.get(uid, pb.ROLLOUT_VIEW_MESSAGES) == expected
    del expected.outcome.messages[:], expected.spec.messages[:]
    assert await caller.get(uid, pb.ROLLOUT_VIEW_BASIC) == expected
    assert await caller.get(uid, pb.ROLLOUT_VIEW_UNSPECIFIED) == expected
    assert [content for content in CONTENTS if content in expected.SerializeToString()] == []


@pytest.mark.parametrize("view", list(pb.RolloutView.values()))
async def test_wait_and_list_show_the_same_views(caller: Caller, uid: str, view: View) -> None:
    rollout = await caller.get(uid, view)
    waited = await caller.stub.WaitRollout(pb.WaitRolloutRequest(uid=uid, view=view))
    listed = await caller.stub.ListRollouts(pb.ListRolloutsRequest(view=view))
    assert rollout == waited.rollout
    assert [rollout] == list(listed.rollouts)


async def test_a_rollout_that_runs_shows_what_it_has_used_so_far(
    open_server: OpenServer, trainer: StrictTrainer
) -> None:
    await trainer.put_script("r", Script((SCRIPT.lines[0], ScriptedReply(content="late", delay=600))))
    caller = await open_server(Calculator())
    uid = (await caller.start(start(completions=target(trainer.url)))).rollout.uid
    watching = caller.watch(uid)
    async for item in watching:
        if item.event.WhichOneof("event") == "asked" and item.event.turn == 2:
            break
    rollout = await caller.get(uid, pb.ROLLOUT_VIEW_FULL)
    assert (rollout.state, rollout.last_sequence) == (pb.ROLLOUT_STATE_RUNNING, item.event.sequence)
    assert (rollout.metrics.turns, rollout.metrics.tool_calls) == (1, 1)
    assert not rollout.HasField("outcome")
    assert not rollout.HasField("finish_time")
    await caller.stub.CancelRollouts(pb.CancelRolloutsRequest(selection=pb.Selection(uids=[uid]), reason="seen"))
    outcome = (await caller.finished(uid)).outcome
    assert (outcome.cancellation.reason, outcome.metrics.turns, len(outcome.messages)) == ("seen", 1, 3)
    assert len(outcome.samples) == 1
