"""Finished rollouts, and the command that prints them."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from rollout_client import AsyncClient
from rollout_server.app import Server
from rollout_server.calculator import Calculator
from rollout_server.cli.commands import app
from rollout_server.testing.script import Script
from rollout_server.testing.trainer import StrictTrainer
from typer.testing import CliRunner, Result

from tests.support.calculator_tools import calculator_tools
from tests.support.processes import environment
from tests.support.start_requests import settings

Invoke = Callable[..., Awaitable[Result]]
TOY = ("--tokenizer", "toy=toy")


@dataclass(frozen=True)
class Played:
    """A server and its strict trainer."""

    server: Server
    trainer: StrictTrainer
    client: AsyncClient

    @property
    def address(self) -> str:
        """The server's gRPC address."""
        return f"127.0.0.1:{self.server.grpc_port}"

    async def play(self, script: Script, **changes: object) -> pb.Rollout:
        """Run a rollout with a script and return it in view "full"."""
        await self.trainer.put_script("r/1", script)
        fields = {"tokenizer": "toy", "messages": [{"role": "user", "content": "Go."}], **changes}
        started = await self.client.start(completions=self.trainer.url, rollout_id="r/1", **fields)  # type: ignore[misc,arg-type]
        return await self.client.wait(started.uid, timeout=60, view="full")


@pytest.fixture
async def played() -> AsyncIterator[Played]:
    """A real server and trainer, in this event loop."""
    async with (
        Server([Calculator()], settings(http=True)) as server,
        StrictTrainer(tools=calculator_tools()) as trainer,
        AsyncClient(f"127.0.0.1:{server.grpc_port}") as client,
    ):
        yield Played(server, trainer, client)


@pytest.fixture
def invoke(tmp_path: Path) -> Iterator[Invoke]:
    """`await invoke(*arguments, **environment)`: run `rollout inspect` in a thread and an empty directory.

    `stdin` is its input.
    """
    clean = environment()

    async def invoked(*arguments: object, stdin: bytes = b"", **env: str) -> Result:
        unset = dict.fromkeys(os.environ.keys() - clean.keys())
        texts = ["inspect", *map(str, arguments)]
        return await asyncio.to_thread(CliRunner().invoke, app, texts, input=stdin, env={**unset, **clean, **env})

    with contextlib.chdir(tmp_path):
        yield invoked


def saved(rollout: pb.Rollout, folder: Path) -> Path:
    """Save a rollout to a file."""
    path = folder / "rollout.binpb"
    path.write_bytes(rollout.SerializeToString())
    return path
