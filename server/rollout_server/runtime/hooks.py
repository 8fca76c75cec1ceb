"""Starts agents with the server that holds them, and stops them with it."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial

from rollout_server.runtime.port import PlaysRuns
from rollout_server.runtime.where import raised_at, written_at

_log = logging.getLogger(__name__)

STOP_SECONDS = 10.0
"""How long an agent's stop may take: others, and whoever stops the server, wait for it."""


class AgentFailed(RuntimeError):
    """An agent could not start. The text names the agent, what it raised, and the line of the author's code."""


async def start_agents(agents: Sequence[PlaysRuns], stack: AsyncExitStack) -> None:
    """Starts agents in order; `stack` stops those that started, the last one first. Raises `AgentFailed`."""
    for agent in agents:
        try:
            await _called(agent.start)
        except Exception as error:  # the boundary to an author's code
            what = " ".join(f"{type(error).__name__}: {error}".split())
            place = raised_at(error).removeprefix(" at ")
            where = f" ({place})" if place else written_at(agent.start)
            raise AgentFailed(f"agent {agent.name!r} could not start: {what}{where}") from error
        stack.push_async_callback(_stop, agent)


async def _stop(agent: PlaysRuns) -> None:
    """Stops an agent. That it fails is its author's to know, and keeps nobody else from stopping."""
    try:
        async with asyncio.timeout(STOP_SECONDS):
            await _called(agent.stop)
    except TimeoutError:
        _log.error("the stop of agent %s%s did not end within %g s", agent.name, written_at(agent.stop), STOP_SECONDS)
    except Exception as error:
        _log.error("the stop of agent %s failed%s", agent.name, raised_at(error), exc_info=error)


async def _called(function: Callable[[], object]) -> None:
    if inspect.iscoroutinefunction(function):
        await function()
        return
    result = await asyncio.get_running_loop().run_in_executor(None, partial(function))
    if inspect.isawaitable(result):
        await result
