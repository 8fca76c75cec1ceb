"""Rollouts on a stream of the library's `Trainer`, while their server is killed or stopped and started again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from osmosis.rollout.v1 import event_pb2
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from rollout_client import AsyncClient, Retry
from rollout_client.trainer import Finished, Generated, Trainer, Turn, parsers

from tests.durability.aims import Case
from tests.durability.server import Forker, JournaledServer, journaled_server
from tests.support.toy_model import END, decode, encode

CASES = [Case(1, ["look"]), Case(2, ["look", "look", "look"]), Case(3, ["look+look", "look"])]
N, STEP = 4, 3
STRIKES = (2, 11, 22)
"""After how many generated turns, of 36, the server is stopped."""
MEMORY = {"ROLLOUT_JOURNAL": "memory"}


@dataclass
class Crashing:
    """A policy that calls the tools of its case's steps, and stops the server. It survives the servers."""

    server: JournaledServer
    number: signal.Signals
    strikes: list[int] = field(default_factory=list)
    generated: Counter[tuple[str, int]] = field(default_factory=Counter)
    steps: set[int | None] = field(default_factory=set)
    stopped: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(self, turn: Turn) -> Generated:
        """Generate a turn: the same for the same prompt."""
        self.generated[turn.rollout_id, turn.turn] += 1
        self.steps.add(turn.policy_step)
        if self.strikes and self.generated.total() >= self.strikes[0] and not self.stopped.is_set():
            self.strikes.pop(0)
            self.stopped.set()
            self.server.send(self.number)
            while self.stopped.is_set():  # noqa: ASYNC110 - this turn is completed after the restart, all others before
                await asyncio.sleep(0.01)
        text = decode(turn.ids)
        case, at = Case.of(text), text.count("<|im_start|>assistant")
        calls = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in case.calls(at)]
        ids = encode(case.text(at) + "".join(f"\n<tool_call>\n{call}\n</tool_call>" for call in calls))
        await asyncio.sleep(0.002 * case.number)
        return Generated(
            [*ids, END], [-0.01 * (1 + at % 7) for at in range(len(turn.ids), len(turn.ids) + len(ids) + 1)]
        )

    async def keep_alive(self) -> None:
        """Start the server again whenever it was stopped."""
        while True:
            await self.stopped.wait()
            await self.server.restart()
            self.stopped.clear()


async def run(trainer: Trainer, agent: str) -> list[Sequence[Finished]]:
    """The rollouts of a group per case."""
    prompts = [case.question for case in CASES]
    fields = {"agent": agent, "tokenizer": "toy", "max_lag": 1, "on_stale": "cancel"}
    return [group.rollouts async for group in trainer.rollouts(prompts, n=N, in_order=True, **fields)]  # type: ignore[arg-type]


def tokens(finished: Finished) -> list[object]:
    """What a rollout that completed trains on, and its reward."""
    assert (finished.end, finished.error, finished.mismatch, finished.checked) == ("stop", "", None, True)
    samples = [(each.prompt_ids, each.response_ids, each.response_mask, each.logprobs) for each in finished.samples]
    return [finished.reward, *samples]


async def events(server: JournaledServer, uid: str) -> list[str | None]:
    """The kinds of a rollout's events."""
    request = pb.WatchRolloutRequest(uid=uid, detail=event_pb2.EVENT_DETAIL_BASIC)
    return [item.event.WhichOneof("event") async for item in server.stub.WatchRollout(request) if item.event.sequence]


@pytest.mark.parametrize(
    ("agent", "number", "variables"),
    [
        ("steps", signal.SIGKILL, {}),
        ("steps", signal.SIGTERM, {}),
        ("ranked", signal.SIGKILL, {}),
        ("steps", signal.SIGKILL, MEMORY),
    ],
    ids=["killed", "stopped", "killed, with rewards of groups", "killed without a journal"],
)
async def test_rollouts_of_a_trainer_survive_their_servers(
    forker: Forker, tmp_path: Path, agent: str, number: signal.Signals, variables: dict[str, str]
) -> None:
    async with journaled_server(forker, tmp_path, **variables) as server, asyncio.timeout(60):
        policy = Crashing(server, number)
        client = AsyncClient(f"127.0.0.1:{server.grpc_port}", retry=Retry(first=0.01, longest=0.1))
        model = {"generate": policy.generate, "decode": decode, "parse": parsers.hermes, "end_ids": {END}}
        async with client, Trainer(client, **model) as trainer:  # type: ignore[arg-type]
            await trainer.announce(version="v3", step=STEP)
            undisturbed = [tokens(each) for group in await run(trainer, agent) for each in group]
            policy.generated.clear()
            policy.strikes = [*STRIKES]
            restarting = asyncio.create_task(policy.keep_alive())
            groups = await run(trainer, agent)
            restarting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await restarting
        assert policy.strikes == []
        finished = [each for group in groups for each in group]
        assert [tokens(each) for each in finished] == undisturbed
        assert policy.steps == {STEP}
        if variables:
            return
        assert set(policy.generated.values()) == {1}
        kinds = {each.uid: await events(server, each.uid) for each in finished}
        assert all(each.count("finished") == 1 for each in kinds.values())
        assert any("resumed" in each for each in kinds.values())
        listed = await server.stub.ListRollouts(pb.ListRolloutsRequest(selection=pb.Selection(all=True), page_size=100))
        ids = Counter(rollout.spec.rollout_id for rollout in listed.rollouts)
        assert (len(ids), set(ids.values())) == (2 * N * len(CASES), {1})
        assert {rollout.state for rollout in listed.rollouts} == {pb.ROLLOUT_STATE_FINISHED}
