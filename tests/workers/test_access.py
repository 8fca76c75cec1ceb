"""Keys of callers and of model endpoints over any connection, with TLS. Half of the calls reach another worker."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import httpx
import pytest
from osmosis.rollout.v1 import agent_service_pb2
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from osmosis.rollout.v1.agent_service_pb2_grpc import AgentServiceStub
from osmosis.rollout.v1.rollout_service_pb2_grpc import RolloutServiceStub
from osmosis.rollout.v1.trainer_service_pb2_grpc import TrainerServiceStub
from rollout_server.edge.api_keys import entry_of
from rollout_server.workers.link import LINK_VARIABLE
from rollout_server.workers.plan import WorkerPlan

from bench.programs.child import free_port
from tests.keys.test_callers import bearing
from tests.support.certificates import Authority
from tests.support.engine_model import EngineModel
from tests.support.engines import MODEL, serving
from tests.support.outside_agent import GatedEngine, Texts
from tests.support.processes import COMMAND, environment
from tests.support.server_client import refusal
from tests.workers.service import Workers, workers
from tests.workers.test_service import server_of

pytestmark = pytest.mark.timeout(300)
ALICE, BOB, ADMIN = "key-of-alice-0123", "key-of-bob-4567", "key-of-admin-89ab"
AGENT = """
from rollout_server import ExternalAgent

agent = ExternalAgent(name="remote", idle_seconds=600)
"""
CONNECTIONS = 5
UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    folder = tmp_path_factory.mktemp("access")
    (folder / "remote.py").write_text(AGENT)
    (folder / "keys").write_text("\n".join((entry_of("alice", ALICE), entry_of("bob", BOB))))
    authority = Authority()
    pair = authority.put(folder)
    variables = {
        "ROLLOUT_API_KEYS_FILE": str(folder / "keys"),
        "ROLLOUT_ADMIN_KEY": ADMIN,
        "ROLLOUT_TLS_CERT": str(pair.cert),
        "ROLLOUT_TLS_KEY": str(pair.key),
    }
    with workers(folder, 2, str(folder / "remote.py"), ca=authority.put_ca(folder), **variables) as service:
        yield service


@pytest.fixture
async def engine() -> AsyncIterator[GatedEngine]:
    engine = GatedEngine(EngineModel(Texts()))
    engine.gate = asyncio.Event()
    engine.gate.set()
    async with serving(engine):
        yield engine


@asynccontextmanager
async def client(service: Workers, key: str = "") -> AsyncIterator[httpx.AsyncClient]:
    """A client whose requests each have a connection of their own."""
    limits = httpx.Limits(max_keepalive_connections=0)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(
        base_url=service.url,
        headers=headers,
        limits=limits,
        timeout=60,
        verify=ssl.create_default_context(cafile=service.ca),
        trust_env=False,
    ) as client:
        yield client


def of(rollout_id: str, engine: GatedEngine) -> dict[str, Any]:
    return {
        "request_id": rollout_id,
        "rollout_id": rollout_id,
        "agent": "remote",
        "messages": [{"role": "user", "content": "The task."}],
        "completions": {"url": engine.url, "dialect": "vllm", "model": MODEL},
        "tokenizer": {"name": "toy"},
        "token_mode": "tokens",
    }


async def available(request: Callable[[], Awaitable[httpx.Response]]) -> httpx.Response:
    """Send a request until the worker is back, as clients do."""
    while True:
        try:
            response = await request()
        except httpx.TransportError:  # the connection was to the worker that was killed
            continue
        if response.status_code != 503:
            return response
        await asyncio.sleep(0.1)


async def started(http: httpx.AsyncClient, name: str, engine: GatedEngine, least: int = 4) -> dict[str, dict[str, str]]:
    """Start rollouts until both workers have some. Return what gives access to their model endpoints, by uid."""
    found: dict[str, dict[str, str]] = {}
    while len(found) < least or len({server_of(uid) for uid in found}) < 2:
        response = await available(partial(http.post, "/v1/rollouts", json=of(f"{name}{len(found)}", engine)))
        assert response.status_code in (200, 201), response.text
        found[response.json()["rollout"]["uid"]] = response.json()["access"]
    return found


async def test_callers_see_their_own_rollouts_over_any_connection(service: Workers, engine: GatedEngine) -> None:
    async with client(service, ALICE) as http, service.channels(CONNECTIONS) as channels:
        uids = sorted(await started(http, "own", engine, 2))
        for channel in channels:
            stub: Any = RolloutServiceStub(channel)
            for key, seen in ((ALICE, uids), (BOB, []), (ADMIN, uids)):
                page = await stub.ListRollouts(pb.ListRolloutsRequest(), metadata=bearing(key))
                assert sorted(each.uid for each in page.rollouts) == seen
            for uid in uids:
                one = pb.Selection(uids=[uid])
                calls = {
                    "GetRollout": pb.GetRolloutRequest(uid=uid, include_access=True),
                    "WaitRollout": pb.WaitRolloutRequest(uid=uid),
                    "AcknowledgeOutcome": pb.AcknowledgeOutcomeRequest(uid=uid),
                    "CancelRollouts": pb.CancelRolloutsRequest(selection=one),
                    "RedeliverOutcomes": pb.RedeliverOutcomesRequest(selection=one),
                    "ListRollouts": pb.ListRolloutsRequest(selection=one),
                }
                keys = ((), bearing("wrong"), (*bearing(ALICE), *bearing(ALICE)))
                # All at once, because the server answers wrong keys slowly.
                refusals = await asyncio.gather(
                    *(refusal(getattr(stub, name)(each, metadata=key)) for name, each in calls.items() for key in keys)
                )
                assert {each.code for each in refusals} == {UNAUTHENTICATED}
                del calls["ListRollouts"]
                for name, each in calls.items():
                    foreign = await refusal(getattr(stub, name)(each, metadata=bearing(BOB)))
                    assert (foreign.code, foreign.reason) == (grpc.StatusCode.NOT_FOUND, "ROLLOUT_NOT_FOUND")
            train: Any = TrainerServiceStub(channel).Train()
            assert (await refusal(train.read())).code is UNAUTHENTICATED
        async with client(service) as stranger, client(service, BOB) as bob:
            for uid in uids:
                for path in ("/v1/rollouts", f"/v1/rollouts/{uid}", "/metrics", "/v1/server"):
                    assert (await stranger.get(path)).status_code == 401
                assert (await bob.get(f"/v1/rollouts/{uid}")).status_code == 404
                assert (await http.get(f"/v1/rollouts/{uid}")).status_code == 200
            assert (await bob.get("/v1/rollouts")).json()["rollouts"] == []


async def test_a_call_on_another_worker_ends_when_its_key_is_revoked(service: Workers, engine: GatedEngine) -> None:
    keys = service.directory / "keys"
    async with client(service, BOB) as http, service.stubs(CONNECTIONS) as stubs:
        uids = await started(http, "revoked", engine)
        request = (pb.WatchRolloutRequest(uid=uid) for uid in uids)
        watches = [stub.WatchRollout(each, metadata=bearing(BOB)) for each in request for stub in stubs]
        each_item = [aiter(watch) for watch in watches]
        assert {(await anext(items)).event.sequence for items in each_item} == {1}
        keys.write_text("\n".join(line for line in keys.read_text().splitlines() if not line.startswith("bob")))

        async def end(items: AsyncIterator[Any]) -> grpc.StatusCode:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                async for _ in items:
                    pass
            return error.value.code()

        assert {await end(items) for items in each_item} == {UNAUTHENTICATED}
        for _ in range(4):
            assert (await http.get("/v1/rollouts")).status_code == 401


async def call(http: httpx.AsyncClient, uid: str, key: str, text: str, *, shape: str = "openai") -> httpx.Response:
    """Call the model endpoint of a rollout."""
    messages = [{"role": "user", "content": text}]
    if shape == "openai":
        headers, path, more = {"authorization": f"Bearer {key}"}, "chat/completions", {}
    else:
        headers, path, more = {"x-api-key": key}, "messages", {"max_tokens": 100}
    body: Mapping[str, Any] = {"model": "any", "messages": messages, **more}
    return await http.post(f"/r/{uid}/v1/{path}", json=body, headers=headers)


async def completed(http: httpx.AsyncClient, uid: str, key: str, text: str) -> str:
    """Call the model endpoint until the worker is back. Return the completion."""
    response = await available(lambda: call(http, uid, key, text))
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


async def test_model_endpoints_over_any_connection_and_over_the_death_of_their_worker(
    service: Workers, engine: GatedEngine
) -> None:
    async with client(service, ALICE) as http, client(service) as agent, service.channels(CONNECTIONS) as channels:
        access = await started(http, "looped", engine)
        uids = list(access)
        for uid in uids:
            key = access[uid]["key"]
            assert urlsplit(access[uid]["base_url"]).path == f"/r/{uid}"
            assert {
                (await call(agent, uid, key, "Hello.", shape=shape)).status_code
                for shape in ("openai", "anthropic") * 3
            } == {200}
            others = (access[each]["key"] for each in uids if each != uid)
            wrong = (*others, f"{key[:-4]}AAAA", f"rk_{uid}.", ALICE, "rk_")
            assert {(await call(agent, uid, each, "Hello.")).status_code for each in wrong} == {403}
            for channel in channels:
                stub: Any = AgentServiceStub(channel)
                request = agent_service_pb2.GetModelAccessRequest(uid=uid)
                await stub.GetModelAccess(request, metadata=bearing(key))
                for each in wrong:
                    refused = await refusal(stub.GetModelAccess(request, metadata=bearing(each)))
                    assert (refused.code, refused.reason) == (grpc.StatusCode.PERMISSION_DENIED, "MODEL_KEY_INVALID")
                # No worker reads this request, which is over the limit: it would be RESOURCE_EXHAUSTED.
                count = channel.unary_unary("/osmosis.rollout.v1.AgentService/CountTokens")
                refused = await refusal(count(b"\n" * (20 << 20), metadata=bearing(f"rk_{uid}.AAAA")))
                assert refused.code is grpc.StatusCode.PERMISSION_DENIED
        server = server_of(uids[0])
        for uid in (f"{server}-{'0' * 20}", "0123456789-nothing", "-", server, f"{uids[0]}0"):
            assert (await call(agent, uid, f"rk_{uid}.AAAA", "Hello.")).status_code == 403
            assert (await http.get(f"/v1/rollouts/{uid}")).status_code == 404
        engine.gate.clear()
        calls = [
            asyncio.create_task(completed(agent, uid, each["key"], "What now?"), name=uid)
            for uid, each in access.items()
        ]
        while engine.waiting < len(calls):  # noqa: ASYNC110 - it is counted in another task
            await asyncio.sleep(0.01)
        os.kill(service.processes[1], signal.SIGKILL)
        engine.gate.set()
        assert all(text.startswith("Answer") for text in await asyncio.gather(*calls))
        assert await started(http, "looped", engine) == access
        for uid in uids:
            headers = {"authorization": f"Bearer {access[uid]['key']}"}
            finish = partial(agent.post, f"/r/{uid}/finish", json={"reward": 0.5}, headers=headers)
            ended = await available(finish)
            assert ended.status_code == 200, ended.text
            found = (await available(partial(http.get, f"/v1/rollouts/{uid}", params={"wait": 30}))).json()
            assert (found["state"], found["outcome"]["reward"]) == ("finished", 0.5)


async def test_a_worker_knows_the_key_of_the_other_gateways_once_they_can_reach_it(tmp_path: Path) -> None:
    """Its own gateway starts later. Until then POST /rollout without a key was 401 at the gateways of the others."""
    plan = WorkerPlan(0, 2, str(tmp_path), free_port(), free_port(), None, "memory", "ab" * 32)
    ours, theirs = socket.socketpair()
    with theirs:
        variables = {
            "ROLLOUT_API_KEYS": entry_of("alice", ALICE),
            "ROLLOUT_SYNCHRONOUS_NEEDS_KEY": "false",
            LINK_VARIABLE: str(theirs.fileno()),
        }
        process = await asyncio.create_subprocess_exec(
            *COMMAND, "serve", "--workers", "2", env=environment(**variables), pass_fds=(theirs.fileno(),)
        )
    try:
        reader, writer = await asyncio.open_connection(sock=ours)
        writer.write(json.dumps(asdict(plan)).encode() + b"\n")
        assert "up" in json.loads(await reader.readline())
        async with grpc.aio.insecure_channel(plan.address(0)) as channel:
            stub: Any = RolloutServiceStub(channel)
            found = await stub.ListAgents(pb.ListAgentsRequest(), metadata=bearing(plan.gateway_key))
            assert [agent.name for agent in found.agents] == ["calculator"]
            wrong = await refusal(stub.ListAgents(pb.ListAgentsRequest(), metadata=bearing("gateway-")))
            assert wrong.code is UNAUTHENTICATED
    finally:
        process.kill()
        await process.wait()
