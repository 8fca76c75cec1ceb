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
        self.stream.wake()

    def read(self, reader: asyncio.Task[None]) -> None:
        """Nothing more is read."""
        if not reader.cancelled():
            reader.exception()  # whoever sends looks at it, unless the connection is over
        self.stream.wake()


class Streams:
    """Lives on one event loop. Holds all rollouts on streams, also of those whose stream is gone while they run."""

    def __init__(self, limits: StreamLimits) -> None:
        self.limits = limits
        self._streams: dict[str, TrainerStream] = {}
        self._connections: dict[str, StreamConnection] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._rollouts: dict[str, StreamRollout] = {}
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
        return self._connect(stream)

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
        return self._connect(stream)

    def disconnect(self, connection: StreamConnection) -> None:
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

    def stream_rollout(self, uid: str) -> StreamRollout | None:
        """A rollout on a stream."""
        return self._rollouts.get(uid)

    def check(self, rollout: Rollout, stream: TrainerStream) -> None:
        """Raises `NotPossible` where a rollout cannot come to this stream: it is on another one that is connected."""
        stream_rollout = self._rollouts.get(rollout.uid)
        other = self._stream_of(stream_rollout) if stream_rollout is not None else None
        if other is not None and other is not stream and other.connected:
            text = (
                f"rollout {rollout.uid} is on another stream of yours, which is connected; close that one, or use another "
                "request_id for another rollout"
            )
            raise NotPossible(text, reason="STREAM_TAKEN")

    def has(self, stream: TrainerStream) -> bool:
        """Whether it goes on, or may be resumed."""
        return stream.id in self._streams

    def add(self, rollout: Rollout, stream: TrainerStream) -> StreamRollout:
        """The rollout, on this stream from here on. It is announced by the reply that tells of it.

        Raises `NotPossible` as `check`.
        """
        self.check(rollout, stream)
        stream_rollout = self._rollouts.get(rollout.uid)
        if stream_rollout is not None and stream_rollout.stream is stream:
            return stream_rollout
        if stream_rollout is None:
            stream_rollout = self._rollouts[rollout.uid] = StreamRollout(rollout, self._forget)
            stream_rollout.stream = stream
            rollout.hold()
        else:
            other = self._stream_of(stream_rollout)
            if other is not None:
                other.leave(stream_rollout)
            stream_rollout.move_to(stream)
        stream.add(stream_rollout)
        return stream_rollout

    def remove(self, stream_rollout: StreamRollout, why: str) -> None:
        """A rollout has no stream any more."""
        stream = self._stream_of(stream_rollout)
        if stream is not None:
            stream.leave(stream_rollout)
        stream_rollout.fail(why)
        if stream_rollout.rollout.outcome is not None:
            self._forget(stream_rollout)

    def confirm(self, rollout: Rollout) -> None:
        """A rollout's outcome was acknowledged, and with it everything."""
        stream_rollout = self._rollouts.get(rollout.uid)
        if stream_rollout is not None:
            self._forget(stream_rollout)

    async def drain(self, seconds: float) -> None:
        """Waits so long for trainers that are there to take the outcomes that they are owed, then ends all streams."""
        self._draining = Draining("the server is stopping; its streams end with it", retry_after=1.0)
        for connection in self._connections.values():
            connection.stream.leaving = self._draining
            connection.stream.wake()
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

    def _connect(self, stream: TrainerStream) -> StreamConnection:
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
        rollouts = list(stream.rollouts.values())
        if rollouts:
            _log.info("a stream of %s ended with %d rollouts: %s", stream.caller, len(rollouts), why)
        for stream_rollout in rollouts:
            self.remove(stream_rollout, why)

    def _forget(self, stream_rollout: StreamRollout) -> None:
        if self._rollouts.get(stream_rollout.rollout.uid) is stream_rollout:
            del self._rollouts[stream_rollout.rollout.uid]
            stream_rollout.rollout.release()

    def _stream_of(self, stream_rollout: StreamRollout) -> TrainerStream | None:
        return stream_rollout.stream if isinstance(stream_rollout.stream, TrainerStream) else None
