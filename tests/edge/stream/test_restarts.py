"""Rollouts of streams whose server was restarted on its journal: who takes them over, and what becomes of the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from osmosis.rollout.v1 import outcome_pb2, spec_pb2
from osmosis.rollout.v1 import rollout_service_pb2 as rpb
from rollout_server.edge.api_keys import entry_of, new_key

from tests.edge.stream.conftest import TURNS, StreamServer, opened
from tests.edge.stream.trainer import FULL, Trainer, start
from tests.support.server_client import Refusal, until

pytestmark = pytest.mark.asyncio(loop_scope="module")
INTERRUPTED = outcome_pb2.FAILURE_CATEGORY_INTERRUPTED
NETWORK = outcome_pb2.FAILURE_CATEGORY_NETWORK


@dataclass
class Processes:
    """One server after another on one journal."""

    toy: Any
    settings: dict[str, Any]
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def next(self, **changes: Any) -> StreamServer:
        """Stop the server as SIGTERM does without time for rollouts, and start the next one."""
        await self.stack.aclose()
        return await opened(self.stack, self.toy, **self.settings, **changes)


@pytest_asyncio.fixture(loop_scope="module")
async def processes(toy: Any, tmp_path: Path) -> AsyncIterator[Processes]:
    processes = Processes(toy, {"journal": str(tmp_path / "journal")})
    yield processes
    await processes.stack.aclose()


async def begun(place: StreamServer, asks: int = 1, **spec: Any) -> Trainer:
    """A trainer with a rollout whose turn `asks` was requested and is not completed."""
    trainer = place.trainer(detail=FULL)
    trainer.automatic = False
    await trainer.put(start=start("r", request_id="k", **spec))
    while True:
        await trainer.until(lambda t: bool(t.asks))
        await trainer.acknowledge()
        if trainer.asks[-1].turn == asks:
            return trainer
        await trainer.complete(trainer.asks.pop())


def successor(place: StreamServer, former: Trainer) -> Trainer:
    """The trainer on the next process of its server. It has its ledgers, and no stream."""
    trainer = place.trainer(detail=FULL)
    trainer.books, trainer.key = former.books, former.key
    return trainer


async def test_a_trainer_that_repeats_its_start_takes_the_rollout_over(processes: Processes) -> None:
    place = await processes.next()
    undisturbed = place.trainer()
    await undisturbed.put(start=start("undisturbed"))
    await undisturbed.until(lambda t: bool(t.outcomes))
    former = await begun(place, asks=2)
    place = await processes.next()
    trainer = successor(place, former)
    await trainer.put(start=start("r", request_id="k"))
    await trainer.until(lambda t: bool(t.outcomes))
    (started,), (rollout,) = trainer.started, trainer.outcomes
    assert started.uid == rollout.uid == former.started[0].uid
    assert [ask.turn for ask in trainer.asks] == list(range(2, TURNS + 1))
    assert trainer.asks[0].turn_key == former.asks[-1].turn_key
    assert [warning.code for warning in rollout.outcome.warnings] == ["resampled"]
    (sample,), (same,) = rollout.outcome.samples, undisturbed.outcomes[0].outcome.samples
    assert sample.response_ids == same.response_ids
    assert sample.response_mask == same.response_mask
    numbers = [item.event.sequence for item in trainer.events]
    assert numbers == list(range(1, rollout.last_sequence + 1))
    seen = {item.event.sequence: item.event for item in former.events}
    again = {item.event.sequence: item.event for item in trainer.events}
    assert seen
    assert seen == {number: again[number] for number in seen}


async def test_without_its_trainer_it_fails_when_it_needs_one(processes: Processes) -> None:
    former = await begun(await processes.next())
    place = await processes.next(stream_grace_seconds=0.05)
    rollout = await place.finished(former.started[0].uid)
    assert rollout.outcome.failure.category == NETWORK
    assert "turn 1: the server was restarted, and the trainer did not" in rollout.outcome.failure.message

    async def is_forgotten() -> bool:
        return not place.server._streams._rollouts

    await until(is_forgotten)
    trainer = successor(place, former)
    await trainer.put(start=start("r", request_id="k"))
    await trainer.until(lambda t: bool(t.outcomes))  # late, it still gets the outcome
    assert trainer.outcomes == [rollout]
    assert trainer.asks == []


async def test_until_it_needs_its_trainer_it_can_be_taken_over_late(processes: Processes) -> None:
    place = await processes.next()
    former = place.trainer()
    await former.put(start=start("r", request_id="k", agent="held"))
    await former.until(lambda t: bool(t.started))
    place = await processes.next(stream_grace_seconds=0)
    trainer = successor(place, former)
    await trainer.put(start=start("r", request_id="k", agent="held"))
    await trainer.until(lambda t: bool(t.started))
    place.held.gate.set()
    await trainer.until(lambda t: bool(t.outcomes))
    assert trainer.outcomes[0].uid == former.started[0].uid
    assert trainer.outcomes[0].outcome.stop.reason == "stop"


@pytest.mark.parametrize("records", [10_000, 0])
async def test_an_outcome_that_was_not_acknowledged_comes_again(processes: Processes, records: int) -> None:
    """Until the grace time is over, it is kept although there is no room for finished rollouts."""
    processes.settings["max_records"] = records
    place = await processes.next()
    former = await begun(place, asks=TURNS)
    await former.complete(former.asks.pop())
    await former.until(lambda t: bool(t.outcomes))
    place = await processes.next()
    trainer = successor(place, former)
    await trainer.put(start=start("r", request_id="k"))
    await trainer.until(lambda t: bool(t.outcomes))
    assert trainer.outcomes == former.outcomes
    assert [item.event.sequence for item in trainer.events] == list(range(1, trainer.outcomes[0].last_sequence + 1))
    assert trainer.asks == []

    async def is_dropped() -> bool:
        listed = await place.stub.ListRollouts(rpb.ListRolloutsRequest())
        return not listed.rollouts

    if not records:
        await until(is_dropped)  # the trainer has acknowledged it


async def test_only_the_same_start_of_the_same_caller_takes_it_over(processes: Processes) -> None:
    keys = {name: new_key() for name in ("ann", "bob")}
    processes.settings["api_keys"] = [entry_of(name, key) for name, key in keys.items()]
    place = await processes.next()
    former = place.trainer()
    former.key, former.automatic = keys["ann"], False
    await former.put(start=start("r", request_id="k"))
    await former.until(lambda t: bool(t.asks))
    place = await processes.next()
    bob = place.trainer()
    bob.key = keys["bob"]
    await bob.put(start=start("r", request_id="k"))
    await bob.until(lambda t: bool(t.outcomes))
    assert bob.outcomes[0].uid != former.started[0].uid
    trainer = successor(place, former)
    await trainer.put(start=start("other", request_id="k"))
    await trainer.until(lambda t: bool(t.refused))
    assert trainer.refused[0].code == grpc.StatusCode.ALREADY_EXISTS.value[0]
    await trainer.put(start=start("r", request_id="k"))
    await trainer.until(lambda t: bool(t.outcomes))
    assert trainer.outcomes[0].uid == former.started[0].uid
    assert trainer.outcomes[0].outcome.HasField("stop")


async def test_what_is_announced_on_the_new_stream_holds(processes: Processes) -> None:
    former = await begun(await processes.next())
    place = await processes.next()
    trainer = successor(place, former)
    await trainer.put(policy=spec_pb2.PolicyUpdate(step=7, paused=True))
    await trainer.put(start=start("r", request_id="k"))
    await trainer.until(lambda t: bool(t.started) and not t.kept)
    assert trainer.asks == []
    await trainer.put(policy=spec_pb2.PolicyUpdate(step=8))
    await trainer.until(lambda t: bool(t.outcomes))
    assert {ask.policy_step for ask in trainer.asks} == {8}


async def test_a_start_without_request_id_cannot_be_repeated(processes: Processes) -> None:
    place = await processes.next()
    former = place.trainer()
    former.automatic = False
    await former.put(start=start("r"))
    await former.put(start=start("demanding", on_interrupt=spec_pb2.INTERRUPT_POLICY_RESUME))
    await former.put(start=start("named", request_id="k", on_interrupt=spec_pb2.INTERRUPT_POLICY_RESUME))
    await former.until(lambda t: len(t.asks) == 2)
    assert [refused.start_sequence for refused in former.refused] == [2]
    assert "has no request id" in former.refused[0].message
    place = await processes.next()
    rollout = await place.finished(former.started[0].uid)
    assert rollout.outcome.failure.category == INTERRUPTED
    assert "has no request id" in rollout.outcome.failure.message
    assert (await place.get(former.started[1].uid)).state != rpb.ROLLOUT_STATE_FINISHED


async def test_a_stop_ends_the_streams_of_suspended_rollouts_at_once(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout_server.app.LAST_SECONDS", 1e6)  # nobody waits for their outcomes, which do not come
    place = await processes.next(drain_seconds=0)
    former = await begun(place)
    assert former.line is not None
    stopped = asyncio.create_task(place.server.drain())
    refusal = Refusal.of(await former.line.refused())
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
    await stopped
    assert former.outcomes == []
    left = [task.get_name() for task in asyncio.all_tasks()]
    assert not [name for name in left if name.startswith("follow ")]
