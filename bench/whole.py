"""A whole server beside its samplers alone: what a turn costs it over a stream, and with CompletionService, in token mode.

The server runs in this process, with an agent that takes the time, the trainer (`bench.streaming`) in another one. The figures hold
what the samplers' rows hold and the rollout around it: its machine, its records, its roster, and the stream itself.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollout_server import Agent, Run
from rollout_server.app import Server
from rollout_server.settings import Settings

from bench.streaming import STREAM, TOKENIZER, UNARY

NAMES = {STREAM: "whole server, stream, tokens", UNARY: "whole server, gRPC, tokens"}


@dataclass(frozen=True, slots=True)
class Played:
    """One rollout: CPU milliseconds and request bytes of each turn."""

    name: str
    cpu: Sequence[float]
    sent: Sequence[int]


@dataclass
class Timed(Agent):
    """Says the same after each answer, and notes the CPU that each of them took."""

    turns: int
    heard: str
    costs: list[list[float]] = field(default_factory=list)
    name = "timed"

    async def play(self, run: Run) -> None:
        self.costs.append([])
        for turn in range(self.turns):
            began = time.process_time()
            await run.sample()
            self.costs[-1].append(1000 * (time.process_time() - began))
            if turn < self.turns - 1:
                await run.append({"role": "user", "content": self.heard})


async def play(directory: Path, agent: Timed, texts: Sequence[str]) -> AsyncIterator[Played]:
    """A rollout for each text, both ways. Raises SystemExit where the trainer fails."""
    ports: Any = {"host": "127.0.0.1", "http": False, "http_port": 0, "grpc_port": 0}
    settings = Settings(_env_file=None, tokenizers={TOKENIZER: directory}, tokenizers_offline=True, **ports)
    async with Server([agent], settings) as server:
        command = [sys.executable, "-m", "bench.streaming", f"127.0.0.1:{server.grpc_port}", str(directory)]
        piped = asyncio.subprocess.PIPE
        child = await asyncio.create_subprocess_exec(*command, stdin=piped, stdout=piped)
        output, _ = await child.communicate(json.dumps(texts).encode())
    if child.returncode:
        raise SystemExit(f"bench.dialects: the trainer ended with {child.returncode}")
    for line, cpu in zip(output.decode().splitlines(), agent.costs, strict=True):
        told = json.loads(line)
        yield Played(NAMES[told["way"]], cpu, told["sent"])
