"""The gateway as a separate process: TLS on both sides, disconnected clients, signals, and invalid settings."""

from __future__ import annotations

import asyncio
import json
import signal
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from rollout_server.agent import ExternalAgent
from rollout_server.app import Server
from rollout_server.settings import WrongSettings
from rollout_server.settings.standalone_gateway import load_options
from rollout_server.testing.trainer import StrictTrainer

from tests.gateway.fleet.fleets import FleetMember, fleets
from tests.support.bodies import body, rpc
from tests.support.certificates import Authority
from tests.support.gated_model import GatedModel
from tests.support.gateway_process import Alone, alone
from tests.support.gateways import http_client
from tests.support.processes import Serving, command, serve
from tests.support.server_client import until
from tests.support.start_requests import NOWHERE, settings
from tests.support.tcp_proxy import TcpProxy
from tests.system.test_shutdown import taken


@dataclass
class StandaloneGateway:
    """A server process, a gateway process in front of it, TLS on both sides, and a trainer controlled by the test."""

    server: Serving
    gateway: Alone
    trainer: StrictTrainer
    gate: GatedModel
    context: ssl.SSLContext
    stack: AsyncExitStack

    async def client(self) -> httpx.AsyncClient:
        """A client of the gateway with its own connections."""
        made = httpx.AsyncClient(base_url=self.gateway.url, verify=self.context, timeout=60, trust_env=False)
        return await self.stack.enter_async_context(made)

    async def ask(self) -> asyncio.Task[httpx.Response]:
        """Request the rollout."""
        client = await self.client()
        return asyncio.create_task(client.post("/rollout", json=body("r1", self.trainer.url)))

    async def rollouts(self) -> list[pb.Rollout]:
        """All rollouts of the server."""
        async with rpc(self.server.grpc_port) as stub:
            return list((await stub.ListRollouts(pb.ListRolloutsRequest())).rollouts)

    async def hung_up(self) -> pb.Rollout:
        """The rollout of a client that disconnected before its end."""
        asking = await self.ask()
        await self.gate.asked()
        asking.cancel()
        await asyncio.wait([asking])
        (rollout,) = await self.rollouts()
        return rollout


@pytest.fixture
def grace() -> str:
    """Seconds that a rollout continues without its client."""
    return "60"


@pytest.fixture
async def world(tmp_path: Path, grace: str) -> AsyncIterator[StandaloneGateway]:
    async with AsyncExitStack() as stack:
        inside, outside, gate = Authority(), Authority(), GatedModel()
        server = await stack.enter_async_context(serve(cwd=tmp_path))
        # The proxy terminates the server's TLS, so this tests the gateway's.
        there = await stack.enter_async_context(TcpProxy(server.grpc_port, tls=inside.server()))
        pair = outside.put(tmp_path)
        arguments = [
            "--server",
            f"grpcs://localhost:{there.port}",
            "--server-ca",
            str(inside.put_ca(tmp_path, "inside")),
        ]
        arguments += ["--tls-cert", str(pair.cert), "--tls-key", str(pair.key), "--detach-grace-seconds", grace]
        gateway = await stack.enter_async_context(alone(*arguments, cwd=tmp_path))
        trainer = await stack.enter_async_context(StrictTrainer(model=gate, tools_from=server.url))
        yield StandaloneGateway(server, gateway, trainer, gate, outside.client(), stack)
        gate.open()


async def test_who_hangs_up_and_comes_back_in_time_gets_the_result(world: StandaloneGateway) -> None:
    left = await world.hung_up()
    again = await world.ask()
    world.gate.open()
    answer = await again
    assert (answer.status_code, answer.headers["x-rollout-uid"]) == (200, left.uid)
    assert answer.json()["status"] == "COMPLETED"
    assert len(await world.rollouts()) == 1
    assert world.gateway.scheme == "https"
    assert world.gateway.before.startswith("grpcs://localhost:")


@pytest.mark.parametrize("grace", ["0.3"])
async def test_who_hangs_up_for_good_has_it_cancelled(world: StandaloneGateway) -> None:
    left = await world.hung_up()

    async def is_over() -> bool:
        return (await world.rollouts())[0].state == pb.ROLLOUT_STATE_FINISHED

    await until(is_over)
    (rollout,) = await world.rollouts()
    assert rollout.uid == left.uid
    assert rollout.outcome.cancellation.reason == "detached"


@dataclass
class Asked:
    """A gateway process with a request in progress."""

    place: FleetMember
    gateway: Alone
    client: httpx.AsyncClient
    asking: asyncio.Task[httpx.Response]


@asynccontextmanager
async def asked(tmp_path: Path) -> AsyncIterator[Asked]:
    async with fleets(1) as there:
        (place,) = there.places
        async with (
            alone("--server", place.proxy.address, cwd=tmp_path) as gateway,
            http_client(gateway.url, timeout=60) as client,
        ):
            asking = asyncio.create_task(client.post("/rollout", json=body("r1", NOWHERE)))

            async def is_running() -> bool:
                return bool(await place.rollouts())

            await until(is_running)
            yield Asked(place, gateway, client, asking)
            await asyncio.wait([asking])


async def test_the_first_signal_lets_requests_finish(tmp_path: Path) -> None:
    async with asked(tmp_path) as world:
        world.gateway.send(signal.SIGTERM)
        await world.gateway.logged("draining: open requests have 30 s")
        while True:
            try:
                await world.client.get("/health")
            except httpx.TransportError:
                break
        assert not world.asking.done()
        world.place.gated.gate.set()
        assert (await world.asking).json()["status"] == "COMPLETED"
        assert await world.gateway.ended() == 0
        assert "Traceback" not in world.gateway.text


async def test_the_second_signal_ends_them(tmp_path: Path) -> None:
    async with asked(tmp_path) as world:
        world.gateway.send(signal.SIGINT)
        await world.gateway.logged("draining")
        world.gateway.send(signal.SIGINT)
        answer = await world.asking
        assert (answer.status_code, answer.json()) == (503, {"detail": "The gateway is shutting down; try again"})
        assert answer.headers["retry-after"] == "1"
        assert await world.gateway.ended() == 0
        assert "Traceback" not in world.gateway.text
        # The rollout continues for a client that reconnects through another gateway.
        assert [rollout.state for rollout in await world.place.rollouts()] == [pb.ROLLOUT_STATE_RUNNING]


async def test_requests_that_outlast_the_drain_are_told_so(tmp_path: Path) -> None:
    async with fleets(1) as there:
        (place,) = there.places
        settings = {"ROLLOUT_SERVERS": place.proxy.address, "ROLLOUT_DRAIN_SECONDS": "0.2"}
        async with (
            alone(cwd=tmp_path, **settings) as gateway,
            http_client(gateway.url, timeout=30) as client,
        ):
            uid = (await client.post("/v1/rollouts", json=plain(1))).json()["rollout"]["uid"]
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            writer.write(f"GET /v1/rollouts/{uid}?wait=60 HTTP/1.1\r\nhost: gateway\r\n\r\n".encode())
            async with client.stream("GET", f"/v1/rollouts/{uid}/events") as stream:
                texts = stream.aiter_text()
                while "accepted" not in await anext(texts):
                    pass
                gateway.send(signal.SIGTERM)
                assert [text async for text in texts if "data" in text] == []
            head, _, content = (await reader.read()).partition(b"\r\n\r\n")
            writer.close()
            assert head.startswith(b"HTTP/1.1 503 ")
            assert json.loads(content)["error"]["message"] == "The gateway is shutting down; try again"
            assert await gateway.ended() == 0
        assert "Traceback" not in gateway.text
        assert [rollout.state for rollout in await place.rollouts()] == [pb.ROLLOUT_STATE_RUNNING]


def plain(number: int) -> dict[str, Any]:
    """A body for the REST API."""
    return {
        "request_id": f"request-{number}",
        "messages": [{"role": "user", "content": "?"}],
        "completions": {"url": NOWHERE},
        "tokenizer": {"name": "toy"},
    }


async def test_several_servers_are_one_api(tmp_path: Path) -> None:
    async with fleets(3) as there:
        servers = ", ".join(place.proxy.address for place in there.places)
        async with (
            alone(cwd=tmp_path, ROLLOUT_SERVERS=servers) as gateway,
            http_client(gateway.url, timeout=30) as client,
        ):
            assert gateway.before == servers
            started = [await client.post("/v1/rollouts", json=plain(number)) for number in range(9)]
            assert {answer.is_success for answer in started} == {True}
            listed: list[str] = []
            query: dict[str, Any] = {"page_size": 4}
            while "page_token" in query or not listed:
                page = (await client.get("/v1/rollouts", params=query)).json()
                listed += [each["uid"] for each in page["rollouts"]]
                query = {"page_size": 4, "page_token": page["next_page_token"]} if page["next_page_token"] else {}
            assert sorted(listed) == sorted(rollout.uid for _, rollout in await there.all())
            assert (await client.get(f"/v1/rollouts/{listed[3]}")).json()["uid"] == listed[3]
            await there.places[0].proxy.down()
            away = {rollout.uid for rollout in await there.places[0].rollouts()}
            found = [(await client.get(f"/v1/rollouts/{uid}")).status_code for uid in listed]
            assert found == [503 if uid in away else 200 for uid in listed]
            more = [await client.post("/v1/rollouts", json=plain(number)) for number in range(100, 110)]
            assert {answer.is_success for answer in more} == {True}
            assert (await client.get("/v1/rollouts")).status_code == 503
            assert (await client.get("/readyz")).status_code == 200
            missing = await client.get("/v1/rollouts/nowhere")
            assert (missing.status_code, missing.json()["error"]["code"]) == (503, "SERVER_UNREACHABLE")
            assert "127.0.0.1" not in missing.text


MANY = range(32)
"""So many that both servers get some: which one does depends on a hash of its random port."""


async def test_agents_that_run_elsewhere_reach_their_rollouts_on_several_servers(tmp_path: Path) -> None:
    """Each key opens the endpoint of its rollout, whichever server has that, and no other one."""
    agent = ExternalAgent(name="external")
    async with (
        Server([agent], settings()) as one,
        Server([agent], settings()) as two,
        StrictTrainer() as trainer,
        alone(cwd=tmp_path, ROLLOUT_SERVERS=f"127.0.0.1:{one.grpc_port},127.0.0.1:{two.grpc_port}") as gateway,
        http_client(gateway.url, timeout=30) as client,
    ):
        question = {"role": "user", "content": "Hello."}
        request = {
            "messages": [question],
            "completions": {"url": f"grpc://{trainer.grpc_target}"},
            "tokenizer": {"name": "toy"},
        }
        found = [(await client.post("/v1/rollouts", json=request | {"rollout_id": f"r{n}"})).json() for n in MANY]
        assert all("rollout" in each for each in found), found
        uids = [each["rollout"]["uid"] for each in found]
        keys = [{"authorization": f"Bearer {each['access']['key']}"} for each in found]
        call = {"model": "any", "messages": [question]}
        for uid, key, other in zip(uids, keys, [*keys[1:], keys[0]], strict=True):
            assert (await client.post(f"/r/{uid}/v1/chat/completions", json=call, headers=other)).status_code == 403
            assert (await client.post(f"/r/{uid}/v1/chat/completions", json=call, headers=key)).status_code == 200
            assert (await client.post(f"/r/{uid}/finish", json={"reward": 1.0}, headers=key)).status_code == 200
        ended = [await until_finished(client, uid) for uid in uids]
        assert {(each["outcome"]["reward"], each["outcome"]["metrics"]["turns"]) for each in ended} == {(1.0, 1)}
        for server in (one, two):
            async with rpc(server.grpc_port) as stub:
                assert 0 < len((await stub.ListRollouts(pb.ListRolloutsRequest())).rollouts) < len(MANY)


async def until_finished(client: httpx.AsyncClient, uid: str) -> Any:
    """The rollout, once it has an outcome."""
    while (rollout := (await client.get(f"/v1/rollouts/{uid}")).json())["state"] != "finished":  # noqa: ASYNC110 - it is asked over HTTP
        await asyncio.sleep(0.01)
    return rollout


A = ("a:1",)
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no server": ({}, "ROLLOUT_SERVERS names no rollout server"),
    "blank servers": ({"servers": " , "}, "ROLLOUT_SERVERS names no rollout server"),
    "a server twice": ({"servers": "a:1,b:1,a:1"}, "ROLLOUT_SERVERS names a rollout server twice"),
    "no number": ({"servers": A, "max_connections": 0}, "ROLLOUT_MAX_CONNECTIONS: "),
    "no port": ({"servers": A, "port": 65536}, "ROLLOUT_GATEWAY_PORT: "),
    "no word": ({"servers": A, "log_format": "xml"}, "ROLLOUT_LOG_FORMAT: "),
    "no key": ({"servers": A, "tls_cert": "x"}, "ROLLOUT_TLS_CERT is set, but ROLLOUT_TLS_KEY is not"),
    "no certificate": ({"servers": A, "tls_key": "x"}, "ROLLOUT_TLS_KEY is set, but ROLLOUT_TLS_CERT is not"),
    "no TLS": ({"servers": A, "client_ca": "x"}, "ROLLOUT_TLS_CLIENT_CA is set, but ROLLOUT_TLS_CERT is not"),
    "no server key": (
        {"servers": A, "server_cert": "x"},
        "ROLLOUT_SERVERS_CERT is set, but ROLLOUT_SERVERS_KEY is not",
    ),
}


@pytest.mark.parametrize(("given", "complaint"), WRONG.values(), ids=WRONG.keys())
def test_wrong_settings_are_told_by_their_names(given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(WrongSettings) as caught:
        load_options(_env_file=None, **given)
    assert str(caught.value).startswith(complaint)


def test_several_wrong_settings_are_all_told() -> None:
    with pytest.raises(WrongSettings, match=r"ROLLOUT_GATEWAY_PORT: .*; ROLLOUT_MAX_METADATA_BYTES: "):
        load_options(_env_file=None, servers=A, port=-1, max_metadata_bytes="many")


def test_keys_are_in_no_repr() -> None:
    assert "hidden" not in repr(load_options(_env_file=None, servers=A, synchronous_key="hidden"))


UNUSABLE = {
    "nothing": ((), "ROLLOUT_SERVERS names no rollout server; set it to HOST:PORT, or pass --server"),
    "address": (("--server", "http://a:1"), "'http://a:1' is not an address of a rollout server"),
    "password": (("--server", "grpcs://u:hidden@a:1"), "must not contain a user or password"),
    "certificate": (("--server", "a:1", "--tls-cert", "x.pem", "--tls-key", "y"), "x.pem cannot be read: No such file"),
    "authority": (("--server", "a:1", "--server-ca", "x.pem"), "x.pem cannot be read: No such file"),
}


@pytest.mark.parametrize(("arguments", "complaint"), UNUSABLE.values(), ids=UNUSABLE.keys())
async def test_what_cannot_be_used_is_told_in_one_line(
    tmp_path: Path, arguments: tuple[str, ...], complaint: str
) -> None:
    told = await command("gateway", "--host", "127.0.0.1", "--port", "0", *arguments, cwd=tmp_path)
    assert told.code == 1
    (line,) = told.err.strip().splitlines()
    assert line.startswith("rollout gateway: ")
    assert complaint in line
    assert "hidden" not in line


async def test_a_port_that_is_taken_is_told_in_one_line(tmp_path: Path) -> None:
    with taken() as listener:
        port = str(listener.getsockname()[1])
        told = await command("gateway", "--server", "a:1", "--host", "127.0.0.1", "--port", port, cwd=tmp_path)
    assert told.code == 1
    assert f"cannot listen on 127.0.0.1:{port}" in told.err
    assert len(told.err.strip().splitlines()) == 1


async def test_keys_have_no_flag(tmp_path: Path) -> None:
    told = await command("gateway", "--help", cwd=tmp_path)
    assert "--server-name" in told.out
    assert "synchronous-key" not in told.out
