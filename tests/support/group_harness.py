"""A runtime harness that starts groups, and an agent that ranks the rollouts of a group."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rollout_server import Agent, RewardResult, Run
from rollout_server.runtime.groups.group import FinishedMember, RolloutGroup
from rollout_server.runtime.groups.registry import GroupRegistry
from rollout_server.runtime.groups.state import GroupPlan, GroupResult
from rollout_server.runtime.registry.selection import Selection
from rollout_server.runtime.start_request import StartRequest

from tests.support.runtime_harness import ADMIN, RuntimeHarness, Say, Script, a_spec, check_log

SLOW = 1000.0


class Ranked(Agent):
    """Rewards each rollout with the length of its last message, and then with its rank in the group.

    `gate` delays the group's reward; `failing` is raised by it.
    """

    name = "ranked"

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.failing: BaseException | None = None
        self.groups: list[list[int | None]] = []

    async def reward(self, run: Run) -> RewardResult:
        length = float(len(str(run.messages[-1]["content"])))
        return RewardResult(reward=length, scores={"length": length})

    async def reward_group(self, runs: Sequence[Run]) -> list[RewardResult]:
        self.groups.append([run.request.group_index for run in runs])
        await self.gate.wait()
        if self.failing is not None:
            raise self.failing
        lengths = sorted(run.reward.reward or 0.0 for run in runs)
        return [
            RewardResult(reward=float(lengths.index(run.reward.reward or 0.0)), scores={"ranked": 1.0}) for run in runs
        ]


class GroupHarness(RuntimeHarness):
    """A harness for groups. A script belongs to a rollout id; without one a rollout completes at once."""

    taken = 0
    dropped = 0

    def __init__(self, *agents: Agent, **settings: object) -> None:
        super().__init__(*agents, **settings)  # type: ignore[arg-type]
        self.groups = GroupRegistry(self.roster)

    def _new_uid(self) -> str:
        self.taken += 1
        return f"u-{self.taken}"

    def says(self, **scripts: Say) -> None:
        """Set the completion of the rollouts of group "g" by suffix: `_0`, or `_0_r1` for a refill."""
        self.scripts |= {"g" + name.replace("_", "/"): Script(say) for name, say in scripts.items()}

    def start_group(
        self,
        count: int,
        request_id: str = "",
        min_usable: int = 0,
        refill: int = 0,
        caller: str = "me",
        **fields: object,
    ) -> RolloutGroup:
        """Start a group with the rollout ids "g/0", "g/1", ...; or find it."""
        request = StartRequest(a_spec(**{"rollout_id": "g", **fields}), caller, request_id)
        return self.start_request(request, GroupPlan(count, min_usable, refill))[0]

    def start_request(self, request: StartRequest, plan: GroupPlan) -> tuple[RolloutGroup, bool]:
        """Admit and start a group."""
        return self.groups.start(self.groups.admit(request, plan), plan)

    async def next_process(self, *agents: Agent, resumes: bool = True, **settings: object) -> GroupHarness:
        """Return the harness of the next process after a crash. Its rollouts have the scripts that are set here."""
        journal = self.roster.journal.after_crash()  # type: ignore[attr-defined]
        harness = type(self)(*agents, journal=journal, **settings)
        harness.scripts = {name: type(script)(*script.says) for name, script in self.scripts.items()}
        harness.taken = self.taken + 1000  # its uids are new
        await harness.groups.load()
        if resumes:
            await harness.groups.resume()
        return harness

    async def close(self) -> None:
        """End all rollouts, and check each of them."""
        await self.roster.drain(0)
        await asyncio.sleep(0)
        rollouts = [rollout for _, rollout in self.roster.select(Selection(ADMIN))]
        for rollout in rollouts:
            check_log(rollout)
        assert (self.roster.running, self.roster.queued) == (0, 0)
        assert self.roster.totals.finished == len(rollouts) + self.dropped


async def finished(group: RolloutGroup) -> GroupResult:
    """Wait for the end of a group."""
    *_, (_, result) = [item async for item in group.follow(0)]
    assert isinstance(result, GroupResult)
    return result


async def items(group: RolloutGroup, after: int = 0) -> list[tuple[int, int, bool, bool] | GroupResult]:
    """Wait for the end of a group; return (sequence, index, usable, replaced) per rollout, and the result."""
    found: list[tuple[int, int, bool, bool] | GroupResult] = []
    async for sequence, item in group.follow(after):
        if isinstance(item, FinishedMember):
            found.append((sequence, item.rollout.spec.group_index or 0, item.usable, item.replaced))
        else:
            found.append(item)
    return found
