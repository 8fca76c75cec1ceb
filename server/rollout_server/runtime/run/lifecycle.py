"""Starts agents with their server and stops them with it."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import cast

from rollout_server.runtime.agent_protocol import AgentProtocol
from rollout_server.runtime.aio.source_location import raised_at, waits_at, written_at
from rollout_server.runtime.ports import Tool
from rollout_server.runtime.tools.toolset import McpServer
from rollout_server.runtime.tools.toolsets import Toolsets

_log = logging.getLogger(__name__)

STOP_SECONDS = 10.0
"""Time limit of an agent's `stop`. The other agents and the shutdown of the server wait for it."""
PATIENT_SECONDS = 10.0
"""Time after which a running `start` is logged. It has no limit: some agents load models."""


class AgentFailed(RuntimeError):
    """An agent could not start. The text has the agent, its exception, and the line of the author's code."""


async def start_agents(agents: Sequence[AgentProtocol], stack: AsyncExitStack) -> None:
    """Start agents in order; `stack` stops the started ones in reverse order. Raise `AgentFailed`."""
    if not agents:
        raise AgentFailed("there is no agent to serve")
    for agent in agents:
        if isinstance(agent, type) or not callable(getattr(agent, "perform", None)):
            made = f": serve an instance, {agent.__name__}()" if isinstance(agent, type) else ""
            raise AgentFailed(f"{agent!r:.100} is not an agent{made}")
        try:
            await _start(agent)
        except Exception as error:  # the boundary to an author's code
            what = " ".join(f"{type(error).__name__}: {error}".split())
            location = raised_at(error).removeprefix(" at ")
            where = f" ({location})" if location else written_at(agent.start)
            raise AgentFailed(f"agent {agent.name!r} could not start: {what}{where}") from error
        stack.push_async_callback(_stop, agent)


async def list_toolsets(agents: Sequence[AgentProtocol], toolsets: Toolsets) -> None:
    """List the tools of all toolsets of agents, concurrently. Raise `AgentFailed`."""
    sources = list(dict.fromkeys(source for agent in agents for source in agent.toolsets))
    results = await asyncio.gather(*map(toolsets.list_tools, sources), return_exceptions=True)
    listed = dict(zip(sources, results, strict=True))
    for agent in agents:
        for source in agent.toolsets:
            if isinstance(error := listed[source], BaseException):
                raise AgentFailed(f"agent {agent.name!r} cannot offer the tools of {source}: {error}") from error
        try:
            agent.list_toolsets(cast("Mapping[McpServer, Sequence[Tool]]", listed))
        except ValueError as error:
            raise AgentFailed(str(error)) from error


async def _start(agent: AgentProtocol) -> None:
    task = asyncio.create_task(_call(agent.start), name=f"start of agent {agent.name}")
    try:
        done, _ = await asyncio.wait({task}, timeout=PATIENT_SECONDS)
        if not done:
            text = "agent %s%s is still starting after %g s%s; the server accepts no requests until it has started"
            where = written_at(agent.start)
            _log.warning(text, agent.name, where, PATIENT_SECONDS, waits_at(task))
            await asyncio.wait({task})
    except asyncio.CancelledError:
        task.cancel()
        raise
    if task.cancelled():
        raise RuntimeError("its start was cancelled")
    await task


async def _stop(agent: AgentProtocol) -> None:
    """Stop an agent. Failures are logged and do not keep other agents from stopping."""
    task = asyncio.create_task(_call(agent.stop), name=f"stop of agent {agent.name}")
    done, _ = await asyncio.wait({task}, timeout=STOP_SECONDS)
    if not done:
        where = written_at(agent.stop)
        _log.error("agent %s: stop()%s did not return within %g s%s", agent.name, where, STOP_SECONDS, waits_at(task))
        task.cancel()
    elif task.cancelled():
        _log.error("agent %s: stop()%s was cancelled", agent.name, written_at(agent.stop))
    elif (error := task.exception()) is not None:
        where = raised_at(error) or written_at(agent.stop)
        _log.error("agent %s: stop() failed%s", agent.name, where, exc_info=error)


async def _call(function: Callable[[], object]) -> None:
    """Call a hook. SystemExit and KeyboardInterrupt become RuntimeError: they would end the program."""
    try:
        if inspect.iscoroutinefunction(function):
            await function()
            return
        result = await asyncio.get_running_loop().run_in_executor(None, partial(function))
        if inspect.isawaitable(result):
            await result
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(f"it raised {error!r}") from error
