"""Bursts of starts, with enough slots for all: no rollout is lost, through any API, however busy the server is."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from osmosis.rollout.v1 import event_pb2
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from osmosis.rollout.v1.rollout_service_pb2_grpc import RolloutServiceStub

from tests.support.processes import Serving, serve
from tests.support.server_client import CHANNEL_OPTIONS, until
from tests.support.start_requests import HELLO, NOWHERE, start

MANY = 500
AGENT = Path(__file__).with_name("bursts_agent.py")
MESSAGES = [json.loads(HELLO)]
BODIES: dict[str, dict[str, Any]] = {
    "/rollout": {"server_url": NOWHERE, "messages": MESSAGES, "sampling_params": {}, "tokenizer_name": "toy"},
    "/v1/rollout/init": {"server_url": NOWHERE, "messages": MESSAGES, "completion_params": {}},
    "/v1/rollouts": {"messages": MESSAGES, "completions": {"url": NOWHERE}, "tokenizer": {"name": "toy"}},
}
# In the reported failures, Python accepted no call for this long, and gRPC cancelled calls that had waited for 30 s.
HELD_SECONDS = 33


class Clients:
    """The clients that a burst uses."""

    def __init__(self, http: aiohttp.ClientSession, stub: Any) -> None:
        self.http = http
        self.stub = stub

    async def post(self, path: str, number: int) -> tuple[int, str]:
        """Start a rollout over HTTP. Returns the status and, for an error, the text."""
        body = BODIES[path] | {"rollout_id": f"r{number}"}
        async with self.http.post(path, json=body) as response:
            text = await response.text()
            return response.status, "" if response.status < 300 else text

    async def run(self, number: int) -> str:
        """Run a rollout over gRPC and return how it ended."""
        request = pb.RunRolloutRequest(start=start(rollout_id=f"r{number}"), detail=event_pb2.EVENT_DETAIL_OUTCOME)
        ends = [item.event.finished.outcome async for item in self.stub.RunRollout(request) if item.HasField("event")]
        return ",".join(str(end.WhichOneof("end")) for end in ends)

    async def all_finished(self) -> bool:
        """Whether no rollout runs or waits."""
        info = await self.stub.GetServerInfo(pb.GetServerInfoRequest())
        return not (info.running or info.queued)

    async def ends(self) -> Counter[str]:
        """How the rollouts of the server ended."""
        found, token = Counter[str](), ""
        while True:
            page = await self.stub.ListRollouts(pb.ListRolloutsRequest(page_size=1000, page_token=token))
            found.update(str(rollout.outcome.WhichOneof("end")) for rollout in page.rollouts)
            token = page.next_page_token
            if not token:
                return found


@asynccontextmanager
async def clients(serving: Serving) -> AsyncIterator[Clients]:
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        aiohttp.ClientSession(serving.url, connector=connector, timeout=aiohttp.ClientTimeout()) as http,
        grpc.aio.insecure_channel(f"127.0.0.1:{serving.grpc_port}", options=CHANNEL_OPTIONS) as channel,
    ):
        yield Clients(http, RolloutServiceStub(channel))


@asynccontextmanager
async def server(directory: Path) -> AsyncIterator[Clients]:
    """A server process with slots for a whole burst, and clients."""
    env = {"ROLLOUT_MAX_RUNNING": str(MANY), "ROLLOUT_DELIVERY_RETRIES": "0"}
    async with serve(f"{AGENT}:Brief", cwd=directory, **env) as serving, clients(serving) as found:
        yield found


async def check_http_burst(server: Clients, path: str) -> None:
    answers = Counter(await asyncio.gather(*(server.post(path, number) for number in range(MANY))))
    assert [(status, text) for status, text in answers if status >= 300] == [], path


async def check_burst_of_runs(server: Clients) -> None:
    ends = await asyncio.gather(*(server.run(number) for number in range(MANY)))
    assert Counter(ends) == {"stop": MANY}


async def check_burst_of_starts(server: Clients) -> None:
    started = await asyncio.gather(*(server.stub.StartRollout(start(rollout_id=f"r{n}")) for n in range(MANY)))
    assert len({response.rollout.uid for response in started}) == MANY


async def check_calls_that_wait(server: Clients) -> None:
    held = server.stub.StartRollout(start(metadata_json=json.dumps({"hold": HELD_SECONDS})))
    waiting = [server.stub.StartRollout(start(rollout_id=f"r{number}")) for number in range(200)]
    posted = [server.post("/rollout", number) for number in range(200)]
    _, answers, *started = await asyncio.gather(held, asyncio.gather(*posted), *waiting)
    assert set(answers) == {(200, "")}
    assert len({response.rollout.uid for response in started}) == 200


@pytest.mark.timeout(300)
async def test_no_rollout_is_lost_in_bursts_and_by_a_server_that_picks_up_no_calls_for_long(tmp_path: Path) -> None:
    """The bursts are sent to one server, while another one is blocked."""
    async with server(tmp_path) as blocked, server(tmp_path) as busy, asyncio.TaskGroup() as group:
        group.create_task(check_calls_that_wait(blocked))
        bursts = [partial(check_http_burst, path=path) for path in BODIES]
        for number, check in enumerate((*bursts, check_burst_of_runs, check_burst_of_starts), 1):
            await check(busy)
            await until(busy.all_finished)
            assert await busy.ends() == {"stop": number * MANY}
