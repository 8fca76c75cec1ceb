"""Cost of a turn in a whole server: over HTTP with masks, and in token mode over unary gRPC and over the trainer stream.

The server runs in this process, with an agent that measures its turns. The trainer (`bench.streaming`) runs in another
process. The cost includes the sampler and the rollout around it: state machine, records, registry, and the stream. The
event loop watchdog is off: it runs by the clock and would be part of the background CPU that is subtracted.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollout_server import Agent, Run
from rollout_server.app import Server
from rollout_server.settings import Settings

from bench.cpu import Meter
from bench.streaming import HTTP, STREAM, TOKENIZER, UNARY

NAMES = {
    HTTP: "whole server, HTTP, masks",
    UNARY: "whole server, gRPC, tokens",
    STREAM: "whole server, stream, tokens",
}


@dataclass(frozen=True, slots=True)
class Played:
    """One finished rollout with the text at index `place`: CPU milliseconds and request bytes of each turn."""

    name: str
    place: int
    cpu: Sequence[float]
    sent: Sequence[int]


@dataclass
class Timed(Agent):
    """Agent that sends the same user message after each completion, and measures the CPU of each completion."""

    turns: int
    heard: str
    costs: list[list[float]] = field(default_factory=list)
    meter: Meter | None = None
    name = "timed"

    async def play(self, run: Run) -> None:
        self.costs.append([])
        for turn in range(self.turns):
            taken = (self.meter or Meter()).start()
            await run.sample()
            self.costs[-1].append(taken())
            # Once, after the first turn: by then all connections are open and the turn has served as warm-up.
            self.meter = self.meter or await Meter.at_rest()
            if turn < self.turns - 1:
                await run.append({"role": "user", "content": self.heard})


async def play(directory: Path, agent: Timed, texts: Sequence[str], rounds: int) -> AsyncIterator[Played]:
    """Run one rollout per round, text and transport. Raises SystemExit if the trainer fails."""
    ports: Any = {"host": "127.0.0.1", "http": False, "http_port": 0, "grpc_port": 0}
    named: Any = {"tokenizers": {TOKENIZER: directory}, "tokenizers_offline": True}
    async with Server([agent], Settings(_env_file=None, loop_block_seconds=0, **ports, **named)) as server:
        command = [
            sys.executable,
            "-m",
            "bench.streaming",
            f"127.0.0.1:{server.grpc_port}",
            str(directory),
            str(rounds),
        ]
        piped = asyncio.subprocess.PIPE
        child = await asyncio.create_subprocess_exec(*command, stdin=piped, stdout=piped)
        output, _ = await child.communicate(json.dumps(texts).encode())
    if child.returncode:
        raise SystemExit(f"bench.dialects: the trainer exited with status {child.returncode}")
    for line, cpu in zip(output.decode().splitlines(), agent.costs, strict=True):
        row = json.loads(line)
        yield Played(NAMES[row["way"]], row["place"], cpu, row["sent"])
