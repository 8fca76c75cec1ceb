"""Read, list and cancel rollouts through the REST API, over real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from google.rpc.error_details_pb2 import BadRequest
from osmosis.rollout.v1 import message_pb2, outcome_pb2, spec_pb2, token_pb2
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from rollout_gateway.settings import GatewaySettings

from tests.support.rest_gateway import KEY, Plain, plain_gateway
from tests.support.scripted_server import UID, Refusal

Code = grpc.StatusCode
PATH = f"/v1/rollouts/{UID}"
TEXT = '{"role":"user","content":"漢","n":18446744073709551617}'
METRICS = {field.name: 0 for field in outcome_pb2.Metrics.DESCRIPTOR.fields}


@pytest.fixture
async def plain() -> AsyncIterator[Plain]:
    """A gateway in front of a scripted server."""
    async with plain_gateway() as opened:
        yield opened


def finished() -> pb.Rollout:
    """A rollout with all fields set."""
    segment = token_pb2.Segment(
        id="0",
        origin=token_pb2.SegmentOrigin(kind=token_pb2.SEGMENT_KIND_MAIN),
        spans=[
            token_pb2.Span(
                author=token_pb2.AUTHOR_OTHER, mask_reason=token_pb2.MASK_REASON_PROMPT, turn=1, token_ids=[1, 2]
            ),
            token_pb2.Span(
                author=token_pb2.AUTHOR_MODEL,
                turn=1,
                token_ids=[3],
                logprobs=token_pb2.Logprobs(values=[-0.5]),
                policy_version="v1",
                policy_step=7,
                planes=[token_pb2.TokenPlane(name="experts", dtype="uint8", values=b"\x07")],
            ),
        ],
        verified=True,
        role="critic",
        model="large",
        trainable=True,
        reward=0.0,
    )
    sample = token_pb2.Sample(
        segment_id="0",
        prompt_ids=[1, 2],
        response_ids=[3, 2**31 - 1],
        response_mask=b"\x01\x00",
        logprobs=token_pb2.Logprobs(values=[-0.5, 0.0]),
        spans=[
            token_pb2.SampleSpan(author="AUTHOR_OTHER", mask_reason="MASK_REASON_PROMPT", turn=1, stop=2),
            token_pb2.SampleSpan(author="AUTHOR_MODEL", turn=1, start=2, stop=3, policy_version="v1", policy_step=7),
        ],
        origin=token_pb2.SegmentOrigin(parent_id="9", parent_tokens=1, kind="SEGMENT_KIND_DRIFT"),
        verified=True,
        trainable=False,
        untrainable_reason="masked",
        role="critic",
        model="large",
        reward=0.0,
        part=1,
    )
    outcome = outcome_pb2.Outcome(
        stop=outcome_pb2.Stop(reason="max_turns", truncated=True),
        messages=[message_pb2.Message(json=TEXT)],
        segments=[segment],
        samples=[sample, token_pb2.Sample(segment_id="1", trainable=False, untrainable_reason="failure_engine")],
        metrics=outcome_pb2.Metrics(total_ms=1.5, turns=1),
        reward=0.0,
        scores={"b": 1.0, "a": 0.5},
        extra_json='{"k" : 18446744073709551617}',
        warnings=[outcome_pb2.Warning(code="token_drift", message="parted", turn=1, index=0)],
        turn_rewards=[outcome_pb2.TurnReward(turn=1, value=0.5, segment_id="0")],
        reward_rule=outcome_pb2.REWARD_RULE_OWN,
        policy_step=9,
    )
    return pb.Rollout(
        uid=UID,
        spec=spec_pb2.RolloutSpec(rollout_id="r/1", agent="calculator", messages=[message_pb2.Message(json=TEXT)]),
        state=pb.ROLLOUT_STATE_FINISHED,
        last_sequence=9,
        create_time=Timestamp(seconds=1_700_000_000, nanos=5_000_000),
        finish_time=Timestamp(seconds=1_700_000_001),
        outcome=outcome,
        metrics=outcome.metrics,
        delivery=pb.Delivery(
            state=pb.DELIVERY_STATE_PENDING,
            attempts=2,
            error="503",
            next_attempt_time=Timestamp(seconds=1_700_000_002),
        ),
        caller="team-a",
    )


async def test_a_rollout_that_runs(plain: Plain) -> None:
    reply = await plain.http.get(PATH)
    assert (reply.status_code, reply.headers["content-type"]) == (200, "application/json")
    assert reply.json() == {
        "uid": UID,
        "state": "running",
        "caller": "",
        "last_sequence": 0,
        "create_time": None,
        "finish_time": None,
        "spec": {"rollout_id": ""},
        "metrics": METRICS,
        "delivery": None,
        "outcome": None,
    }
    assert plain.server.asked["GetRollout"] == pb.GetRolloutRequest(uid=UID, view=pb.ROLLOUT_VIEW_BASIC)


async def test_a_rollout_that_has_finished_in_every_view(plain: Plain) -> None:
    plain.server.rollout = finished()
    metrics = {**METRICS, "total_ms": 1.5, "turns": 1}
    basic = {
        "end": "stop",
        "reason": "max_turns",
        "truncated": True,
        "reward": 0.0,
        "scores": {"a": 0.5, "b": 1.0},
        "extra": {"k": 18446744073709551617},
        "warnings": [{"code": "token_drift", "message": "parted", "turn": 1, "index": 0}],
        "metrics": metrics,
        "turn_rewards": [{"turn": 1, "value": 0.5, "segment_id": "0"}],
        "reward_rule": "own",
        "policy_step": 9,
    }
    message = json.loads(TEXT)
    sample = {"segment_id": "0", "prompt_ids": [1, 2], "response_ids": [3, 2**31 - 1], "response_mask": [1, 0]}
    empty: dict[str, Any] = {"segment_id": "1", "prompt_ids": [], "response_ids": [], "response_mask": []}
    policies = [{"policy_version": "", "policy_step": None}, {"policy_version": "v1", "policy_step": 7}]
    whose: list[dict[str, Any]] = [
        {"author": "other", "mask_reason": "prompt", "turn": 1, "start": 0, "stop": 2, **policies[0]},
        {"author": "model", "mask_reason": None, "turn": 1, "start": 2, "stop": 3, **policies[1]},
    ]
    from_drift = {"parent_id": "9", "parent_tokens": 1, "kind": "drift"}
    nowhere = {"parent_id": "", "parent_tokens": 0, "kind": "unspecified"}
    judged = {"trainable": False, "untrainable_reason": "masked", "role": "critic", "reward": 0.0, "model": "large"}
    judged["part"] = 1
    untrainable = {"trainable": False, "untrainable_reason": "failure_engine", "role": "", "reward": None, "model": ""}
    untrainable["part"] = 0
    samples = [
        {**sample, "logprobs": [-0.5, 0.0], "spans": whose, "origin": from_drift, "verified": True, **judged},
        {**empty, "logprobs": None, "spans": [], "origin": nowhere, "verified": False, **untrainable},
    ]
    span: dict[str, Any] = {"turn": 1, "logprobs": None, **policies[0]}
    spans = [
        {**span, "author": "other", "mask_reason": "prompt", "token_ids": [1, 2]},
        {
            **span,
            "author": "model",
            "mask_reason": None,
            "token_ids": [3],
            "logprobs": [-0.5],
            **policies[1],
            "planes": [{"name": "experts", "dtype": "uint8", "values": "Bw=="}],
        },
    ]
    origin = {"parent_id": "", "parent_tokens": 0, "kind": "main"}
    role = {"role": "critic", "trainable": True, "reward": 0.0, "model": "large"}
    segments = [{"id": "0", "origin": origin, "spans": spans, "verified": True, **role}]
    parts: dict[str, dict[str, Any]] = {
        "basic": basic,
        "messages": {**basic, "messages": [message]},
        "samples": {**basic, "messages": [message], "samples": samples},
        "full": {**basic, "messages": [message], "samples": samples, "segments": segments},
    }
    for number, (view, outcome) in enumerate(parts.items(), start=1):
        reply = await plain.http.get(PATH, params={"view": view})
        assert plain.server.asked["GetRollout"].view == number
        told = reply.json()
        assert told["outcome"] == outcome
        assert told["spec"].get("messages") == outcome.get("messages")
    assert "18446744073709551617" in reply.text
    assert (told["state"], told["caller"], told["last_sequence"]) == ("finished", "team-a", 9)
    assert (told["create_time"], told["finish_time"]) == ("2023-11-14T22:13:20.005000Z", "2023-11-14T22:13:21.000000Z")
    assert told["delivery"] == {
        "state": "pending",
        "attempts": 2,
        "error": "503",
        "next_attempt_time": "2023-11-14T22:13:22.000000Z",
        "end_time": None,
    }


NETWORK = outcome_pb2.Failure(
    category=outcome_pb2.FAILURE_CATEGORY_NETWORK,
    failure_class=outcome_pb2.FAILURE_CLASS_ENGINE,
    message="m",
    turn=2,
)
FAILED = {
    "end": "failure",
    "category": "internal",
    "failure_class": "unspecified",
    "message": "",
    "turn": 0,
    "http_status": None,
}


@pytest.mark.parametrize(
    ("end", "told"),
    [
        (
            {"failure": NETWORK},
            {**FAILED, "category": "network", "failure_class": "engine", "message": "m", "turn": 2},
        ),
        (
            {"failure": outcome_pb2.Failure(category=99, http_status=503)},  # type: ignore[arg-type]
            {**FAILED, "http_status": 503},
        ),
        (
            {"cancellation": outcome_pb2.Cancellation(reason="detached")},
            {"end": "cancellation", "reason": "detached"},
        ),
        ({}, FAILED),
    ],
)
async def test_other_ends(plain: Plain, end: dict[str, Any], told: dict[str, Any]) -> None:
    plain.server.rollout.outcome.CopyFrom(outcome_pb2.Outcome(**end, extra_json="[1"))
    outcome = (await plain.http.get(PATH)).json()["outcome"]
    rest: dict[str, Any] = {"reward": None, "scores": {}, "extra": None, "warnings": [], "metrics": METRICS}
    rest |= {"turn_rewards": [], "reward_rule": "unspecified", "policy_step": None}
    assert outcome == told | rest


async def test_waiting_answers_when_the_server_does(plain: Plain) -> None:
    plain.server.go.clear()
    waiting = asyncio.create_task(plain.http.get(PATH, params={"wait": "1.5", "view": "messages"}))
    await plain.server.waiting.wait()
    asked = pb.WaitRolloutRequest(
        uid=UID, timeout=Duration(seconds=1, nanos=500_000_000), view=pb.ROLLOUT_VIEW_MESSAGES
    )
    assert plain.server.asked["WaitRollout"] == asked
    assert not waiting.done()
    plain.server.rollout = finished()
    plain.server.go.set()
    assert (await waiting).json()["state"] == "finished"


@pytest.mark.parametrize("path", [f"{PATH}?wait=3600", f"{PATH}/events"])
async def test_a_body_over_the_limit_is_told_to_who_waits(path: str) -> None:
    async with plain_gateway(GatewaySettings(max_body_bytes=1024)) as plain:
        plain.server.stays = True
        plain.server.go.clear()
        reply = await plain.http.request("GET", path, content=b"x" * 1025)
        assert (reply.status_code, reply.json()["error"]["code"]) == (413, "TOO_LARGE")


async def test_hanging_up_ends_the_wait(plain: Plain) -> None:
    plain.server.go.clear()
    waiting = asyncio.create_task(plain.http.get(PATH, params={"wait": "3600"}))
    await plain.server.waiting.wait()
    waiting.cancel()
    await plain.server.left.wait()


async def test_a_page_is_asked_for_as_the_query_says(plain: Plain) -> None:
    plain.server.page.rollouts.add().CopyFrom(finished())
    plain.server.page.next_page_token = "more=="
    query = (
        "state=queued&state=running&delivery=pending&delivery=expired&agent=a&group_id=g&rollout_id=r%2F1&rollout_id=s"
        "&uid=u1&uid=u2&label=k%3Dv%3Dw&label=e%3D&caller=me&caller=you&page_size=7&page_token=t%3D%3D&view=samples"
    )
    reply = await plain.http.get(f"/v1/rollouts?{query}")
    assert reply.status_code == 200
    assert plain.server.asked["ListRollouts"] == pb.ListRolloutsRequest(
        selection=pb.Selection(
            uids=["u1", "u2"],
            rollout_ids=["r/1", "s"],
            group_id="g",
            agent="a",
            states=[pb.ROLLOUT_STATE_QUEUED, pb.ROLLOUT_STATE_RUNNING],
            labels={"k": "v=w", "e": ""},
            delivery_states=[pb.DELIVERY_STATE_PENDING, pb.DELIVERY_STATE_EXPIRED],
            callers=["me", "you"],
        ),
        page_size=7,
        page_token="t==",
        view=pb.ROLLOUT_VIEW_SAMPLES,
    )
    told = reply.json()
    assert told["next_page_token"] == "more=="
    assert [each["uid"] for each in told["rollouts"]] == [UID]
    assert told["rollouts"][0]["outcome"]["samples"]
    assert (await plain.http.get("/v1/rollouts")).status_code == 200
    asked = pb.ListRolloutsRequest(selection=pb.Selection(), page_size=100, view=pb.ROLLOUT_VIEW_BASIC)
    assert plain.server.asked["ListRollouts"] == asked


WRONG = [
    ("/v1/rollouts?page_size=0", "page_size"),
    ("/v1/rollouts?page_size=1001", "page_size"),
    ("/v1/rollouts?page_size=x", "page_size"),
    ("/v1/rollouts?state=done", "state[0]"),
    ("/v1/rollouts?state=queued&state=", "state[1]"),
    ("/v1/rollouts?states=queued", "states"),
    ("/v1/rollouts?delivery=sent", "delivery[0]"),
    ("/v1/rollouts?label=x", "label"),
    ("/v1/rollouts?label=x%3D1&label=x%3D2", "label"),
    ("/v1/rollouts?view=all", "view"),
    ("/v1/rollouts?view=basic&uid=" + "u" * 65, "uid[0]"),
    ("/v1/rollouts?" + "&".join(["uid=u"] * 101), "uid"),
    ("/v1/rollouts?page_token=" + "t" * 12_289, "page_token"),
    (f"{PATH}?wait=-1", "wait"),
    (f"{PATH}?wait=3601", "wait"),
    (f"{PATH}?wait=nan", "wait"),
    (f"{PATH}?vieww=basic", "vieww"),
    ("/v1/agents?agent=a", "agent"),
    ("/v1/rollouts/a.b", "uid"),
    ("/v1/rollouts/a%0A", "uid"),
    ("/v1/rollouts/" + "u" * 65, "uid"),
    ("/v1/rollouts/%F0%9F%8E%89/events", "uid"),
]


async def test_queries_and_paths_that_are_wrong_are_refused(plain: Plain) -> None:
    for path, field in WRONG:
        reply = await plain.http.get(path)
        error = reply.json()["error"]
        assert (reply.status_code, error["code"]) == (422, "INVALID_REQUEST"), path
        assert [each["field"] for each in error["fields"]] == [field]
    assert plain.server.asked.keys() == {"ListAgents"}


async def test_a_stranger_is_not_told_of_a_wrong_query(plain: Plain) -> None:
    plain.server.key = KEY
    for path, _ in WRONG:
        assert (await plain.http.get(path)).status_code == 401
    known = {"authorization": f"Bearer {KEY}"}
    assert (await plain.http.get(WRONG[0][0], headers=known)).status_code == 422


async def test_what_the_server_finds_wrong_is_named_as_in_the_query(plain: Plain) -> None:
    places = {
        "page_token": "page_token",
        "page_size": "page_size",
        "selection.uids": "uid",
        "selection.delivery_states": "delivery",
        "selection.labels": "label",
    }
    bad = BadRequest(field_violations=[BadRequest.FieldViolation(field=path, description="no") for path in places])
    plain.server.refusals["ListRollouts"] = Refusal(Code.INVALID_ARGUMENT, details=(bad,))
    error = (await plain.http.get("/v1/rollouts")).json()["error"]
    assert [each["field"] for each in error["fields"]] == list(places.values())
    assert error["message"].startswith("page_token: no; page_size: no; ")


async def test_rollouts_are_cancelled_as_the_body_says(plain: Plain) -> None:
    body = {
        "uids": ["u"],
        "rollout_ids": ["r/1"],
        "group_id": "g",
        "agent": "a",
        "states": ["queued"],
        "labels": {"k": "v"},
        "callers": ["me"],
        "all": True,
        "reason": "enough",
    }
    reply = await plain.http.post("/v1/rollouts/cancel", json=body)
    assert (reply.status_code, reply.json()) == (200, {"uids": [UID]})
    selection = pb.Selection(
        uids=["u"],
        rollout_ids=["r/1"],
        group_id="g",
        agent="a",
        states=[pb.ROLLOUT_STATE_QUEUED],
        labels={"k": "v"},
        callers=["me"],
        all=True,
    )
    asked = pb.CancelRolloutsRequest(selection=selection, reason="enough")
    assert plain.server.asked["CancelRollouts"] == asked
    assert (await plain.http.post("/v1/rollouts/cancel", json=dict.fromkeys(body))).status_code == 200
    assert plain.server.asked["CancelRollouts"] == pb.CancelRolloutsRequest(selection=pb.Selection())


async def test_a_cancellation_that_is_wrong_is_refused(plain: Plain) -> None:
    wrong: list[tuple[Any, list[str]]] = [
        ({"uid": ["u"]}, ["uid"]),
        ({"uids": "u"}, ["uids"]),
        ({"uids": ["u"] * 1001}, ["uids"]),
        ({"states": ["done"], "all": 1}, ["states[0]", "all"]),
        ({"reason": "x" * 1001}, ["reason"]),
        ([], ["body"]),
    ]
    for value, named in wrong:
        reply = await plain.http.post("/v1/rollouts/cancel", json=value)
        assert reply.status_code == 422
        assert [each["field"] for each in reply.json()["error"]["fields"]] == named
    assert plain.server.asked.keys() == {"ListAgents"}
    bad = BadRequest(field_violations=[BadRequest.FieldViolation(field="selection", description="is empty")])
    plain.server.refusals["CancelRollouts"] = Refusal(Code.INVALID_ARGUMENT, details=(bad,))
    reply = await plain.http.post("/v1/rollouts/cancel", json={})
    assert [each["field"] for each in reply.json()["error"]["fields"]] == ["all"]


async def test_a_query_where_none_is_known_is_refused(plain: Plain) -> None:
    for path in ("/v1/rollouts", "/v1/rollouts/cancel", f"{PATH}/cancel", f"{PATH}/acknowledge"):
        reply = await plain.http.post(f"{path}?dry_run=1", json={"all": True})
        assert reply.status_code == 422
        assert [each["field"] for each in reply.json()["error"]["fields"]] == ["dry_run"]
    assert plain.server.asked.keys() == {"ListAgents"}


async def test_one_rollout_is_cancelled_by_its_path(plain: Plain) -> None:
    assert (await plain.http.post(f"{PATH}/cancel")).json() == {"uids": [UID]}
    assert plain.server.asked["CancelRollouts"] == pb.CancelRolloutsRequest(selection=pb.Selection(uids=[UID]))
    assert (await plain.http.post(f"{PATH}/cancel", json={"reason": "enough"})).status_code == 200
    assert plain.server.asked["CancelRollouts"].reason == "enough"
    assert (await plain.http.post(f"{PATH}/cancel", json={"all": True})).status_code == 422


async def test_an_outcome_is_acknowledged(plain: Plain) -> None:
    reply = await plain.http.post(f"{PATH}/acknowledge")
    assert (reply.status_code, reply.content) == (204, b"")
    assert plain.server.asked["AcknowledgeOutcome"].uid == UID
    plain.server.refusals["AcknowledgeOutcome"] = Refusal(Code.FAILED_PRECONDITION, "it has not finished")
    reply = await plain.http.post(f"{PATH}/acknowledge")
    assert (reply.status_code, reply.json()["error"]["message"]) == (400, "it has not finished")


async def test_who_asks_and_the_trace_travel_on_with_every_call(plain: Plain) -> None:
    headers = {"authorization": "Bearer k", "x-request-id": "r", "traceparent": "00-1-2-01"}
    calls = [
        ("GET", PATH, "GetRollout"),
        ("GET", f"{PATH}?wait=1", "WaitRollout"),
        ("GET", "/v1/rollouts", "ListRollouts"),
        ("POST", f"{PATH}/cancel", "CancelRollouts"),
        ("POST", f"{PATH}/acknowledge", "AcknowledgeOutcome"),
        ("GET", "/v1/agents", "ListAgents"),
    ]
    for method, path, rpc in calls:
        assert (await plain.http.request(method, path, headers=headers)).is_success
        metadata = plain.server.metadata[rpc]
        assert {key: metadata[key] for key in headers} == headers


async def test_a_rollout_that_is_not_there_is_404_everywhere(plain: Plain) -> None:
    refusal = Refusal(Code.NOT_FOUND, "there is no such rollout")
    for rpc in ("GetRollout", "WaitRollout", "CancelRollouts", "AcknowledgeOutcome"):
        plain.server.refusals[rpc] = refusal
    paths = ("", "?wait=1", "/events")
    replies = [await plain.http.get(PATH + path) for path in paths]
    replies += [await plain.http.post(f"{PATH}/{verb}") for verb in ("cancel", "acknowledge")]
    assert {reply.status_code for reply in replies} == {404}
    assert {reply.json()["error"]["message"] for reply in replies} == {"there is no such rollout"}
