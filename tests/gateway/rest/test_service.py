"""Agents, health and metrics in the REST API, and the common format of its errors."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urljoin

import grpc
import httpx
import pytest
from google.protobuf.duration_pb2 import Duration
from osmosis.rollout.v1 import message_pb2, spec_pb2
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from osmosis.rollout.v1.event_pb2 import RolloutEvent
from prometheus_client.parser import text_string_to_metric_families
from rollout_gateway.app import create_app
from rollout_gateway.http.request_boundary import RequestBoundary
from rollout_gateway.osmosis_http.outcome import METRICS
from rollout_gateway.settings import GatewaySettings
from starlette.types import Receive, Scope, Send

from tests.support.gateways import http_client
from tests.support.rest_gateway import BODY, KEY, Plain, listening, plain_gateway, until
from tests.support.scripted_server import UID, Refusal

Code = grpc.StatusCode
KNOWN = {"authorization": f"Bearer {KEY}"}


@pytest.fixture
async def plain() -> AsyncIterator[Plain]:
    """A gateway in front of a scripted server."""
    async with plain_gateway() as opened:
        yield opened


async def test_agents_come_with_tools_and_limits(plain: Plain) -> None:
    tool = message_pb2.Tool(name="add", description="Adds.", parameters_json_schema='{"z":1,"a":2}', strict=True)
    limits = spec_pb2.Limits(turns=8, time=Duration(seconds=120))
    plain.server.agents = [
        pb.Agent(
            name="a", version="1", replayable=True, tools=[tool], limits=limits, default=True, description="Does."
        ),
        pb.Agent(name="b", tools=[message_pb2.Tool(name="bare")]),
    ]
    reply = await plain.http.get("/v1/agents")
    assert '{"z":1,"a":2}' in reply.text
    bare = {"name": "bare", "description": "", "parameters": {"type": "object", "properties": {}}}
    add = {"name": "add", "description": "Adds.", "parameters": {"z": 1, "a": 2}, "strict": True}
    assert reply.json() == {
        "agents": [
            {
                "name": "a",
                "version": "1",
                "description": "Does.",
                "default": True,
                "replayable": True,
                "external": False,
                "limits": {"turns": 8, "seconds": 120.0},
                "tools": [{"type": "function", "function": add}],
            },
            {
                "name": "b",
                "version": "",
                "description": "",
                "default": False,
                "replayable": False,
                "external": False,
                "limits": {},
                "tools": [{"type": "function", "function": bare}],
            },
        ]
    }


async def test_healthz_asks_nobody(plain: Plain) -> None:
    reply = await plain.http.get("/healthz")
    assert (reply.status_code, reply.json()) == (200, {"status": "ok"})
    assert plain.server.asked == {}


async def test_readyz_is_what_the_server_says(plain: Plain) -> None:
    plain.server.key = KEY
    reply = await plain.http.get("/readyz")
    assert (reply.status_code, reply.json()) == (200, {"status": "ready", "running": 3, "queued": 2})
    plain.server.server.draining = True
    reply = await plain.http.get("/readyz")
    assert (reply.status_code, reply.json(), reply.headers["retry-after"]) == (503, {"status": "draining"}, "1")
    plain.server.refusals["GetServerInfo"] = Refusal(Code.UNAVAILABLE, rich=False)
    reply = await plain.http.get("/readyz")
    assert (reply.status_code, reply.json(), reply.headers["retry-after"]) == (503, {"status": "unavailable"}, "1")


def samples(text: str) -> dict[tuple[str, ...], float]:
    """Metrics by name and labels, with the labels sorted by name."""
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_a_gateway_alone_counts_its_requests_by_route(plain: Plain) -> None:
    await plain.http.get(f"/v1/rollouts/{UID}")
    await plain.http.get("/v1/rollouts/another")
    await plain.http.get("/v1/rollouts/a.b")
    await plain.start({})
    await plain.http.get("/v1/secret-place")
    await plain.http.request("PROPFIND", "/v1/rollouts")
    async with plain.http.stream("GET", "/healthz"):
        pass
    reply = await plain.http.get("/metrics")
    assert reply.headers["content-type"] == "text/plain; version=1.0.0; charset=utf-8"
    found = samples(reply.text)
    name = "rollout_gateway_requests_total"
    assert found[name, "GET", "/v1/rollouts/{uid}", "200"] == 2
    assert found[name, "GET", "/v1/rollouts/{uid}", "422"] == 1
    assert found[name, "POST", "/v1/rollouts", "422"] == 1
    assert found[name, "GET", "none", "404"] == 1
    assert found[name, "other", "/v1/rollouts", "405"] == 1
    assert found[name, "GET", "/healthz", "200"] == 1
    assert found["rollout_gateway_request_seconds_count", "GET", "/v1/rollouts/{uid}"] == 3
    assert "secret-place" not in reply.text
    assert "another" not in reply.text


async def test_a_client_that_left_is_counted_as_such(plain: Plain) -> None:
    plain.server.go.clear()
    waiting = asyncio.create_task(plain.http.get(f"/v1/rollouts/{UID}?wait=60"))
    await plain.server.waiting.wait()
    waiting.cancel()
    await plain.server.left.wait()
    label = ("rollout_gateway_requests_total", "GET", "/v1/rollouts/{uid}", "499")

    async def is_counted() -> bool:
        return label in samples((await plain.http.get("/metrics")).text)

    await until(is_counted)


async def test_metrics_of_the_server_come_with_the_gateways_own() -> None:
    texts = [b"# TYPE turns counter\nturns_total 1.0", b"# TYPE turns counter\nturns_total 2.0\n"]
    async with plain_gateway(metrics=lambda: texts.pop(0)) as plain:
        for turns in (1, 2):
            await plain.http.get("/healthz")
            found = samples((await plain.http.get("/metrics")).text)
            assert found[("turns_total",)] == turns
            assert found["rollout_gateway_requests_total", "GET", "/healthz", "200"] == turns


async def test_metrics_of_the_server_want_a_key_where_it_has_some() -> None:
    async with plain_gateway(metrics=lambda: b"turns_total 1.0\n") as plain:
        plain.server.key = KEY
        for headers in ({}, {"authorization": "Bearer wrong"}):
            reply = await plain.http.get("/metrics", headers=headers)
            assert (reply.status_code, reply.headers["www-authenticate"]) == (401, "Bearer")
            assert "turns" not in reply.text
        plain.server.refusals["ListAgents"] = Refusal(Code.UNAVAILABLE, rich=False)
        assert (await plain.http.get("/metrics", headers=KNOWN)).status_code == 503
        plain.server.refusals.clear()
        assert "turns_total 1.0" in (await plain.http.get("/metrics", headers=KNOWN)).text


async def test_every_route_but_the_open_ones_wants_a_key(plain: Plain) -> None:
    plain.server.key = KEY
    described = (await plain.http.get("/openapi.json")).json()
    plain_tags = {"rollouts", "service"}
    seen = 0
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            if not plain_tags & set(operation["tags"]):
                continue
            reply = await plain.http.request(method, path.replace("{uid}", UID))
            expected = 200 if path in ("/healthz", "/readyz", "/metrics") else 401
            assert reply.status_code == expected, path
            seen += expected == 401
    assert seen >= 8


async def test_layers_that_know_nothing_of_this_api_answer_in_its_shape(plain: Plain) -> None:
    async def error(method: str, path: str, status: int, **options: Any) -> dict[str, Any]:
        reply = await plain.http.request(method, path, headers={"x-request-id": "r"}, **options)
        assert reply.status_code == status
        assert reply.headers["content-type"] == "application/json"
        assert int(reply.headers["content-length"]) == len(reply.content)
        found: dict[str, Any] = reply.json()["error"]
        assert (found["request_id"], found["fields"]) == ("r", [])
        assert found["message"]
        return found

    assert (await error("GET", "/v1/nowhere", 404))["code"] == "PATH_NOT_FOUND"
    assert (await error("GET", "/nowhere", 404))["code"] == "PATH_NOT_FOUND"
    assert (await error("GET", "/v1/rollout/nowhere", 404))["code"] == "PATH_NOT_FOUND"
    assert (await error("GET", f"/v1/rollouts/{UID}/nowhere", 404))["code"] == "PATH_NOT_FOUND"
    assert (await error("DELETE", f"/v1/rollouts/{UID}", 405))["code"] == "METHOD_NOT_ALLOWED"
    assert (await error("POST", "/metrics", 405))["code"] == "METHOD_NOT_ALLOWED"
    large = await error("POST", "/v1/rollouts", 413, content=b"x" * 100_001)
    assert (large["code"], "100000" in large["message"]) == ("TOO_LARGE", True)
    late = await plain.http.get("/v1/agents", headers={"grpc-timeout": "soon"})
    assert (late.status_code, late.json()["error"]["code"]) == (400, "INVALID_REQUEST")


async def test_the_dialects_keep_their_shape(plain: Plain) -> None:
    assert (await plain.http.get("/rollout")).json() == {"detail": "Method Not Allowed"}
    assert (await plain.http.get("/v1/rollout/init")).json() == {"detail": "Method Not Allowed"}
    assert "detail" in (await plain.http.post("/rollout", content=b"x" * 100_001)).json()
    assert isinstance((await plain.http.post("/rollout", json={})).json()["detail"], list)
    assert isinstance((await plain.http.post("/v1/rollout/init", json={})).json()["detail"], list)


async def test_a_body_that_grows_too_large_is_refused_in_its_shape(plain: Plain) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b"x" * 50_000

    reply = await plain.http.post("/v1/rollouts", content=chunks())
    assert (reply.status_code, reply.json()["error"]["code"]) == (413, "TOO_LARGE")


async def test_faults_of_ours_and_of_the_server_show_nothing(plain: Plain, caplog: pytest.LogCaptureFixture) -> None:
    plain.server.refusals["StartRollout"] = Refusal(Code.UNKNOWN, "KeyError: 'inside'", rich=False)
    reply = await plain.start(headers={"x-request-id": "look-me-up"})
    text = "Internal server error; find the cause in the log by the request id"
    error = {"code": "INTERNAL", "message": text, "request_id": "look-me-up", "fields": []}
    assert (reply.status_code, reply.json()) == (500, {"error": error})
    assert "inside" in caplog.text
    caplog.clear()

    async def broken(scope: Scope, receive: Receive, send: Send) -> None:
        raise KeyError("inside")

    transport = httpx.ASGITransport(RequestBoundary(broken, is_plain=lambda scope: scope["path"] == "/v1/agents"))
    async with httpx.AsyncClient(base_url="http://gateway", transport=transport) as client:
        reply = await client.get("/v1/agents", headers={"x-request-id": "look-me-up"})
    assert (reply.status_code, reply.json()) == (500, {"error": error})
    assert "inside" in caplog.text


async def test_without_a_server_all_is_503_with_a_time_to_come_back(tmp_path: Any) -> None:
    async with grpc.aio.insecure_channel(f"unix:{tmp_path}/none") as channel:
        app = create_app(channel, GatewaySettings(), metrics=lambda: b"")
        async with (
            listening(app) as (host, port),
            http_client(f"http://{host}:{port}") as client,
        ):
            replies = [
                await client.post("/v1/rollouts", json=BODY),
                await client.get("/v1/rollouts"),
                await client.get(f"/v1/rollouts/{UID}/events"),
                await client.get("/v1/agents"),
                await client.get("/metrics"),
            ]
            ready = await client.get("/readyz")
            assert (await client.get("/healthz")).status_code == 200
    for reply in replies:
        error = reply.json()["error"]
        assert (reply.status_code, reply.headers["retry-after"], error["retry_after"]) == (503, "1", 1.0)
        assert error["code"] == "UNAVAILABLE"
        assert "none" not in reply.text
    assert (ready.status_code, ready.headers["retry-after"], ready.json()) == (503, "1", {"status": "unavailable"})


async def test_the_live_page_is_static(plain: Plain) -> None:
    plain.server.key = KEY
    plain.server.refusals["GetServerInfo"] = Refusal(Code.UNAVAILABLE, rich=False)
    page = await plain.http.get("/")
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert page.content == (await plain.http.get("/", headers=KNOWN)).content
    assert (await plain.http.head("/")).headers["content-length"] == str(len(page.content))
    (imports,) = re.findall(r'<script type="importmap">(.*?)</script>', page.text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(imports.encode()).digest()).decode()
    policy = dict(part.strip().split(" ", 1) for part in page.headers["content-security-policy"].split(";"))
    assert policy["script-src"] == f"'self' 'sha256-{digest}'"
    assert (policy["default-src"], policy["style-src"]) == ("'none'", "'self'")
    assert policy["require-trusted-types-for"] == "'script'"
    assert not re.search(r"style=|https?://|@import|url\(|<style", page.text)
    assert plain.server.asked == {}
    links = re.findall(r'(?:href|src)="([^#"]+)"', page.text)
    for link in links:
        # As a browser resolves it, also where a proxy serves the gateway under a prefix.
        assert urljoin("http://proxy/prefix/", link) == f"http://proxy/prefix/{link}"
        assert (await plain.http.get(urljoin(str(page.url), link))).status_code == (503 if link == "readyz" else 200)
    module = await plain.http.get("/page/app.js")
    assert module.headers["content-type"].startswith("text/javascript")
    again = await plain.http.get("/page/app.js", headers={"if-none-match": module.headers["etag"]})
    for each in (page, module, again):
        assert (each.headers["cache-control"], each.headers["x-content-type-options"]) == ("no-cache", "nosniff")
    assert again.status_code == 304
    assert {"page/app.js", "page/style.css", "docs", "readyz", "metrics"} <= {*links}
    assert "/" not in (await plain.http.get("/openapi.json")).json()["paths"]
    assert (await plain.http.post("/")).json()["error"]["code"] == "METHOD_NOT_ALLOWED"


async def test_the_description_is_whole(plain: Plain) -> None:
    described = (await plain.http.get("/openapi.json")).json()
    schemas = described["components"]["schemas"]
    text = json.dumps(described)
    names = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert names <= schemas.keys()
    assert {"StartRollout", "CancelRollouts", "PlainError", "RolloutModel"} <= names
    secret = schemas["EndpointBody"]["properties"]["bearer"]
    assert (secret["writeOnly"], secret["format"]) == (True, "password")
    assert schemas["StartRollout"]["additionalProperties"] is False
    assert schemas["RolloutResponse"]["properties"]["metrics"]["required"] == list(METRICS)
    operations = described["paths"]["/v1/rollouts"]
    assert {"200", "201", "401", "404", "409", "413", "422", "429", "503"} <= operations["post"]["responses"].keys()
    stream = described["paths"]["/v1/rollouts/{uid}/events"]["get"]["responses"]["200"]["content"]["text/event-stream"]
    kinds = [field.name for field in RolloutEvent.DESCRIPTOR.oneofs_by_name["event"].fields]
    item = stream["itemSchema"]["properties"]
    assert item["event"]["enum"] == item["data"]["contentSchema"]["properties"]["event"]["enum"] == kinds
    headers = described["paths"]["/v1/rollouts/{uid}/events"]["get"]["parameters"]
    assert "Last-Event-ID" in [each["name"] for each in headers]
    for path, methods in described["paths"].items():
        for operation in methods.values():
            if "rollouts" in operation["tags"] or path == "/v1/agents":
                shape = operation["responses"]["422"]["content"]["application/json"]["schema"]["$ref"]
                assert shape.endswith("/PlainError")
