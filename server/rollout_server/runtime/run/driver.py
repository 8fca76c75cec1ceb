"""Drives one rollout from its first turn to its outcome. The one boundary at which an agent's failures are caught.

An agent's code is foreign: it may raise anything, swallow anything and sleep for ever. So its play is a task that is waited for
beside the rollout's own end, and whatever comes first decides: the end that the run has met (a limit, a failed trainer), a
wish to end (cancel, time), or play itself.
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
"""How long an agent may take to give way after its rollout has ended."""


class _Crashed(Exception):
    """An agent's code raised something that asyncio would not keep to itself, such as SystemExit."""


async def drive(rollout: Rollout, open_sampler: OpenSampler, workbench: ToolResources) -> None:
    """Plays the rollout, has it judged, and records its end. Its tools are run on the workbench."""
    started = rollout.clock.monotonic()
    queued_ms = rollout.queued_ms()
    end: End = Failure(Category.INTERRUPTED, "The server stopped before the rollout had ended; ask for it again")
    verdict = RewardResult()
    tasks: list[asyncio.Task[Any]] = []
    run: Run | None = None
    try:
        with _time_limit(rollout):
            run = _open(rollout, open_sampler, workbench)
            end = (
                await _play(rollout, run, tasks)
                if run is not None
                else _failure(rollout, "sampler could not be opened")
            )
            if isinstance(end, Stop) and run is not None:
                end, verdict = await _judge(rollout, run, end, tasks)
            elif run is not None:
                verdict = run.verdict
    finally:
        tasks += [task for task in run.under_way if task not in tasks] if run is not None else []
        for task in tasks:
            task.cancel()
        rollout.record(Ended(end, verdict, 1000 * (rollout.clock.monotonic() - started), queued_ms))
    await _give_way(tasks)


def _open(rollout: Rollout, open_sampler: OpenSampler, workbench: ToolResources) -> Run | None:
    try:
        sampler = open_sampler(rollout.uid, rollout.spec, rollout.tools)
        return Run(
            RunContext(rollout, workbench.threads),
            rollout.machine.main,
            sampler,
            ToolExecutor(rollout.tools, workbench, rollout.spec.tokenizer),
        )
    except Exception:  # a fault of ours, and it must not hold the queue
        _log.exception("no sampler for the rollout", extra=_where(rollout))
        return None


async def _play(rollout: Rollout, run: Run, tasks: list[asyncio.Task[Any]]) -> End:
    play = _start(rollout.agent.perform(run), f"play {rollout.uid}", tasks)
    await _first_of(play, rollout.ending, run.over)
    if run.over.done():
        # What play still does may be part of the reward, but nobody waits for it beyond that.
        await _first_of(play, rollout.ending, within=GRACE_SECONDS)
        _log_other_errors(rollout, play)
        return run.over.result()
    if not play.done():
        return _ended_early(rollout, "play", play)
    if play.cancelled() or play.exception() is not None:
        return _agent_failed(rollout, "play", play)
    for task in run.under_way:
        text = "the play of agent %s returned while a task that it had started went on%s; that is cancelled"
        _log.warning(text, rollout.agent.name, waits_at(task), extra=_where(rollout))
    return _natural_stop(rollout)


def _ended_early(rollout: Rollout, part: str, task: asyncio.Task[Any]) -> End:
    """The end that somebody wished for. Where time was over, the author is told for what."""
    end = rollout.ending.result()
    if isinstance(end, Failure) and end.category is Category.TIMEOUT:
        text = "the %s of agent %s%s had not returned when the time of its rollout was over: it waited%s"
        waited = _calls_under_way(rollout) or waits_at(task)
        _log.warning(text, part, rollout.agent.name, _written(rollout, part), waited, extra=_where(rollout))
    return end


def _natural_stop(rollout: Rollout) -> Stop:
    """In the asynchronous dialect the trainer's finish_reason of the last answer becomes the rollout's (http-wire.md, B)."""
    stop, last = rollout.machine.natural_stop(), rollout.machine.main.last_answer
    plain = rollout.spec.completions.dialect is Dialect.HTTP_PLAIN
    if plain and stop.reason == "stop" and last is not None and last.finish_reason:
        return replace(stop, reason=last.finish_reason)
    return stop


async def _judge(rollout: Rollout, run: Run, stop: Stop, tasks: list[asyncio.Task[Any]]) -> tuple[End, RewardResult]:
    run.close(stop)
    judge = _start(rollout.agent.judge(run.latest), f"judge {rollout.uid}", tasks)
    await _first_of(judge, rollout.ending)
    if not judge.done():
        return _ended_early(rollout, "reward", judge), RewardResult()
    if judge.cancelled() or judge.exception() is not None:
        return _agent_failed(rollout, "reward", judge), RewardResult()
    return stop, judge.result()


def _start(work: Coroutine[Any, Any, _T], name: str, tasks: list[asyncio.Task[Any]]) -> asyncio.Task[_T]:
    task = asyncio.create_task(_contained(work), name=name)
    tasks.append(task)
    return task


async def _contained(work: Coroutine[Any, Any, _T]) -> _T:
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
    rollout.deadline = rollout.clock.monotonic() + seconds
    timer = asyncio.get_running_loop().call_later(seconds, _time_over, rollout, seconds)
    try:
        yield
    finally:
        timer.cancel()


def _time_over(rollout: Rollout, seconds: float) -> None:
    turn = rollout.machine.turn
    text = f"timeout: the rollout's {seconds:g} s were over in turn {turn}; a longer time can be asked for as a limit"
    rollout.ask_to_end(Failure(Category.TIMEOUT, text, turn))


def _agent_failed(rollout: Rollout, part: str, task: asyncio.Task[Any]) -> Failure:
    error = None if task.cancelled() else task.exception()
    place = (raised_at(error) if error is not None else "") or _written(rollout, part)
    _log.error("the %s of agent %s failed%s", part, rollout.agent.name, place, exc_info=error, extra=_where(rollout))
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


def _written(rollout: Rollout, part: str) -> str:
    """Where the author's function is."""
    function = getattr(rollout.agent, part, None)
    return written_at(function) if callable(function) else ""


def _log_other_errors(rollout: Rollout, play: asyncio.Task[Any]) -> None:
    """An agent that failed in its own way while its rollout ended wants to know of it."""
    error = play.exception() if play.done() and not play.cancelled() else None
    others = error.split(RolloutEnded)[1] if isinstance(error, BaseExceptionGroup) else error
    if others is not None and not isinstance(others, RolloutEnded):
        place = raised_at(others)
        text = "agent %s failed as its rollout ended%s"
        _log.error(text, rollout.agent.name, place, exc_info=others, extra=_where(rollout))


def _failure(rollout: Rollout, what: str) -> Failure:
    turn = rollout.machine.turn
    text = f"The {what} in turn {turn}; the server's log has the reason under rollout {rollout.uid}"
    return Failure(Category.INTERNAL, text, turn)


async def _give_way(tasks: list[asyncio.Task[Any]]) -> None:
    """Waits for the agent's tasks to take note of their cancellation. A place that one of them holds for ever would be lost."""
    if not tasks:
        return
    done, pending = await asyncio.wait(tasks, timeout=GRACE_SECONDS)
    for task in pending:
        text = "%s does not give way to its cancellation and is left alone%s"
        _log.warning(text, task.get_name(), waits_at(task))
    for task in done:
        if not task.cancelled():
            task.exception()  # it has been told of, or came after the end


def _where(rollout: Rollout) -> dict[str, object]:
    return {"rollout_uid": rollout.uid, "turn": rollout.machine.turn}
