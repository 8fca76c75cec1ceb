"""Trainers of the library on the streams of two workers, which are killed one after the other."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from rollout_client import AsyncClient, Retry
from rollout_client.trainer import Finished, Generated, Trainer, Turn, parsers

from tests.support.toy_model import END, decode, encode
from tests.workers.service import workers
from tests.workers.test_service import server_of

pytestmark = pytest.mark.timeout(300)
TRAINERS, PROMPTS = 4, 6


class Policy:
    """Completes turns while its gate is open."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.waiting = 0

    async def generate(self, turn: Turn) -> Generated:
        """Generate the same for the same prompt."""
        self.waiting += 1
        await self.gate.wait()
        ids = [*encode(f"The answer has {len(turn.ids)} tokens."), END]
        return Generated(ids, [-0.01 * (1 + at % 7) for at in range(len(ids))])


def trained(finished: Finished) -> list[object]:
    """What a rollout that completed trains on."""
    assert (finished.end, finished.error, finished.mismatch, finished.checked) == ("stop", "", None, True)
    return [(each.prompt_ids, each.response_ids, each.response_mask, each.logprobs) for each in finished.samples]


async def run(trainer: Trainer) -> list[Finished]:
    prompts = [f"Question {'x' * number}?" for number in range(PROMPTS)]
    groups = trainer.rollouts(prompts, n=2, in_order=True, tokenizer="toy")
    return [each async for group in groups for each in group.rollouts]


async def test_streams_of_workers_that_are_killed_lose_nothing(tmp_path: Path) -> None:
    policy = Policy()
    with workers(tmp_path, 2) as service:
        async with AsyncExitStack() as stack:
            trainers = []
            for _ in range(TRAINERS):
                client = AsyncClient(f"127.0.0.1:{service.grpc_port}", retry=Retry(first=0.05, longest=0.2))
                await stack.enter_async_context(client)
                model = {"generate": policy.generate, "decode": decode, "parse": parsers.hermes, "end_ids": {END}}
                trainers.append(await stack.enter_async_context(Trainer(client, **model)))  # type: ignore[arg-type]
            policy.gate.set()
            undisturbed = [[trained(each) for each in await run(trainer)] for trainer in trainers]
            servers = set()
            for victim in (0, 1):
                policy.gate.clear()
                policy.waiting = 0
                running = [asyncio.create_task(run(trainer)) for trainer in trainers]
                while policy.waiting < TRAINERS * PROMPTS * 2:  # noqa: ASYNC110 - it is counted in other tasks
                    await asyncio.sleep(0.01)
                os.kill(service.processes[victim], signal.SIGKILL)
                await asyncio.sleep(0.5)  # the trainers notice it
                policy.gate.set()
                found = [await task for task in running]
                assert [[trained(each) for each in rollouts] for rollouts in found] == undisturbed
                servers |= {server_of(each.uid) for rollouts in found for each in rollouts}
            assert len(servers) == 2
