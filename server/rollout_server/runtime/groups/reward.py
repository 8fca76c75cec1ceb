"""The reward over a group: calls the agent's `reward_group` within its time limit, and merges its results with the members' own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from rollout_server.core.outcome import Category, Failure, FailureClass, RewardResult
from rollout_server.runtime.agent_protocol import AgentProtocol
from rollout_server.runtime.aio.source_location import raised_at, waits_at, written_at
from rollout_server.runtime.errors import RolloutEnded, RolloutFailed, cause_of
from rollout_server.runtime.run.driver import await_cancelled, contain
from rollout_server.runtime.run.reward import checked_reward
from rollout_server.runtime.run.run import Run

_log = logging.getLogger(__name__)


async def group_rewards(
    agent: AgentProtocol, group_id: str, runs: Sequence[object], own: Sequence[RewardResult], over: asyncio.Future[None]
) -> Sequence[RewardResult] | Failure:
    """Return the final reward of each run, or the failure of all of them.

    Args:
        runs: the runs of the completed rollouts, in order of group_index.
        own: the reward of each of them so far.
        over: done once no rollout waits for the reward any more.
    """
    task = asyncio.create_task(contain(agent.judge_group(runs)), name=f"judge group {group_id}")
    location = written_at(getattr(agent, "reward_group", agent.judge_group))
    try:
        ends: set[asyncio.Future[Any]] = {task, over}
        await asyncio.wait(ends, timeout=agent.reward_group_seconds, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            what = f"did not return within {agent.reward_group_seconds:g} s"
            if not over.done():
                text = "agent %s: reward_group()%s %s%s; the rollouts of group %s fail"
                _log.error(text, agent.name, location, what, waits_at(task), group_id)
            return agent_failure(what, group_id)
        rewards = task.result()
        return [
            checked_reward(merged(each, given), f"agent {agent.name!r}: reward_group")
            for each, given in zip(own, rewards, strict=True)
        ]
    except (Exception, BaseExceptionGroup, asyncio.CancelledError, RolloutEnded) as error:
        if not task.done():  # this server cancelled the work
            raise
        where = raised_at(error) or location
        _log.error("agent %s: reward_group() failed%s; group %s", agent.name, where, group_id, exc_info=error)
        cause = cause_of(error)
        return cause.failure if isinstance(cause, RolloutFailed) else agent_failure("failed", group_id)
    finally:
        waiting = [each for run in runs if isinstance(run, Run) for each in run.under_way]  # what threads wait for
        for each in (task, *waiting):
            each.cancel()
        await await_cancelled([task, *waiting])


def agent_failure(what: str, group_id: str) -> Failure:
    """Return the failure of a group's reward. `what` is the verb of a sentence."""
    text = f"The agent's group reward {what}; the server's log has the reason under group {group_id}"
    return Failure(Category.INTERNAL, text, source=FailureClass.ENVIRONMENT)


def merged(own: RewardResult, given: RewardResult | None) -> RewardResult:
    """Return a rollout's own reward with what the group's reward gives: dictionaries are merged, other values replaced."""
    if given is None:
        return own
    names = [each.name for each in fields(RewardResult)]
    return replace(own, **{name: _merged_value(getattr(own, name), getattr(given, name)) for name in names})


def _merged_value(own: Any, given: Any) -> Any:
    if isinstance(own, Mapping) and isinstance(given, Mapping):
        return {**own, **given}
    return own if given is None or given == "" else given
