"""Keys, errors, heartbeats, disconnects and confirmations, which are the same for all APIs."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import httpx
import pytest
from google.rpc.error_details_pb2 import BadRequest
from osmosis.rollout.v1 import agent_service_pb2 as pb
from rollout_gateway.app import create_app
from rollout_gateway.channel import open_channel
from rollout_gateway.http.serve import HttpListener, Listening
from rollout_gateway.settings import GatewaySettings

from tests.support.gateways import http_client, listening
from tests.support.model_gateway import (
    KEY,
    ModelGateway,
    ScriptedAgentService,
    agent_server,
    frames_of,
    model_gateway,
    named,
    said,
)
from tests.support.scripted_server import UID, Refusal, ScriptedServer
from tests.support.tcp_proxy import TcpProxy

Code = grpc.StatusCode
MESSAGES = [{"role": "user", "content": "Hi."}]
BODIES: dict[str, dict[str, Any]] = {
    "v1/chat/completions": {"model": "m", "messages": MESSAGES},
    "v1/responses": {"model": "m", "input": "Hi."},
    "v1/messages": {"model": "m", "max_tokens": 9, "messages": MESSAGES},
}
APIS = pytest.mark.parametrize("path", BODIES)
OVER = named("ROLLOUT_OVER", Code.FAILED_PRECONDITION, "the rollout has ended")


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error, whose shape must be that of the API."""
    body = response.json()
    if response.request.url.path.endswith("messages"):
        assert body.keys() == {"type", "error"}
        assert body["type"] == "error"
        assert body["error"].keys() == {"type", "message"}
    else:
        assert body.keys() == {"error"}
        assert body["error"].keys() == {"message", "type", "param", "code"}
    return dict(body["error"])


@APIS
@pytest.mark.parametrize("base", ["", "v1/", "v1/v1/"])  # the last one: an Anthropic client with the URL for OpenAI's
async def test_all_bases_have_all_routes(endpoint: ModelGateway, path: str, base: str) -> None:
    response = await endpoint.post(base + path.removeprefix("v1/"), BODIES[path])
    assert response.status_code == 200
    assert not endpoint.call.auxiliary


@APIS
@pytest.mark.parametrize("form", ["aux/{}", "v1/aux/{}", "aux/v1/{}"])
async def test_calls_beside_the_task_have_a_path_or_a_header(endpoint: ModelGateway, path: str, form: str) -> None:
    assert (await endpoint.post(form.format(path.removeprefix("v1/")), BODIES[path])).status_code == 200
    assert endpoint.call.auxiliary
    await endpoint.post(path, BODIES[path], **{"x-rollout-auxiliary": "1"})
    assert endpoint.call.auxiliary


@APIS
async def test_headers_mark_repeats_and_agents(endpoint: ModelGateway, path: str) -> None:
    headers = {"x-stainless-retry-count": "1", "idempotency-key": "i1", "x-claude-code-agent-id": "sub"}
    await endpoint.post(path, BODIES[path], **headers)
    assert (endpoint.call.repeated, endpoint.call.repeat_key, endpoint.call.client_agent) == (True, "i1", "sub")
    await endpoint.post(path, BODIES[path], **{"x-stainless-retry-count": "0"})
    assert (endpoint.call.repeated, endpoint.call.repeat_key, endpoint.call.client_agent) == (False, "", "")
    response = await endpoint.post(path, BODIES[path], **{"idempotency-key": "x" * 257})
    assert response.status_code == 400


@APIS
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer sk-another"},
        {"authorization": "Bearer "},
        {"x-api-key": "sk-another"},
        {"authorization": "Basic eA=="},
        {"authorization": f"Bearer {KEY}x"},
    ],
)
async def test_a_wrong_key_is_refused_before_the_body_is_read(
    endpoint: ModelGateway, path: str, headers: dict[str, str]
) -> None:
    reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
    fields = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    writer.write(f"POST /r/{UID}/{path} HTTP/1.1\r\nhost: g\r\ncontent-length: 1000\r\n{fields}\r\n{{".encode())
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    content = (await reader.readuntil(b"}}")).decode()
    writer.close()
    assert head.startswith("http/1.1 403 ")
    assert "www-authenticate" not in head
    assert '"permission_error"' in content
    assert KEY not in content
    assert endpoint.server.calls == []


async def test_a_key_opens_no_other_rollout(endpoint: ModelGateway) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    for uid in ("another", UID + "x"):
        response = await endpoint.http.post(f"/r/{uid}/v1/messages", json=BODIES["v1/messages"], headers=headers)
        assert response.status_code == 403


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {KEY}"},
        {"x-api-key": KEY},
        {"authorization": "Bearer sk-of-another-service", "x-api-key": KEY},
        {"authorization": f"Bearer {KEY}", "x-api-key": "sk-of-another-service"},
    ],
)
async def test_the_key_is_found_in_either_header(endpoint: ModelGateway, headers: dict[str, str]) -> None:
    response = await endpoint.http.post(f"/r/{UID}/v1/messages", json=BODIES["v1/messages"], headers=headers)
    assert response.status_code == 200


async def test_an_accepted_key_is_checked_once_for_many_calls(
    endpoint: ModelGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout_gateway.key_check._ACCEPTED_SECONDS", 1e9)
    for path, body in BODIES.items():
        assert (await endpoint.post(path, body)).status_code == 200
    assert endpoint.server.checks == 1


@APIS
@pytest.mark.parametrize("rpc", ["CallModel", "GetModelAccess"])
async def test_after_the_end_clients_stop(endpoint: ModelGateway, path: str, rpc: str) -> None:
    endpoint.server.refusals = {rpc: OVER, "CallModel": OVER}
    response = await endpoint.post(path, BODIES[path] | {"stream": True})
    assert response.status_code == (400 if path == "v1/responses" else 410)
    error = error_of(response)
    assert error["type"] == "invalid_request_error"
    assert error.get("code", "rollout_over") == "rollout_over"
    assert response.headers["x-should-retry"] == "false"


@APIS
async def test_a_prompt_that_is_too_long_says_so_in_the_words_of_the_api(endpoint: ModelGateway, path: str) -> None:
    endpoint.server.refusals["CallModel"] = named(
        "CONTEXT_LENGTH_EXCEEDED", Code.INVALID_ARGUMENT, "too long", tokens="9000", maximum="8192"
    )
    response = await endpoint.post(path, BODIES[path])
    error = error_of(response)
    assert (response.status_code, error["type"]) == (400, "invalid_request_error")
    if path == "v1/messages":
        assert error["message"] == "prompt is too long: 9000 tokens > 8192 maximum"
    else:
        assert error["code"] == "context_length_exceeded"
        assert "maximum context length is 8192 tokens" in error["message"]
        assert "9000" in error["message"]


@APIS
@pytest.mark.parametrize(
    ("refusal", "status", "kinds"),
    [
        (named("ONE_CONVERSATION", Code.FAILED_PRECONDITION), 400, ("invalid_request_error", "invalid_request_error")),
        (named("BUSY", Code.RESOURCE_EXHAUSTED), 429, ("rate_limit_error", "rate_limit_error")),
        (named("DRAINING", Code.UNAVAILABLE), 503, ("server_error", "overloaded_error")),
        (named("X", Code.DEADLINE_EXCEEDED), 504, ("server_error", "timeout_error")),
        (named("X", Code.INTERNAL), 500, ("server_error", "api_error")),
        (Refusal(Code.RESOURCE_EXHAUSTED, "Received message larger than max", rich=False), 413, None),
        (Refusal(Code.UNIMPLEMENTED, "Method not found", rich=False), 404, None),
    ],
)
async def test_refusals_of_the_server(
    endpoint: ModelGateway, path: str, refusal: Refusal, status: int, kinds: tuple[str, str] | None
) -> None:
    endpoint.server.refusals["CallModel"] = refusal
    response = await endpoint.post(path, BODIES[path] | {"stream": True})
    error = error_of(response)
    assert response.status_code == status
    if kinds:
        assert error["type"] == kinds[path == "v1/messages"]
    if status == 503:
        assert response.headers["retry-after"] == "1"


async def test_an_invalid_message_is_named_as_in_the_body(endpoint: ModelGateway) -> None:
    def refuse(field: str) -> None:
        bad = BadRequest(field_violations=[BadRequest.FieldViolation(field=field, description="is wrong")])
        endpoint.server.refusals["CallModel"] = Refusal(Code.INVALID_ARGUMENT, "invalid", (bad,))

    refuse("prompt.messages[0].content[1].type")
    error = error_of(await endpoint.post("v1/chat/completions", BODIES["v1/chat/completions"]))
    assert (error["param"], error["message"]) == (
        "messages[0].content[1].type",
        "messages[0].content[1].type: is wrong",
    )
    refuse("messages[1].content")
    results = [{"type": "tool_result", "tool_use_id": name, "content": "x"} for name in ("a", "b")]
    body = BODIES["v1/messages"] | {"messages": [{"role": "user", "content": results}]}
    error = error_of(await endpoint.post("v1/messages", body))
    assert error["message"] == "messages[0].content[1].content: is wrong"


@pytest.mark.parametrize("stream", [False, True], ids=["at once", "stream"])
@pytest.mark.parametrize(
    ("api", "field", "path"),
    [
        ("chat/completions", "sampling.extra_json.tool_choice", "tool_choice"),
        ("chat/completions", "sampling.extra_json.response_format", "response_format"),
        ("responses", "sampling.extra_json.tool_choice", "tool_choice"),
        ("responses", "sampling.extra_json.response_format", "text.format"),
        ("responses", "sampling.max_tokens", "max_output_tokens"),
        ("responses", "previous", "previous_response_id"),
        ("messages", "sampling.extra_json.tool_choice", "tool_choice"),
        ("messages", "sampling.extra_json.parallel_tool_calls", "tool_choice.disable_parallel_tool_use"),
        ("messages", "sampling.extra_json.response_format", "output_config.format"),
        ("messages", "sampling.stop", "stop_sequences"),
    ],
)
async def test_an_invalid_parameter_has_its_name_in_the_api(
    endpoint: ModelGateway, api: str, field: str, path: str, stream: bool
) -> None:
    bad = BadRequest(field_violations=[BadRequest.FieldViolation(field=field, description="is wrong")])
    endpoint.server.refusals["CallModel"] = Refusal(Code.INVALID_ARGUMENT, "invalid", (bad,))
    response = await endpoint.post(f"v1/{api}", BODIES[f"v1/{api}"] | {"stream": stream})
    assert error_of(response)["message"] == f"{path}: is wrong"


@APIS
async def test_hostile_bodies_are_refused(path: str) -> None:
    async with model_gateway(max_body_bytes=25_000) as endpoint:
        url, headers = f"/r/{UID}/{path}", {"authorization": f"Bearer {KEY}", "content-type": "application/json"}

        async def send(content: bytes, **more: str) -> httpx.Response:
            return await endpoint.http.post(url, content=content, headers=headers | more)

        for content in (b"", b"{", b"[]", b'{"a": NaN}', b'"\xff"', b'{"a":' * 300 + b"1" + b"}" * 300):
            response = await send(content)
            assert response.status_code == 400, content
            assert error_of(response)["type"] == "invalid_request_error"
        response = await send(b"x" * 60_000)
        assert response.status_code == 413
        assert error_of(response)["type"] == ("request_too_large" if path == "v1/messages" else "invalid_request_error")
        assert (await send(b"{}", **{"content-type": "text/plain"})).status_code == 400
        assert endpoint.server.calls == []


@APIS
async def test_a_body_may_be_larger_than_those_of_other_routes(path: str) -> None:
    async with model_gateway(max_body_bytes=60_000) as endpoint:
        body = BODIES[path] | {"user": "x" * 100_000}
        assert (await endpoint.post(path, body)).status_code == 200
        assert (await endpoint.post(path, body | {"user": "x" * 120_000})).status_code == 413


@asynccontextmanager
async def opened(endpoint: ModelGateway, path: str, **more: Any) -> AsyncIterator[httpx.Response]:
    """A streamed response, once its head has arrived."""
    headers = {"authorization": f"Bearer {KEY}"}
    request = endpoint.http.build_request("POST", f"/r/{UID}/{path}", json=BODIES[path] | more, headers=headers)
    response = await endpoint.http.send(request, stream=True)
    try:
        yield response
    finally:
        await response.aclose()


async def read_into(pieces: list[str], response: httpx.Response) -> None:
    """Collect the pieces of a response that may end early."""
    async for piece in response.aiter_text():
        pieces.append(piece)  # noqa: PERF401  # keeps what came before the error


HEARTBEATS = {
    "v1/chat/completions": [": heartbeat", ": heartbeat"],
    "v1/messages": ["event: ping", "event: ping"],
    "v1/responses": ["event: response.created", "event: response.in_progress"],
}


@APIS
async def test_a_silent_model_is_covered_by_heartbeats(path: str) -> None:
    async with model_gateway(heartbeat_seconds=0.02) as endpoint:
        endpoint.server.go.clear()
        async with opened(endpoint, path, stream=True) as response:
            assert response.status_code == 200
            content, begun, pieces = "", list[str](), response.aiter_text()
            while len(begun) < 3:
                content += await anext(pieces)
                begun = [block.split("\n")[0] for block in content.split("\n\n")[:-1]]
                if path == "v1/responses":  # a slow machine may send heartbeats before it has begun the response
                    begun = [
                        line for line in begun if line != ": heartbeat" or "event: response.created" not in content
                    ]
                    begun = begun if "event: response.created" in begun else []
            assert begun[:2] == HEARTBEATS[path]
            endpoint.server.go.set()
            async for piece in pieces:
                content += piece
        frames = frames_of(content)
        assert "Hello." in json.dumps(frames)
        if path == "v1/responses":
            assert [name for name, _ in frames].count("response.created") == 1
            assert [data["sequence_number"] for _, data in frames] == list(range(len(frames)))
            assert frames[-1][0] == "response.completed"
        await endpoint.confirmed("cmp1")


@APIS
async def test_a_stream_that_fails_is_not_taken_for_complete(path: str) -> None:
    async with model_gateway(heartbeat_seconds=0.02) as endpoint:
        endpoint.server.go.clear()
        endpoint.server.refusals["CallModel"] = named("ENGINE", Code.INTERNAL, "broken")
        pieces: list[str] = []
        async with opened(endpoint, path, stream=True) as response:
            endpoint.server.go.set()
            with pytest.raises(httpx.RemoteProtocolError):
                await read_into(pieces, response)
        content = "".join(pieces)
        name, data = frames_of(content)[-1]
        if path == "v1/chat/completions":
            assert data["error"]["type"] == "server_error"
        else:
            assert (name, data["type"]) == ("error", "error")
        if path == "v1/responses":
            (failed,) = [data["response"] for name, data in frames_of(content) if name == "response.failed"]
            assert (failed["status"], failed["error"]["code"]) == ("failed", "internal")
        assert endpoint.server.confirmed == []


def replying(endpoint: ModelGateway, monkeypatch: pytest.MonkeyPatch, message_json: str) -> None:
    completion = pb.ModelCompletion(id="cmp1", message_json=message_json, finish_reason="stop")
    monkeypatch.setattr(endpoint.server, "completion", lambda: completion)


@APIS
@pytest.mark.parametrize("stream", [True, False])
async def test_a_message_is_read_whatever_its_texts_and_numbers(
    endpoint: ModelGateway, monkeypatch: pytest.MonkeyPatch, path: str, stream: bool
) -> None:
    replying(endpoint, monkeypatch, '{"role": "assistant", "content": "Half \\ud83d, \\ud83d\\ude00", "x": 1e400}')
    response = await endpoint.post(path, BODIES[path] | {"stream": stream})
    assert response.status_code == 200
    shown = json.dumps(frames_of(response.text) if stream else response.json(), ensure_ascii=False)
    assert "Half \ufffd, \U0001f600" in shown
    await endpoint.confirmed("cmp1")


@APIS
async def test_a_text_that_a_client_has_cut_within_a_character_is_accepted(endpoint: ModelGateway, path: str) -> None:
    body = json.dumps(BODIES[path] | {"model": "m \ud83d, \ud83d\ude00"})
    assert "\\ud83d," in body
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    response = await endpoint.http.post(f"/r/{UID}/{path}", content=body, headers=headers)
    assert response.status_code == 200, response.text
    assert endpoint.call.model == "m \ufffd, \U0001f600"


@APIS
@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e400"])
async def test_a_number_that_json_cannot_have_is_refused(endpoint: ModelGateway, path: str, number: str) -> None:
    body = json.dumps(BODIES[path] | {"x": 7, "y": "\ud83d"}).replace('"x": 7', f'"x": {number}')
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    response = await endpoint.http.post(f"/r/{UID}/{path}", content=body, headers=headers)
    assert response.status_code == 400
    assert "not valid JSON: Out of range float values" in error_of(response)["message"]


@APIS
async def test_a_message_that_cannot_be_read_is_an_error_that_stays(
    endpoint: ModelGateway, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    for message in ("{", f'{{"content": {"[" * 3000}{"]" * 3000}}}', f'{{"x": 1e400, "y": 1{"0" * 5000}}}'):
        replying(endpoint, monkeypatch, message)
        response = await endpoint.post(path, BODIES[path])
        assert (response.status_code, response.headers["x-should-retry"]) == (500, "false")
        assert error_of(response)["message"].startswith("The model's message cannot be read: ")
    for message in ('{"content": 3}', '{"content": ["a"]}', '{"content": "", "tool_calls": 3}', "[]"):
        replying(endpoint, monkeypatch, message)
        response = await endpoint.post(path, BODIES[path])
        assert (response.status_code, response.headers["x-should-retry"]) == (500, "false")
        assert error_of(response)["message"] == "The model's message cannot be read: a field has the wrong type"
    assert endpoint.server.confirmed == []


@APIS
@pytest.mark.parametrize("message", ["{", '{"content": 3}'])
async def test_a_stream_whose_message_cannot_be_read_ends_with_an_error(
    endpoint: ModelGateway, monkeypatch: pytest.MonkeyPatch, path: str, message: str
) -> None:
    replying(endpoint, monkeypatch, message)
    pieces: list[str] = []
    async with opened(endpoint, path, stream=True) as response:
        with pytest.raises(httpx.RemoteProtocolError):
            await read_into(pieces, response)
    name, data = frames_of("".join(pieces))[-1]
    assert (name, "error" in data or data["type"] == "error") == ("" if path.endswith("completions") else "error", True)
    assert endpoint.server.confirmed == []


@APIS
async def test_a_gateway_that_stops_does_not_end_a_stream_cleanly(path: str) -> None:
    async with model_gateway(heartbeat_seconds=0.02) as endpoint, open_channel(endpoint.address) as channel:
        endpoint.server.go.clear()
        app = create_app(channel, GatewaySettings(heartbeat_seconds=0.02))
        listener = HttpListener(app, Listening("127.0.0.1", 0, grace_seconds=0.0))
        async with http_client(f"http://127.0.0.1:{await listener.start()}") as client:
            stopping = dataclasses.replace(endpoint, http=client)
            pieces: list[str] = []
            async with opened(stopping, path, stream=True) as response:
                await listener.stop()
                with pytest.raises(httpx.RemoteProtocolError):
                    await read_into(pieces, response)
        assert "shutting down" in frames_of("".join(pieces))[-1][1].get("message", "".join(pieces))
        assert endpoint.server.confirmed == []


@APIS
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("seconds", [0.01, 60])
async def test_a_client_that_leaves_closes_the_call(path: str, stream: bool, seconds: float) -> None:
    async with model_gateway(heartbeat_seconds=seconds) as endpoint:
        endpoint.server.go.clear()
        task = asyncio.create_task(endpoint.post(path, BODIES[path] | {"stream": stream}))
        await endpoint.server.waiting.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await endpoint.server.left.wait()
        assert endpoint.server.confirmed == []


@APIS
@pytest.mark.parametrize("stream", [False, True])
async def test_a_confirmation_delays_no_response_and_precedes_the_next_call(
    endpoint: ModelGateway, path: str, stream: bool
) -> None:
    body = BODIES[path] | {"stream": stream}
    for _ in range(3):
        endpoint.server.may_confirm.clear()
        endpoint.server.confirming.clear()
        assert (await endpoint.post(path, body)).status_code == 200
        await endpoint.server.confirming.wait()
        following = asyncio.create_task(endpoint.post(path, body))
        for _ in range(3):  # requests that are sent later go all the way
            await endpoint.get("v1/models")
        endpoint.server.may_confirm.set()
        assert (await following).status_code == 200
        await endpoint.confirmed(*(f"cmp{number + 1}" for number in range(len(endpoint.server.calls))))
    assert endpoint.server.order == ["call", "confirmation"] * 6


@APIS
@pytest.mark.parametrize("stream", [False, True])
async def test_a_completion_that_is_lost_on_its_way_is_not_confirmed(
    endpoint: ModelGateway, path: str, stream: bool
) -> None:
    endpoint.server.reply = said("x" * 2**24)  # more than the buffers of a connection hold
    headers = {"authorization": f"Bearer {KEY}"}
    async with TcpProxy(endpoint.port) as proxy:
        proxy.lose_an_answer()
        async with http_client(f"http://{proxy.address}") as client:
            with pytest.raises(httpx.TransportError):
                await client.post(f"/r/{UID}/{path}", json=BODIES[path] | {"stream": stream}, headers=headers)
            assert endpoint.server.confirmed == []
            endpoint.server.reply = said("Hello.")
            again = await client.post(f"/r/{UID}/{path}", json=BODIES[path] | {"stream": stream}, headers=headers)
    assert again.status_code == 200
    await endpoint.confirmed("cmp2")


async def test_a_confirmation_that_fails_costs_no_answer(endpoint: ModelGateway) -> None:
    endpoint.server.refusals["ConfirmCompletion"] = named("X", Code.UNAVAILABLE)
    assert (await endpoint.post("v1/messages", BODIES["v1/messages"])).status_code == 200


async def test_models_are_named_as_the_rollout_says(endpoint: ModelGateway) -> None:
    endpoint.server.model = "shown"
    listed = (await endpoint.get("v1/models")).json()
    assert [(model["id"], model["lifecycle"]) for model in listed["data"]] == [("shown", "active")]
    assert (await endpoint.get("v1/models/any/name")).json()["id"] == "any/name"
    response = await endpoint.http.get(f"/r/{UID}/v1/models", headers={"authorization": "Bearer x"})
    assert response.status_code == 403


async def test_a_websocket_is_refused_so_that_clients_go_on_with_http(endpoint: ModelGateway) -> None:
    headers = {
        "connection": "Upgrade",
        "upgrade": "websocket",
        "sec-websocket-version": "13",
        "sec-websocket-key": "eA==",
    }
    response = await endpoint.http.get(f"/r/{UID}/v1/responses", headers=headers)
    assert response.status_code == 426


async def test_an_agent_finishes_its_work(endpoint: ModelGateway) -> None:
    body = {"reward": 1, "scores": {"tests": 0.5}, "extra": {"b": 1, "a": 10**30}}
    first = await endpoint.post("finish", body)
    assert (first.status_code, first.json()) == (200, {"repeated": False})
    (message,) = endpoint.server.finished
    assert message == pb.FinishRolloutRequest(uid=UID, reward=1.0, scores={"tests": 0.5}, extra_json=message.extra_json)
    assert message.extra_json.replace(" ", "") == '{"b":1,"a":1' + "0" * 30 + "}"
    endpoint.server.refusals["GetModelAccess"] = OVER
    assert (await endpoint.post("v1/finish", body)).json() == {"repeated": True}
    await endpoint.post("finish", {"failure": {"message": "crashed", "failure_class": "tool"}})
    failure = endpoint.server.finished[-1].failure
    assert (failure.message, failure.failure_class) == ("crashed", 3)
    assert not endpoint.server.finished[-1].HasField("reward")


@pytest.mark.parametrize("body", [{"reward": "x"}, {"rewards": 1}, {"failure": {}}, {"scores": {"a": None}}])
async def test_a_wrong_result_is_refused(endpoint: ModelGateway, body: Any) -> None:
    response = await endpoint.post("finish", body)
    assert response.status_code == 422
    assert response.json()["error"]["fields"]
    response = await endpoint.http.post(f"/r/{UID}/finish", json=body, headers={"authorization": "Bearer x"})
    assert response.status_code == 403


async def test_a_key_finds_its_server_among_several() -> None:
    """Each server refuses the keys of the others' rollouts, and API keys are of no use here."""
    servers = [ScriptedAgentService(key=f"rk_{UID}.other"), ScriptedAgentService()]
    async with (
        agent_server(servers[0], ScriptedServer()) as first,  # type: ignore[abstract]
        agent_server(servers[1], ScriptedServer()) as second,  # type: ignore[abstract]
        open_channel(first) as one,
        open_channel(second) as two,
        listening(create_app([one, two])) as (host, port),
        http_client(f"http://{host}:{port}") as client,
    ):
        headers = {"authorization": f"Bearer {KEY}"}
        for path, body in BODIES.items():
            response = await client.post(f"/r/{UID}/{path}", json=body, headers=headers)
            assert response.status_code == 200, response.text
        assert [len(server.calls) for server in servers] == [0, 3]
        assert servers[1].order == ["call", "confirmation"] * 2 + ["call", *servers[1].order[5:]]
        headers = {"authorization": f"Bearer rk_{UID}.stolen"}
        response = await client.post(f"/r/{UID}/v1/messages", json=BODIES["v1/messages"], headers=headers)
        assert response.status_code == 403
