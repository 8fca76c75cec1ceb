"""An agent without tools, a client of its server, and a comparison of its samples."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from osmosis.rollout.v1 import outcome_pb2
from rollout_client import AsyncClient, TrainingSample
from rollout_server import Agent, Run, tool
from rollout_server.app import Server
from rollout_server.runtime.ports import Tool
from rollout_server.settings import Settings
from rollout_server.testing.checks.verdict import TrainerSample
from rollout_server.testing.tokenizer import TOY_TOKENIZER


@tool
async def noop() -> str:
    """Does nothing."""
    return "nothing"


class Talk(Agent):
    """Append a user message after each completion, for this many turns."""

    name = "talk"
    replayable = True

    def __init__(self, turns: int, *tools: Tool) -> None:
        self.turns, self.tools = turns, tools

    async def play(self, run: Run) -> None:
        for number in range(self.turns):
            await run.sample()
            if number < self.turns - 1:
                await run.append({"role": "user", "content": f"And {number}?"})


@asynccontextmanager
async def connected(agent: Agent) -> AsyncIterator[AsyncClient]:
    """A client of a server with this agent; the server retries quickly."""
    ports: Any = {"host": "127.0.0.1", "http_port": 0, "grpc_port": 0, "http": False, "retry_base_seconds": 0.01}
    settings = Settings(_env_file=None, tokenizers={"t": TOY_TOKENIZER}, tokenizers_offline=True, **ports)
    async with Server([agent], settings) as server, AsyncClient(f"127.0.0.1:{server.grpc_port}") as client:
        yield client


def warned(outcome: outcome_pb2.Outcome) -> list[str]:
    return [warning.code for warning in outcome.warnings]


def equal(sample: TrainingSample, theirs: TrainerSample) -> bool:
    """Compare a sample with what the trainer accumulated, element by element. Returns whether the sample is verified."""
    assert sample.prompt_ids == list(theirs.prompt_ids)
    assert sample.response_ids == list(theirs.response_ids)
    assert sample.response_mask == list(theirs.response_mask)
    assert sample.logprobs == pytest.approx(list(theirs.logprobs))
    return bool(sample.verified)
