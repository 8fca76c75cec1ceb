"""`idle` items: sent as soon as no further completion can be requested, and never before."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import grpc
import pytest
from osmosis.rollout.v1 import completion_service_pb2 as cpb
from osmosis.rollout.v1 import rollout_service_pb2 as rpb
from osmosis.rollout.v1 import spec_pb2
from osmosis.rollout.v1 import trainer_service_pb2 as pb
from osmosis.rollout.v1.rollout_service_pb2_grpc import RolloutServiceStub
from rollout_client.trainer import parsers
from rollout_client.trainer.policy import AnnouncedPolicy
from rollout_client.trainer.rollout_records import Outcomes, Records
from rollout_client.trainer.turns import Model, Turns
from rollout_server import Agent, Run, tool
from rollout_server.app import Server

from tests.edge.stream.conftest import OPTIONS, StreamServer
from tests.edge.stream.trainer import Trainer, kind, start
from tests.support.start_requests import settings
from tests.support.toy_model import END, ToyModel, decode

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOOLS = "".join(f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>' for name in ("hop", "ponder"))
_BREADTH = 3


@tool
async def hop() -> str:
    """Lets other tasks run."""
    for _ in range(3):
        await asyncio.sleep(0)
    return "here"


@tool
async def ponder(run: Run) -> str:
    """Asks the model itself."""
    helper = await run.fork([{"role": "user", "content": "Think."}])
    return (await helper.sample()).content


class Wandering(Agent):
    """Sample, call tools, and continue in several conversations at once, as a random generator decides."""

    name = "wandering"
    tools = (hop, ponder)

    async def setup(self, run: Run) -> None:
        await asyncio.sleep(0.001 * run.metadata["seed"] % 0.005)

    async def play(self, run: Run) -> None:
        await self._wander(run, Random(run.metadata["seed"]), 2)

    async def reward(self, run: Run) -> float:
        await asyncio.sleep(0.002)
        return 1.0

    async def _wander(self, run: Run, random: Random, depth: int) -> None:
        for _ in range(random.randint(1, 2)):
            match random.randint(0, 4 if depth else 2):
                case 0:
                    await asyncio.gather(run.sample())
                case 1:
                    await run.call((await run.sample()).tool_calls)
                case 2:
                    await asyncio.wait_for(run.sample(), None)
                    await run.append({"role": "user", "content": "Go on."})
                case _:
                    await self._split(run, random, depth)

    async def _split(self, run: Run, random: Random, depth: int) -> None:
        """Continue in conversations that take different numbers of turns."""
        async with asyncio.TaskGroup() as group:
            for _ in range(random.randint(2, _BREADTH)):
                part = await run.fork([{"role": "user", "content": "Your part."}])
                group.create_task(self._wander(part, Random(random.random()), depth - 1))


class LedgerTrainer(Trainer):
    """A raw trainer that keeps the ledgers of all conversations, with the library's code, and calls all tools in each turn."""

    def __init__(self, channel: grpc.aio.Channel, **hello: Any) -> None:
        super().__init__(channel, [], idle=True, **hello)
        self.automatic = False
        self.pending: dict[str, cpb.CompleteRequest] = {}
        self.last_ask = 0
        model = ToyModel(lambda prompt: TOOLS)
        self.turns = Turns(
            Model(model, decode, parsers.hermes, None, {END}), Records(1000), Outcomes(), 1000, AnnouncedPolicy()
        )

    async def one(self) -> pb.TrainResponse:
        item = await super().one()
        if kind(item) == "ask":
            self.pending[item.ask.turn_key], self.last_ask = item.ask, item.sequence
        if item.sequence:
            await self.acknowledge()
        return item

    async def complete(self, ask: cpb.CompleteRequest) -> None:
        response = await self.turns.complete(ask)
        await self.put(answer=pb.TrainAnswer(turn_key=ask.turn_key, response=response))


@asynccontextmanager
async def served(*agents: Agent, **changes: Any) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a server with these agents."""
    async with (
        Server(list(agents), settings(**changes)) as server,
        grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc_port}", options=OPTIONS) as channel,
    ):
        yield channel


async def look_around(channel: grpc.aio.Channel) -> None:
    """Give the server time for requests that it must not send."""
    for _ in range(5):
        await RolloutServiceStub(channel).GetServerInfo(rpb.GetServerInfoRequest())


async def next_idle(trainer: LedgerTrainer, rollouts: int) -> bool:
    """Receive items up to the next `idle` that is not out of date. Return False if all rollouts have ended before."""
    while len(trainer.outcomes) < rollouts:
        item = await trainer.one()
        if kind(item) == "idle" and not trainer.kept:
            assert item.idle.last_ask == trainer.last_ask
            assert trainer.pending
            return True
    return False


@pytest.mark.parametrize("slots", [2, 100])
@pytest.mark.parametrize("seed", range(6))
async def test_no_completion_is_requested_between_idle_and_the_next_response(seed: int, slots: int) -> None:
    """Random agents; each time, some of the pending requests are answered. The test ends only if `idle` always comes."""
    random, rollouts, idle = Random(seed), 6, 0
    async with served(Wandering(), max_running=slots) as channel:
        trainer = LedgerTrainer(channel, credit=1000)
        await trainer.connect()
        for number in range(rollouts):
            metadata = f'{{"seed": {10 * seed + number}}}'
            tokenizer = spec_pb2.Tokenizer(name="toy")
            await trainer.put(start=start(f"r{number}", agent="wandering", metadata_json=metadata, tokenizer=tokenizer))
        while await next_idle(trainer, rollouts):
            idle += 1
            await look_around(channel)
            chosen = random.sample(sorted(trainer.pending), random.randint(1, len(trainer.pending)))
            first = trainer.sent + 1
            for key in chosen:
                await trainer.complete(trainer.pending.pop(key))
            before = set(trainer.pending)
            while (item := await trainer.one()).acknowledge.sequence < first:
                assert kind(item) != "ask"
            assert set(trainer.pending) == before
        assert idle > 1
        assert {each.outcome.WhichOneof("end") for each in trainer.outcomes} == {"stop"}


async def test_only_a_trainer_that_wants_it_gets_idle_and_once(place: StreamServer) -> None:
    trainer = place.trainer()
    trainer.automatic = False
    place.held.gate.set()
    await trainer.put(start=start("r", agent="held"))
    await trainer.until(lambda t: len(t.asks) == 1)
    trainer.cut()
    trainer.hello = {"idle": True}
    await trainer.until(lambda t: kind(t.items[-1]) == "idle")
    await look_around(place.channel)
    await trainer.complete(trainer.asks[0])
    await trainer.until(lambda t: bool(t.outcomes))
    assert [kind(item) for item in trainer.items].count("idle") == 1


async def test_it_comes_again_after_a_resume(place: StreamServer) -> None:
    trainer = place.trainer(idle=True)
    trainer.automatic = False
    place.held.gate.set()
    await trainer.put(start=start("r", agent="held", count=2))
    for _ in range(3):
        await trainer.until(lambda t: bool(t.items) and kind(t.items[-1]) == "idle")
        assert trainer.items[-1].idle.last_ask == trainer.seen
        assert len(trainer.asks) == 2
        trainer.items.clear()
        trainer.cut()


async def test_used_up_credit_is_idle_whatever_the_others_do(place: StreamServer) -> None:
    trainer = place.trainer(idle=True, credit=2)
    trainer.automatic = False
    await trainer.put(start=start("busy", agent="held"))  # waits for the gate
    await trainer.put(start=start("talk", count=3))
    await trainer.until(lambda t: bool(t.items) and kind(t.items[-1]) == "idle")
    assert len(trainer.asks) == 2


async def test_a_busy_rollout_keeps_it_back_until_it_ends(place: StreamServer) -> None:
    trainer = place.trainer(idle=True)
    trainer.automatic = False
    await trainer.put(start=start("busy", agent="held"))
    await trainer.put(start=start("talk"))
    await trainer.until(lambda t: len(t.asks) == 1)
    await look_around(place.channel)
    await trainer.put(cancel=rpb.CancelRolloutsRequest(selection=rpb.Selection(rollout_ids=["busy"])))
    await trainer.until(lambda t: kind(t.items[-1]) == "idle")
    assert [each.spec.rollout_id for each in trainer.outcomes] == ["busy"]
    assert [kind(item) for item in trainer.items].count("idle") == 1
