"""Server-sent events over raw sockets: no event is lost or repeated, whichever side breaks the connection."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from fastapi import FastAPI
from osmosis.rollout.v1 import event_pb2, message_pb2, outcome_pb2, token_pb2
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from osmosis.rollout.v1.rollout_service_pb2_grpc import RolloutServiceStub
from rollout_gateway.calls import Rollouts
from rollout_gateway.errors import ErrorResponses
from rollout_gateway.http.request_boundary import RequestBoundary
from rollout_gateway.key_check import KeyCheck
from rollout_gateway.rest.event_routes import StreamLimits, events_router
from rollout_gateway.settings import GatewaySettings

from tests.support.gateways import http_client
from tests.support.rest_gateway import Plain, PlainServer, Sse, event, listening, plain_gateway, scripted
from tests.support.scripted_server import UID, Refusal, stopped

Code = grpc.StatusCode
COUNT = 8


@pytest.fixture
async def plain() -> AsyncIterator[Plain]:
    """A gateway in front of a finished rollout."""
    async with plain_gateway() as opened:
        finish(opened.server)
        yield opened


def finish(server: PlainServer, *others: event_pb2.RolloutEvent) -> None:
    server.events = [*others, *(event(number) for number in range(len(others) + 1, COUNT))]
    server.events.append(event(COUNT, finished=event_pb2.Finished(outcome=stopped('{"role":"user"}'))))
    server.rollout.state = pb.ROLLOUT_STATE_FINISHED
    server.rollout.last_sequence = COUNT


def run_on(server: PlainServer, last: int) -> None:
    """Make the rollout run, with events up to that one."""
    server.events = [event(number) for number in range(1, last + 1)]
    server.rollout.state = pb.ROLLOUT_STATE_RUNNING
    server.rollout.last_sequence = last
    server.stays = True
    server.go.clear()


@asynccontextmanager
async def impatient(server: PlainServer, patience: StreamLimits) -> AsyncIterator[tuple[str, int]]:
    """Run a gateway for streams only, with a given retry time; yield host and port."""
    async with scripted(server) as address, grpc.aio.insecure_channel(address) as channel:
        rollouts = Rollouts(RolloutServiceStub(channel), GatewaySettings())
        app = FastAPI()
        app.include_router(events_router(rollouts, patience))
        ErrorResponses(rollouts, KeyCheck(rollouts.server, 10.0), lambda _: True).install(app)
        app.add_middleware(RequestBoundary)
        async with listening(app) as where:
            yield where


async def first(stream: Sse, count: int) -> list[dict[str, Any]]:
    """The first events of a stream, which stays open."""
    found: list[dict[str, Any]] = []
    frames = stream.frames()
    while len(found) < count:
        frame = await anext(frames)
        if frame.is_event:
            found.append(frame.json)
    return found


async def test_a_finished_rollout_is_told_from_its_beginning_to_its_end(plain: Plain) -> None:
    stream = await plain.events()
    assert (stream.status, stream.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    assert stream.headers["cache-control"] == "no-store"
    assert stream.headers["x-accel-buffering"] == "no"
    assert stream.headers["x-request-id"]
    frames = [frame async for frame in stream.frames()]
    assert stream.ended
    assert frames.pop(0).fields == {"retry": "1000"}
    assert [frame.fields["id"] for frame in frames] == [str(number) for number in range(1, COUNT + 1)]
    assert [frame.fields["event"] for frame in frames] == ["note"] * (COUNT - 1) + ["finished"]
    assert frames[1].json == {
        "sequence": 2,
        "time": None,
        "event": "note",
        "turn": 1,
        "segment_id": "0",
        "code": "n",
        "text": "event 2",
    }
    assert frames[-1].json["outcome"]["end"] == "stop"
    assert plain.server.watches[0] == pb.WatchRolloutRequest(uid=UID, detail=event_pb2.EVENT_DETAIL_MESSAGES)


async def test_a_connection_that_is_killed_loses_nothing_and_repeats_nothing(plain: Plain) -> None:
    for position in range(1, COUNT + 1):
        killed = await plain.events()
        seen = await first(killed, position)
        killed.kill()
        again = await plain.events(last=str(seen[-1]["sequence"]))
        if position == COUNT:
            assert again.status == 204
        else:
            seen += [frame.json for frame in await again.all()]
        assert [each["sequence"] for each in seen] == list(range(1, COUNT + 1))


@pytest.mark.parametrize(
    "refusal", [Refusal(Code.UNAVAILABLE), Refusal(Code.UNAVAILABLE, rich=False), Refusal(Code.CANCELLED), None]
)
async def test_a_server_that_breaks_off_is_asked_for_the_rest(plain: Plain, refusal: Refusal | None) -> None:
    for position in range(1, COUNT):
        plain.server.watches.clear()
        plain.server.breaks[position] = refusal
        sequences = [frame.json["sequence"] for frame in await (await plain.events()).all()]
        assert sequences == list(range(1, COUNT + 1))
        assert [watch.after_sequence for watch in plain.server.watches] == [0, position]


async def test_a_server_that_breaks_after_every_event_is_followed_to_the_end(plain: Plain) -> None:
    plain.server.breaks = {number: Refusal(Code.UNAVAILABLE) for number in range(1, COUNT)}
    assert [frame.json["sequence"] for frame in await (await plain.events()).all()] == list(range(1, COUNT + 1))


async def test_a_server_that_repeats_itself_is_heard_once(plain: Plain) -> None:
    plain.server.events.insert(3, event(2))
    assert [frame.json["sequence"] for frame in await (await plain.events()).all()] == list(range(1, COUNT + 1))


@pytest.mark.parametrize("refusal", [Refusal(Code.NOT_FOUND), Refusal(Code.INTERNAL), Refusal(Code.UNAUTHENTICATED)])
async def test_what_resuming_does_not_heal_ends_the_stream(plain: Plain, refusal: Refusal) -> None:
    plain.server.breaks[3] = refusal
    assert [frame.json["sequence"] for frame in await (await plain.events()).all()] == [1, 2, 3]
    assert len(plain.server.watches) == 1


async def test_a_server_that_stays_away_ends_the_stream_and_the_client_may_come_back(plain: Plain) -> None:
    plain.server.events = plain.server.events[:3]
    async with impatient(plain.server, StreamLimits(pauses=(0.01, 0.01))) as (host, port):
        path = f"/v1/rollouts/{UID}/events"
        stream = await Sse.open(host, port, path)
        assert [frame.json["sequence"] for frame in await stream.all()] == [1, 2, 3]
        assert [watch.after_sequence for watch in plain.server.watches] == [0, 3, 3]
        finish(plain.server)
        rest = await (await Sse.open(host, port, path, "3")).all()
        assert [frame.json["sequence"] for frame in rest] == list(range(4, COUNT + 1))


async def test_the_header_goes_before_the_query(plain: Plain) -> None:
    stream = await plain.events("?after=1", last="5")
    assert [frame.json["sequence"] for frame in await stream.all()] == [6, 7, 8]
    stream = await plain.events("?after=5", last="")
    assert [frame.json["sequence"] for frame in await stream.all()] == [6, 7, 8]


async def test_who_has_seen_the_end_is_told_not_to_come_back(plain: Plain) -> None:
    for stream in (await plain.events(last=str(COUNT)), await plain.events(f"?after={COUNT}")):
        assert stream.status == 204
        assert "content-type" not in stream.headers
    assert plain.server.watches == []


@pytest.mark.parametrize("last", ["x", "-1", "1.5", "٣", "1" * 21, str(2**64), "1 2"])
async def test_a_last_id_that_is_none_is_refused(plain: Plain, last: str) -> None:
    reply = await plain.http.get(f"/v1/rollouts/{UID}/events", headers=[(b"last-event-id", last.encode())])
    assert reply.status_code == 422
    assert reply.json()["error"]["fields"][0]["field"] == "Last-Event-ID"
    assert plain.server.watches == []


@pytest.mark.parametrize(
    ("rpc", "refusal", "status"),
    [
        ("GetRollout", Refusal(Code.NOT_FOUND), 404),
        ("GetRollout", Refusal(Code.UNAUTHENTICATED), 401),
        ("GetRollout", Refusal(Code.UNAVAILABLE), 503),
        ("WatchRollout", Refusal(Code.OUT_OF_RANGE), 400),
        ("WatchRollout", Refusal(Code.NOT_FOUND), 404),
    ],
)
async def test_an_error_before_the_first_event_is_an_error(
    plain: Plain, rpc: str, refusal: Refusal, status: int
) -> None:
    plain.server.refusals[rpc] = refusal
    stream = await plain.events()
    assert stream.status == status
    assert (await stream.body())["error"]["code"] == "TEST"


async def test_a_stream_begins_at_once_also_where_nothing_happens(plain: Plain) -> None:
    run_on(plain.server, 3)
    stream = await plain.events(last="3")
    assert stream.status == 200
    await plain.server.waiting.wait()
    stream.kill()


async def test_only_the_outcome_may_be_wanted(plain: Plain) -> None:
    run_on(plain.server, 3)
    plain.server.events = []
    stream = await plain.events("?detail=outcome")
    await plain.server.waiting.wait()
    plain.server.stays = False
    finish(plain.server)
    plain.server.events = plain.server.events[-1:]
    plain.server.go.set()
    assert [frame.json["event"] for frame in await stream.all()] == ["finished"]
    assert {watch.detail for watch in plain.server.watches} == {event_pb2.EVENT_DETAIL_OUTCOME}


@pytest.mark.parametrize("last", [None, "3"])
async def test_a_client_that_leaves_ends_the_call(plain: Plain, last: str | None) -> None:
    run_on(plain.server, 3)
    stream = await plain.events(last=last)
    await plain.server.waiting.wait()
    stream.kill()
    await plain.server.left.wait()


async def test_a_client_that_leaves_before_it_is_answered_ends_the_call(plain: Plain) -> None:
    run_on(plain.server, 3)
    plain.server.events = []
    opening = asyncio.create_task(plain.http.get(f"/v1/rollouts/{UID}/events"))
    await plain.server.waiting.wait()
    opening.cancel()
    await plain.server.left.wait()


async def test_silence_is_filled_with_comments(plain: Plain) -> None:
    run_on(plain.server, 1)
    async with impatient(plain.server, StreamLimits(keep_alive=0.02)) as (host, port):
        stream = await Sse.open(host, port, f"/v1/rollouts/{UID}/events")
        frames = stream.frames()
        kinds = [await anext(frames) for _ in range(5)]
        assert [sorted(frame.fields) for frame in kinds[:2]] == [["retry"], ["data", "event", "id"]]
        assert [frame.fields for frame in kinds[2:]] == [{"": "keep-alive"}] * 3
        plain.server.go.set()
        stream.kill()


async def test_texts_of_all_kinds_stay_on_their_line(plain: Plain) -> None:
    text = (
        '{"role":\n"assistant",\r\n "content":"a\\n\\u2028 \u2028\u0085é漢🎉\\ud83c\\udf89", "n":18446744073709551617}'
    )
    answered = event_pb2.Answered(message=message_pb2.Message(json=text), finish_reason="stop\n\nid: 99")
    finish(plain.server, event(1, answered=answered))
    stream = await plain.events()
    told = (await stream.all())[0]
    assert told.fields["data"].isascii()
    assert "18446744073709551617" in told.fields["data"]
    assert told.json["message"] == json.loads(text)
    assert told.json["finish_reason"] == "stop\n\nid: 99"
    assert told.fields["id"] == "1"


async def test_an_event_of_the_future_only_moves_the_id_on(plain: Plain) -> None:
    plain.server.events[1] = event_pb2.RolloutEvent(sequence=2)
    frames = [frame async for frame in (await plain.events()).frames()]
    assert frames[2].fields == {"id": "2"}
    assert [frame.fields["id"] for frame in frames[1:]] == [str(number) for number in range(1, COUNT + 1)]


async def test_an_event_that_is_not_recorded_has_no_id(plain: Plain) -> None:
    plain.server.events.insert(2, event(0))
    frames = await (await plain.events()).all()
    assert [frame.fields.get("id") for frame in frames[:4]] == ["1", "2", None, "3"]


@pytest.mark.parametrize("query", ["?after=-1", "?after=x", "?detail=all", "?afterr=1", f"?after={2**64}"])
async def test_a_query_that_is_wrong_is_refused(plain: Plain, query: str) -> None:
    stream = await plain.events(query)
    assert stream.status == 422
    field = (await stream.body())["error"]["fields"][0]["field"]
    assert field == query[1:].partition("=")[0]


async def test_httpx_reads_the_stream_to_its_end(plain: Plain) -> None:
    async with (
        http_client(plain.http.base_url) as client,
        client.stream("GET", f"/v1/rollouts/{UID}/events", params={"detail": "full"}) as reply,
    ):
        lines = [line async for line in reply.aiter_lines()]
    assert lines.count("event: finished") == 1
    assert plain.server.watches[0].detail == event_pb2.EVENT_DETAIL_FULL


PARTING: dict[str, Any] = {
    "message": 2,
    "field": "content",
    "expected": "8",
    "found": "9",
    "api": "chat",
    "client_agent": "a1",
}
REPORT: dict[str, Any] = {
    "continued": 1,
    "parted": 2,
    "joined": 3,
    "replayed": 4,
    "abandoned": 5,
    "auxiliary": 6,
    "restored": 7,
    "dropped": 8,
    "refused": 9,
    "fixed_replies": 11,
    "longest_share": 0.5,
}


async def test_what_agents_do_has_its_fields(plain: Plain) -> None:
    origin = token_pb2.SegmentOrigin(parent_id="0", kind=token_pb2.SEGMENT_KIND_SUBAGENT)
    help_ = message_pb2.Message(json='{"role": "user", "content": "Help."}')
    parted = token_pb2.SegmentOrigin(
        parent_id="0", parent_tokens=9, kind=token_pb2.SEGMENT_KIND_BRANCH, parting=token_pb2.Parting(**PARTING)
    )
    report = outcome_pb2.CaptureReport(**REPORT)
    whose = {"role": "critic", "trainable": False, "model": "large"}
    forked = event_pb2.Forked(of_segment_id="0", origin=origin, count=1, messages=[help_], tools=["add"], **whose)
    deeds: list[tuple[event_pb2.RolloutEvent, dict[str, Any]]] = [
        (
            event(1, forked=forked),
            {
                "of_segment_id": "0",
                "origin": {"parent_id": "0", "parent_tokens": 0, "kind": "subagent"},
                "count": 1,
                "tools": ["add"],
                "messages": [{"role": "user", "content": "Help."}],
                **whose,
            },
        ),
        (event(2, given_up=event_pb2.GivenUp()), {}),
        (event(3, masked=event_pb2.Masked(reason="a plan")), {"reason": "a plan"}),
        (
            event(4, observed=event_pb2.Observed(what="once", value_json='{"n": [1]}')),
            {"what": "once", "value": {"n": [1]}},
        ),
        (event(5, observed=event_pb2.Observed(what="now")), {"what": "now"}),
        (event(6, rewarded=event_pb2.Rewarded(value=-0.5)), {"value": -0.5}),
        (
            event(
                7, model_called=event_pb2.ModelCalled(model="judge", message=help_, finish_reason="stop", attempts=1)
            ),
            {
                "model": "judge",
                "message": {"role": "user", "content": "Help."},
                "finish_reason": "stop",
                "prompt_tokens": 0,
                "generated_tokens": 0,
                "attempts": 1,
                "elapsed_ms": 0.0,
            },
        ),
        (
            event(8, forked=event_pb2.Forked(of_segment_id="0", origin=parted, count=4, after_turn=2)),
            {
                "of_segment_id": "0",
                "origin": {"parent_id": "0", "parent_tokens": 9, "kind": "branch", "parting": PARTING},
                "count": 4,
                "tools": [],
                "role": "",
                "trainable": None,
                "model": "",
                "after_turn": 2,
            },
        ),
        (event(9, capture_settled=event_pb2.CaptureSettled(report=report)), {"report": REPORT}),
    ]
    finish(plain.server, *(each for each, _ in deeds))
    for frame, (_, own) in zip(await (await plain.events()).all(), deeds, strict=False):
        assert {
            key: value
            for key, value in frame.json.items()
            if key not in {"sequence", "time", "event", "turn", "segment_id"}
        } == own


async def test_every_kind_of_event_has_a_form(plain: Plain) -> None:
    kinds = [field.name for field in event_pb2.RolloutEvent.DESCRIPTOR.oneofs_by_name["event"].fields]
    plain.server.events = [event_pb2.RolloutEvent(sequence=number) for number in range(1, len(kinds) + 1)]
    for kind, each in zip(kinds, plain.server.events, strict=True):
        getattr(each, kind).SetInParent()
    plain.server.rollout.last_sequence = len(kinds)
    frames = await (await plain.events("?detail=full")).all()
    assert [frame.fields["event"] for frame in frames] == kinds
    assert all(frame.json["sequence"] == int(frame.fields["id"]) for frame in frames)
