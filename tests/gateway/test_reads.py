"""`GET /health`, `/tools` and the OpenAPI description, over real sockets."""

import json
from typing import Any

import grpc
import pytest
from osmosis.rollout.v1 import message_pb2
from rollout_gateway.settings import GatewaySettings

from tests.support.example_bodies import EXAMPLE, INIT_EXAMPLE
from tests.support.gateways import Gateway, http_client, serving
from tests.support.scripted_server import Refusal
from tests.support.transcripts import client_exchange

Code = grpc.StatusCode


HEALTHY = {
    "status": "healthy",
    "service": "rollout-server",
    "agent_loop": "calculator",
    "active_rollouts": 5,
    "completed_rollouts": 7,
}


async def test_health_tells_agent_and_counts(gateway: Gateway) -> None:
    response = await gateway.client.get("/health")
    assert (response.status_code, response.json()) == (200, HEALTHY)


async def test_health_is_open_and_whole_where_the_server_demands_a_key(gateway: Gateway) -> None:
    gateway.server.info.keys_required = True
    gateway.server.refusals["ListAgents"] = Refusal(Code.UNAUTHENTICATED)
    response = await gateway.client.get("/health")
    assert (response.status_code, response.json()) == (200, HEALTHY)


@pytest.mark.parametrize("path", ["/health", "/platform/health"])
async def test_a_server_that_drains_is_unhealthy(gateway: Gateway, path: str) -> None:
    gateway.server.info.keys_required = gateway.server.info.draining = True
    response = await gateway.client.get(path)
    assert (response.status_code, response.json()) == (503, {"status": "draining", "service": "rollout-server"})


@pytest.mark.parametrize("path", ["/health", "/platform/health"])
async def test_a_server_that_does_not_answer_is_unhealthy(gateway: Gateway, path: str) -> None:
    gateway.server.refusals["GetServerInfo"] = Refusal(Code.UNAVAILABLE, "the server drains")
    response = await gateway.client.get(path)
    expected = {"status": "unhealthy", "service": "rollout-server", "detail": "the server drains"}
    assert (response.status_code, response.json()) == (503, expected)


async def test_platform_health_is_not_there_without_keys(gateway: Gateway) -> None:
    response = await gateway.client.get("/platform/health")
    assert (response.status_code, response.json()) == (404, {"detail": "Not found"})
    assert "ListAgents" not in gateway.server.metadata


@pytest.mark.parametrize("code", [Code.UNAUTHENTICATED, Code.PERMISSION_DENIED])
async def test_platform_health_wants_a_key_of_the_servers(gateway: Gateway, code: grpc.StatusCode) -> None:
    gateway.server.info.keys_required = True
    gateway.server.refusals["ListAgents"] = Refusal(code, "something else")
    response = await gateway.client.get("/platform/health", headers={"authorization": "Bearer wrong"})
    assert (response.status_code, response.json()) == (401, {"detail": "Invalid or missing API key"})
    assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("key", ["Bearer right", "bearer right", "right"])
async def test_platform_health_tells_holders_of_a_key_the_same(gateway: Gateway, key: str) -> None:
    gateway.server.info.keys_required = True
    response = await gateway.client.get("/platform/health", headers={"authorization": key})
    assert (response.status_code, response.json()) == (200, HEALTHY)
    assert gateway.server.metadata["ListAgents"]["authorization"] == key


async def test_platform_health_of_a_server_that_falls_silent_is_503(gateway: Gateway) -> None:
    gateway.server.info.keys_required = True
    gateway.server.refusals["ListAgents"] = Refusal(Code.UNAVAILABLE)
    response = await gateway.client.get("/platform/health")
    assert (response.status_code, response.json()["status"]) == (503, "unhealthy")


async def test_without_a_server_all_is_503_and_no_address_is_shown(address: str) -> None:
    async with (
        serving(address, GatewaySettings()) as (host, port),
        http_client(f"http://{host}:{port}") as client,
    ):
        health, tools = await client.get("/health"), await client.get("/tools")
        rollout = await client.post("/rollout", json=EXAMPLE)
        init = await client.post("/v1/rollout/init", json=INIT_EXAMPLE)
    assert health.json()["status"] == "unhealthy"
    assert {health.status_code, tools.status_code, rollout.status_code, init.status_code} == {503}
    assert tools.json() == rollout.json() == init.json() == {"detail": "The rollout server is not available"}


async def test_tools_are_those_of_the_transcript(gateway: Gateway) -> None:
    recorded = client_exchange("tools")["response"]
    for each in recorded["tools"]:
        function = each["function"]
        gateway.server.tools.append(
            message_pb2.Tool(
                name=function["name"],
                description=function["description"],
                parameters_json_schema=json.dumps(function["parameters"]),
            )
        )
    response = await gateway.client.get("/tools")
    assert (response.status_code, response.json()) == (200, recorded)
    await gateway.client.get("/tools", params={"agent": "another"})
    assert gateway.server.agents_asked == ["", "another"]


async def test_an_unknown_agent_is_404(gateway: Gateway) -> None:
    gateway.server.refusals["ListTools"] = Refusal(Code.NOT_FOUND, "there is no agent 'x'")
    response = await gateway.client.get("/tools", params={"agent": "x"})
    assert (response.status_code, response.json()) == (404, {"detail": "there is no agent 'x'"})


UNKNOWN = ["/nowhere", "/rollouts", "/rollout/x", "/docs/files/nowhere", "/v1", "/v1/rollout", "/health%0a", "/%0a"]


@pytest.mark.parametrize("path", UNKNOWN)
async def test_an_unknown_path_is_404_in_one_shape(gateway: Gateway, path: str) -> None:
    response = await gateway.client.get(path, headers={"x-request-id": "r"})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["request_id"]) == (404, "PATH_NOT_FOUND", "r")
    assert response.headers["x-request-id"] == "r"


@pytest.mark.parametrize(
    "path", ["/rollout", "/v1/rollout/init", "/r/u/v1/chat/completions", "/r/u/mcp", "/v1/rollouts"]
)
async def test_a_line_break_at_the_end_is_another_path(gateway: Gateway, path: str) -> None:
    assert "PATH_NOT_FOUND" not in (await gateway.client.post(path, json={})).text
    response = await gateway.client.post(f"{path}%0a", json={})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "PATH_NOT_FOUND")


async def test_the_description_shows_a_body_that_works(gateway: Gateway) -> None:
    assert (await gateway.client.get("/docs")).status_code == 200
    described = (await gateway.client.get("/openapi.json")).json()
    operation = described["paths"]["/rollout"]["post"]
    content = operation["requestBody"]["content"]["application/json"]
    assert (await gateway.post(content["example"])).status_code == 200
    assert {"200", "409", "413", "422", "429", "503"} <= operation["responses"].keys()
    init = described["paths"]["/v1/rollout/init"]["post"]
    assert (await gateway.init(init["requestBody"]["content"]["application/json"]["example"])).status_code == 202
    assert {"202", "401", "409", "413", "422", "429", "503"} <= init["responses"].keys()
    assert {"200", "401", "404", "503"} <= described["paths"]["/platform/health"]["get"]["responses"].keys()
    schemas = described["components"]["schemas"]
    assert schemas["RolloutBody"]["properties"]["max_turns"] == {
        "default": 10,
        "maximum": 100,
        "minimum": 1,
        "title": "Max Turns",
        "type": "integer",
    }
    unresolved = [each for each in references(described) if each.removeprefix("#/components/schemas/") not in schemas]
    assert unresolved == []


def references(value: Any) -> list[str]:
    if isinstance(value, dict):
        own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
        return own + [found for each in value.values() for found in references(each)]
    if isinstance(value, list):
        return [found for each in value for found in references(each)]
    return []
