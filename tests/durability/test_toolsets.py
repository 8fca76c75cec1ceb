"""Tool servers of a server that is killed: programs end with it, and rollouts go on if their state is not that of a session."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from osmosis.rollout.v1 import outcome_pb2, spec_pb2
from osmosis.rollout.v1 import tool_service_pb2 as tools_pb
from rollout_server.testing.script import ScriptedReply
from rollout_server.testing.trainer import StrictTrainer

from tests.durability.server import Forker, JournaledServer
from tests.durability.toolset_agents import MARK
from tests.support.rogue_http import rogue_http
from tests.support.server_client import Caller
from tests.support.tool_service import CounterService, serving
from tests.support.toolset_stand import ObedientModel, Stand, marked, texts_of

ADD = [("add", {"amount": 5})]
COUNT = [("count", {"number": 5})]


class SlowModel(ObedientModel):
    """Its completions after a tool message wait until the gate is open."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self._waits = threading.Event()

    def reply(self, messages: Sequence[Mapping[str, object]]) -> ScriptedReply:
        """Return the next completion."""
        if any(each["role"] == "tool" for each in messages):
            self._waits.set()
            self.gate.wait()
        return super().reply(messages)

    async def waits(self) -> None:
        """Wait until a completion waits."""
        await asyncio.to_thread(self._waits.wait)


@dataclass
class GatedService(CounterService):
    """The counter, whose calls run only while the gate is open. Calls whose caller is gone have not run."""

    gate: asyncio.Event = field(default_factory=asyncio.Event)

    async def _run(self, request: tools_pb.CallToolRequest) -> tools_pb.CallToolResponse:
        self.began.set()
        await self.gate.wait()
        return await super()._run(request)


@dataclass
class ToolsetServer(JournaledServer):
    """A server with the agents of `toolset_agents`, that goes on with its rollouts after a restart."""

    @property
    def arguments(self) -> Sequence[str]:
        """The arguments of `rollout`."""
        count = next(at for at, each in enumerate(super().arguments) if each.startswith("tests."))
        return [
            *super().arguments[:count],
            *(f"tests.durability.toolset_agents:{name}" for name in ("plain", "programs")),
        ]


@asynccontextmanager
async def killed_later(
    forker: Forker, folder: Path, model: ObedientModel
) -> AsyncIterator[tuple[ToolsetServer, Stand]]:
    """A server in a process of its own, and a stand whose trainer survives it."""
    variables = {MARK: str(folder), "ROLLOUT_ON_INTERRUPT": "resume"}
    server = ToolsetServer(forker, folder, variables)
    async with StrictTrainer(model=model) as trainer:
        try:
            await server.start()
            yield server, Stand(_RemoteCaller(server), trainer)
        finally:
            await server.stop()


class _RemoteCaller(Caller):
    """A client of whichever process of the server runs."""

    def __init__(self, server: ToolsetServer) -> None:
        object.__setattr__(self, "_killed", server)

    @property
    def stub(self) -> Any:
        """A stub of the current process."""
        return object.__getattribute__(self, "_killed").stub


async def test_programs_end_with_a_server_that_is_killed(forker: Forker, tmp_path: Path) -> None:
    async with killed_later(forker, tmp_path, ObedientModel()) as (server, stand):
        for _ in range(3):
            await stand.start("programs", [[("do", {"fault": "children, then hang"})]])
        while len(marked(str(tmp_path))) < 15:  # noqa: ASYNC110 - each rollout has a supervisor, a program and three children
            await asyncio.sleep(0.02)
        server.kill()
        await server.ended()
        while marked(str(tmp_path)):  # noqa: ASYNC110 - they are not children of this process
            await asyncio.sleep(0.02)


async def test_a_rollout_with_a_tool_service_goes_on_with_its_list(forker: Forker, tmp_path: Path) -> None:
    model, service = SlowModel(), CounterService()
    async with serving(service) as url, killed_later(forker, tmp_path, model) as (server, stand):
        uid = await stand.start("plain", [ADD, ADD], tools=url, bearer="sk-1", completions=target(stand))
        await model.waits()
        server.kill()
        await server.restart()
        model.gate.set()
        rollout = await stand.caller.finished(uid)
        assert texts_of(rollout.outcome) == ["5", "10"], rollout.outcome
        stand.check_samples(rollout.outcome)
    assert len(service.listings) == 1
    assert {each["authorization"] for each in service.metadata} == {"Bearer sk-1"}


async def test_a_call_of_a_tool_service_is_repeated_under_its_key(forker: Forker, tmp_path: Path) -> None:
    service = GatedService()
    async with serving(service) as url, killed_later(forker, tmp_path, ObedientModel()) as (server, stand):
        uid = await stand.start("plain", [ADD, ADD], tools=url, completions=target(stand))
        await service.began.wait()
        server.kill()
        await server.ended()
        service.gate.set()
        await server.restart()
        rollout = await stand.caller.finished(uid)
        assert texts_of(rollout.outcome) == ["5", "10"], rollout.outcome
    assert len({each.call_key for each in service.calls}) == 2
    assert len(service.calls) == 3
    # The first run of the first call was cancelled with its caller, or had ended before the tool server noticed that it is gone.
    assert sorted(service.runs.values()) in ([1, 1], [1, 2])


@pytest.mark.parametrize("agent", ["plain", "programs"])
async def test_a_rollout_whose_session_has_state_is_interrupted(forker: Forker, tmp_path: Path, agent: str) -> None:
    model = SlowModel()
    async with rogue_http() as rogue, killed_later(forker, tmp_path, model) as (server, stand):
        tools = rogue.url("sound") if agent == "plain" else None
        uid = await stand.start(agent, [COUNT, COUNT], tools=tools, completions=target(stand))
        await model.waits()
        server.kill()
        await server.restart()
        model.gate.set()
        outcome = (await stand.caller.finished(uid)).outcome
        assert outcome.failure.category == outcome_pb2.FAILURE_CATEGORY_INTERRUPTED, outcome
        assert "ended with the server, and the state of its tools with it" in outcome.failure.message
        assert texts_of(outcome) == ["5"]


def target(stand: Stand) -> Any:
    """The trainer, which repeats completions."""
    return spec_pb2.Target(
        url=f"grpc://{stand.trainer.grpc_target}", dialect=spec_pb2.DIALECT_GRPC, replays_turn_keys=True
    )
