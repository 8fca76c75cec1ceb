"""A group of rollouts: follows their ends, starts refills, stops early, and holds completed rollouts until the group's reward.

With an agent that has a `reward_group`, the end of a completed rollout is only provisional: the driver hands it over to the group
and leaves its slot. Once all rollouts of the group have ended, `reward_group` runs, and each held end is recorded with its final
reward. So an outcome never changes after it was recorded, and a group that is larger than the server's slots cannot block itself.
A rollout that fails or is cancelled is not held; one that is cancelled while it is held is recorded at once.

A group survives the process with its rollouts: the journal has what it was formed of and its refills, and the ends of its rollouts
tell the rest. A refill shares the commit of the end that it follows, and the ends of a group have increasing times.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from math import inf, nextafter

from rollout_server.core.error import Gone, RolloutError
from rollout_server.core.outcome import Cancellation, Category, End, Failure, RewardResult, Stop
from rollout_server.core.record import Ended
from rollout_server.runtime.groups.reward import agent_failure, group_rewards
from rollout_server.runtime.groups.state import EARLY_STOP, GroupPlan, GroupResult, GroupState, member_id
from rollout_server.runtime.journal import FormedGroup, GroupDropped, GroupFormed, GroupGrew
from rollout_server.runtime.ports import Credentials, Tool
from rollout_server.runtime.registry.interruption import interrupted_text, obstacle_to_resume
from rollout_server.runtime.registry.registry import RolloutRegistry
from rollout_server.runtime.rollout import Rollout
from rollout_server.runtime.start_request import AdmittedStart


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
    """One group. Lives on one event loop.

    `uid` is the server's id of it, which is its `id`, too, if its request names none. `dropped` is called when the registry has
    dropped one of its rollouts; None: callers cannot find the group.
    """

    def __init__(
        self,
        uid: str,
        admitted: AdmittedStart,
        plan: GroupPlan,
        registry: RolloutRegistry,
        dropped: Callable[[RolloutGroup], None] | None = None,
    ) -> None:
        self.uid = uid
        self.id = admitted.request.spec.group_id or uid
        self.admitted = admitted
        self.plan = plan
        self.created = 0.0
        self.members: list[Rollout] = []
        self.result: GroupResult | None = None
        self._dropped = dropped
        self._is_dropped = False
        self._registry = registry
        self._tools: Sequence[Tool] | None = None
        self._state = GroupState.of(plan)
        self._items: list[FinishedMember | GroupResult] = []
        self._problem: RolloutError | None = None
        self._held: dict[int, HeldEnd] = {}
        self._has_reward = admitted.agent.overrides("reward_group")
        self._none_held: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._rewarding = self._reward_begun = False
        self._ended = 0
        self._last_end = 0.0
        self._grown: asyncio.Event | None = None
        self._watchers: list[ExitStack] = []
        self._rollouts: list[Rollout] = []

    def start(self) -> None:
        """Start all rollouts, or none of them. Raise `RolloutError`."""
        self.form(self._registry.start_group([self._member(index) for index in range(self.plan.count)]))

    def form(self, members: Sequence[Rollout]) -> None:
        """Form the group of rollouts that have just been started, with their `group_index`."""
        self.members = list(members)
        self.created, self._tools = self.members[0].created, self.members[0].tools
        for rollout in self.members:
            self._adopt(rollout)
        request, plan, uids = self.admitted.request, self.plan, tuple(rollout.uid for rollout in members)
        ids = self.uid, self.id, request.request_id, request.spec.rollout_id
        listed = self._dropped is not None
        self._registry.journal.write(GroupFormed(FormedGroup(*ids, plan.min_usable, plan.refill, listed, uids)))

    def restore(
        self, members: Sequence[Rollout], refills: Sequence[tuple[int, Rollout]], tools: Sequence[Tool] | None
    ) -> None:
        """Take over the rollouts of an earlier process: those that it was formed of, and its refills with their indices.

        `tools` are those of further refills; None: there are none, because this server does not have their agent.
        """
        self.members, self._tools = list(members), tools
        for index, refill in refills:
            self.members[index] = refill
        self.created = members[0].created
        rollouts = [*members, *(refill for _, refill in refills)]
        finished = [rollout for rollout in rollouts if rollout.outcome is not None]
        for rollout in sorted(finished, key=lambda each: each.finished or 0.0):
            self._restore_end(rollout)
        for rollout in rollouts:
            self._adopt(rollout)

    def resume(self) -> None:
        """Request the ends that the rollouts of an earlier process were to have: right before they continue."""
        unfinished = [rollout for rollout in self.members if rollout.outcome is None]
        completed = any(isinstance(end, Stop) for end in self._state.ends)
        # The journal has a part of these ends if it is damaged, or all of them if the agent had no `reward_group` before.
        if self._has_reward and unfinished and completed:
            self._reward_begun = True
            text = interrupted_text("rollouts of its group had completed, so `reward_group` cannot run for all of them")
            end: End = Failure(Category.INTERRUPTED, text)
        elif self._state.early_stop:
            end = Cancellation(EARLY_STOP)
        else:
            return
        for rollout in unfinished:
            rollout.ending.request(end)

    def abandon(self, problem: RolloutError) -> None:
        """Raise `problem` to all that follow the group: its rollouts are forgotten without an end."""
        self._problem = problem
        self._wake()

    @property
    def caller(self) -> str:
        """The caller that owns the group."""
        return self.admitted.request.caller

    @property
    def rollouts(self) -> Sequence[Rollout]:
        """All of its rollouts, also those that were replaced."""
        return self._rollouts

    @property
    def is_stored(self) -> bool:
        """Whether the journal has stored the group: its first commit has all members."""
        return self._rollouts[0].log.last_sequence > 0

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

        Raises `Gone` for a number that the group has not reached yet, and the problem of `abandon`.
        """
        if after > len(self._items):
            raise Gone(f"the group has no item {after} yet", oldest=1, newest=len(self._items))
        while True:
            while after < len(self._items):
                after += 1
                yield after, self._items[after - 1]
            if self._problem is not None:
                raise self._problem
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

    def next_end(self, now: float) -> float:
        """See `GroupMembership`. After a restart, the times of the ends give the order of the items."""
        self._last_end = max(now, nextafter(self._last_end, inf))
        return self._last_end

    def on_recorded(self, rollout: Rollout, end: End) -> None:
        """See `GroupMembership`."""
        registry = self._registry
        # What is started anew during a drain waits for the next process, which must be able to run it. The reward covers the
        # rollouts that it found: what fails with it is not started anew.
        stops = registry.draining and not self._can_wait()
        may_refill = not (self._tools is None or self._reward_begun or stops or _is_cancelled(rollout))
        self._step(rollout, end, may_refill=may_refill)

    def on_ended(self, rollout: Rollout) -> None:
        """See `GroupMembership`."""
        if rollout.outcome is None or rollout.log.is_abandoned:
            return
        end, replaced = rollout.outcome.end, self.members[self._index(rollout)] is not rollout
        self._ended += not replaced
        self._add(FinishedMember(rollout, self.plan.is_usable(end), replaced))
        self._finish_if_over()

    def on_dropped(self) -> None:
        """See `GroupMembership`. The group is forgotten with the first of its rollouts."""
        if not self._is_dropped:
            self._is_dropped = True
            self._registry.journal.write(GroupDropped(self.uid))
            if self._dropped is not None:
                self._dropped(self)

    def _step(self, rollout: Rollout, end: End, *, may_refill: bool = False) -> None:
        """Apply the end of a rollout."""
        before, index = self._state, self._index(rollout)
        self._state = state = before.after(index, end, may_refill=may_refill)
        if state.refilled > before.refilled and self._tools is not None:
            refill = self._registry.start_anew(self._member(index, state.refilled), self._tools)
            self._registry.journal.write(GroupGrew(self.uid, state.refilled, index, refill.uid))
            self.members[index] = refill
            self._adopt(refill)
            return
        if state.early_stop and not before.early_stop:
            for other in self.members:
                if other.ending.decided is None:
                    other.ending.request(Cancellation(EARLY_STOP))
        if state.is_complete and self._held and not self._rewarding:
            self._rewarding = self._reward_begun = True
            self._registry.spawn(self._reward(), f"reward of group {self.id}")

    def _restore_end(self, rollout: Rollout) -> None:
        """Apply the end of a rollout that an earlier process has published."""
        outcome, index = rollout.outcome, self._index(rollout)
        if outcome is not None:
            is_replaced = self.members[index] is not rollout
            state = self._state
            self._state = (
                replace(state, refilled=state.refilled + 1)
                if is_replaced
                else state.after(index, outcome.end, may_refill=False)
            )
            self._last_end = rollout.finished or 0.0
            self.on_ended(rollout)

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
        """Record the requested end of a rollout that was held. A suspended one gets none: the next process continues it."""
        if index in self._held:
            each = self._held[index]
            end = each.rollout.ending.requested.result()
            ended = replace(each.ended, end=end, reward_result=RewardResult())
            self._record_held(index, None if each.rollout.is_suspended else ended)

    def _record_held(self, index: int, ended: Ended | None) -> None:
        """Record the end of a rollout, unless it was recorded before. None: let it go without an end."""
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
        self._wake()

    def _wake(self) -> None:
        if self._grown is not None:
            self._grown.set()
            self._grown = None

    def _adopt(self, rollout: Rollout) -> None:
        rollout.join(self, provisional=self._has_reward, held=self.result is None)
        self._rollouts.append(rollout)
        for stack in self._watchers:
            stack.enter_context(rollout.attached())

    def _member(self, index: int, refills: int = 0) -> AdmittedStart:
        request = self.admitted.request
        rollout_id = member_id(request.spec.rollout_id, index, refills)
        spec = replace(request.spec, rollout_id=rollout_id, group_id=self.id, group_index=index)
        return replace(self.admitted, request=replace(request, spec=spec, request_id=""))

    def _can_wait(self) -> bool:
        """Return whether the next process of the server could run a refill that this one only accepts."""
        registry, spec, agent = self._registry, self.admitted.request.spec, self.admitted.agent
        by_default = registry.resume_by_default
        return registry.journal.is_durable and not obstacle_to_resume(
            spec, agent, (), request_id="", resume_by_default=by_default, never_ran=True
        )

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
