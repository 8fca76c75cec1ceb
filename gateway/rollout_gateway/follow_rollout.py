"""Following a rollout, or a group of rollouts, to its end. Broken calls to the rollout server are resumed."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from copy import copy
from dataclasses import dataclass
from typing import Any, Final, cast

import grpc
from osmosis.rollout.v1 import event_pb2
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from osmosis.rollout.v1.group_pb2 import GetGroupRequest

from rollout_gateway.calls import Calls, StreamEndedEarly

#: Seconds between attempts to resume a call. A channel reconnects to a restarted server within 5 s.
PAUSES: Final = (0.05, 0.15, 0.5, 1.5, 5.0)

# Statuses with which the transport or a restarting server breaks a stream.
_BROKEN: Final = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)

Events = AsyncGenerator[Any, None]


@dataclass(frozen=True, slots=True)
class RolloutFollower:
    """Follows the events of a rollout, or the items of a group, on behalf of an HTTP client."""

    calls: Calls
    watch: pb.WatchRolloutRequest | pb.WatchGroupRequest
    pauses: tuple[float, ...] = PAUSES

    async def open(self) -> Events | None:
        """Return the event stream, or None if the client already has the last event of the rollout.

        If the next event exists already, it is fetched before this method returns. Raises grpc.aio.AioRpcError: at this time
        the response has not begun, so an error can still become an HTTP status.
        """
        (last, finished), after = await self._last(), self.watch.after_sequence
        if finished and after == last:
            return None
        events = self.events()
        detail = getattr(self.watch, "detail", 0)
        nothing_yet = after == last or (after < last and detail == event_pb2.EVENT_DETAIL_OUTCOME)
        if nothing_yet and not finished:
            # The next event may take long. Return now, so that the client gets the response headers.
            return events
        return _chained(await anext(events), events)

    async def events(self) -> Events:
        """Yield the events to the end, each exactly once. A broken call is resumed after the last event received.

        Raises grpc.aio.AioRpcError, or StreamEndedEarly if the server repeatedly ends its stream without the last event.
        """
        last, broken, rpc = self.watch.after_sequence, 0, cast(Any, self.calls.rpc)
        is_group = isinstance(self.watch, pb.WatchGroupRequest)
        while True:
            resumed = copy(self.watch)
            resumed.after_sequence = last
            call = (rpc.WatchGroup if is_group else rpc.WatchRollout)(resumed, timeout=None)
            fault: Exception = StreamEndedEarly(getattr(self.watch, "group_id" if is_group else "uid"))
            try:
                async for item in call:
                    event: Any = item if is_group else item.event
                    # A resumed stream may repeat events. Events with sequence 0 are not recorded, so they never repeat.
                    if 0 < event.sequence <= last:
                        continue
                    last, broken = event.sequence or last, 0
                    yield event
                    if event.HasField("result" if is_group else "finished"):
                        return
            except grpc.aio.AioRpcError as error:
                if error.code() not in _BROKEN:
                    raise
                fault = error
            finally:
                # Leaving the loop does not cancel a grpc.aio stream. After its end, cancel() has no effect.
                call.cancel()
            if broken == len(self.pauses):
                raise fault
            await asyncio.sleep(self.pauses[broken])
            broken += 1

    async def _last(self) -> tuple[int, bool]:
        """Return the sequence number of the last event so far, and whether it is the last one at all."""
        if isinstance(self.watch, pb.WatchGroupRequest):
            group = (await self.calls.rpc.GetGroup(GetGroupRequest(group_id=self.watch.group_id))).group
            return group.last_sequence, group.HasField("result")
        rollout = (await self.calls.rpc.GetRollout(pb.GetRolloutRequest(uid=self.watch.uid))).rollout
        return rollout.last_sequence, rollout.state == pb.ROLLOUT_STATE_FINISHED


async def _chained(first: Any, events: Events) -> Events:
    async with aclosing(events):
        yield first
        async for event in events:
            yield event
