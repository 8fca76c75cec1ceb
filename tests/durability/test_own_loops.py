"""Agents that own their loop across crashes of the server: over HTTP from elsewhere, and as programs that the server runs."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from aiohttp import web

from tests.durability.server import Forker, JournaledServer, journaled_server
from tests.support.engine_model import EngineModel, toy
from tests.support.engines import MODEL, serving
from tests.support.gateways import http_client
from tests.support.outside_agent import GatedEngine, Texts

SECONDS = 100.0


class LaterTurns(GatedEngine):
    """Its gate is for the turns after the first one."""

    async def taken(self, request: web.Request) -> dict[str, Any]:
        """Wait for the gate. The request is read before: the server may die meanwhile."""
        prompt = json.loads(await request.text()).get("token_ids", [])
        gated = "Go on" in toy().decode(prompt)
        return await (super() if gated else super(GatedEngine, self)).taken(request)


@dataclass
class Crashable:
    """A server that can be killed, an engine that survives it, and an HTTP client."""

    server: JournaledServer
    engine: GatedEngine
    http: httpx.AsyncClient

    async def start(self, rollout_id: str, agent: str) -> dict[str, Any]:
        """Start a rollout, or find it. Returns the response."""
        body = {
            "request_id": rollout_id,
            "rollout_id": rollout_id,
            "agent": agent,
            "messages": [{"role": "user", "content": "The task."}],
            "completions": {"url": self.engine.url, "dialect": "vllm", "model": MODEL},
            "tokenizer": {"name": "toy"},
            "token_mode": "tokens",
        }
        reply = await self.http.post("/v1/rollouts", json=body)
        assert reply.status_code in (200, 201), reply.text
        response: dict[str, Any] = reply.json()
        return response

    async def requested(self, times: int = 1) -> None:
        """Wait until so many requests are at the closed gate, those of dead servers included."""
        while self.engine.waiting < times:  # noqa: ASYNC110 - it is counted in another task
            await asyncio.sleep(0.01)

    async def restart(self, *, kill: bool = True) -> None:
        """End the process and start the next one."""
        self.server.send(signal.SIGKILL if kill else signal.SIGTERM)
        await self.server.restart()

    async def outcome(self, uid: str) -> dict[str, Any]:
        """Wait for the end of a rollout and return its outcome."""
        while True:
            reply = await self.http.get(f"/v1/rollouts/{uid}", params={"wait": 10, "view": "full"})
            assert reply.status_code == 200, reply.text
            if reply.json()["state"] == "finished":
                outcome: dict[str, Any] = reply.json()["outcome"]
                return outcome


@dataclass
class Elsewhere:
    """An agent in a process of its own: it repeats a call until it gets a completion."""

    http: httpx.AsyncClient
    access: Mapping[str, str]
    history: list[dict[str, str]] = field(default_factory=lambda: [{"role": "user", "content": "Hello."}])
    received: list[str] = field(default_factory=list)
    statuses: set[int] = field(default_factory=set)

    @property
    def path(self) -> str:
        """The path of its endpoint."""
        return urlsplit(self.access["base_url"]).path

    async def post(self, route: str, body: Any, key: str = "") -> httpx.Response:
        """Send a request, again and again while the server is not there."""
        headers = {"authorization": f"Bearer {key or self.access['key']}"}
        while True:
            try:
                reply = await self.http.post(f"{self.path}/{route}", json=body, headers=headers)
            except httpx.TransportError:
                reply = httpx.Response(503)
            self.statuses.add(reply.status_code)
            if reply.status_code < 500:
                return reply
            await asyncio.sleep(0.05)

    async def turn(self) -> None:
        """Get a completion and put it into the history."""
        reply = await self.post("v1/chat/completions", {"model": "any", "messages": self.history})
        assert reply.status_code == 200, reply.text
        self.received.append(reply.json()["choices"][0]["message"]["content"])
        self.history += [
            {"role": "assistant", "content": self.received[-1]},
            {"role": "user", "content": f"Go on, {len(self.received)}."},
        ]


@asynccontextmanager
async def crashable(forker: Forker, directory: Path) -> AsyncIterator[Crashable]:
    """Serve until the block ends."""
    async with AsyncExitStack() as stack:
        engine = LaterTurns(EngineModel(Texts()))
        engine.gate = asyncio.Event()
        engine.gate.set()
        await stack.enter_async_context(serving(engine))
        server = await stack.enter_async_context(journaled_server(forker, directory))
        http = await stack.enter_async_context(http_client(server.url, timeout=60))
        await stack.enter_async_context(asyncio.timeout(SECONDS))
        yield Crashable(server, engine, http)


def trained_texts(outcome: Mapping[str, Any]) -> list[str]:
    """The texts of the token runs that train, once for each sample."""
    found = []
    for sample in outcome["samples"]:
        run: list[int] = []
        for token, mask in zip([*sample["response_ids"], 0], [*sample["response_mask"], 0], strict=True):
            if mask:
                run.append(token)
            elif run:
                found.append(str(toy().decode(run, skip_special_tokens=True)).strip())
                run = []
    return found


async def test_an_agent_elsewhere_goes_on_with_its_key(forker: Forker, tmp_path: Path) -> None:
    async with crashable(forker, tmp_path) as here:
        started = await here.start("first", "remote")
        uid = started["rollout"]["uid"]
        other = (await here.start("other", "remote"))["access"]
        agent = Elsewhere(here.http, started["access"])
        await agent.turn()
        await agent.turn()
        await here.restart()  # between two calls
        await agent.turn()
        again = await here.start("first", "remote")  # as a caller does that has lost the response
        assert (again["rollout"]["uid"], again["access"]["base_url"]) == (uid, agent.access["base_url"])
        assert again["access"]["key"] != agent.access["key"]
        for kill in (True, False):  # in the middle of a call
            here.engine.gate.clear()
            calling = asyncio.create_task(agent.turn())
            await here.requested()
            await here.restart(kill=kill)
            here.engine.gate.set()
            await calling
        await agent.turn()
        ours, guessed = again["access"]["key"], f"rk_{uid}.{'A' * 43}"
        tried = {key: await agent.post("v1/chat/completions", {}, key) for key in (other["key"], guessed, ours)}
        assert [reply.status_code for reply in tried.values()] == [403, 403, 400]
        finishing = await agent.post("finish", {"reward": 0.5})
        assert finishing.status_code == 200
        await here.restart()  # its result is stored
        repeated = await agent.post("finish", {"reward": 0.5})
        assert repeated.status_code == 200, repeated.text
        outcome = await here.outcome(uid)
        assert outcome["reward"] == 0.5
        texts = trained_texts(outcome)
        assert len(texts) == len(set(texts))
        assert set(texts) <= set(agent.received)
        assert agent.received[0] in texts  # a later call sent it back
        assert agent.received[1] not in texts  # the last one before the first crash
        assert agent.received[-1] in texts
        assert len(agent.received) == 6
        assert 410 not in agent.statuses
        stored = b"".join(file.read_bytes() for file in here.server.journal.iterdir())
        for key in (agent.access["key"], ours, other["key"]):
            assert key.encode() not in stored
            assert key.rpartition(".")[2].encode() not in stored


async def test_a_program_is_run_anew_if_its_author_wants_it(forker: Forker, tmp_path: Path) -> None:
    async with crashable(forker, tmp_path) as here:
        here.engine.gate.clear()
        uids = [(await here.start(agent, agent))["rollout"]["uid"] for agent in ("run_again", "run_once")]
        await here.requested(2)
        before = len(here.engine.model.seen)
        await here.restart()
        await here.requested(3)
        here.engine.gate.set()
        again, once = [await here.outcome(uid) for uid in uids]
        assert again["end"] == "stop", again
        attempts = {f"Answer {number}." for number in range(before)}
        texts = trained_texts(again)
        assert len(texts) == 2
        assert attempts.isdisjoint(texts)
        assert (once["end"], once["category"]) == ("failure", "interrupted")
        assert "on_restart" in once["message"]
        assert once["samples"]  # the evidence is kept
