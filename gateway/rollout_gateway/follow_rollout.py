"""Following a rollout to its end, across broken calls to its server."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

import grpc
from osmosis.rollout.v1 import event_pb2
from osmosis.rollout.v1 import rollout_service_pb2 as pb

from rollout_gateway.calls import Calls, StreamEndedEarly

#: Between the attempts to resume a call, in seconds: a channel finds a server that is back within 5 s.
PAUSES: Final = (0.05, 0.15, 0.5, 1.5, 5.0)

# How the transport, or a server that restarts, breaks a stream off.
_BROKEN: Final = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)

Events = AsyncGenerator[event_pb2.RolloutEvent, None]


@dataclass(frozen=True, slots=True)
class RolloutFollower:
    """A wish to hear a rollout's events, on behalf of an HTTP client."""

    calls: Calls
    asked: pb.WatchRolloutRequest
    pauses: tuple[float, ...] = PAUSES

    async def open(self) -> Events | None:
        """The events, the first of them fetched already if it is there; None if the last one had been seen.

        Raises grpc.aio.AioRpcError: as long as nothing was sent to the client, an error can be told as one.
        """
        got = await self.calls.rpc.GetRollout(pb.GetRolloutRequest(uid=self.asked.uid))
        after, last = self.asked.after_sequence, got.rollout.last_sequence
        finished = got.rollout.state == pb.ROLLOUT_STATE_FINISHED
        if finished and after == last:
            return None
        events = self.events()
        nothing_yet = after == last or (after < last and self.asked.detail == event_pb2.EVENT_DETAIL_OUTCOME)
        if nothing_yet and not finished:
            # The first one may be long in coming, and the client is not to wait that long for its answer's head.
            return events
        return _chained(await anext(events), events)

    async def events(self) -> Events:
        """The events to the end, each once, also where the call breaks and is made again.

        Raises grpc.aio.AioRpcError, or StreamEndedEarly where the server keeps ending its stream without `finished`.
        """
        last, broken = self.asked.after_sequence, 0
        while True:
            resumed = pb.WatchRolloutRequest(uid=self.asked.uid, after_sequence=last, detail=self.asked.detail)
            call = self.calls.rpc.WatchRollout(resumed, timeout=None)
            fault: Exception = StreamEndedEarly(self.asked.uid)
            try:
                async for item in call:
                    event = item.event
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
                # On a stream only this cancels; it does nothing once the stream has ended.
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
