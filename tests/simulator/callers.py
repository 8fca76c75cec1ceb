"""The callers of a world: they repeat requests until these are accepted, and compare what they see with what they saw before."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from rollout_server.core.error import Busy, Conflict, Draining, NotFound, NotPossible, RolloutError, Unavailable
from rollout_server.core.message import Message
from rollout_server.core.record import Ended
from rollout_server.runtime.groups.group import FinishedMember, RolloutGroup
from rollout_server.runtime.groups.state import GroupResult
from rollout_server.runtime.log import Entry
from rollout_server.runtime.policy import PolicyUpdate
from rollout_server.runtime.registry.selection import Selection
from rollout_server.runtime.rollout import Rollout
from rollout_server.runtime.start_request import Caller

from tests.simulator.faults import Fault
from tests.simulator.jobs import Job
from tests.support.machine_records import shown_outcome

if TYPE_CHECKING:
    from tests.simulator.world import Life, World

_AGAIN = 2.0


class Callers:
    """What all callers know; it outlives the server.

    Attributes:
        accepted: the job of each rollout whose acceptance was reported.
        seen: the events of each rollout, in order.
        outcomes: the outcome of each rollout, as it was seen first.
        items: the items of each group, in order.
    """

    def __init__(self, world: World) -> None:
        self.accepted: dict[str, Job] = {}
        self.seen: dict[str, list[Entry]] = defaultdict(list)
        self.outcomes: dict[str, object] = {}
        self.items: dict[str, list[object]] = defaultdict(list)
        self._world = world

    def accept(self, rollout: Rollout, job: Job) -> None:
        """The acceptance of a rollout was reported to its caller."""
        self._world.note(f"accepted {rollout.uid}")
        self._world.laws.require(
            self._world.disk.has(rollout.uid, 1), f"{rollout.uid}: accepted before its acceptance was committed"
        )
        self.accepted.setdefault(rollout.uid, job)
        if rollout.uid not in job.uids:
            job.uids.append(rollout.uid)

    def see(self, uid: str, entry: Entry) -> None:
        """An event was received."""
        seen, laws = self.seen[uid], self._world.laws
        laws.require(self._world.disk.has(uid, entry.sequence), f"{uid}: event {entry.sequence} seen before its commit")
        if entry.sequence <= len(seen):
            laws.require(seen[entry.sequence - 1] == entry, f"{uid}: event {entry.sequence} has changed")
        else:
            laws.require(entry.sequence == len(seen) + 1, f"{uid}: event {entry.sequence} came after {len(seen)}")
            seen.append(entry)

    def see_outcome(self, rollout: Rollout) -> None:
        """The outcome of a rollout was received."""
        self._world.laws.require(rollout.outcome is not None, f"{rollout.uid}: no outcome after the last event")
        if rollout.outcome is not None:
            shown = shown_outcome(rollout.outcome)
            first = self.outcomes.setdefault(rollout.uid, shown)
            self._world.laws.require(first == shown, f"{rollout.uid}: the outcome has changed")

    def see_item(self, group: RolloutGroup, sequence: int, item: FinishedMember | GroupResult) -> None:
        """An item of a group was received."""
        shown: object = item
        if isinstance(item, FinishedMember):
            self.see_outcome(item.rollout)
            shown = (item.rollout.uid, item.usable, item.replaced)
        seen, laws = self.items[group.id], self._world.laws
        if sequence <= len(seen):
            laws.require(seen[sequence - 1] == shown, f"group {group.id}: item {sequence} has changed")
        else:
            laws.require(sequence == len(seen) + 1, f"group {group.id}: item {sequence} came after {len(seen)}")
            seen.append(shown)


class Client:
    """The calls for one job on one process of the server."""

    def __init__(self, life: Life, job: Job) -> None:
        self._life = life
        self._world = life.world
        self._job = job
        self._callers = life.world.callers
        self._caller = Caller(job.request.caller)
        self._watches: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Have the job accepted, and follow it to its end."""
        await asyncio.sleep(self._job.delay)
        again = self._world.faults.happens(Fault.CALLER_REPEATS)
        if not self._job.uids:
            await self._accepted()
        elif self._job.plan is not None:
            await self._find_group(repeats=again)
        elif again and self._job.request.request_id:
            await self._repeat()
        for uid in [*self._job.uids]:
            self._watch(uid)
        if self._world.faults.happens(Fault.CALLER_CONFLICTS) and self._job.plan is None:
            self._conflict()
        if self._world.faults.happens(Fault.CALLER_CANCELS):
            await asyncio.sleep(self._world.draw.uniform(0, 15))
            self._life.registry.cancel(Selection(self._caller, uids=tuple(self._job.uids)), "not needed")
        while self._watches:
            await asyncio.wait([*self._watches.values()])
            self._watches = {uid: task for uid, task in self._watches.items() if not task.done()}
        if self._world.faults.happens(Fault.CALLER_RESENDS):
            await asyncio.sleep(self._world.draw.uniform(0, 20))
            self._resend()

    async def _accepted(self) -> None:
        """Send the request until it is accepted."""
        while not self._job.uids:
            twice = self._world.faults.happens(Fault.CALLER_RACES)
            start = self._start if self._job.plan is None else self._start_group
            attempts = [asyncio.create_task(start()) for _ in range(1 + twice)]
            await asyncio.wait(attempts)
            if twice and self._job.request.request_id:
                found = {uid for attempt in attempts for uid in attempt.result()}
                size = 1 if self._job.plan is None else self._job.plan.count
                self._world.laws.require(len(found) <= size, f"{sorted(found)} have one request id")
            if not self._job.uids:
                await asyncio.sleep(_AGAIN)

    async def _start(self) -> Sequence[str]:
        """Send the request. Return the uid if the acceptance was reported."""
        registry = self._life.registry
        try:
            rollout, _ = registry.start(registry.admission.admit(self._job.request))
            await asyncio.sleep(0)
            await registry.accept([rollout])
        except (Busy, Draining, Unavailable) as error:
            self._world.note(f"not accepted: {error.reason}")
            return ()
        self._callers.accept(rollout, self._job)
        return [rollout.uid]

    async def _start_group(self) -> Sequence[str]:
        groups, plan = self._life.groups, self._job.plan
        if plan is None:
            return ()
        try:
            group, _ = groups.start(groups.admit(self._job.request, plan), plan)
            members = [*group.members]
            await groups.accept(group)
        except (Busy, Draining, Unavailable) as error:
            self._world.note(f"not accepted: {error.reason}")
            return ()
        for rollout in members:
            self._callers.accept(rollout, self._job)
        self._job.group_id = group.id
        self._watches[group.id] = asyncio.create_task(self._watch_group(group))
        return [rollout.uid for rollout in members]

    async def _find_group(self, *, repeats: bool) -> None:
        """Follow a group that an earlier process has accepted, unless the server may have forgotten it."""
        group_id, disk = self._job.group_id, self._world.disk
        stored = disk.groups.get(group_id)
        uids = () if stored is None else (*stored.group.members, *(uid for _, uid in stored.refills))
        # Whoever has ended may be dropped, and its group with it.
        forgotten = all(disk.rollouts[uid].ended for uid in uids)
        try:
            group = self._life.groups.get(group_id, self._caller)
        except NotFound:
            self._world.laws.require(forgotten, f"group {group_id} was accepted, and the server does not know it")
            return
        if group.result is None:
            self._world.faults.count(Fault.CRASH_IN_GROUP)
        self._watches[group_id] = asyncio.create_task(self._watch_group(group))
        if repeats and self._job.request.request_id:
            known = {rollout.uid for rollout in group.rollouts}
            found = {*await self._start_group()}
            same = self._job.group_id == group_id and found <= {rollout.uid for rollout in group.rollouts}
            self._world.laws.require(same or forgotten, f"group {group_id} of {known}: its request started {found}")

    async def _repeat(self) -> None:
        """Send a request again that was accepted: it finds its rollout, unless the server may have forgotten it."""
        known = self._job.uids[-1]
        stored = self._world.disk.rollouts[known]
        found = await self._start()
        free = stored.dropped or (self._job.request.until_received and stored.ended)
        self._world.laws.require(not found or free or found == [known], f"{known}: its request started {found}")

    def _conflict(self) -> None:
        request = self._job.request
        other = replace(
            request, spec=replace(request.spec, messages=(Message.write({"role": "user", "content": "?"}),))
        )
        uids = [*self._job.uids]
        found = self._life.registry.agents  # the registry of this process, whatever it has
        if not request.request_id or not found or not uids:
            return
        rollout = self._find(uids[-1])
        if rollout is None or rollout.outcome is not None:
            return
        try:
            self._life.registry.start(self._life.registry.admission.admit(other))
        except (Conflict, Busy, Draining, Unavailable):
            return
        self._world.laws.require(False, f"{uids[-1]}: its request id was accepted for another payload")

    def _resend(self) -> None:
        try:
            uids = self._life.registry.redeliver(Selection(self._caller, uids=tuple(self._job.uids)))
        except Draining:
            return
        self._life.reporter.refused -= {f"{uid}/outcome" for uid in uids}

    def _find(self, uid: str) -> Rollout | None:
        try:
            return self._life.registry.get(uid, self._caller)
        except NotFound:
            stored = self._world.disk.rollouts.get(uid)
            forgotten = stored is not None and stored.ended
            self._world.laws.require(forgotten, f"{uid} was accepted, and the server does not know it")
            return None

    def _watch(self, uid: str) -> None:
        if uid not in self._watches:
            self._watches[uid] = asyncio.create_task(self._follow(uid))

    async def _watch_group(self, group: RolloutGroup) -> None:
        seen, laws, draw = self._callers.items[group.id], self._world.laws, self._world.draw
        laws.require(
            group.last_sequence >= len(seen), f"group {group.id} has lost items: {seen[group.last_sequence :]}"
        )
        with group.attached() if draw.random() < 0.5 else nullcontext():
            async for sequence, item in group.follow(draw.choice((0, min(len(seen), group.last_sequence)))):
                self._callers.see_item(group, sequence, item)
        self._world.note(f"group {group.id}: {group.result}")
        ended = sum(isinstance(item, tuple) and not item[2] for item in seen)
        laws.require(ended == group.plan.count, f"group {group.id} ended with {ended} of {group.plan.count} members")

    async def _follow(self, uid: str) -> None:
        """Follow the events of a rollout to its end, and acknowledge the outcome."""
        rollout = self._find(uid)
        if rollout is None:
            return
        draw, faults = self._world.draw, self._world.faults
        after = draw.choice((0, min(len(self._callers.seen[uid]), rollout.log.last_sequence)))
        with rollout.attached() if draw.random() < 0.5 else nullcontext():
            async for entry in rollout.log.follow(after):
                self._callers.see(uid, entry)
                if faults.happens(Fault.CALLER_DETACHES, 0.1) and not isinstance(entry.record, Ended):
                    break
        await rollout.log.final_entry()
        self._callers.see_outcome(rollout)
        if self._job.acknowledges:
            await self._acknowledge(uid)

    async def _acknowledge(self, uid: str) -> None:
        await asyncio.sleep(self._world.draw.uniform(0, 3))
        try:
            self._life.registry.acknowledge(uid, self._caller)
        except (NotFound, NotPossible):
            return
        self._world.faults.count(Fault.CALLER_ACKNOWLEDGES)
        await self._life.registry.journal.flush()
        self._world.receiver.acknowledged.add(uid)


async def pause_policies(life: Life) -> None:
    """Announce policies of a caller, and pause its rollouts now and then."""
    world = life.world
    caller = world.draw.choice(("ann", "bob"))
    while not world.faults.calm:
        await asyncio.sleep(world.draw.uniform(1, 20))
        paused = world.faults.happens(Fault.CALLER_PAUSES)
        try:
            life.registry.policies.announce(caller, PolicyUpdate("", world.trainer.step, paused))
            if paused:
                await asyncio.sleep(world.draw.uniform(0, 30))
                life.registry.policies.announce(caller, PolicyUpdate("", world.trainer.step, False))
        except RolloutError as error:
            world.note(f"not announced: {error.reason}")
