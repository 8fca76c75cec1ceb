"""The registry: the rollouts that this server knows. Admission, idempotency, cancellation and retention."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

from rollout_server.core.error import Draining, NotPossible, RolloutError
from rollout_server.core.outcome import Cancellation, End
from rollout_server.core.record import Ended
from rollout_server.core.spec_validation import Bounds
from rollout_server.runtime.agent_protocol import AgentProtocol
from rollout_server.runtime.aio.event_loop import until_done
from rollout_server.runtime.capture.endpoint import CapturePorts
from rollout_server.runtime.journal import (
    CancelRequested,
    JournalUnavailable,
    RolloutDropped,
    StoredDelivery,
    journal_down,
)
from rollout_server.runtime.log import Entry
from rollout_server.runtime.ports import OpenSampler, Tool
from rollout_server.runtime.registry.admission import StartAdmission
from rollout_server.runtime.registry.admission_queue import RolloutQueue
from rollout_server.runtime.registry.dependencies import RegistryDependencies, RestoreGroups, by_name, log_finished
from rollout_server.runtime.registry.interruption import (
    end_without_slot,
    interrupt,
    restored,
)
from rollout_server.runtime.registry.outcome_outbox import Outbox
from rollout_server.runtime.registry.pages import RolloutPages
from rollout_server.runtime.registry.policies import AnnouncedPolicies
from rollout_server.runtime.registry.rollout_index import Retention, RolloutIndex, check_alike
from rollout_server.runtime.registry.selection import Selection
from rollout_server.runtime.registry.totals import Totals
from rollout_server.runtime.rollout import Rollout, RolloutState
from rollout_server.runtime.run.driver import drive, seconds_to_end
from rollout_server.runtime.start_request import AdmittedStart, Caller, Capacity
from rollout_server.runtime.tools.resources import ToolResources

Check: TypeAlias = Callable[[Sequence[Rollout | None]], None]
"""Inspects the rollouts found for a group of requests (None: will be started) and raises if they cannot be used."""

_log = logging.getLogger(__name__)
_LAST_DELIVERIES = 5.0
"""Seconds for deliveries at the end of a drain, even if its grace time is used up; and before that, for the last commit."""


class RolloutRegistry:
    """All rollouts of a server. Lives on one event loop.

    `start` contains no `await` between its lookup and its insertion, so of concurrent duplicates the second finds the first.
    """

    def __init__(
        self,
        agents: Sequence[AgentProtocol],
        open_sampler: OpenSampler,
        new_uid: Callable[[], str] | None = None,
        *,
        capacity: Capacity = Capacity(),
        bounds: Bounds = Bounds(),
        dependencies: RegistryDependencies = RegistryDependencies(),
    ) -> None:
        self.resume_by_default = dependencies.resume_by_default
        self.agents = by_name(agents)
        self.default_agent = agents[0].name
        self.capacity = capacity
        self.bounds = bounds
        durable = dependencies.journal.is_durable
        self.admission = StartAdmission(
            agents=self.agents, default_agent=self.default_agent, bounds=bounds, capacity=capacity, durable=durable
        )
        self.totals = Totals()
        self.draining = False
        self.policies = AnnouncedPolicies()
        self._open_sampler = open_sampler
        self.journal = journal = dependencies.journal
        # Every uid begins with the server's id, so a gateway for several servers can route by it (D26).
        self.new_id = new_uid or (lambda: f"{journal.server_id}-{secrets.token_hex(10)}")
        self._clock = dependencies.clock
        self._observer, self._tracer = dependencies.observer, dependencies.tracer
        self._tool_resources = dependencies.tool_resources or ToolResources()
        self._models = dependencies.models
        self.model_access = dependencies.model_access
        self._capture_ports = CapturePorts(
            dependencies.model_access, dependencies.later_system, dependencies.count_tool
        )
        self._outbox = Outbox(dependencies, self._settle)
        self._index = RolloutIndex()
        self.pages = RolloutPages(self._index)
        self._queue = RolloutQueue(capacity, self._clock)
        self._tasks: set[asyncio.Task[None]] = set()
        self._retention = Retention(capacity, self._clock)
        self._is_held_back = False  # nothing begins to run: before `resume`, and after a drain has stopped what ran
        self._unresumable: list[tuple[Rollout, End]] = []

    @property
    def running(self) -> int:
        """Number of running rollouts."""
        return self._queue.running

    @property
    def queued(self) -> int:
        """Number of waiting rollouts."""
        return len(self._queue)

    @property
    def active_bytes(self) -> int:
        """Approximate memory of rollouts that wait, run, or still deliver their outcome."""
        return self._queue.bytes

    @property
    def owed(self) -> int:
        """Number of outcomes that still have to be delivered."""
        return self._outbox.pending

    def start(self, admitted: AdmittedStart) -> tuple[Rollout, bool]:
        """Start an admitted rollout, or find the one that was started under the same request id.

        Returns the rollout and whether it was found. Raises `RolloutError` if there is no room, or if the request id belongs to
        a different payload.
        """
        existing = self._index.find(admitted)
        if existing is not None:
            existing.update_credentials(admitted.request.credentials)
            return existing, True
        self._check_room((admitted,))
        return self._take(admitted, admitted.tools()), False

    async def start_all(
        self, admitted: Sequence[AdmittedStart], check: Check = lambda found: None
    ) -> Sequence[tuple[Rollout, bool]]:
        """Start or find all rollouts of a group, or none of them; then raise what `start` raises.

        The method yields to the event loop after each agent's choice of tools. Then it starts all rollouts without an `await`.
        Right before that, `check` receives the rollout found for each request and may raise. No other task runs between `check`
        and the return.
        """
        tools = dict[int, Sequence[Tool]]()
        for at, each in enumerate(admitted):
            if self._index.find(each) is None:
                tools[at] = each.tools()
            await asyncio.sleep(0)
        # No await from here on. Other tasks may have started or dropped rollouts meanwhile, so look everything up again.
        found = [self._index.find(each) for each in admitted]
        check_alike(admitted)
        lacking = {at: each for at, each in enumerate(admitted) if found[at] is None}
        tools |= {at: each.tools() for at, each in lacking.items() if at not in tools}
        self._check_room(tuple(lacking.values()))
        check(found)
        taken: list[tuple[Rollout, bool]] = []
        for at, each in enumerate(admitted):
            existing = self._index.find(each)  # an earlier request of this group may have the same id
            if existing is not None:
                existing.update_credentials(each.request.credentials)
            taken.append((self._take(each, tools[at]), False) if existing is None else (existing, True))
        return taken

    async def load(self, restore_groups: RestoreGroups) -> None:
        """Take over the rollouts of earlier processes from the journal. Called once, before the first start.

        Nothing runs and nothing is delivered before `resume`. `restore_groups` is called before a finished rollout can be
        dropped: it may hold some. Raises `JournalUnusable`.
        """
        self._is_held_back = True
        finished: dict[Rollout, StoredDelivery | None] = {}
        for stored in await self.journal.load():
            if not stored.entries:  # its acceptance was not stored completely, so its start was not acknowledged
                self.journal.write(RolloutDropped(stored.start.uid))
                continue
            found = restored(stored, self.agents, self._clock, self, resume_by_default=self.resume_by_default)
            rollout, number = found.rollout, self._index.add(found.rollout, found.admitted)
            self._queue.measure(rollout)
            if rollout.outcome is not None:
                finished[rollout] = stored.stored_delivery
            elif found.end is not None:
                self._unresumable.append((rollout, found.end))
            else:
                self._put(rollout, number)
        restore_groups(await self.journal.load_groups(), {each.uid: each for each in self._index.rollouts()})
        for rollout, since in self._retention.starts(finished):
            if rollout.spec.outcome is not None:
                self._outbox.restore(rollout, finished[rollout])
            self._settle(rollout, since)

    def resume(self) -> None:
        """Once the ports are open, continue what `load` took over, or end it as interrupted, and continue the deliveries."""
        self._is_held_back = False
        unresumable, self._unresumable = self._unresumable, []
        for rollout, end in unresumable:
            rollout.ending.request(end)  # no effect on one that was cancelled since the ports were opened
            end_without_slot(rollout)
        for rollout in self._index.rollouts():
            rollout.expect_clients()
        self._outbox.resume()
        self._fill()

    async def accept(self, rollouts: Iterable[Rollout]) -> None:
        """Wait until rollouts that were started or found are stored. Their start must not be acknowledged before that.

        Raises `Unavailable` if the journal cannot be written. Then rollouts that are not stored yet are forgotten without an
        outcome: for their callers they were never accepted.
        """
        try:
            await self.journal.flush(patient=False)
        except JournalUnavailable as error:
            for rollout in rollouts:
                if not rollout.log.last_sequence and not rollout.is_suspended:
                    self._refuse(rollout, journal_down(str(error)))
            raise journal_down(str(error)) from None

    def start_group(self, admitted: Sequence[AdmittedStart]) -> Sequence[Rollout]:
        """Start rollouts with the same agent and tools, all or none, whatever their request ids. Raise what `start` raises."""
        self._check_room(admitted)
        tools = admitted[0].tools()
        return [self._take(each, tools) for each in admitted]

    def start_anew(self, admitted: AdmittedStart, tools: Sequence[Tool]) -> Rollout:
        """Start a rollout in place of one that ended. It needs no further room. Once a drain has stopped the others, it waits."""
        rollout = self._take(admitted, tools)
        if self.draining and self._is_held_back:
            rollout.suspend()
        return rollout

    def park(self, rollout: Rollout) -> None:
        """Let a rollout leave its slot without an outcome: it waits for its group, until `end_parked`."""
        self._queue.park(rollout)

    def end_parked(self, rollout: Rollout, ended: Ended | None) -> None:
        """Record the end of a rollout that waited for its group. None: it is suspended, and gets none in this process."""
        self._queue.unpark(rollout)
        if ended is not None:
            rollout.record(ended)

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run work of this server that a drain waits for."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def get(self, uid: str, caller: Caller) -> Rollout:
        """Return a rollout that the caller may see. Raise `NotFound`."""
        return self._index.get(uid, caller)

    def select(self, selection: Selection) -> Iterator[tuple[int, Rollout]]:
        """Yield the selected rollouts with their numbers, newest first."""
        return self._index.select(selection)

    def cancel(self, selection: Selection, reason: str) -> Sequence[str]:
        """Request the end of the selected rollouts. Return the uids of those that had not finished."""
        found = self.select(selection.unfinished())
        chosen = [rollout for _, rollout in found if rollout.state is not RolloutState.FINISHED]
        for rollout in chosen:
            rollout.ending.request(Cancellation(reason))
            if rollout.machine.outcome is None:  # whatever end was requested before: this process may not record it
                self.journal.write(CancelRequested(rollout.uid, reason))
        return [rollout.uid for rollout in chosen]

    def acknowledge(self, uid: str, caller: Caller) -> None:
        """Record that the rollout's outcome was received. Raise `NotFound`, or `NotPossible` if there is no outcome yet."""
        rollout = self.get(uid, caller)
        if rollout.outcome is None:
            raise NotPossible(f"rollout {uid!r} has not finished", reason="ROLLOUT_NOT_FINISHED")
        rollout.mark_received()
        self._outbox.acknowledge(rollout)

    def redeliver(self, selection: Selection) -> Sequence[str]:
        """Send the outcomes of the selected rollouts again, except acknowledged ones. Return the uids. Raise `Draining`."""
        if self.draining:
            raise Draining("the server is stopping and begins no deliveries", retry_after=1.0)
        chosen = [rollout for _, rollout in self.select(selection) if rollout.owes or rollout.undelivered]
        # Until its delivery is over, a rollout counts as active and is not dropped. `_settle` returns it to the retention.
        self._retention.take_back(chosen)
        for rollout in chosen:
            self._queue.measure(rollout)
        return [rollout.uid for rollout in chosen if self._outbox.resend(rollout)]

    def forget(self) -> None:
        """Drop finished rollouts that exceed the limits of age, number or size, the oldest first."""
        for uid in self._retention.surplus():
            self._discard(self._index.drop(uid))

    async def drain(self, grace: float) -> None:
        """Refuse new rollouts, let running ones finish for `grace` seconds, then stop the others.

        With a durable journal, those that the next process can continue are suspended. The others end as interrupted. Agents get
        a few seconds to end, and the time limit of their `cleanup`. Deliveries get the rest of the grace, at least 5 seconds.
        """
        self.draining = True
        until = asyncio.get_running_loop().time() + grace
        await until_done(self._tasks, grace)
        self._is_held_back = self.journal.is_durable
        for rollout in self._index.rollouts():
            if rollout.machine.outcome is None:
                interrupt(rollout, durable=self.journal.is_durable, resume_by_default=self.resume_by_default)
        await until_done(self._tasks, max(seconds_to_end(agent) for agent in self.agents.values()))
        with suppress(JournalUnavailable, TimeoutError):  # deliveries of these ends begin once they are stored
            await asyncio.wait_for(self.journal.flush(), _LAST_DELIVERIES)
        await self._outbox.drain(max(_LAST_DELIVERIES, until - asyncio.get_running_loop().time()))

    def _refuse(self, rollout: Rollout, problem: RolloutError) -> None:
        """Forget a rollout whose acceptance could not be stored. It stops without an outcome."""
        self._queue.withdraw(rollout)
        rollout.suspend()
        self.policies.remove(rollout)
        self._index.drop(rollout.uid)
        rollout.log.abandon(problem)
        self._discard(rollout)  # at once: no restart may continue it beside that of a repeated request
        if not rollout.running:
            self._queue.forget(rollout)

    def _discard(self, rollout: Rollout) -> None:
        """Let journal and group forget a rollout that is not in the index any more."""
        self.journal.write(RolloutDropped(rollout.uid))
        if rollout.group is not None:
            rollout.group.on_dropped()

    def _check_room(self, admitted: Sequence[AdmittedStart]) -> None:
        """Raise `Draining`, or `Busy` if there is no room for all of these requests, which have the same caller."""
        if not admitted:
            return
        if self.draining:
            raise Draining("the server is stopping and takes no new rollouts", retry_after=1.0)
        if self.journal.problem:
            raise journal_down(self.journal.problem)
        self._queue.check(admitted[0].request.caller, [each.size for each in admitted])
        if any(each.request.spec.outcome is not None for each in admitted):
            self._outbox.check(admitted[0].request.caller, max(self.capacity.finished, 1))

    def _take(self, admitted: AdmittedStart, tools: Sequence[Tool]) -> Rollout:
        rollout = Rollout(self.new_id(), admitted, tools, self._clock, self)
        self._put(rollout, self._index.add(rollout, admitted))
        self._fill()
        rollout.had_to_wait = not rollout.running
        return rollout

    def _put(self, rollout: Rollout, number: int) -> None:
        """Put a rollout into the queue."""
        self.policies.add(rollout)
        rollout.ending.requested.add_done_callback(lambda _: self._end_queued(rollout))
        self._queue.put(rollout, number)

    def _fill(self) -> None:
        while not self._is_held_back and (rollout := self._queue.next()) is not None:
            self._run(rollout)

    def _run(self, rollout: Rollout) -> None:
        rollout.take_slot()
        task = asyncio.create_task(
            drive(rollout, self._open_sampler, self._tool_resources, self._models, self._capture_ports, self._tracer),
            name=f"drive {rollout.uid}",
        )
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._on_driven(done, rollout))

    def _on_driven(self, task: asyncio.Task[None], rollout: Rollout) -> None:
        self._tasks.discard(task)
        self._queue.leave(rollout)
        rollout.leave_slot()
        if not task.cancelled() and task.exception() is not None:
            _log.error("driving rollout %s failed", rollout.uid, exc_info=task.exception())
        if rollout.log.is_abandoned:
            self._queue.forget(rollout)
        elif rollout.outcome is not None:
            self._keep(rollout)
        self._fill()

    def _end_queued(self, rollout: Rollout) -> None:
        """End a rollout at once whose end is requested before it has a slot."""
        if self._queue.withdraw(rollout) and not rollout.is_suspended:
            end_without_slot(rollout)

    def on_recorded(self, rollout: Rollout, entries: Sequence[Entry]) -> None:
        """See `RolloutOwner`."""
        if not rollout.log.is_abandoned:
            self._queue.measure(rollout)
        if rollout.machine.outcome is not None:
            self.policies.remove(rollout)

    def on_published(self, rollout: Rollout, entries: Sequence[Entry]) -> None:
        """See `RolloutOwner`."""
        if rollout.log.is_abandoned:
            return
        has_ended = rollout.outcome is not None
        if has_ended and rollout.spec.outcome is not None:
            # Send it now and not when the driver returns: an agent that ignores its cancellation must not delay the outcome.
            self._outbox.send(rollout, rollout.spec.outcome)
        self._observer.recorded(rollout, entries)
        self.totals.count_turns(entries)
        if has_ended:  # lists and totals show it as finished, although its agent may still run
            self._index.mark_finished(rollout)
            self.totals.count_end(rollout)
            if not rollout.running:
                self._keep(rollout)

    def on_released(self, rollout: Rollout) -> None:
        """See `RolloutOwner`."""
        if rollout.outcome is not None and not rollout.log.is_abandoned:
            self._settle(rollout)

    def _keep(self, rollout: Rollout) -> None:
        log_finished(rollout)
        self._settle(rollout)

    def _settle(self, rollout: Rollout, since: float | None = None) -> None:
        """Drop the credentials once the delivery is over, and move the rollout to the retention store once nothing uses it.

        Called when the rollout leaves its slot, when its delivery is over and when its hold is released, in any order. The last
        of these calls finds all conditions true and moves it. `since`: see `Retention.add`.
        """
        if self._outbox.holds(rollout):
            return
        if not rollout.is_read:
            rollout.drop_credentials()
        if not (rollout.running or rollout.held):
            self._queue.forget(rollout)
            self._retention.add(rollout, since)
            self.forget()
