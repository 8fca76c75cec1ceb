"""Serve agents until SIGTERM or SIGINT: one process, or one of several workers."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack

from rollout_server.agent import Agent
from rollout_server.app import LAST_SECONDS, Server, tune_interpreter
from rollout_server.edge.grpc_loop import loop_factory, run_loop
from rollout_server.edge.tracing.sdk import exporting
from rollout_server.runtime.aio.stop_signals import StopSignals
from rollout_server.settings import Settings, load
from rollout_server.settings.journal import MEMORY, journal_directory
from rollout_server.workers.link import ParentLink, is_worker, take_link
from rollout_server.workers.plan import check_journals
from rollout_server.workers.supervisor import supervise, this_command

_log = logging.getLogger(__name__)


def serve(*agents: Agent, **settings: object) -> None:
    """Serve agents over gRPC and HTTP until SIGTERM or Ctrl-C. Settings are given by field name.

    With several `workers` the program is run again for each of them, so what it does before this call happens in all of them.
    """
    chosen = load(**settings)
    if chosen.workers > 1 and not is_worker():
        if code := supervise(chosen, this_command()):
            sys.exit(code)
        return
    serve_with(agents, settings)


def serve_with(
    agents: Sequence[Agent], settings: Mapping[str, object], serving: Callable[[Server], None] | None = None
) -> None:
    """Serve as `serve` does, and call `serving` with the server once it accepts requests."""
    from rollout_server import logs

    chosen, link = load(**settings), take_link()
    logs.set_up(chosen.log_format, chosen.log_level, None if link is None else link.plan.index)
    if link is None:
        directory = journal_directory(chosen.journal, chosen.grpc_port, durable_by_default=True)
        check_journals(directory, 1)
        chosen = chosen.model_copy(update={"journal": str(directory or MEMORY)})
    else:
        chosen = link.plan.settings(chosen)
    tune_interpreter()
    with exporting():
        run_loop(_serve(agents, chosen, link, serving), loop_factory())


async def _serve(
    agents: Sequence[Agent], settings: Settings, link: ParentLink | None, serving: Callable[[Server], None] | None
) -> None:
    began = time.monotonic()
    signals = StopSignals()
    async with AsyncExitStack() as stack:
        worker = None
        if link is not None:
            from rollout_server.workers.worker import Worker  # imports the gateway

            link.listen()
            worker = Worker(link)
            stack.push_async_callback(worker.close)
        server = Server(agents, settings, worker)
        if not await _start_unless_stopped(stack, server, signals):
            _log.info("stopped by a signal before the server had started")
            return
        if link is not None:
            link.send(serving=True)
            _log.info("worker %d of %d is ready, process %d", link.plan.index, link.plan.count, os.getpid())
        else:
            _log_serving(server, began)
            if serving is not None:
                serving(server)
        await signals.first.wait()
        _log.info("draining: running rollouts have %g s; a second signal ends them at once", settings.drain_seconds)
        # After the drain, or at once on a second signal, leaving the block ends the rollouts that still run.
        ending = asyncio.create_task(server.drain()), asyncio.create_task(signals.second.wait())
        await asyncio.wait(ending, return_when=asyncio.FIRST_COMPLETED)
        for task in ending:
            task.cancel()


def _log_serving(server: Server, began: float) -> None:
    settings = server.settings
    ports = f"gRPC on port {server.grpc_port}" + (f", HTTP on port {server.http_port}" if settings.http else "")
    if settings.journal == MEMORY:
        _log.info("rollouts are kept in memory and end with this process; ROLLOUT_JOURNAL names a directory for them")
    else:
        _log.info("rollouts are kept in the journal %s", settings.journal)
    _log.info("serving %s of %s (started in %.2f s)", ports, settings.host, time.monotonic() - began)


async def _start_unless_stopped(stack: AsyncExitStack, server: Server, signals: StopSignals) -> bool:
    """Start the server. Return False if a signal came first; raise what entering the server raises."""
    entering = asyncio.create_task(stack.enter_async_context(server), name="start of the server")
    stopped = asyncio.create_task(signals.first.wait())
    await asyncio.wait({entering, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not entering.done():
        entering.cancel()
        await asyncio.wait({entering}, timeout=LAST_SECONDS)  # bounded: an agent's start may ignore the cancellation
        return False
    await entering
    return True
