"""The roster: the rollouts this server knows. Admission, idempotency, cancelling and forgetting."""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import count

from rollout_server.core.admission import Bounds, settle, violations
from rollout_server.core.error import Busy, Conflict, Draining, InvalidRequest, NotFound, NotPossible, Violation
from rollout_server.core.fingerprint import fingerprint
from rollout_server.core.outcome import Cancellation, Category, Failure
from rollout_server.core.record import Ended
from rollout_server.runtime.drive import drive
from rollout_server.runtime.kept import Kept
from rollout_server.runtime.log import Entry
from rollout_server.runtime.outbox import Outbox
from rollout_server.runtime.place import Place, Selection
from rollout_server.runtime.port import Credentials, OpenSampler, PlaysRuns
from rollout_server.runtime.rollout import Rollout, RolloutState
from rollout_server.runtime.surroundings import Surroundings
from rollout_server.runtime.wish import Caller, Capacity, Wish
from rollout_server.runtime.workbench import Workbench

_log = logging.getLogger(__name__)
_LAST_DELIVERIES = 5.0


class Roster:
    """Lives on one event loop. `start` does not await, so duplicates that arrive together find each other."""

    def __init__(
        self,
        agents: Sequence[PlaysRuns],
        open_sampler: OpenSampler,
        new_uid: Callable[[], str],
        *,
        capacity: Capacity = Capacity(),
        bounds: Bounds = Bounds(),
        surroundings: Surroundings = Surroundings(),
    ) -> None:
        self.agents = {agent.name: agent for agent in agents}
        if len(self.agents) < len(agents):
            raise ValueError(f"two agents have the same name, of {[agent.name for agent in agents]}")
        self.default_agent = agents[0].name
        self.capacity = capacity
        self.bounds = bounds
        self.finished = 0
        self.draining = False
        self._open_sampler = open_sampler
        self._new_uid = new_uid
        self._clock = surroundings.clock
        self._observer = surroundings.observer
        self._workbench = surroundings.workbench or Workbench()
        self._outbox = Outbox(surroundings, self._settle)
        self._places: dict[str, Place] = {}
        self._requests: dict[tuple[str, str, str], str] = {}
        self._queue: list[tuple[int, int, str]] = []
        self._waiting: dict[str, Rollout] = {}
        self._numbers = count(1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._kept = Kept(capacity, self._clock)

    @property
    def running(self) -> int:
        """Rollouts that run now."""
        return len(self._tasks)

    @property
    def queued(self) -> int:
        """Rollouts that wait now."""
        return len(self._waiting)

    @property
    def owed(self) -> int:
        """Outcomes that are still to be delivered."""
        return self._outbox.pending

    def agent(self, name: str) -> PlaysRuns:
        """The agent of that name; the default one for an empty name. Raises `NotFound`."""
        agent = self.agents.get(name or self.default_agent)
        if agent is None:
            raise NotFound(f"there is no agent {name!r}; there are {sorted(self.agents)}", reason="AGENT_NOT_FOUND")
        return agent

    def start(self, wish: Wish, also_wrong: Iterable[Violation] = ()) -> tuple[Rollout, bool]:
        """Takes a rollout, or finds the one that was taken under the same request id. The second value says: found.

        `also_wrong` is what the caller of this method found, told of together with what is found here: one word for each field.
        """
        wrong = [*violations(wish.spec, self.bounds)]
        named = {violation.field for violation in wrong}
        wrong += [violation for violation in also_wrong if violation.field not in named]
        if len(wish.request_id) > 256:
            raise NotPossible("request_id has more than 256 characters", reason="REQUEST_ID_TOO_LONG")
        if wrong:
            raise InvalidRequest(*wrong)
        agent = self.agent(wish.spec.agent)
        spec = settle(wish.spec, agent.name, agent.limits, self.bounds)
        print_ = fingerprint(spec)
        key = (wish.caller, spec.completions.url, wish.request_id) if wish.request_id else None
        known = self._known(wish, key, print_)
        if known is not None:
            if known.outcome is None or known.owes:
                known.credentials = known.credentials.refreshed(wish.credentials)
            return known, True
        return self._take(replace(wish, spec=spec), agent, print_, key), False

    def get(self, uid: str, caller: Caller) -> Rollout:
        """A rollout that the caller sees. Raises `NotFound`."""
        place = self._places.get(uid)
        if place is None or not caller.sees(place.rollout.caller):
            raise NotFound(
                f"there is no rollout {uid!r}; finished ones are forgotten after a while", reason="ROLLOUT_NOT_FOUND"
            )
        return place.rollout

    def select(self, selection: Selection, *, before: int | None = None) -> Iterator[tuple[int, Rollout]]:
        """The selected rollouts with their numbers, newest first, those with a number below `before` only."""
        if selection.uids:
            chosen = [self._places[uid] for uid in set(selection.uids) if uid in self._places]
            places: Sequence[Place] = sorted(chosen, key=lambda place: -place.number)
        else:
            places = list(reversed(self._places.values()))
        for place in places:
            if (before is None or place.number < before) and selection.matches(place.rollout):
                yield place.number, place.rollout

    def cancel(self, selection: Selection, reason: str) -> Sequence[str]:
        """Asks the selected rollouts to end. Returns the uids of those that had not finished."""
        chosen = [rollout for _, rollout in self.select(selection) if rollout.state is not RolloutState.FINISHED]
        for rollout in chosen:
            rollout.ask_to_end(Cancellation(reason))
        return [rollout.uid for rollout in chosen]

    def acknowledge(self, uid: str, caller: Caller) -> None:
        """Its outcome was received. Raises `NotFound`, or `NotPossible` where there is none yet."""
        rollout = self.get(uid, caller)
        if rollout.outcome is None:
            raise NotPossible(f"rollout {uid!r} has not finished", reason="ROLLOUT_NOT_FINISHED")
        rollout.received = True
        self._outbox.acknowledge(rollout)

    def forget(self) -> None:
        """Drops finished rollouts that are too old, too many or too large together, the oldest first."""
        for uid in self._kept.surplus():
            place = self._places.pop(uid)
            if place.request is not None and self._requests.get(place.request) == uid:
                del self._requests[place.request]

    async def drain(self, grace: float) -> None:
        """Takes nothing new, lets rollouts finish for `grace` seconds, then ends those that are left as interrupted.

        Outcomes that are to be delivered get what is left of that time, and a little in any case.
        """
        self.draining = True
        until = asyncio.get_running_loop().time() + grace
        text = "the server stopped while the rollout ran; start it again"
        if self._tasks:
            await self._idle(grace)
        for place in list(self._places.values()):
            place.rollout.ask_to_end(Failure(Category.INTERRUPTED, text, place.rollout.machine.turn))
        await self._idle(5.0)
        await self._outbox.drain(max(_LAST_DELIVERIES, until - asyncio.get_running_loop().time()))

    async def _idle(self, seconds: float) -> None:
        deadline = asyncio.get_running_loop().time() + seconds
        while self._tasks and (left := deadline - asyncio.get_running_loop().time()) > 0:
            await asyncio.wait(self._tasks, timeout=left, return_when=asyncio.FIRST_COMPLETED)

    def _known(self, wish: Wish, key: tuple[str, str, str] | None, print_: str) -> Rollout | None:
        uid = self._requests.get(key) if key is not None else None
        if uid is None:
            return None
        place = self._places[uid]
        over = place.rollout.state is RolloutState.FINISHED
        if place.fingerprint == print_:
            return None if place.until_received and over and place.rollout.received else place.rollout
        if place.until_received and over:
            return None
        raise Conflict(
            f"request id {wish.request_id!r} is known with another payload (rollout {uid}); use another id for another rollout"
        )

    def _take(self, wish: Wish, agent: PlaysRuns, print_: str, key: tuple[str, str, str] | None) -> Rollout:
        if self.draining:
            raise Draining("the server is stopping and takes no new rollouts", retry_after=1.0)
        if self.running >= self.capacity.running and self.queued >= self.capacity.queued:
            raise Busy(f"{self.running} rollouts run and {self.queued} wait; ask again later", retry_after=1.0)
        most = max(self.capacity.finished, 1)
        if wish.spec.outcome is not None and self.owed >= most:
            text = f"{self.owed} outcomes wait for their receivers, at most {most} may; ask again when they have been taken"
            raise Busy(text, retry_after=1.0)
        rollout = Rollout(self._new_uid(), wish, agent, self._clock, self._recorded)
        place = Place(next(self._numbers), rollout, print_, key, wish.until_received)
        self._places[rollout.uid] = place
        if key is not None:
            self._requests[key] = rollout.uid
        rollout.ending.add_done_callback(lambda _: self._end_queued(rollout))
        heapq.heappush(self._queue, (-wish.spec.priority, place.number, rollout.uid))
        self._waiting[rollout.uid] = rollout
        self._fill()
        return rollout

    def _fill(self) -> None:
        while self._queue and self.running < self.capacity.running:
            rollout = self._waiting.pop(heapq.heappop(self._queue)[2], None)
            if rollout is not None:  # else it ended while it waited
                self._run(rollout)

    def _run(self, rollout: Rollout) -> None:
        rollout.running = True
        task = asyncio.create_task(drive(rollout, self._open_sampler, self._workbench), name=f"drive {rollout.uid}")
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._finished(done, rollout))

    def _finished(self, task: asyncio.Task[None], rollout: Rollout) -> None:
        self._tasks.discard(task)
        rollout.running = False
        if not task.cancelled() and task.exception() is not None:
            _log.error("driving rollout %s failed", rollout.uid, exc_info=task.exception())
        self._keep(rollout)
        self._fill()

    def _end_queued(self, rollout: Rollout) -> None:
        """A rollout that is to end before it found a place ends at once."""
        if self._waiting.pop(rollout.uid, None) is None:
            return
        rollout.record(Ended(rollout.ending.result(), queued_ms=rollout.queued_ms()))
        self._keep(rollout)

    def _recorded(self, rollout: Rollout, entries: Sequence[Entry]) -> None:
        if rollout.outcome is not None and rollout.spec.outcome is not None:
            # At once: an agent that does not give way holds its place, not the outcome.
            self._outbox.send(rollout, rollout.spec.outcome)
        self._observer.recorded(rollout, entries)

    def _keep(self, rollout: Rollout) -> None:
        self.finished += 1
        _log_finished(rollout)
        self._settle(rollout)

    def _settle(self, rollout: Rollout) -> None:
        """Forgets its credentials once nobody waits to be told; remembers it for a while, once it has also left its place."""
        if self._outbox.holds(rollout):
            return
        rollout.credentials = Credentials()
        if not rollout.running:
            self._kept.add(rollout)
            self.forget()


def _log_finished(rollout: Rollout) -> None:
    """The one line about a rollout: never contents, tokens or keys."""
    outcome = rollout.outcome
    if outcome is None:
        return
    end, metrics = outcome.end, outcome.metrics
    what = {"end": type(end).__name__.lower(), "turns": metrics.turns, "tool_calls": metrics.tool_calls}
    if isinstance(end, Failure):
        what |= {"category": end.category.value}
    what |= {
        "generated_tokens": metrics.generated_tokens,
        "warnings": len(outcome.warnings),
        "ms": round(metrics.total_ms),
    }
    text = " ".join(f"{key}={value}" for key, value in what.items())
    extra = {"rollout_uid": rollout.uid, "rollout_id": rollout.spec.rollout_id, "turn": rollout.machine.turn}
    _log.info("rollout finished: %s", text, extra=extra)
