"""The streams of a server: who may open one, go on with one, and what becomes of one that nobody goes on with."""

from __future__ import annotations

import asyncio
import logging
import secrets

from rollout_server.core.error import Busy, Draining, NotPossible, RolloutError, Superseded
from rollout_server.edge.stream.stream import StreamLimits, TrainerStream
from rollout_server.edge.stream.stream_rollout import StreamRollout
from rollout_server.runtime.rollout import Rollout

_log = logging.getLogger(__name__)
_LAST_SECONDS = 1.0
"""How long connections may take to note that they are ended."""


class TooManyStreams(Busy):
    """There is no room for another stream."""

    reason = "TOO_MANY_STREAMS"


class StreamConnection:
    """One connection of a stream. `ending` says how it is to end, once it is."""

    def __init__(self, stream: TrainerStream) -> None:
        self.stream = stream
        self.ending: RolloutError | None = None

    def end(self, error: RolloutError) -> None:
        """It is to end this way."""
        self.ending = self.ending or error
        self.stream.stir()

    def read(self, reader: asyncio.Task[None]) -> None:
        """Nothing more is read."""
        if not reader.cancelled():
            reader.exception()  # whoever sends looks at it, unless the connection is over
        self.stream.stir()


class Streams:
    """Lives on one event loop. Holds the seats of all rollouts on streams, also of those whose stream is gone while they run."""

    def __init__(self, limits: StreamLimits) -> None:
        self.limits = limits
        self._streams: dict[str, TrainerStream] = {}
        self._connections: dict[str, StreamConnection] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._seats: dict[str, StreamRollout] = {}
        self._draining: RolloutError | None = None
        self._left = asyncio.Event()

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, caller: str) -> StreamConnection:
        """A new stream. Raises `TooManyStreams`, and `Draining` once the server stops."""
        if self._draining is not None:
            raise self._draining
        own = sum(stream.caller == caller for stream in self._streams.values())
        limits = self.limits
        if len(self._streams) >= limits.streams or own >= limits.of_caller:
            text = (
                f"there are {len(self._streams)} streams, {own} of them yours; at most {limits.streams} and {limits.of_caller} may "
                f"be. One that was cut counts for {limits.grace:g} s"
            )
            raise TooManyStreams(text, retry_after=1.0)
        stream = TrainerStream(secrets.token_urlsafe(24), caller, limits)
        self._streams[stream.id] = stream
        return self._connected(stream)

    def resume(self, stream_id: str, caller: str, last_seen: int) -> StreamConnection:
        """Goes on with a stream, in the place of the connection that it may have. `NotPossible` where the caller has none such.

        Raises InvalidRequest for a last item that cannot have been seen.
        """
        if self._draining is not None:
            raise self._draining
        stream = self._streams.get(stream_id)
        if stream is None or stream.caller != caller or stream.closed:
            text = (
                f"you have no such stream: it was cut for longer than {self.limits.grace:g} s, you had closed it, or the server "
                "was started anew. Open another one; RolloutService has the outcomes of what has finished"
            )
            raise NotPossible(text, reason="STREAM_EXPIRED")
        stream.check(last_seen)
        return self._connected(stream)

    def disconnected(self, connection: StreamConnection) -> None:
        """A connection is over. Its stream is kept for the grace time, unless it is done."""
        stream = connection.stream
        if self._connections.get(stream.id) is not connection:
            return  # another one has taken its place
        del self._connections[stream.id]
        stream.disconnect()
        self._left.set()
        if stream.closed or self._draining is not None:
            self._expire(stream, "the trainer closed its stream" if stream.closed else "the server stops")
            return
        why = (
            f"the trainer's stream was cut and not resumed within {self.limits.grace:g} s (ROLLOUT_STREAM_GRACE_SECONDS), so "
            "nobody completes; start the rollout again"
        )
        loop = asyncio.get_running_loop()
        self._timers[stream.id] = loop.call_later(self.limits.grace, self._expire, stream, why)

    def seat(self, uid: str) -> StreamRollout | None:
        """The seat of a rollout."""
        return self._seats.get(uid)

    def check(self, rollout: Rollout, stream: TrainerStream) -> None:
        """Raises `NotPossible` where a rollout cannot come to this stream: it is on another one that is connected."""
        seat = self._seats.get(rollout.uid)
        other = self._stream_of(seat) if seat is not None else None
        if other is not None and other is not stream and other.connected:
            text = (
                f"rollout {rollout.uid} is on another stream of yours, which is connected; close that one, or use another "
                "request_id for another rollout"
            )
            raise NotPossible(text, reason="STREAM_TAKEN")

    def holds(self, stream: TrainerStream) -> bool:
        """Whether it goes on, or may be resumed."""
        return stream.id in self._streams

    def sit(self, rollout: Rollout, stream: TrainerStream) -> StreamRollout:
        """The rollout's seat, on this stream from here on. It is announced by the reply that tells of it.

        Raises `NotPossible` as `check`.
        """
        self.check(rollout, stream)
        seat = self._seats.get(rollout.uid)
        if seat is not None and seat.stream is stream:
            return seat
        if seat is None:
            seat = self._seats[rollout.uid] = StreamRollout(rollout, self._forget)
            seat.stream = stream
            rollout.hold()
        else:
            other = self._stream_of(seat)
            if other is not None:
                other.leave(seat)
            seat.move(stream)
        stream.sit(seat)
        return seat

    def stand(self, seat: StreamRollout, why: str) -> None:
        """A rollout has no stream any more."""
        stream = self._stream_of(seat)
        if stream is not None:
            stream.leave(seat)
        seat.lose(why)
        if seat.rollout.outcome is not None:
            self._forget(seat)

    def received(self, rollout: Rollout) -> None:
        """A rollout's outcome was acknowledged, and with it everything."""
        seat = self._seats.get(rollout.uid)
        if seat is not None:
            self._forget(seat)

    async def drain(self, seconds: float) -> None:
        """Waits so long for trainers that are there to take the outcomes that they are owed, then ends all streams."""
        self._draining = Draining("the server is stopping; its streams end with it", retry_after=1.0)
        for connection in self._connections.values():
            connection.stream.leaving = self._draining
            connection.stream.stir()
        await self._until_left(seconds)
        for connection in self._connections.values():
            connection.end(self._draining)
        await self._until_left(_LAST_SECONDS)
        for stream in list(self._streams.values()):
            self._expire(stream, "the server stops")

    async def _until_left(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while self._connections and (left := until - loop.time()) > 0:
            self._left.clear()
            try:
                await asyncio.wait_for(self._left.wait(), left)
            except TimeoutError:
                return

    def _connected(self, stream: TrainerStream) -> StreamConnection:
        timer = self._timers.pop(stream.id, None)
        if timer is not None:
            timer.cancel()
        former = self._connections.get(stream.id)
        connection = self._connections[stream.id] = StreamConnection(stream)
        if former is not None:
            former.end(Superseded("another connection goes on with this stream"))
        return connection

    def _expire(self, stream: TrainerStream, why: str) -> None:
        timer = self._timers.pop(stream.id, None)
        if timer is not None:
            timer.cancel()
        if self._streams.pop(stream.id, None) is None:
            return
        seats = list(stream.seats.values())
        if seats:
            _log.info("a stream of %s ended with %d rollouts: %s", stream.caller, len(seats), why)
        for seat in seats:
            self.stand(seat, why)

    def _forget(self, seat: StreamRollout) -> None:
        if self._seats.get(seat.rollout.uid) is seat:
            del self._seats[seat.rollout.uid]
            seat.rollout.release()

    def _stream_of(self, seat: StreamRollout) -> TrainerStream | None:
        return seat.stream if isinstance(seat.stream, TrainerStream) else None
