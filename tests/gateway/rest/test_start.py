"""`POST /v1/rollouts` over real sockets: the request to the server, the response, and refusals."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import BadRequest, RetryInfo
from osmosis.rollout.v1 import message_pb2, spec_pb2
from osmosis.rollout.v1 import rollout_service_pb2 as pb

from tests.support.rest_gateway import BODY, KEY, Plain, plain_gateway
from tests.support.scripted_server import UID, Refusal

Code = grpc.StatusCode
SECRETS = ("hush-completions", "hush-outcome", "hush-tools")
WHOLE = (
    '{"rollout_id": "step-1/漢", "request_id": "q", "group_id": "g", "agent": "a", '
    '"messages": [ {"role":"user" , "content":null,"n":18446744073709551617, "x":1.50}, {"b":1,"a":2,"b":3,"role":"tool"}], '
    '"completions": {"url": "http://t:1", "dialect": "http_plain", "bearer": "hush-completions", "replays_turn_keys": true}, '
    '"outcome": {"url": "grpc://o:1", "dialect": "grpc", "bearer": "hush-outcome"}, '
    '"tools": {"url": "grpcs://s:1", "bearer": "hush-tools"}, '
    '"sampling": {"temperature": 0, "top_p": 1, "max_tokens": 7, "stop": ["a", "b"], "logprobs": false, '
    '"extra": {"top_k" : 99999999999999999999}}, '
    '"limits": {"turns": 0, "generated_tokens": 9007199254740992, "seconds": 1.5, "calls_per_turn": 3, "tool_turns": 0, '
    '"bytes": 5}, '
    '"tokenizer": {"name": "n", "revision": "r", "template_kwargs": {"think" : false}}, '
    '"token_mode": "messages", "on_drift": "fail", "on_interrupt": "resume", "cancel_after_detach_seconds": 0.25, '
    '"priority": -3, "metadata": {"k" : [1e400]}, "labels": {"x": "", "é": "=é"}, "train_on": [], '
    '"models": {"judge": {"url": "http://j:1", "model": "m", "bearer": "hush-judge"}, '
    '"user": {"url": "http://u:1", "dialect": "vllm", "model": "m"}}, '
    '"staleness": {"max_lag": 0, "action": "split"}}'
)
ASKED = pb.StartRolloutRequest(
    request_id="q",
    spec=spec_pb2.RolloutSpec(
        rollout_id="step-1/漢",
        group_id="g",
        agent="a",
        messages=[
            message_pb2.Message(json='{"role":"user" , "content":null,"n":18446744073709551617, "x":1.50}'),
            message_pb2.Message(json='{"b":1,"a":2,"b":3,"role":"tool"}'),
        ],
        completions=spec_pb2.Target(url="http://t:1", dialect=spec_pb2.DIALECT_HTTP_PLAIN, replays_turn_keys=True),
        outcome=spec_pb2.Target(url="grpc://o:1", dialect=spec_pb2.DIALECT_GRPC),
        tools=spec_pb2.Target(url="grpcs://s:1"),
        sampling=spec_pb2.Sampling(
            temperature=0,
            top_p=1,
            max_tokens=7,
            stop=["a", "b"],
            logprobs=False,
            extra_json='{"top_k" : 99999999999999999999}',
        ),
        limits=spec_pb2.Limits(
            turns=0,
            generated_tokens=2**53,
            time=Duration(seconds=1, nanos=500_000_000),
            calls_per_turn=3,
            tool_turns=0,
            bytes=5,
        ),
        tokenizer=spec_pb2.Tokenizer(name="n", revision="r", template_kwargs_json='{"think" : false}'),
        token_mode=spec_pb2.TOKEN_MODE_MESSAGES,
        on_drift=spec_pb2.DRIFT_POLICY_FAIL,
        on_interrupt=spec_pb2.INTERRUPT_POLICY_RESUME,
        cancel_after_detach=Duration(nanos=250_000_000),
        priority=-3,
        metadata_json='{"k" : [1e400]}',
        labels={"x": "", "é": "=é"},
        train_on=spec_pb2.TrainOn(),
        models={
            "judge": spec_pb2.Target(url="http://j:1", model="m"),
            "user": spec_pb2.Target(url="http://u:1", dialect=spec_pb2.DIALECT_VLLM, model="m"),
        },
        staleness=spec_pb2.Staleness(max_lag=0, action=spec_pb2.STALE_ACTION_SPLIT),
    ),
    credentials=spec_pb2.Credentials(
        completions_bearer="hush-completions",
        outcome_bearer="hush-outcome",
        tools_bearer="hush-tools",
        model_bearers={"judge": "hush-judge"},
    ),
)


@pytest.fixture
async def plain() -> AsyncIterator[Plain]:
    """A gateway in front of a scripted server."""
    async with plain_gateway() as opened:
        yield opened


async def test_a_whole_body_reaches_the_server_as_it_was_meant(plain: Plain) -> None:
    reply = await plain.http.post("/v1/rollouts", content=WHOLE.encode(), headers={"x-request-id": "mine"})
    assert reply.status_code == 201
    assert plain.server.asked["StartRollout"] == ASKED
    assert plain.server.metadata["StartRollout"]["x-request-id"] == "mine"
    assert reply.headers["x-request-id"] == "mine"


async def test_what_is_null_is_as_what_is_absent(plain: Plain) -> None:
    null = dict.fromkeys(json.loads(WHOLE).keys() - BODY.keys())
    whole = json.loads(WHOLE)
    nested = {key: dict.fromkeys(whole[key]) for key in ("sampling", "limits")}
    for more in ({}, null, {**null, **nested}):
        assert (await plain.start({**BODY, **more})).status_code == 201
        asked = plain.server.asked["StartRollout"]
        asked.spec.ClearField("rollout_id")
        asked.spec.ClearField("sampling")
        asked.spec.ClearField("limits")
        message = message_pb2.Message(json='{"role":"user","content":"Hi."}')
        spec = spec_pb2.RolloutSpec(messages=[message], completions=spec_pb2.Target(url="http://trainer:9001"))
        assert asked.spec == spec


async def test_an_accepted_rollout_is_201_and_a_found_one_200(plain: Plain) -> None:
    plain.server.tools = [message_pb2.Tool(name="add", description="Adds.", parameters_json_schema='{"type":"object"}')]
    reply = await plain.start()
    assert (reply.status_code, reply.headers["location"]) == (201, f"/v1/rollouts/{UID}")
    assert reply.headers["content-type"] == "application/json"
    told = reply.json()
    assert told.keys() == {"rollout", "attached", "tools"}
    assert told["attached"] is False
    assert told["rollout"]["uid"] == UID
    function = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}
    assert told["tools"] == [{"type": "function", "function": function}]
    plain.server.attached = True
    again = await plain.start()
    assert (again.status_code, again.json()["attached"]) == (200, True)
    assert again.headers["location"] == reply.headers["location"]


async def test_the_access_of_an_agent_that_runs_elsewhere_is_returned_and_never_by_a_get(plain: Plain) -> None:
    path = f"/v1/rollouts/{UID}/access"
    refused = await plain.http.post(path)
    assert (refused.status_code, "no access" in refused.text) == (400, True)
    access = {"base_url": f"https://agents.example/r/{UID}", "key": "rk_secret"}
    plain.server.access = pb.ModelAccess(**access)
    assert (await plain.start()).json()["access"] == access
    assert (await plain.http.post(path)).json() == access
    plain.server.access = pb.ModelAccess(base_url=f"/r/{UID}", key="rk_secret")
    for reply in (await plain.start(), await plain.http.post(path)):
        shown = reply.json().get("access", reply.json())
        assert shown["base_url"] == f"{str(plain.http.base_url).rstrip('/')}/r/{UID}"
    assert (await plain.http.get(path)).status_code == 405
    assert "rk_secret" not in (await plain.http.get(f"/v1/rollouts/{UID}?view=full")).text
    assert (await plain.http.post(f"{path}?view=full")).status_code == 422


async def test_ids_that_are_not_given(plain: Plain) -> None:
    async def ids(**options: Any) -> tuple[str, str]:
        assert (await plain.start(**options)).status_code == 201
        asked = plain.server.asked["StartRollout"]
        return asked.request_id, asked.spec.rollout_id

    header = {"idempotency-key": "h"}
    assert await ids(value={**BODY, "request_id": "q"}) == ("q", "q")
    assert await ids(headers=header) == ("h", "h")
    assert await ids(value={**BODY, "rollout_id": "r"}, headers=header) == ("h", "r")
    assert await ids(value={**BODY, "request_id": "h"}, headers=header) == ("h", "h")
    (first, made), (second, another) = await ids(), await ids()
    assert (first, second) == ("", "")
    assert made
    assert made != another


async def test_two_request_ids_in_one_request_are_refused(plain: Plain) -> None:
    reply = await plain.start({**BODY, "request_id": "q"}, headers={"idempotency-key": "h"})
    assert (reply.status_code, fields(reply.json())) == (422, ["Idempotency-Key"])
    assert plain.server.asked.keys() == {"ListAgents"}


def fields(answer: dict[str, Any]) -> list[str]:
    error = answer["error"]
    assert error["code"] == "INVALID_REQUEST"
    assert error["request_id"]
    assert all(each["message"] for each in error["fields"])
    assert all(each["field"] in error["message"] for each in error["fields"][:5])
    return [each["field"] for each in error["fields"]]


WRONG: list[tuple[dict[str, Any], list[str]]] = [
    ({"messagess": []}, ["messagess"]),
    ({"agent": 5, "group_id": "x" * 257}, ["group_id", "agent"]),
    ({"messages": None}, ["messages"]),
    ({"messages": {}}, ["messages"]),
    ({"messages": "Hi."}, ["messages"]),
    ({"completions": None}, ["completions"]),
    ({"completions": {"url": "http://t", "key": "x"}}, ["completions.key"]),
    ({"completions": {"url": "http://t", "dialect": "http"}}, ["completions.dialect"]),
    ({"completions": {"url": "http://t", "bearer": 5}}, ["completions.bearer"]),
    ({"completions": "http://t"}, ["completions"]),
    (
        {"sampling": {"temperature": 2.5, "top_p": "1", "topp": 1}},
        ["sampling.temperature", "sampling.top_p", "sampling.topp"],
    ),
    ({"sampling": {"max_tokens": 1.5}}, ["sampling.max_tokens"]),
    ({"sampling": {"max_tokens": True}}, ["sampling.max_tokens"]),
    ({"sampling": {"stop": ["a", 1]}}, ["sampling.stop[1]"]),
    ({"sampling": {"stop": "a"}}, ["sampling.stop"]),
    ({"sampling": {"extra": []}}, ["sampling.extra"]),
    ({"sampling": []}, ["sampling"]),
    ({"limits": {"turns": -1, "seconds": 0, "bytes": 2**53 + 1}}, ["limits.turns", "limits.seconds", "limits.bytes"]),
    ({"limits": {"turns": 10**400}}, ["limits.turns"]),
    ({"tokenizer": {}}, ["tokenizer.name"]),
    ({"tokenizer": {"name": "n", "template_kwargs": "x"}}, ["tokenizer.template_kwargs"]),
    ({"token_mode": "ids"}, ["token_mode"]),
    ({"on_drift": ""}, ["on_drift"]),
    ({"cancel_after_detach_seconds": -1}, ["cancel_after_detach_seconds"]),
    ({"priority": 2**31}, ["priority"]),
    ({"train_on": ["nobody"]}, ["train_on[0]"]),
    ({"train_on": ["policy"] * 9}, ["train_on"]),
    ({"staleness": {"action": "drop"}}, ["staleness.max_lag", "staleness.action"]),
    ({"staleness": {"max_lag": -1}}, ["staleness.max_lag"]),
    ({"metadata": [1]}, ["metadata"]),
    ({"metadata": "{}"}, ["metadata"]),
    ({"labels": {"a": 1}}, ["labels.a"]),
    ({"rollout_id": ""}, ["rollout_id"]),
]


async def test_fields_that_are_wrong_are_named_and_nobody_is_asked(plain: Plain) -> None:
    for change, named in WRONG:
        reply = await plain.start({**BODY, **change})
        assert (reply.status_code, fields(reply.json())) == (422, named), change
    assert plain.server.asked.keys() == {"ListAgents"}


TOP = "is not known here; the keys of a request belong at the top of the body"
ASTRAY: list[tuple[dict[str, Any], dict[str, str]]] = [
    ({"spec": BODY}, {"spec": TOP}),
    ({"start": {"request_id": "r", "spec": {}}}, {"start": TOP}),
    ({"start": {"spec": BODY}}, {"start": TOP}),
    ({**BODY, "temperature": 1.0}, {"temperature": "is not known here; it belongs in sampling"}),
    ({**BODY, "bearer": "k"}, {"bearer": "is not known here; it belongs in completions or outcome or tools"}),
    (
        {**BODY, "completions": {"url": "http://t", "tokenizer": {"name": "n"}, "stop": []}},
        {
            "completions.tokenizer": "is not known here; it belongs at the top of the body",
            "completions.stop": "is not known here; it belongs in sampling",
        },
    ),
    ({**BODY, "max_turns": 3}, {"max_turns": "is not known here"}),
    ({**BODY, "more": {"turns": 3}}, {"more": "is not known here"}),
]


@pytest.mark.parametrize(("body", "messages"), ASTRAY, ids=lambda value: " ".join(value)[:40])
async def test_an_unknown_key_is_told_where_it_belongs(
    plain: Plain, body: dict[str, Any], messages: dict[str, str]
) -> None:
    found = (await plain.start(body)).json()["error"]["fields"]
    missing = {name: "Field required" for name in ("messages", "completions") if name not in body}
    assert {each["field"]: each["message"] for each in found} == missing | messages


@pytest.mark.parametrize(
    ("part", "place", "example"),
    [
        ({"completions": "http://t"}, "completions", ', such as {"url": "http://localhost:9001"}'),
        ({"models": {"judge": "http://t"}}, "models.judge", ', such as {"url": "http://localhost:9001"}'),
        ({"tokenizer": "toy"}, "tokenizer", ', such as {"name": "Qwen/Qwen3-8B"}'),
        ({"limits": "8"}, "limits", ""),
    ],
)
async def test_a_text_in_place_of_an_object(plain: Plain, part: dict[str, Any], place: str, example: str) -> None:
    reply = await plain.start(BODY | part)
    expected = {"field": place, "message": f"Input should be a JSON object{example}"}
    assert reply.json()["error"]["fields"] == [expected]


async def test_keys_of_a_cancellation_that_are_wrapped(plain: Plain) -> None:
    reply = await plain.http.post("/v1/rollouts/cancel", json={"selection": {"all": True}})
    assert reply.json()["error"]["fields"] == [{"field": "selection", "message": TOP}]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"x"',
        b"\xff",
        b'{"messages": [{"role": "\xff"}]}',
        b'{"metadata": {"k": NaN}}',
        b'{"messages": [{"role": "\\ud800 and more"}], "completions": {"url": "http://t"}}',
        b'{"labels": ' + b"[" * 90_000 + b"]" * 5_000 + b"}",
        b'{"metadata": ' + b'{"a":' * 15_000 + b"1" + b"}" * 15_000 + b"}",
    ],
)
async def test_what_is_not_json_is_refused(plain: Plain, content: bytes) -> None:
    reply = await plain.http.post("/v1/rollouts", content=content, headers={"content-type": "application/json"})
    assert reply.status_code == 422
    assert len(fields(reply.json())) == 1
    assert plain.server.asked.keys() == {"ListAgents"}


async def test_many_faults_do_not_make_a_large_answer(plain: Plain) -> None:
    reply = await plain.start({**BODY, **{f"k{number}": 1 for number in range(5_000)}, "y" * 5_000: 1})
    assert reply.status_code == 422
    assert reply.json()["error"]["message"] == "body: At most 100 keys"
    reply = await plain.start({**BODY, **{f"k{number}": 1 for number in range(90)}, "y" * 5_000: 1})
    fields = reply.json()["error"]["fields"]
    assert len(fields) == 21
    assert fields[-1] == {"field": "body", "message": "71 more are not listed"}
    assert len(reply.content) < 20_000


async def test_what_a_web_page_could_send_unasked_is_refused(plain: Plain) -> None:
    reply = await plain.http.post("/v1/rollouts", content=json.dumps(BODY), headers={"content-type": "text/plain"})
    assert reply.status_code == 422
    assert "application/json" in reply.json()["error"]["message"]


async def test_fields_that_the_server_refuses_are_named_as_in_the_body(plain: Plain) -> None:
    places = {
        "request_id": "request_id",
        "spec.rollout_id": "rollout_id",
        "spec.messages[0].json": "messages[0]",
        "spec.messages[2].role": "messages[2].role",
        "spec.completions.url": "completions.url",
        "spec.outcome.dialect": "outcome.dialect",
        "spec.sampling.extra_json": "sampling.extra",
        "spec.sampling.stop[3]": "sampling.stop[3]",
        "spec.limits.time": "limits.seconds",
        "spec.limits.turns": "limits.turns",
        "spec.tokenizer": "tokenizer",
        "spec.tokenizer.template_kwargs_json": "tokenizer.template_kwargs",
        "spec.metadata_json": "metadata",
        "spec.cancel_after_detach": "cancel_after_detach_seconds",
        "spec.labels": "labels",
        "credentials.completions_bearer": "completions.bearer",
        "credentials.outcome_bearer": "outcome.bearer",
        "credentials.tools_bearer": "tools.bearer",
    }
    bad = BadRequest(field_violations=[BadRequest.FieldViolation(field=path, description="no") for path in places])
    plain.server.refusals["StartRollout"] = Refusal(Code.INVALID_ARGUMENT, details=(bad,))
    reply = await plain.start()
    assert reply.status_code == 422
    assert [each["field"] for each in reply.json()["error"]["fields"]] == list(places.values())


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (Code.INVALID_ARGUMENT, 400),
        (Code.FAILED_PRECONDITION, 400),
        (Code.NOT_FOUND, 404),
        (Code.ALREADY_EXISTS, 409),
        (Code.PERMISSION_DENIED, 403),
    ],
)
async def test_a_refusal_says_what_the_server_said(plain: Plain, code: Code, status: int) -> None:
    plain.server.refusals["StartRollout"] = Refusal(code, "no, and do something else")
    reply = await plain.start(headers={"x-request-id": "r"})
    error = {"code": "TEST", "message": "no, and do something else", "request_id": "r", "fields": []}
    assert (reply.status_code, reply.json()) == (status, {"error": error})


async def test_a_full_server_says_when_to_come_back(plain: Plain) -> None:
    retry = RetryInfo(retry_delay=Duration(seconds=1, nanos=500_000_000))
    plain.server.refusals["StartRollout"] = Refusal(Code.RESOURCE_EXHAUSTED, "too many", (retry,))
    reply = await plain.start()
    assert (reply.status_code, reply.headers["retry-after"]) == (429, "2")
    assert reply.json()["error"]["retry_after"] == 1.5


async def test_a_stranger_hears_about_the_key_whatever_else_is_wrong(plain: Plain) -> None:
    plain.server.key = KEY
    values: tuple[Any, ...] = (BODY, {"nonsense": 1}, [], "x")
    for value in values:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Bearer ключ".encode()}):
            reply = await plain.start(value, headers=headers)
            assert (reply.status_code, reply.headers["www-authenticate"]) == (401, "Bearer")
            assert reply.json()["error"]["fields"] == []
    known = {"authorization": f"Bearer {KEY}"}
    assert (await plain.start(headers=known)).status_code == 201
    assert (await plain.start({"nonsense": 1}, headers=known)).status_code == 422


async def test_a_body_is_not_looked_at_where_the_server_cannot_look_at_the_key(plain: Plain) -> None:
    plain.server.refusals["ListAgents"] = Refusal(Code.UNAVAILABLE)
    reply = await plain.start({})
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
    assert (await plain.http.get("/v1/rollouts?page_size=none")).status_code == 422


async def test_secrets_never_come_back(plain: Plain, caplog: pytest.LogCaptureFixture) -> None:
    body = {**json.loads(WHOLE), "metadata": {}}
    wrong = [
        body,
        {**body, "on_drift": 5},
        {**body, "completions": {**body["completions"], "url": 5}},
        {**body, "completions": {**body["completions"], "dialect": body["completions"]}},
        {**body, "outcome": {"url": "http://o", "bearer": [SECRETS[1]]}},
        {**body, "tools": SECRETS[2]},
        {**body, "completions": {"url": "http://t", "bearer": SECRETS[0] * 10_000}},
    ]
    plain.server.rollout.spec.CopyFrom(ASKED.spec)
    refusals = [None, Refusal(Code.INTERNAL), Refusal(Code.INVALID_ARGUMENT), Refusal(Code.UNAVAILABLE, rich=False)]
    for refusal in refusals:
        plain.server.refusals = {"StartRollout": refusal} if refusal else {}
        for value in wrong:
            reply = await plain.start(value)
            told = reply.text + str(reply.headers) + caplog.text
            assert not any(secret in told for secret in SECRETS)


async def test_behind_a_prefix_location_has_it_and_errors_keep_their_shape() -> None:
    async with plain_gateway(root_path="/api") as plain:
        reply = await plain.start()
        assert (reply.status_code, reply.headers["location"]) == (201, f"/api/v1/rollouts/{UID}")
        assert (await plain.http.get("/v1/nowhere")).json()["error"]["code"] == "PATH_NOT_FOUND"
        assert (await plain.http.get("/rollout")).json() == {"detail": "Method Not Allowed"}
