"""The parent of the workers: it starts them, starts one again that dies, and passes on signals."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from rollout_server.edge.rpc.sockets import socket_directory
from rollout_server.settings import Settings, WrongSettings
from rollout_server.settings.journal import journal_directory
from rollout_server.workers.link import LINK_VARIABLE
from rollout_server.workers.plan import WorkerPlan, check_journals, journal_of
from rollout_server.workers.ports import held_port

_log = logging.getLogger(__name__)
_LONGEST_BACKOFF: Final = 30.0
_STEADY_SECONDS: Final = 60.0
"""A worker that dies sooner than this after its start is started again with a growing pause."""
_KILL_SECONDS: Final = 20.0
"""Seconds after the second signal in which a worker may end by itself."""
_MOST_FAILURES: Final = 5
"""Number of starts of one worker in a row that may fail, after all workers were up once, before the whole server ends."""
_LONGEST_MESSAGE: Final = 1 << 24
"""In bytes: the names of all agents are in one."""
_EXPECTED: Final = (0, -signal.SIGTERM, -signal.SIGINT)
"""Exit codes of workers that were told to stop."""

Announce = Callable[[int, int, Sequence[str]], None]
"""Called with the ports of gRPC and HTTP (0 without HTTP) and the names of the agents, once all workers serve."""


def supervise(settings: Settings, command: Sequence[str], announce: Announce = lambda *_: None) -> int:
    """Serve with `settings.workers` processes until SIGTERM or Ctrl-C, and return the exit code.

    Args:
        settings: those of the whole service.
        command: runs one worker. It must come to `take_link`.
        announce: see `Announce`.

    Raises OSError if a port cannot be opened, and `WrongSettings` for a journal of more workers.
    """
    from rollout_server import logs

    logs.set_up(settings.log_format, settings.log_level)
    directory = journal_directory(settings.journal, settings.grpc_port, durable_by_default=True)
    check_journals(directory, settings.workers)
    if directory is None:
        _log.info("rollouts are kept in memory and end with their worker; ROLLOUT_JOURNAL names a directory for them")
    else:
        _log.info("rollouts are kept in the journal %s", directory)
    with ExitStack() as stack:
        plans = stack.enter_context(_plans(settings, directory))
        return asyncio.run(_Supervisor(settings, plans, command, announce).run())


@contextmanager
def _plans(settings: Settings, directory: Path | None) -> Iterator[Sequence[WorkerPlan]]:
    """Hold the ports and a directory for sockets, and yield the plans of the workers."""
    with ExitStack() as stack:

        def hold(port: int) -> int:
            return stack.enter_context(held_port(settings.host, port))

        grpc_port = hold(settings.grpc_port)
        http_port = hold(settings.http_port) if settings.http else 0
        metrics_port = None if settings.metrics_port is None else hold(settings.metrics_port)
        sockets = str(stack.enter_context(socket_directory()))
        secret, count = secrets.token_hex(32), settings.workers
        yield [
            WorkerPlan(index, count, sockets, http_port, grpc_port, metrics_port, journal_of(directory, index), secret)
            for index in range(count)
        ]


class _WorkerProcess:
    """One worker as its parent sees it, over all its processes."""

    def __init__(self, plan: WorkerPlan) -> None:
        self.plan = plan
        self.server_id = ""
        self.agents: Sequence[str] = ()
        self.up, self.serving = asyncio.Event(), asyncio.Event()
        self.drained = False
        self.process: asyncio.subprocess.Process | None = None
        self._link: asyncio.StreamWriter | None = None

    @property
    def runs(self) -> bool:
        """Whether it has a process."""
        return self.process is not None and self.process.returncode is None

    async def start(self, command: Sequence[str]) -> tuple[asyncio.subprocess.Process, asyncio.StreamReader]:
        """Start a process. Return it with its side of the link."""
        self.up.clear()
        self.serving.clear()
        self.drained = False
        ours, theirs = socket.socketpair()
        with ExitStack() as failed, theirs:
            failed.enter_context(ours)
            environment = {**os.environ, LINK_VARIABLE: str(theirs.fileno())}
            # A process group of its own: Ctrl-C reaches only the parent, which passes it on once.
            process = self.process = await asyncio.create_subprocess_exec(
                *command,
                env=environment,
                pass_fds=(theirs.fileno(),),
                process_group=0,
                stdin=asyncio.subprocess.DEVNULL,
            )
            failed.pop_all()
        reader, self._link = await asyncio.open_connection(sock=ours, limit=_LONGEST_MESSAGE)
        self.send(asdict(self.plan))
        return process, reader

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message to the process, if there is one."""
        if self._link is not None and not self._link.is_closing():
            self._link.write(json.dumps(message).encode() + b"\n")

    def close(self) -> None:
        """Close the link of a process that has ended."""
        if self._link is not None:
            self._link.close()

    def signal(self, number: int) -> None:
        """Send a signal to the process, if there is one."""
        if self.process is not None and self.runs:
            self.process.send_signal(number)


class _Supervisor:
    """Keeps all workers running until a signal or a worker that cannot be started."""

    def __init__(
        self, settings: Settings, plans: Sequence[WorkerPlan], command: Sequence[str], announce: Announce
    ) -> None:
        self._settings = settings
        self._plans = plans
        self._command = command
        self._announce = announce
        self._workers: list[_WorkerProcess] = []
        self._stopping = asyncio.Event()
        self._complete = False
        self._code = 0

    async def run(self) -> int:
        """Run until the last worker has ended. Return the exit code."""
        began = time.monotonic()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, number)
        self._workers = [_WorkerProcess(plan) for plan in self._plans]
        first, *others = self._workers
        # One worker first: what is wrong for all of them, such as a setting or an agent, is reported once.
        keeping = [asyncio.create_task(self._keep(first))]
        if await self._unless_stopped(first.up):
            keeping += [asyncio.create_task(self._keep(worker)) for worker in others]
            keeping.append(asyncio.create_task(self._open(began)))
        await asyncio.gather(*keeping)
        return self._code

    async def _open(self, began: float) -> None:
        """Let the workers open the public ports once all of them can be reached."""
        for worker in self._workers:
            if not await self._unless_stopped(worker.up):
                return
        self._complete = True
        self._introduce()
        for worker in self._workers:
            if not await self._unless_stopped(worker.serving):
                return
        plan, host = self._plans[0], self._settings.host
        ports = f"gRPC on port {plan.grpc_port}" + (f", HTTP on port {plan.http_port}" if plan.http_port else "")
        seconds = time.monotonic() - began
        _log.info("serving %s of %s with %d workers (started in %.2f s)", ports, host, plan.count, seconds)
        self._announce(plan.grpc_port, plan.http_port, self._workers[0].agents)

    def _introduce(self) -> None:
        servers = [worker.server_id for worker in self._workers]
        for worker in self._workers:
            worker.send({"servers": servers})

    async def _keep(self, worker: _WorkerProcess) -> None:
        """Run one worker, and start it again whenever it dies."""
        failures = deaths = 0
        while not self._stopping.is_set():
            began = time.monotonic()
            code = await self._run_once(worker)
            if self._stopping.is_set():
                self._on_end(worker, code)
                return
            failures = 0 if worker.serving.is_set() else failures + 1
            # Also of one that serves each time for a moment, such as a worker that a rollout of its journal kills.
            deaths = 0 if time.monotonic() - began > _STEADY_SECONDS else deaths + 1
            if not self._complete or failures > _MOST_FAILURES:
                _log.error("worker %d ended with %s, so the server ends", worker.plan.index, _ending(code))
                self._code = code if code > 0 else 1
                self._stop(signal.SIGTERM)
                return
            seconds = min(_LONGEST_BACKOFF, 2.0 ** max(0, deaths - 1) - 1.0)
            text = "worker %d ended with %s; it is started again in %g s"
            _log.error(text, worker.plan.index, _ending(code), seconds)
            if seconds:
                await self._unless_stopped(asyncio.Event(), seconds)

    async def _run_once(self, worker: _WorkerProcess) -> int:
        """Run one process of a worker, and return its exit code; 1 if it cannot be started."""
        try:
            process, reader = await worker.start(self._command)
        except OSError as error:  # for example, too many processes
            _log.error("worker %d cannot be started: %s", worker.plan.index, error)
            return 1
        if self._stopping.is_set():  # the signal came while the process was being created
            worker.signal(signal.SIGTERM)
        await self._follow(worker, reader)
        code = await process.wait()
        worker.close()
        return code

    async def _follow(self, worker: _WorkerProcess, reader: asyncio.StreamReader) -> None:
        """Process the messages of one process until it ends."""
        try:
            async for line in reader:
                if not line.endswith(b"\n"):  # it was killed while it sent this
                    return
                message = json.loads(line)
                if "up" in message:
                    worker.server_id, worker.agents = message["up"], message["agents"]
                    worker.up.set()
                    if self._complete:
                        self._introduce()
                if "serving" in message:
                    worker.serving.set()
                if "drained" in message:
                    worker.drained = True
                    self._release()
        except ConnectionError:  # it was killed, with messages to it unread
            pass

    def _on_end(self, worker: _WorkerProcess, code: int) -> None:
        if code not in _EXPECTED:
            _log.error("worker %d ended with %s while it was stopping", worker.plan.index, _ending(code))
            self._code = self._code or (code if code > 0 else 1)
        self._release()

    def _release(self) -> None:
        """Let the workers end once all have drained: until then one may hold the connections of callers of another."""
        if all(worker.drained or not worker.runs for worker in self._workers):
            for worker in self._workers:
                worker.send({"leave": True})

    def _stop(self, number: int) -> None:
        """Pass a signal on. A second one ends the drain of the workers, also of one that cannot process signals."""
        if self._stopping.is_set():
            asyncio.get_running_loop().call_later(_KILL_SECONDS, self._kill)
        self._stopping.set()
        for worker in self._workers:
            worker.signal(number)

    def _kill(self) -> None:
        for worker in self._workers:
            worker.signal(signal.SIGKILL)

    async def _unless_stopped(self, event: asyncio.Event, seconds: float | None = None) -> bool:
        """Wait for an event, at most `seconds`. Return False if the server is stopping, or the time is over."""
        waiting = [asyncio.create_task(each.wait()) for each in (event, self._stopping)]
        await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
        return event.is_set() and not self._stopping.is_set()


def _ending(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def this_command() -> Sequence[str]:
    """Return the command line of this process. Raises `WrongSettings` for an interactive interpreter, which has none to repeat."""
    if not sys.argv[0]:
        raise WrongSettings("ROLLOUT_WORKERS: several workers need a program or a command that can be started again")
    return [sys.executable, *sys.orig_argv[1:]]
