"""Requests that `POST /rollout` refuses, and its responses to failed calls, over real sockets."""

import asyncio
import json
from collections.abc import AsyncIterator

import grpc
import httpx
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import BadRequest, RetryInfo
from rollout_gateway.http.request_boundary import RequestBoundary
from starlette.types import Receive, Scope, Send

from tests.support.example_bodies import EXAMPLE
from tests.support.gateways import Gateway
from tests.support.scripted_server import Refusal
from tests.support.transcripts import client_exchange, scenarios

Code = grpc.StatusCode


async def test_a_stream_without_an_outcome_is_503(gateway: Gateway) -> None:
    gateway.server.finishes = False
    response = await gateway.post()
    assert response.status_code == 503
    assert "outcome" in response.json()["detail"]
    assert gateway.server.acknowledged == []


async def test_a_known_id_with_another_payload_is_409(gateway: Gateway) -> None:
    gateway.server.refusals["RunRollout"] = Refusal(Code.ALREADY_EXISTS, "the id is known with another payload")
    response = await gateway.post()
    assert (response.status_code, response.json()) == (409, {"detail": "the id is known with another payload"})
    assert gateway.server.acknowledged == []


async def test_fields_that_the_server_refuses_are_named_in_the_clients_words(gateway: Gateway) -> None:
    violation = BadRequest.FieldViolation(field="start.spec.completions.url", description="not on the allow-list")
    details = (BadRequest(field_violations=[violation]),)
    gateway.server.refusals["RunRollout"] = Refusal(Code.INVALID_ARGUMENT, details=details)
    response = await gateway.post()
    assert response.status_code == 422
    assert response.json()["detail"][0]["loc"] == ["body", "server_url"]


async def test_a_full_server_says_when_to_come_back(gateway: Gateway) -> None:
    details = (RetryInfo(retry_delay=Duration(seconds=2, nanos=1)),)
    gateway.server.refusals["RunRollout"] = Refusal(Code.RESOURCE_EXHAUSTED, "too many rollouts wait", details)
    response = await gateway.post()
    assert (response.status_code, response.headers["retry-after"]) == (429, "3")


async def test_a_fault_of_the_server_shows_nothing(gateway: Gateway, caplog: pytest.LogCaptureFixture) -> None:
    gateway.server.refusals["RunRollout"] = Refusal(Code.UNKNOWN, "KeyError: 'inside'", rich=False)
    response = await gateway.post(headers={"x-request-id": "look-me-up"})
    assert (response.status_code, response.json()) == (500, {"detail": "Internal server error"})
    assert "look-me-up" in caplog.text
    assert "inside" in caplog.text


@pytest.mark.parametrize(
    ("refusal", "level"),
    [
        (Refusal(Code.UNAVAILABLE, "the server is stopping", (RetryInfo(retry_delay=Duration(seconds=1)),)), "WARNING"),
        (Refusal(Code.UNAVAILABLE, "no connection", rich=False), "WARNING"),
        (Refusal(Code.DEADLINE_EXCEEDED, rich=False), "WARNING"),
        (Refusal(Code.INTERNAL), "ERROR"),
        (Refusal(Code.UNKNOWN, rich=False), "ERROR"),
        (Refusal(Code.UNIMPLEMENTED, rich=False), "ERROR"),
        (Refusal(Code.RESOURCE_EXHAUSTED), None),
        (Refusal(Code.NOT_FOUND), None),
    ],
    ids=lambda value: value.code.name if isinstance(value, Refusal) else None,
)
async def test_only_faults_are_logged_as_errors(
    gateway: Gateway, caplog: pytest.LogCaptureFixture, refusal: Refusal, level: str | None
) -> None:
    gateway.server.refusals = dict.fromkeys(("RunRollout", "StartRollout", "ListAgents"), refusal)
    await gateway.post()
    await gateway.init()
    await gateway.client.get("/v1/agents")
    found = [record.levelname for record in caplog.records if record.name.startswith("rollout_gateway")]
    assert found == ([] if level is None else [level] * 3)


async def test_a_fault_of_the_gateway_shows_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(scope: Scope, receive: Receive, send: Send) -> None:
        raise KeyError("inside")

    transport = httpx.ASGITransport(RequestBoundary(broken))
    async with httpx.AsyncClient(base_url="http://gateway", transport=transport) as client:
        response = await client.get("/health", headers={"x-request-id": "look-me-up"})
    assert (response.status_code, response.json()) == (500, {"detail": "Internal server error"})
    assert response.headers["x-request-id"] == "look-me-up"
    assert "look-me-up" in caplog.text
    assert "inside" in caplog.text


@pytest.mark.parametrize("scenario", scenarios("invalid_body_"))
async def test_recorded_invalid_bodies_are_422_and_call_nobody(gateway: Gateway, scenario: str) -> None:
    exchange = client_exchange(scenario)
    sent = exchange["request"]
    content = sent if isinstance(sent, str) else json.dumps(sent)
    response = await gateway.client.post("/rollout", content=content.encode(), headers=exchange["headers"])
    assert response.status_code == exchange["status"] == 422
    detail = response.json()["detail"]
    assert all({"type", "loc", "msg"} <= each.keys() for each in detail)
    if not isinstance(sent, str):
        assert [each["loc"] for each in detail] == [each["loc"] for each in exchange["response"]["detail"]]
    assert gateway.server.requests == []


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "tool_calls": [{"id": "", "function": {"name": "add", "arguments": "{}"}}]},
        {
            "role": "assistant",
            "tool_calls": [{"id": "c", "type": "tool", "function": {"name": "add", "arguments": ""}}],
        },
        {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "x" * 257, "arguments": "{}"}}]},
        {"role": "tool", "content": "8", "tool_call_id": "x" * 257},
    ],
)
async def test_tool_calls_that_break_the_protocol_are_422_and_call_nobody(gateway: Gateway, message: object) -> None:
    response = await gateway.post({**EXAMPLE, "messages": [message]})
    assert response.status_code == 422
    assert response.json()["detail"][0]["loc"][:3] == ["body", "messages", 0]
    assert gateway.server.requests == []


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"])
async def test_what_a_web_page_could_send_unasked_is_refused(gateway: Gateway, kind: str) -> None:
    content = json.dumps(EXAMPLE).encode()
    response = await gateway.client.post("/rollout", content=content, headers={"content-type": kind})
    assert (response.status_code, response.json()["detail"][0]["loc"]) == (422, ["body"])
    assert gateway.server.requests == []


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "Application/Problem+JSON"])
async def test_json_by_any_name_is_taken(gateway: Gateway, kind: str) -> None:
    content = json.dumps(EXAMPLE).encode()
    assert (await gateway.client.post("/rollout", content=content, headers={"content-type": kind})).status_code == 200


async def test_metadata_over_the_limit_is_422(gateway: Gateway) -> None:
    response = await gateway.post({**EXAMPLE, "metadata": {"k": "x" * 1_000}})
    assert (response.status_code, response.json()["detail"][0]["loc"]) == (422, ["body", "metadata"])


async def test_a_body_with_a_length_over_the_limit_is_413_before_it_is_sent(gateway: Gateway) -> None:
    reader, writer = await asyncio.open_connection(gateway.host, gateway.port)
    writer.write(b"POST /rollout HTTP/1.1\r\nhost: gateway\r\ncontent-length: 100001\r\n\r\n")
    answer = await reader.readuntil(b"}")
    writer.close()
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert answer.endswith(b'\r\n\r\n{"detail":"The body is larger than 100000 bytes"}')
    assert b"x-request-id: " in answer


async def test_who_asks_before_sending_is_not_told_to_send_too_much(gateway: Gateway) -> None:
    reader, writer = await asyncio.open_connection(gateway.host, gateway.port)
    head = b"POST /rollout HTTP/1.1\r\nhost: gateway\r\nexpect: 100-continue\r\ncontent-length: "
    writer.write(head + b"100001\r\n\r\n")
    assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 413 ")
    writer.close()


async def test_a_chunked_body_over_the_limit_is_413_while_it_arrives(gateway: Gateway) -> None:
    reader, writer = await asyncio.open_connection(gateway.host, gateway.port)
    writer.write(b"POST /rollout HTTP/1.1\r\nhost: gateway\r\ntransfer-encoding: chunked\r\n\r\n")
    writer.write(b"ea60\r\n" + b"x" * 60_000 + b"\r\n")
    writer.write(b"ea60\r\n" + b"x" * 60_000 + b"\r\n")
    answer = await reader.readuntil(b"}")
    writer.close()
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert answer.endswith(b'\r\n\r\n{"detail":"The body is larger than 100000 bytes"}')
    assert gateway.server.requests == []


async def test_a_chunked_body_within_the_limit_is_taken(gateway: Gateway) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for byte in json.dumps(EXAMPLE).encode():
            yield bytes([byte])

    assert (await gateway.client.post("/rollout", content=chunks())).status_code == 200
