"""Following a rollout to its end. Broken calls to the rollout server are resumed."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

import grpc
from osmosis.rollout.v1 import event_pb2
from osmosis.rollout.v1 import rollout_service_pb2 as pb

from rollout_gateway.calls import Calls, StreamEndedEarly

#: Seconds between attempts to resume a call. A channel reconnects to a restarted server within 5 s.
PAUSES: Final = (0.05, 0.15, 0.5, 1.5, 5.0)

# Statuses with which the transport or a restarting server breaks a stream.
_BROKEN: Final = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)

Events = AsyncGenerator[event_pb2.RolloutEvent, None]


@dataclass(frozen=True, slots=True)
class RolloutFollower:
    """Follows the events of a rollout on behalf of an HTTP client."""

    calls: Calls
    watch: pb.WatchRolloutRequest
    pauses: tuple[float, ...] = PAUSES

    async def open(self) -> Events | None:
        """Return the event stream, or None if the client already has the last event of the rollout.

        If the next event exists already, it is fetched before this method returns. Raises grpc.aio.AioRpcError: at this time
        the response has not begun, so an error can still become an HTTP status.
        """
        got = await self.calls.rpc.GetRollout(pb.GetRolloutRequest(uid=self.watch.uid))
        after, last = self.watch.after_sequence, got.rollout.last_sequence
        finished = got.rollout.state == pb.ROLLOUT_STATE_FINISHED
        if finished and after == last:
            return None
        events = self.events()
        nothing_yet = after == last or (after < last and self.watch.detail == event_pb2.EVENT_DETAIL_OUTCOME)
        if nothing_yet and not finished:
            # The next event may take long. Return now, so that the client gets the response headers.
            return events
        return _chained(await anext(events), events)

    async def events(self) -> Events:
        """Yield the events to the end, each exactly once. A broken call is resumed after the last event received.

        Raises grpc.aio.AioRpcError, or StreamEndedEarly if the server repeatedly ends its stream without `finished`.
        """
        last, broken = self.watch.after_sequence, 0
        while True:
            resumed = pb.WatchRolloutRequest(uid=self.watch.uid, after_sequence=last, detail=self.watch.detail)
            call = self.calls.rpc.WatchRollout(resumed, timeout=None)
            fault: Exception = StreamEndedEarly(self.watch.uid)
            try:
                async for item in call:
                    event = item.event
                    # A resumed stream may repeat events. Events with sequence 0 are not recorded, so they never repeat.
                    if 0 < event.sequence <= last:
                        continue
                    last, broken = event.sequence or last, 0
                    yield event
                    if event.HasField("finished"):
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


async def _chained(first: event_pb2.RolloutEvent, events: Events) -> Events:
    async with aclosing(events):
        yield first
        async for event in events:
            yield event
