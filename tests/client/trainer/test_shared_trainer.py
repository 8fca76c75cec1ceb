"""`SharedTrainer` of `rollout_client.adapters`: rollouts that each bring their own `generate`, over one connection."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from rollout_client.adapters.shared_trainer import GenerateTurn, SharedTrainer, shared_trainer
from rollout_client.trainer import Generated, Prompt, Trainer, Turn, parsers
from rollout_server.app import Server
from rollout_server.calculator import Calculator

from tests.support.start_requests import settings
from tests.support.toy_model import ADDS, END, decode, encode

PROMPT = Prompt([{"role": "user", "content": "Please calculate 5 plus 3."}])


@pytest.fixture
async def address() -> AsyncIterator[str]:
    async with Server([Calculator()], settings()) as server:
        yield f"127.0.0.1:{server.grpc_port}"


class Caller:
    """A rollout's own `generate`, which keeps its turns."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []

    async def generate(self, turn: Turn) -> Generated:
        """Generate a turn of the calculation."""
        self.turns.append(turn)
        return Generated([*encode(ADDS(decode(turn.ids))), END])


def shared(address: str, at_once: int = 4) -> SharedTrainer:
    """The trainer of this event loop for the address."""

    @asynccontextmanager
    async def connect(generate: GenerateTurn) -> AsyncIterator[Trainer]:
        async with Trainer(address, generate=generate, decode=decode, parse=parsers.hermes, end_ids={END}) as trainer:
            yield trainer

    return shared_trainer(address, connect, at_once)


async def test_each_rollout_is_generated_by_its_own_function(address: str) -> None:
    assert shared(address) is shared(address)
    callers = [Caller() for _ in range(6)]
    samplings = [{"max_tokens": 64, "extra": {"top_k": number} if number else None} for number in range(6)]
    found = await asyncio.gather(
        *(
            shared(address).run(PROMPT, caller.generate, sampling=sampling, tokenizer="toy")
            for caller, sampling in zip(callers, samplings, strict=True)
        )
    )
    for number, (caller, finished) in enumerate(zip(callers, found, strict=True)):
        assert finished.end == "stop"
        assert [turn.uid for turn in caller.turns] == [finished.uid] * 2
        for turn in caller.turns:
            assert turn.sampling.max_tokens == 64
            assert turn.sampling.extra_json == (json.dumps({"top_k": number}) if number else "")


def test_another_event_loop_has_another_trainer_and_a_failure_is_not_kept() -> None:
    opened = []

    @asynccontextmanager
    async def connect(generate: GenerateTurn) -> AsyncIterator[Trainer]:
        opened.append(generate)
        raise ConnectionError(f"failure {len(opened)}")
        yield

    async def main() -> list[str]:
        texts = []
        for _ in range(2):
            trainer = shared_trainer("key", connect, 1)
            calls = [trainer.run(PROMPT, Caller().generate, sampling={}) for _ in range(2)]
            texts += [str(each) for each in await asyncio.gather(*calls, return_exceptions=True)]
        return texts

    assert asyncio.run(main()) == ["failure 1", "failure 1", "failure 2", "failure 2"]
    assert asyncio.run(main()) == ["failure 3", "failure 3", "failure 4", "failure 4"]
