"""A group of rollouts: follows their ends, starts refills, stops early, and holds completed rollouts until the group's reward.

With an agent that has a `reward_group`, the end of a completed rollout is only provisional: the driver hands it over to the group
and leaves its slot. Once all rollouts of the group have ended, `reward_group` runs, and each held end is recorded with its final
reward. So an outcome never changes after it was recorded, and a group that is larger than the server's slots cannot block itself.
A rollout that fails or is cancelled is not held; one that is cancelled while it is held is recorded at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from rollout_server.core.error import Gone
from rollout_server.core.outcome import Cancellation, End, Failure, RewardResult
from rollout_server.core.record import Ended
from rollout_server.runtime.groups.reward import agent_failure, group_rewards
from rollout_server.runtime.groups.state import GroupPlan, GroupResult, GroupState, member_id
from rollout_server.runtime.ports import Credentials
from rollout_server.runtime.registry.registry import RolloutRegistry
from rollout_server.runtime.rollout import Rollout
from rollout_server.runtime.start_request import AdmittedStart

EARLY_STOP = "the group has enough usable rollouts"
"""Reason of the cancellations of an early stop."""


@dataclass(frozen=True, slots=True)
class FinishedMember:
    """A rollout of a group that has its outcome. `replaced`: another rollout was started in its place."""

    rollout: Rollout
    usable: bool
    replaced: bool


@dataclass(frozen=True, slots=True)
class HeldEnd:
    """The end of a completed rollout that waits for the group's reward."""

    rollout: Rollout
    run: object
    ended: Ended


class RolloutGroup:
    """One group. Lives on one event loop. `dropped` is called when the registry has dropped one of its rollouts."""

    def __init__(
        self,
        group_id: str,
        admitted: AdmittedStart,
        plan: GroupPlan,
        registry: RolloutRegistry,
        dropped: Callable[[RolloutGroup], None] = lambda group: None,
    ) -> None:
        self.id = group_id
        self.admitted = admitted
        self.plan = plan
        self.created = 0.0
        self.members: list[Rollout] = []
        self.result: GroupResult | None = None
        self.on_dropped = lambda: dropped(self)
        self._registry = registry
        self._state = GroupState.of(plan)
        self._items: list[FinishedMember | GroupResult] = []
        self._held: dict[int, HeldEnd] = {}
        self._has_reward = admitted.agent.overrides("reward_group")
        self._none_held: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._rewarding = self._reward_begun = False
        self._ended = 0
        self._grown: asyncio.Event | None = None
        self._watchers: list[ExitStack] = []
        self._rollouts: list[Rollout] = []

    def start(self) -> None:
        """Start all rollouts, or none of them. Raise `RolloutError`."""
        self.form(self._registry.start_group([self._member(index) for index in range(self.plan.count)]))

    def form(self, members: Sequence[Rollout]) -> None:
        """Form the group of rollouts that have just been started, with their `group_index`."""
        self.members = list(members)
        self.created = self.members[0].created
        for rollout in self.members:
            self._adopt(rollout)

    @property
    def caller(self) -> str:
        """The caller that owns the group."""
        return self.admitted.request.caller

    @property
    def rewarding(self) -> bool:
        """See `GroupMembership`."""
        return self._rewarding

    @property
    def last_sequence(self) -> int:
        """Number of the last item that `follow` can yield now."""
        return len(self._items)

    async def follow(self, after: int) -> AsyncIterator[tuple[int, FinishedMember | GroupResult]]:
        """Yield the items after a sequence number, with their numbers. The last item is the result.

        Raises `Gone` for a number that the group has not reached yet.
        """
        if after > len(self._items):
            raise Gone(f"the group has no item {after} yet", oldest=1, newest=len(self._items))
        while True:
            while after < len(self._items):
                after += 1
                yield after, self._items[after - 1]
            if self.result is not None:
                return
            self._grown = self._grown or asyncio.Event()
            await self._grown.wait()

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Count a client as attached to all rollouts of the group, and to those that are started anew meanwhile."""
        with ExitStack() as stack:
            self._watchers.append(stack)
            try:
                for rollout in self.members:
                    stack.enter_context(rollout.attached())
                yield
            finally:
                self._watchers.remove(stack)

    def update_credentials(self, by: AdmittedStart) -> None:
        """Take over the credentials of a repeated request, also for rollouts that are started anew."""
        if self.result is not None:
            return
        credentials = by.request.credentials
        for rollout in self.members:
            rollout.update_credentials(credentials)
        self._set_credentials(self.admitted.request.credentials.updated(credentials))

    def wait(self, rollout: Rollout, run: object, ended: Ended) -> bool:
        """See `GroupMembership`."""
        if not rollout.ending.provisional or isinstance(ended.end, Failure | Cancellation):
            return False
        index = self._index(rollout)
        self._held[index] = HeldEnd(rollout, run, ended)
        self._registry.park(rollout)
        if rollout.ending.requested.done():  # during the agent's `cleanup`
            self._end_early(index)
            return True
        rollout.ending.requested.add_done_callback(lambda _: self._end_early(index))
        self._step(rollout, ended.end)
        return True

    def on_ended(self, rollout: Rollout) -> None:
        """See `GroupMembership`."""
        outcome = rollout.outcome
        if outcome is None:
            return
        replaced = self._step(rollout, outcome.end, has_outcome=True)
        self._ended += not replaced
        self._add(FinishedMember(rollout, self.plan.is_usable(outcome.end), replaced))
        self._finish_if_over()

    def _step(self, rollout: Rollout, end: End, *, has_outcome: bool = False) -> bool:
        """Apply the end of a rollout. Return whether another one was started in its place."""
        before, index = self._state, self._index(rollout)
        # The reward covers the rollouts that it found. What fails with it, or is published after it, is not started anew.
        may_refill = has_outcome and not (self._reward_begun or self._registry.draining or _is_cancelled(rollout))
        self._state = state = before.after(index, end, may_refill=may_refill)
        if state.refilled > before.refilled:
            self.members[index] = self._registry.start_anew(rollout, self._member(index, state.refilled))
            self._adopt(self.members[index])
            return True
        if state.early_stop and not before.early_stop:
            for other in self.members:
                if other.ending.decided is None:
                    other.ending.request(Cancellation(EARLY_STOP))
        if state.is_complete and self._held and not self._rewarding:
            self._rewarding = self._reward_begun = True
            self._registry.spawn(self._reward(), f"reward of group {self.id}")
        return False

    async def _reward(self) -> None:
        """Compute the group's reward and record the held ends with it."""
        held = [self._held[index] for index in sorted(self._held)]
        rewards: Sequence[RewardResult] | Failure = agent_failure("was interrupted", self.id)
        try:
            if held:
                runs, own = [each.run for each in held], [each.ended.reward_result for each in held]
                rewards = await group_rewards(self.admitted.agent, self.id, runs, own, self._none_held)
        finally:
            # On every path: a rollout always gets an outcome.
            for place, each in enumerate(held):
                reward = rewards if isinstance(rewards, Failure) else rewards[place]
                self._record_held(self._index(each.rollout), _with_reward(each, reward))
            self._rewarding = False
            self._finish_if_over()

    def _end_early(self, index: int) -> None:
        """Record the requested end of a rollout that was held."""
        if index in self._held:
            each = self._held[index]
            end = each.rollout.ending.requested.result()
            self._record_held(index, replace(each.ended, end=end, reward_result=RewardResult()))

    def _record_held(self, index: int, ended: Ended) -> None:
        """Record the end of a rollout, unless it was recorded before."""
        each = self._held.pop(index, None)
        if each is None:
            return
        if self._rewarding and not self._held and not self._none_held.done():
            self._none_held.set_result(None)
        self._registry.end_parked(each.rollout, ended)

    def _finish_if_over(self) -> None:
        """Set the result once all outcomes are published: that may be later than they are recorded."""
        if self._held or self._rewarding or self._ended < self.plan.count or self.result is not None:
            return
        self.result = self._state.result()
        self._add(self.result)
        self._set_credentials(Credentials())
        # Later: the registry may still be recording the last end.
        asyncio.get_running_loop().call_soon(self._release)

    def _set_credentials(self, credentials: Credentials) -> None:
        self.admitted = replace(self.admitted, request=replace(self.admitted.request, credentials=credentials))

    def _release(self) -> None:
        for rollout in self._rollouts:
            rollout.release(self)

    def _add(self, item: FinishedMember | GroupResult) -> None:
        self._items.append(item)
        if self._grown is not None:
            self._grown.set()
            self._grown = None

    def _adopt(self, rollout: Rollout) -> None:
        rollout.join(self, provisional=self._has_reward)
        self._rollouts.append(rollout)
        for stack in self._watchers:
            stack.enter_context(rollout.attached())

    def _member(self, index: int, refills: int = 0) -> AdmittedStart:
        request = self.admitted.request
        rollout_id = member_id(request.spec.rollout_id, index, refills)
        spec = replace(request.spec, rollout_id=rollout_id, group_id=self.id, group_index=index)
        return replace(self.admitted, request=replace(request, spec=spec, request_id=""))

    def _index(self, rollout: Rollout) -> int:
        return rollout.spec.group_index or 0


def _is_cancelled(rollout: Rollout) -> bool:
    """Return whether the rollout was cancelled, by a caller or because it is stale, even if it ended otherwise before that."""
    requested = rollout.ending.requested
    return requested.done() and isinstance(requested.result(), Cancellation)


def _with_reward(held: HeldEnd, reward: RewardResult | Failure) -> Ended:
    """Return the end of a held rollout with its final reward, or with the failure of the group's reward."""
    if isinstance(reward, RewardResult):
        return replace(held.ended, reward_result=reward)
    return replace(held.ended, end=replace(reward, turn=held.rollout.machine.turn), reward_result=RewardResult())
