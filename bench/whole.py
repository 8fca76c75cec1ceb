"""A whole server beside its samplers alone: what a turn costs it over HTTP with masks, and in token mode in both ways.

The server runs in this process, with an agent that takes the time, the trainer (`bench.streaming`) in another one. The figures hold
what the samplers' rows hold and the rollout around it: its machine, its records, its roster, and the stream itself. The watch
over the event loop is off: it beats by the clock, whatever there is to do, and so goes with the time that is taken off as rest.
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
    """One rollout, with the text at this place: CPU milliseconds and request bytes of each turn."""

    name: str
    place: int
    cpu: Sequence[float]
    sent: Sequence[int]


@dataclass
class Timed(Agent):
    """Says the same after each answer, and notes the CPU that each of them took."""

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
            # Once, where the trainer has opened all connections, and after a turn that is a warm-up.
            self.meter = self.meter or await Meter.at_rest()
            if turn < self.turns - 1:
                await run.append({"role": "user", "content": self.heard})


async def play(directory: Path, agent: Timed, texts: Sequence[str], rounds: int) -> AsyncIterator[Played]:
    """In each round a rollout for each text, in all three ways. Raises SystemExit where the trainer fails."""
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
        raise SystemExit(f"bench.dialects: the trainer ended with {child.returncode}")
    for line, cpu in zip(output.decode().splitlines(), agent.costs, strict=True):
        told = json.loads(line)
        yield Played(NAMES[told["way"]], told["place"], cpu, told["sent"])
