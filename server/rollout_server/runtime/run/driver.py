"""Drives one rollout from its first turn to its outcome. The only boundary that catches an agent's failures.

An agent's code is arbitrary: it may raise anything, swallow any exception, or never return. Each of its methods therefore runs in
a task of its own. While `setup` or `play` runs, the driver waits for the first of three events: the run reached an end (a limit, a
failed trainer), an end was requested (cancel, time limit, drain), or the method returned.

A rollout without a `cleanup` gets its outcome as soon as its end is decided. With one, the outcome waits for it and has its
warning: first the agent's cancelled tasks and its threads have `GRACE_SECONDS` to end, then `cleanup` has its time limit.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from rollout_server.core.ledger import Origin, SegmentKind
from rollout_server.core.outcome import Category, End, Failure, FailureClass, RewardResult, Stop, Warned
from rollout_server.core.record import FIRST, Ended, ToolReturned, ToolStarted
from rollout_server.core.spec import Dialect
from rollout_server.runtime.agent_protocol import AGAIN, END, AgentProtocol, has_finished
from rollout_server.runtime.aio.event_loop import first_done
from rollout_server.runtime.aio.source_location import raised_at, waits_at, written_at
from rollout_server.runtime.capture.continuation import earlier_stop, go_on, goes_on
from rollout_server.runtime.capture.endpoint import CapturePorts
from rollout_server.runtime.errors import RolloutEnded, RolloutFailed, cause_of
from rollout_server.runtime.models import FurtherModels
from rollout_server.runtime.ports import Fork, OpenSampler
from rollout_server.runtime.rollout import Rollout
from rollout_server.runtime.run.context import RunContext
from rollout_server.runtime.run.run import Run
from rollout_server.runtime.run.tool_listing import has_toolsets, list_requested, note_use
from rollout_server.runtime.run.tracer import NoTracer, Tracer
from rollout_server.runtime.tools.executor import ToolExecutor, label_of
from rollout_server.runtime.tools.resources import ToolResources
from rollout_server.runtime.tools.toolset import ToolsetCaller
from rollout_server.runtime.tools.toolsets import RolloutToolsets

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

GRACE_SECONDS = 5.0
"""How long an agent's tasks may continue after the end of their rollout."""
CLEANUP_FAILED = "cleanup_failed"
"""Code of the warning about a cleanup that failed or did not return."""
GROUP_REWARD_MISSING = "group_reward_missing"
"""Code of the warning about a rollout whose agent rewards groups, but that was not started with its group."""


class _Crashed(Exception):
    """An agent raised SystemExit or KeyboardInterrupt, which asyncio would pass on to the event loop."""


def seconds_to_end(agent: AgentProtocol) -> float:
    """Return the seconds within which a rollout of the agent ends once its end is requested.

    The last second is a reserve: the rollout's timers start a little after its end is requested.
    """
    return GRACE_SECONDS + (agent.cleanup_seconds + 1.0 if agent.overrides("cleanup") else 0.0)


async def drive(
    rollout: Rollout,
    open_sampler: OpenSampler,
    tool_resources: ToolResources,
    models: FurtherModels,
    capture_ports: CapturePorts = CapturePorts(),
    tracer: Tracer = NoTracer(),
) -> None:
    """Run a rollout's agent, compute the reward, and record the end. Tools run with the server's shared resources."""

    threads = tool_resources.threads, tool_resources.cleanup_threads
    context = RunContext(rollout, *threads, models, capture_ports, tracer)
    caller = ToolsetCaller(rollout.uid, rollout.spec.metadata_json, rollout.credentials.tools)
    toolsets = tool_resources.toolsets.of_rollout(caller, partial(note_use, context))
    with tracer.rollout(rollout):
        try:
            await _drive(context, open_sampler, tool_resources, toolsets)
        finally:
            await toolsets.close()


async def _drive(
    context: RunContext, open_sampler: OpenSampler, tool_resources: ToolResources, toolsets: RolloutToolsets
) -> None:
    rollout = context.rollout
    rollout.activity.enter()
    started = rollout.clock.monotonic() - rollout.earlier_seconds
    queued_ms = rollout.queued_ms()
    end: End = Failure(Category.INTERRUPTED, "The server stopped before the rollout had ended; start it again")
    reward = RewardResult()
    tasks: list[asyncio.Task[Any]] = []
    run: Run | None = None
    try:
        with _time_limit(rollout):
            unlisted = await _prepare(context, toolsets, tool_resources, tasks)
            if unlisted is None:
                run = _open(context, open_sampler, tool_resources, toolsets)
            if run is not None:
                end = await _run_to_end(rollout, run, tasks)
            else:
                end = unlisted or _failure(rollout, "sampler could not be opened", FailureClass.SERVER)
            if isinstance(end, Stop) and run is not None:
                end, reward = await _run_reward(rollout, run, end, tasks)
            elif run is not None:
                reward = rollout.ending.reward
    finally:
        # Reached on every path, also when the driver itself is cancelled: a rollout always gets an outcome. Without a cleanup,
        # the tasks are cancelled before `Ended` is recorded and awaited after it, so the outcome does not wait for an agent that
        # ignores its cancellation. What such a task still does is rejected, because the end is decided.
        _call_before_end(rollout, run)
        rollout.ending.decide(end, reward)
        total_ms = 1000 * (rollout.clock.monotonic() - started)
        warnings = _group_reward_missing(rollout, end)
        ended = Ended(end, reward, total_ms, queued_ms, warnings, rollout.reward_rule)
        _cancel(run, tasks)
        try:
            goes_on_elsewhere = rollout.is_suspended and rollout.agent.external
            if run is not None and rollout.agent.overrides("cleanup") and not goes_on_elsewhere:
                ended = replace(ended, warnings=(*warnings, *await _run_cleanup(rollout, run, tasks)))
        finally:
            if not (rollout.is_suspended or _waits_for_group(rollout, run, ended)):
                rollout.record(ended)
    await await_cancelled(tasks)


def _waits_for_group(rollout: Rollout, run: Run | None, ended: Ended) -> bool:
    return rollout.group is not None and run is not None and rollout.group.wait(rollout, run.latest, ended)


async def _prepare(
    context: RunContext, toolsets: RolloutToolsets, tool_resources: ToolResources, tasks: list[asyncio.Task[Any]]
) -> End | None:
    """List the tools, and record that a rollout of an earlier process goes on. Return the end if one was reached meanwhile."""
    continues = goes_on(context.rollout)  # before anything is recorded
    unlisted = await _list_tools(context, toolsets, tool_resources, tasks)
    if continues:
        go_on(context.rollout)
    return unlisted


async def _list_tools(
    context: RunContext, toolsets: RolloutToolsets, tool_resources: ToolResources, tasks: list[asyncio.Task[Any]]
) -> End | None:
    """List the tools of the rollout's toolsets. Return its end if that fails, or if an end was requested meanwhile."""
    rollout = context.rollout
    if not has_toolsets(rollout):
        return None
    work = list_requested(context, toolsets, tool_resources.toolsets.limits)
    listing = _start(work, f"tools {rollout.uid}", tasks)
    await first_done(listing, rollout.ending.requested)
    if not listing.done():
        return rollout.ending.requested.result()
    if not _has_failed(listing):
        rollout.tools = listing.result()
        return None
    error = listing.exception() if not listing.cancelled() else None
    if isinstance(error, RolloutFailed):
        return error.failure
    if isinstance(error, RolloutEnded):
        return error.end
    _log.error("the tools of the rollout could not be listed", exc_info=error, extra=_log_fields(rollout))
    return _failure(rollout, "tools could not be listed", FailureClass.SERVER)


def _open(
    context: RunContext, open_sampler: OpenSampler, tool_resources: ToolResources, toolsets: RolloutToolsets
) -> Run | None:
    rollout = context.rollout
    try:
        sampler = open_sampler(rollout.uid, rollout.spec, rollout.tools)
        # Then an earlier attempt has used the trainer's first conversation.
        if rollout.agent.on_restart == AGAIN and rollout.machine.main.line.id != FIRST:
            sampler = sampler.fork(Fork(Origin(SegmentKind.SUBAGENT, FIRST)))
        return Run(
            context,
            rollout.machine.main,
            sampler,
            ToolExecutor(rollout.tools, tool_resources, rollout.spec.tokenizer, toolsets),
        )
    except Exception:  # a bug of this server; the rollout must still end and leave its slot
        _log.exception("the sampler of the rollout could not be opened", extra=_log_fields(rollout))
        return None


async def _run_to_end(rollout: Rollout, run: Run, tasks: list[asyncio.Task[Any]]) -> End:
    agent, end = rollout.agent, None
    if agent.on_restart == END and has_finished(agent, rollout.log.records):
        rollout.capture.close()  # only the reward is missing: neither `setup` nor `play` may start the agent again
        return earlier_stop(rollout) or _natural_stop(rollout)
    if rollout.replay is not None:
        rollout.replay.proceed()
    if agent.overrides("setup"):
        end = await _run_part(rollout, "setup", agent.run_setup(run), tasks)
    if end is None and rollout.is_restored and (stop := earlier_stop(rollout)) is not None:
        rollout.ending.reach(stop)
    end = end or await _run_part(rollout, "play", agent.perform(run.latest), tasks) or _replay_failure(rollout)
    if end is not None:
        return end
    for task in run.under_way:
        text = "agent %s: play() returned while a task it started was still running%s; the task is cancelled"
        _log.warning(text, rollout.agent.name, waits_at(task), extra=_log_fields(rollout))
    return _natural_stop(rollout)


async def _run_part(
    rollout: Rollout, part: str, work: Coroutine[Any, Any, None], tasks: list[asyncio.Task[Any]]
) -> End | None:
    """Run the agent's `setup` or `play`. Return the end of the rollout, or None if the method returned without one."""
    running = _start(work, f"{part} {rollout.uid}", tasks)
    ending = rollout.ending
    await first_done(running, ending.requested, ending.reached)
    if ending.reached.done():
        # The method may still compute what the reward needs, so it gets some time to return.
        await first_done(running, ending.requested, within=GRACE_SECONDS)
        _log_other_errors(rollout, part, running)
        return ending.reached.result()
    if not running.done():
        return _early_end(rollout, part, running)
    if not _has_failed(running):
        return None
    # A command of the method may meet a requested end before the driver does.
    if ending.requested.done() and _own_error(running) is None:
        return ending.requested.result()
    return _agent_failure(rollout, part, running)


def _early_end(rollout: Rollout, part: str, task: asyncio.Task[Any]) -> End:
    """Return the requested end. On a timeout, log what the agent was waiting for, and name the method if no turn was running."""
    end = rollout.ending.requested.result()
    if isinstance(end, Failure) and end.category is Category.TIMEOUT:
        text = "agent %s: %s()%s had not returned at the time limit of its rollout; it was waiting%s"
        waited = _calls_under_way(rollout) or waits_at(task)
        _log.warning(text, rollout.agent.name, part, _location(rollout, part), waited, extra=_log_fields(rollout))
        if part != "play":
            return replace(end, message=f"{end.message}. The agent's {part} had not returned")
    return end


def _natural_stop(rollout: Rollout) -> Stop:
    """Return the stop of a `play` that returned.

    In the asynchronous HTTP API the rollout's reason is the trainer's finish_reason of the last completion (docs/design.md,
    protocol B).
    """
    stop, last = rollout.machine.natural_stop(), rollout.machine.main.last_completion
    plain = rollout.spec.completions.dialect is Dialect.HTTP_PLAIN
    if plain and stop.reason == "stop" and last is not None and last.finish_reason:
        return replace(stop, reason=last.finish_reason)
    return stop


async def _run_reward(
    rollout: Rollout, run: Run, stop: Stop, tasks: list[asyncio.Task[Any]]
) -> tuple[End, RewardResult]:
    # From here on the run issues no more commands: a reward may read the rollout, but not sample.
    rollout.ending.reach(stop)
    judge = _start(rollout.agent.judge(run.latest), f"judge {rollout.uid}", tasks)
    await first_done(judge, rollout.ending.requested)
    if rollout.ending.requested.done():
        return _early_end(rollout, "reward", judge), RewardResult()
    replay = rollout.replay
    failure = replay.failure if replay is not None else None
    if failure is None and _has_failed(judge):
        return _agent_failure(rollout, "reward", judge), RewardResult()
    failure = failure or _replay_failure(rollout, rewarded=True)
    return (stop, judge.result()) if failure is None else (failure, RewardResult())


def _replay_failure(rollout: Rollout, *, rewarded: bool = False) -> Failure | None:
    """Return the failure if the agent did less than what its log has, which it replays."""
    return None if rollout.replay is None else rollout.replay.failure_of_return(rewarded=rewarded)


def _call_before_end(rollout: Rollout, run: Run | None) -> None:
    """Let the run record what it still has to. A bug in it must not keep the rollout from its outcome."""
    try:
        if run is not None:
            run.call_before_end()
    except Exception:
        _log.exception("the rollout could not complete its records", extra=_log_fields(rollout))


def _group_reward_missing(rollout: Rollout, end: End) -> tuple[Warned, ...]:
    """Return a warning if the reward lacks what the agent's `reward_group` would add, because no group was started."""
    apart = rollout.spec.group_id and rollout.group is None
    if not (apart and isinstance(end, Stop) and rollout.agent.overrides("reward_group")):
        return ()
    text = "The agent's reward_group was not called, because this rollout was not started as one of a group"
    return (Warned(GROUP_REWARD_MISSING, text, rollout.machine.turn),)


async def _run_cleanup(rollout: Rollout, run: Run, tasks: list[asyncio.Task[Any]]) -> tuple[Warned, ...]:
    """Run the agent's `cleanup` after its other tasks and threads have ended or are abandoned. Return the warning if it fails."""
    until = asyncio.get_running_loop().time() + GRACE_SECONDS
    await await_cancelled(tasks)
    with suppress(TimeoutError):
        async with asyncio.timeout_at(until):
            await run.threads_ended()  # a cancelled `setup` in a thread may still open what `cleanup` closes
    tasks.clear()
    agent = rollout.agent
    cleanup = _start(agent.run_cleanup(run.latest), f"cleanup {rollout.uid}", tasks)
    try:
        await first_done(cleanup, within=agent.cleanup_seconds)
    finally:
        _cancel(run, tasks)
    if not cleanup.done():
        what = f"did not return within {agent.cleanup_seconds:g} s"
        where = _location(rollout, "cleanup"), waits_at(cleanup)
        _log.error("agent %s: cleanup()%s %s%s", agent.name, where[0], what, where[1], extra=_log_fields(rollout))
    elif _has_failed(cleanup):
        what = "failed"
        _log_failure(rollout, "cleanup", cleanup)
    else:
        return ()
    text = f"The agent's cleanup {what}; the server's log has the reason under rollout {rollout.uid}"
    return (Warned(CLEANUP_FAILED, text, rollout.machine.turn),)


def _has_failed(ended: asyncio.Task[Any]) -> bool:
    return ended.cancelled() or ended.exception() is not None


def _cancel(run: Run | None, tasks: list[asyncio.Task[Any]]) -> None:
    """Cancel the agent's tasks, and add to them those that it started itself."""
    tasks += [task for task in run.under_way if task not in tasks] if run is not None else []
    for task in tasks:
        task.cancel()


def _start(work: Coroutine[Any, Any, _T], name: str, tasks: list[asyncio.Task[Any]]) -> asyncio.Task[_T]:
    task = asyncio.create_task(contain(work), name=name)
    task.add_done_callback(lambda _: work.close())  # a task that is cancelled before it begins has not awaited it
    tasks.append(task)
    return task


async def contain(work: Coroutine[Any, Any, _T]) -> _T:
    """Turn exceptions that would stop the event loop into an ordinary one."""
    try:
        return await work
    except (SystemExit, KeyboardInterrupt) as error:
        raise _Crashed(repr(error)) from error


@contextmanager
def _time_limit(rollout: Rollout) -> Iterator[None]:
    """Request the end of the rollout when its time limit expires."""
    seconds = rollout.spec.limits.seconds
    if seconds is None:
        yield
        return
    left = max(0.0, seconds - rollout.earlier_seconds)
    rollout.limit_time(left)
    timer = asyncio.get_running_loop().call_later(left, _time_over, rollout, seconds)
    try:
        yield
    finally:
        timer.cancel()


def _time_over(rollout: Rollout, seconds: float) -> None:
    turn = max(rollout.machine.turn, *(entry.turn for entry in rollout.log.entries))  # of the log, also in a replay
    text = f"timeout: the rollout's time limit of {seconds:g} s expired in turn {turn}; request a longer limit if it needs more"
    rollout.ending.request(Failure(Category.TIMEOUT, text, turn, source=FailureClass.DEADLINE))


def _agent_failure(rollout: Rollout, part: str, task: asyncio.Task[Any]) -> Failure:
    _log_failure(rollout, part, task)
    error = None if task.cancelled() else task.exception()
    cause = None if error is None else cause_of(error)
    if isinstance(cause, RolloutFailed):
        return cause.failure
    return _failure(rollout, f"agent's {part} failed", FailureClass.ENVIRONMENT)


def _log_failure(rollout: Rollout, part: str, task: asyncio.Task[Any]) -> None:
    error = None if task.cancelled() else task.exception()
    location = raised_at(error) if error is not None else ""
    told = type(error) is RolloutFailed and not location  # its text says what failed, and no frame is an author's
    if told:
        location = f": {error}"
    elif not location and not isinstance(error, RolloutFailed):
        location = _location(rollout, part)
    text, shown = "agent %s: %s() failed%s", None if told else error
    _log.error(text, rollout.agent.name, part, location, exc_info=shown, extra=_log_fields(rollout))


def _calls_under_way(rollout: Rollout) -> str:
    """Return the tools that have not returned, as " for tool add (agent.py:3)"; empty if all have."""
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
    """Return the source location of an agent's method, as " (file.py:3)"."""
    function = getattr(rollout.agent, part, None)
    return written_at(function) if callable(function) else ""


def _log_other_errors(rollout: Rollout, part: str, task: asyncio.Task[Any]) -> None:
    """Log an agent's own error while its rollout ended."""
    error = _own_error(task)
    if error is not None:
        location = raised_at(error)
        text = "agent %s: %s() failed while its rollout was ending%s"
        _log.error(text, rollout.agent.name, part, location, exc_info=error, extra=_log_fields(rollout))


def _own_error(task: asyncio.Task[Any]) -> BaseException | None:
    """Return what an agent's method raised, without the `RolloutEnded` that the end of its rollout makes it raise."""
    error = task.exception() if task.done() and not task.cancelled() else None
    others = error.split(RolloutEnded)[1] if isinstance(error, BaseExceptionGroup) else error
    return None if isinstance(others, RolloutEnded) else others


def _failure(rollout: Rollout, what: str, failure_class: FailureClass) -> Failure:
    turn = rollout.machine.turn
    text = f"The {what} in turn {turn}; the server's log has the reason under rollout {rollout.uid}"
    return Failure(Category.INTERNAL, text, turn, source=failure_class)


async def await_cancelled(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Wait for the agent's cancelled tasks, but not for ever: a task that never ends would otherwise keep the rollout's slot."""
    if not all(task.done() for task in tasks):
        await asyncio.wait(tasks, timeout=GRACE_SECONDS)
    for task in tasks:
        if not task.done():
            text = "%s ignores its cancellation and is abandoned%s"
            _log.warning(text, task.get_name(), waits_at(task))
        elif not task.cancelled():
            task.exception()  # mark it as retrieved: it was logged, or came after the end


def _log_fields(rollout: Rollout) -> dict[str, object]:
    return {"rollout_uid": rollout.uid, "turn": rollout.machine.turn}
