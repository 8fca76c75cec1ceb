"""Drives one rollout from its first turn to its outcome. The one boundary at which an agent's failures are caught."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rollout_server.core.outcome import Category, End, Failure, Stop, Verdict
from rollout_server.core.record import Ended
from rollout_server.runtime.port import Sampler
from rollout_server.runtime.rollout import Rollout
from rollout_server.runtime.run import RolloutOver, Run
from rollout_server.runtime.toolbox import Toolbox

_log = logging.getLogger(__name__)

GRACE_SECONDS = 5.0
"""How long an agent may take to give way after its rollout has ended."""


async def drive(rollout: Rollout, sampler: Sampler) -> None:
    """Plays the rollout and records its end: whatever comes first of the agent's own, the time limit, and a wish to end."""
    started = rollout.clock.monotonic()
    queued_ms = rollout.queued_ms()
    run = Run(rollout, sampler, Toolbox(rollout.agent.tools))
    play = asyncio.create_task(_play(rollout, run), name=f"play {rollout.uid}")  # begins at the first await
    end: End = Failure(Category.INTERRUPTED, "The server stopped before the rollout had ended; ask for it again")
    verdict = Verdict()
    try:
        with _time_limit(rollout):
            await asyncio.wait(_either(play, rollout.ending), return_when=asyncio.FIRST_COMPLETED)
        end, verdict = _ended(rollout, play)
    finally:
        play.cancel()
        rollout.record(Ended(end, verdict, 1000 * (rollout.clock.monotonic() - started), queued_ms))
    await _give_way(play)


def _either(*futures: asyncio.Future[Any]) -> set[asyncio.Future[Any]]:
    return set(futures)


def _ended(rollout: Rollout, play: asyncio.Task[tuple[End, Verdict]]) -> tuple[End, Verdict]:
    if not play.done():
        return rollout.ending.result(), Verdict()
    if play.cancelled():  # by the agent's own doing: nobody else has cancelled it yet
        return _agent_failure(rollout, "play"), Verdict()
    return play.result()


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


async def _play(rollout: Rollout, run: Run) -> tuple[End, Verdict]:
    end = await _end_of_play(rollout, run)
    if not isinstance(end, Stop):
        return end, Verdict()
    try:
        return end, await rollout.agent.judge(run)
    except (Exception, RolloutOver):  # the boundary to an author's code
        _log.exception("the reward of agent %s failed", rollout.agent.name, extra=_where(rollout))
        return _agent_failure(rollout, "reward"), Verdict()


async def _end_of_play(rollout: Rollout, run: Run) -> End:
    try:
        await rollout.agent.perform(run)
    except RolloutOver as over:
        return over.end
    except Exception:  # the boundary to an author's code
        _log.exception("agent %s failed", rollout.agent.name, extra=_where(rollout))
        return run.over or _agent_failure(rollout, "play")
    return run.over or rollout.machine.natural_stop()


def _agent_failure(rollout: Rollout, part: str) -> Failure:
    turn = rollout.machine.turn
    text = f"The agent's {part} failed in turn {turn}; the server's log has the reason under rollout {rollout.uid}"
    return Failure(Category.INTERNAL, text, turn)


async def _give_way(play: asyncio.Task[tuple[End, Verdict]]) -> None:
    done, _ = await asyncio.wait({play}, timeout=GRACE_SECONDS)
    if not done:
        _log.warning("%s does not give way to its cancellation and is left alone", play.get_name())
    elif not play.cancelled() and play.exception() is not None:
        _log.error("%s failed", play.get_name(), exc_info=play.exception())


def _where(rollout: Rollout) -> dict[str, object]:
    return {"rollout_uid": rollout.uid, "turn": rollout.machine.turn}
