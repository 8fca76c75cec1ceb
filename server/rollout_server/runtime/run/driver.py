"""Drives one rollout from its first turn to its outcome. The one boundary at which an agent's failures are caught.

An agent's code is foreign: it may raise anything, swallow anything and sleep for ever. So its play is a task that is waited for
beside the rollout's own end, and whatever comes first decides: the end that the run has met (a limit, a failed trainer), a
request to end (cancel, time), or play itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from rollout_server.core.outcome import Category, End, Failure, RewardResult, Stop
from rollout_server.core.record import Ended, ToolReturned, ToolStarted
from rollout_server.core.spec import Dialect
from rollout_server.runtime.aio.source_location import raised_at, waits_at, written_at
from rollout_server.runtime.errors import RolloutEnded
from rollout_server.runtime.ports import OpenSampler
from rollout_server.runtime.rollout import Rollout
from rollout_server.runtime.run.context import RunContext
from rollout_server.runtime.run.run import Run
from rollout_server.runtime.tools.executor import ToolExecutor, label_of
from rollout_server.runtime.tools.resources import ToolResources

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

GRACE_SECONDS = 5.0
"""How long an agent may take to end after its rollout has ended."""


class _Crashed(Exception):
    """An agent's code raised something that asyncio would not keep to itself, such as SystemExit."""


async def drive(rollout: Rollout, open_sampler: OpenSampler, tool_resources: ToolResources) -> None:
    """Plays the rollout, has it judged, and records its end. Its tools run with the resources of the server."""
    started = rollout.clock.monotonic()
    queued_ms = rollout.queued_ms()
    end: End = Failure(Category.INTERRUPTED, "The server stopped before the rollout had ended; ask for it again")
    reward = RewardResult()
    tasks: list[asyncio.Task[Any]] = []
    run: Run | None = None
    try:
        with _time_limit(rollout):
            run = _open(rollout, open_sampler, tool_resources)
            end = (
                await _run_play(rollout, run, tasks)
                if run is not None
                else _failure(rollout, "sampler could not be opened")
            )
            if isinstance(end, Stop) and run is not None:
                end, reward = await _run_reward(rollout, run, end, tasks)
            elif run is not None:
                reward = rollout.ending.reward
    finally:
        tasks += [task for task in run.under_way if task not in tasks] if run is not None else []
        for task in tasks:
            task.cancel()
        rollout.record(Ended(end, reward, 1000 * (rollout.clock.monotonic() - started), queued_ms))
    await _await_cancelled(tasks)


def _open(rollout: Rollout, open_sampler: OpenSampler, tool_resources: ToolResources) -> Run | None:
    try:
        sampler = open_sampler(rollout.uid, rollout.spec, rollout.tools)
        return Run(
            RunContext(rollout, tool_resources.threads),
            rollout.machine.main,
            sampler,
            ToolExecutor(rollout.tools, tool_resources, rollout.spec.tokenizer),
        )
    except Exception:  # a fault of ours, and it must not hold the queue
        _log.exception("no sampler for the rollout", extra=_log_fields(rollout))
        return None


async def _run_play(rollout: Rollout, run: Run, tasks: list[asyncio.Task[Any]]) -> End:
    play = _start(rollout.agent.perform(run), f"play {rollout.uid}", tasks)
    ending = rollout.ending
    await _first_of(play, ending.requested, ending.reached)
    if ending.reached.done():
        # What play still does may be part of the reward, but nobody waits for it beyond that.
        await _first_of(play, ending.requested, within=GRACE_SECONDS)
        _log_other_errors(rollout, play)
        return ending.reached.result()
    if not play.done():
        return _early_end(rollout, "play", play)
    if play.cancelled() or play.exception() is not None:
        return _agent_failure(rollout, "play", play)
    for task in run.under_way:
        text = "the play of agent %s returned while a task that it had started went on%s; that is cancelled"
        _log.warning(text, rollout.agent.name, waits_at(task), extra=_log_fields(rollout))
    return _natural_stop(rollout)


def _early_end(rollout: Rollout, part: str, task: asyncio.Task[Any]) -> End:
    """The end that somebody requested. Where time was over, the log says what the agent waited for."""
    end = rollout.ending.requested.result()
    if isinstance(end, Failure) and end.category is Category.TIMEOUT:
        text = "the %s of agent %s%s had not returned when the time of its rollout was over: it waited%s"
        waited = _calls_under_way(rollout) or waits_at(task)
        _log.warning(text, part, rollout.agent.name, _location(rollout, part), waited, extra=_log_fields(rollout))
    return end


def _natural_stop(rollout: Rollout) -> Stop:
    """In the asynchronous dialect the trainer's finish_reason of the last answer becomes the rollout's (docs/design.md, B)."""
    stop, last = rollout.machine.natural_stop(), rollout.machine.main.last_completion
    plain = rollout.spec.completions.dialect is Dialect.HTTP_PLAIN
    if plain and stop.reason == "stop" and last is not None and last.finish_reason:
        return replace(stop, reason=last.finish_reason)
    return stop


async def _run_reward(
    rollout: Rollout, run: Run, stop: Stop, tasks: list[asyncio.Task[Any]]
) -> tuple[End, RewardResult]:
    rollout.ending.reach(stop)
    judge = _start(rollout.agent.judge(run.latest), f"judge {rollout.uid}", tasks)
    await _first_of(judge, rollout.ending.requested)
    if not judge.done():
        return _early_end(rollout, "reward", judge), RewardResult()
    if judge.cancelled() or judge.exception() is not None:
        return _agent_failure(rollout, "reward", judge), RewardResult()
    return stop, judge.result()


def _start(work: Coroutine[Any, Any, _T], name: str, tasks: list[asyncio.Task[Any]]) -> asyncio.Task[_T]:
    task = asyncio.create_task(_contain(work), name=name)
    tasks.append(task)
    return task


async def _contain(work: Coroutine[Any, Any, _T]) -> _T:
    try:
        return await work
    except (SystemExit, KeyboardInterrupt) as error:
        raise _Crashed(repr(error)) from error


async def _first_of(*futures: asyncio.Future[Any], within: float | None = None) -> None:
    await asyncio.wait(set(futures), timeout=within, return_when=asyncio.FIRST_COMPLETED)


@contextmanager
def _time_limit(rollout: Rollout) -> Iterator[None]:
    """Asks the rollout to end when its time is over."""
    seconds = rollout.spec.limits.seconds
    if seconds is None:
        yield
        return
    rollout.limit_time(seconds)
    timer = asyncio.get_running_loop().call_later(seconds, _time_over, rollout, seconds)
    try:
        yield
    finally:
        timer.cancel()


def _time_over(rollout: Rollout, seconds: float) -> None:
    turn = rollout.machine.turn
    text = f"timeout: the rollout's {seconds:g} s were over in turn {turn}; a longer time can be asked for as a limit"
    rollout.ending.request(Failure(Category.TIMEOUT, text, turn))


def _agent_failure(rollout: Rollout, part: str, task: asyncio.Task[Any]) -> Failure:
    error = None if task.cancelled() else task.exception()
    location = (raised_at(error) if error is not None else "") or _location(rollout, part)
    _log.error(
        "the %s of agent %s failed%s", part, rollout.agent.name, location, exc_info=error, extra=_log_fields(rollout)
    )
    return _failure(rollout, f"agent's {part} failed")


def _calls_under_way(rollout: Rollout) -> str:
    """The tools that have not returned, as " for tool add (agent.py:3)"; empty: all have."""
    names: dict[tuple[str, int, int], str] = {}
    for entry in rollout.log.entries:
        match entry.record:
            case ToolStarted(turn, index, call, segment_id):
                names[segment_id, turn, index] = call.name
            case ToolReturned(turn=turn, index=index, segment_id=segment_id):
                names.pop((segment_id, turn, index), None)
    waited = {name: label_of(tool) for tool in rollout.tools if (name := tool.name) in names.values()}
    return f" for {', '.join(waited.values())}" if waited else ""


def _location(rollout: Rollout, part: str) -> str:
    """Where the author's function is."""
    function = getattr(rollout.agent, part, None)
    return written_at(function) if callable(function) else ""


def _log_other_errors(rollout: Rollout, play: asyncio.Task[Any]) -> None:
    """An agent that failed in its own way while its rollout ended wants to know of it."""
    error = play.exception() if play.done() and not play.cancelled() else None
    others = error.split(RolloutEnded)[1] if isinstance(error, BaseExceptionGroup) else error
    if others is not None and not isinstance(others, RolloutEnded):
        location = raised_at(others)
        text = "agent %s failed as its rollout ended%s"
        _log.error(text, rollout.agent.name, location, exc_info=others, extra=_log_fields(rollout))


def _failure(rollout: Rollout, what: str) -> Failure:
    turn = rollout.machine.turn
    text = f"The {what} in turn {turn}; the server's log has the reason under rollout {rollout.uid}"
    return Failure(Category.INTERNAL, text, turn)


async def _await_cancelled(tasks: list[asyncio.Task[Any]]) -> None:
    """Waits for the agent's tasks to take note of their cancellation. A slot that one of them holds for ever would be lost."""
    if not tasks:
        return
    done, pending = await asyncio.wait(tasks, timeout=GRACE_SECONDS)
    for task in pending:
        text = "%s does not give way to its cancellation and is left alone%s"
        _log.warning(text, task.get_name(), waits_at(task))
    for task in done:
        if not task.cancelled():
            task.exception()  # it has been told of, or came after the end


def _log_fields(rollout: Rollout) -> dict[str, object]:
    return {"rollout_uid": rollout.uid, "turn": rollout.machine.turn}
