"""A rollout server with the agents of the scenarios: `python -m tests.adapters.server`, in the environment of the product.

It prints the port of gRPC and serves until its standard input ends, so it never outlives the tests that started it.
"""

from __future__ import annotations

import asyncio
import sys

from rollout_server.app import Server
from rollout_server.settings import load
from rollout_server.testing.tokenizer import TOY_TOKENIZER

from tests.adapters.agents import AGENTS

SETTINGS = {
    "host": "127.0.0.1",
    "grpc_port": 0,
    "http_port": 0,
    "tokenizers": {"toy": TOY_TOKENIZER},
    "stream_grace_seconds": 2,  # the rollouts of a trainer that is killed end soon
}


async def main() -> None:
    """Serve until the end of standard input."""
    async with Server(AGENTS, load(_env_file=None, **SETTINGS)) as server:
        print(server.grpc_port, flush=True)  # noqa: T201 - the tests read it
        await asyncio.to_thread(sys.stdin.read)


asyncio.run(main())
