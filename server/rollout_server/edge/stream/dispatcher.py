"""Processes the items that trainers send: each exactly once, in order."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from rollout_server.core.error import Busy, InvalidRequest, NotFound, NotPossible, RolloutError, Violation
from rollout_server.edge.offload import offload_request
from rollout_server.edge.stream.items import RefusedItem, StartedItem
from rollout_server.edge.stream.stream import TrainerStream
from rollout_server.edge.stream.streams import Streams
from rollout_server.edge.wire import request as requests
from rollout_server.edge.wire import train as wire
from rollout_server.runtime.groups.group import RolloutGroup
from rollout_server.runtime.groups.state import GroupPlan
from rollout_server.runtime.registry.registry import RolloutRegistry
from rollout_server.runtime.rollout import Rollout
from rollout_server.runtime.start_request import AdmittedStart, Caller, StartRequest

_log = logging.getLogger(__name__)
NUMBERED = ("start", "answer", "reject", "cancel", "policy")
REFUSABLE = ("start", "cancel", "policy")
MOST_CREDIT = 1_000_000


class TooManyRefusals(Busy):
    """The trainer sends more requests that are refused than it reads refusals."""

    reason = "TOO_MANY_REFUSALS"


class Dispatcher:
    """Processes trainers' items.

    `violations` returns which parts of a start request this server does not allow. It raises `NotPossible` for a request that
    the server cannot run at all. `ignored` is called for each response to a completion that is not requested.
    """

    def __init__(
        self,
        registry: RolloutRegistry,
        streams: Streams,
        violations: Callable[[StartRequest], Sequence[Violation]],
        ignored: Callable[[], None],
    ) -> None:
        self.registry = registry
        self.streams = streams
        self._violations = violations
        self._ignored = ignored
        self._groups: dict[TrainerStream, asyncio.Task[None]] = {}

    async def take(self, stream: TrainerStream, item: wire.TrainerItem, caller: Caller) -> None:
        """Process one item. If it raises `InvalidRequest` (out of order) or `TooManyRefusals`, the item was not taken."""
        kind = item.WhichOneof("item")
        if kind in NUMBERED:
            await self._wait_for_group(stream)
        if kind in NUMBERED and not self._is_next(stream, kind, item.sequence):
            return
        if kind not in NUMBERED and item.sequence:
            raise InvalidRequest(
                Violation("sequence", f"is only for {', '.join(NUMBERED)}; leave it unset in other items")
            )
        match kind:
            case "start":
                await self._start_group(stream, item.start, caller)
            case "answer" | "reject":
                turn_key, response = wire.completion_response(item)
                if not stream.respond(turn_key, response):
                    self._ignored()
            case "cancel" | "policy":
                self._apply(stream, item, caller)
            case "acknowledge":
                self.acknowledge(stream, item.acknowledge.sequence, caller)
            case "credit":
                stream.completions.credit = min(MOST_CREDIT, stream.completions.credit + item.credit.asks)
                stream.wake()
            case "ledger":
                stream.ledger_reads.resolve(item.ledger.uid, item.ledger.segment_id, partial(wire.ledger, item.ledger))
            case "hello":
                raise InvalidRequest(Violation("hello", "must be sent once, as the first item of a connection"))
            case _:
                raise InvalidRequest(Violation("item", "is unset, or of a kind that this server does not know"))

    def acknowledge(self, stream: TrainerStream, sequence: int, caller: Caller) -> None:
        """Process the acknowledgement of the server's items, including outcomes. Raise `InvalidRequest`."""
        for rollout in stream.acknowledge(sequence):
            with suppress(NotFound):  # a rollout that was attached after its end may have been dropped meanwhile
                self.registry.acknowledge(rollout.uid, caller)
            self.streams.confirm(rollout)

    def _is_next(self, stream: TrainerStream, kind: str | None, sequence: int) -> bool:
        """Return whether to process an item, and record its sequence number; False for a repeated item.

        After a reconnection a trainer repeats items that the server may not have received. The number is recorded before the
        item is processed and without an `await` in between, so no item is processed twice.
        """
        if not sequence:
            raise InvalidRequest(Violation("sequence", f"is required for `{kind}`; it counts up from 1"))
        if sequence <= stream.seen:
            return False
        if sequence != stream.seen + 1:
            text = f"is {sequence}, expected {stream.seen + 1}: items count up without gaps, over all connections of a stream"
            raise InvalidRequest(Violation("sequence", text))
        if kind in REFUSABLE and stream.refusals >= stream.limits.unacknowledged:
            text = f"{stream.refusals} refusals are not sent yet: read and acknowledge the server's items"
            raise TooManyRefusals(text, retry_after=1.0)
        stream.received.take(sequence, at_once=kind in REFUSABLE)
        return True

    def _apply(self, stream: TrainerStream, item: wire.TrainerItem, caller: Caller) -> None:
        try:
            if item.HasField("policy"):
                stream.announce(requests.policy_update(item.policy))
            else:
                self.registry.cancel(*requests.cancel_request(item.cancel, Caller(caller.name)))
        except RolloutError as error:
            stream.reply(RefusedItem(stream.seen, error))

    async def _start_group(self, stream: TrainerStream, start: wire.Start, caller: Caller) -> None:
        """Start a group of rollouts.

        The task is shielded from the connection: the item's number is recorded, so the trainer does not repeat it, and it must
        be processed also if the connection breaks.
        """
        task = asyncio.create_task(self._start(stream, stream.seen, start, caller), name="start a group")
        self._groups[stream], stream.starting = task, True
        task.add_done_callback(lambda _: self._on_started(stream))
        await asyncio.shield(task)

    def _on_started(self, stream: TrainerStream) -> None:
        self._groups.pop(stream, None)
        stream.starting = False
        stream.wake()

    async def _wait_for_group(self, stream: TrainerStream) -> None:
        """Wait until a group from an earlier item, possibly of an earlier connection, is started: items take effect in order."""
        task = self._groups.get(stream)
        if task is not None:
            await asyncio.wait((task,))

    async def _start(self, stream: TrainerStream, sequence: int, start: wire.Start, caller: Caller) -> None:
        try:
            admitted = await offload_request(lambda: self._admit(start, caller), start.ByteSize() * max(start.count, 1))
            taken = await self.registry.start_all(admitted, partial(self._check, stream))
        except RolloutError as error:
            stream.reply(RefusedItem(sequence, error))
            return
        except Exception:  # a bug of this server; the stream's other rollouts continue
            _log.exception("a group of rollouts could not be started")
            stream.reply(RefusedItem(sequence, RolloutError("internal error of the server; its log has the reason")))
            return
        # No `await` since `start_all` created the rollouts' tasks: before its first turn each rollout is in its group and on the
        # stream.
        self._form_group(admitted, taken)
        started = [StartedItem(self.streams.add(rollout, stream), attached) for rollout, attached in taken]
        try:
            await self.registry.accept([rollout for rollout, _ in taken])
        except RolloutError as error:
            for item in started:
                # The others are stored: a repeated start finds them.
                if item.stream_rollout.rollout.log.is_abandoned:
                    self.streams.remove(item.stream_rollout, error.message)
            stream.reply(RefusedItem(sequence, error))
            return
        for item in started:
            stream.reply(item)

    def _form_group(self, admitted: Sequence[AdmittedStart], taken: Sequence[tuple[Rollout, bool]]) -> None:
        """Let rollouts that were started together wait for the agent's `reward_group`, if it has one.

        Such a group is found by nobody: its outcomes go to the stream. A trainer may use its group id again.
        """
        first = admitted[0]
        if len(taken) > 1 and first.agent.overrides("reward_group") and not any(attached for _, attached in taken):
            plan = GroupPlan(len(taken), train_on=first.request.spec.train_on)
            group = RolloutGroup(self.registry.new_id(), first, plan, self.registry)
            group.form([rollout for rollout, _ in taken])

    def _admit(self, start: wire.Start, caller: Caller) -> Sequence[AdmittedStart]:
        start_requests = wire.start_requests(start, caller)
        return self.registry.admission.admit_alike(start_requests, self._violations(start_requests[0]))

    def _check(self, stream: TrainerStream, found: Sequence[Rollout | None]) -> None:
        """Raise `NotPossible` or `Busy` if these rollouts cannot be added to the stream."""
        if stream.closed or not self.streams.has(stream):
            raise NotPossible("the stream ended before the rollouts were started", reason="STREAM_EXPIRED")
        for rollout in found:
            if rollout is not None:
                self.streams.check(rollout, stream)
        new = sum(rollout is None or rollout.uid not in stream.rollouts for rollout in found)
        if len(stream.rollouts) + new > stream.limits.rollouts:
            text = (
                f"{len(stream.rollouts)} rollouts of this stream are not acknowledged, at most {stream.limits.rollouts} may be; "
                "acknowledge outcomes, or open another stream"
            )
            raise Busy(text, retry_after=1.0)
        if stream.replies > stream.limits.rollouts:  # repeated starts of the same rollouts, which no other limit counts
            text = f"{stream.replies} replies to starts are not sent yet: read and acknowledge the server's items"
            raise Busy(text, retry_after=1.0)
