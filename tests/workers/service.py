"""`rollout serve --workers N` as processes, and connections that reach any of them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from osmosis.rollout.v1 import rollout_service_pb2_grpc

from bench.programs.child import free_port
from tests.support.processes import COMMAND, environment

_READY = re.compile(r"worker (\d+) of \d+ is ready, process (\d+)")
_OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("grpc.initial_reconnect_backoff_ms", 100))


@dataclass
class Workers:
    """A server of several processes. `variables` are settings, `arguments` further ones of the command, such as agents.

    `ca`: the authority of its certificate, if it has one.
    """

    directory: Path
    count: int
    variables: dict[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    ca: Path | None = None
    grpc_port: int = field(default_factory=free_port)
    http_port: int = field(default_factory=free_port)
    metrics_port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0

    @property
    def url(self) -> str:
        """Base URL of the HTTP port."""
        return f"{'https' if self.ca else 'http'}://127.0.0.1:{self.http_port}"

    @property
    def log(self) -> str:
        """What the processes of this start have logged."""
        return (self.directory / f"log-{self.starts}").read_text()

    @property
    def processes(self) -> dict[int, int]:
        """The latest processes of the workers, by their numbers."""
        return {int(index): int(process) for index, process in _READY.findall(self.log)}

    def begin(self) -> subprocess.Popen[bytes]:
        """Start the parent."""
        self.starts += 1
        ports = ("--grpc-port", str(self.grpc_port), "--http-port", str(self.http_port))
        variables = {
            "ROLLOUT_JOURNAL": str(self.directory / "journal"),
            "ROLLOUT_METRICS_PORT": str(self.metrics_port),
            "ROLLOUT_TOKENIZERS_OFFLINE": "true",
            **self.variables,
        }
        with (self.directory / f"log-{self.starts}").open("wb") as log:
            self.process = subprocess.Popen(
                [*COMMAND, "serve", "--workers", str(self.count), "--tokenizer", "toy=toy", *ports, *self.arguments],
                cwd=self.directory,
                env=environment(**variables),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        return self.process

    def start(self) -> None:
        """Start the server, and wait until it serves."""
        process = self.begin()
        while "serving gRPC on port" not in self.log:
            assert process.poll() is None, self.log
            time.sleep(0.05)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the parent."""
        assert self.process is not None
        self.process.send_signal(number)

    def stop(self) -> None:
        """End all processes."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        gone(self.processes.values(), 20)

    @asynccontextmanager
    async def channels(self, count: int) -> AsyncIterator[list[grpc.aio.Channel]]:
        """As many connections, which the kernel distributes over the workers."""
        async with AsyncExitStack() as stack:
            channels = [self._channel(f"127.0.0.1:{self.grpc_port}") for _ in range(count)]
            yield [await stack.enter_async_context(channel) for channel in channels]

    @asynccontextmanager
    async def stubs(self, count: int) -> AsyncIterator[list[Any]]:
        """Stubs of the service, each on a connection of its own."""
        async with self.channels(count) as channels:
            yield [rollout_service_pb2_grpc.RolloutServiceStub(channel) for channel in channels]

    def _channel(self, address: str) -> grpc.aio.Channel:
        if self.ca is None:
            return grpc.aio.insecure_channel(address, _OPTIONS)
        return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(self.ca.read_bytes()), _OPTIONS)


def gone(processes: Any, seconds: float) -> bool:
    """Wait until none of these processes exists. Return False if some still do after the time."""
    ends = time.monotonic() + seconds
    while any(exists(process) for process in processes):
        if time.monotonic() > ends:
            return False
        time.sleep(0.05)
    return True


def exists(process: int) -> bool:
    """Whether a process exists."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


@contextlib.contextmanager
def workers(
    directory: Path, count: int, *arguments: str, ca: Path | None = None, **variables: str
) -> Iterator[Workers]:
    """A running server of several processes."""
    service = Workers(directory, count, variables, arguments, ca)
    try:
        service.start()
        yield service
    finally:
        service.stop()
