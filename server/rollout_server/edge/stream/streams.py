"""The streams of a server: opening, resuming and expiry."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Iterable

from rollout_server.core.error import Busy, Draining, NotPossible, RolloutError, Superseded
from rollout_server.core.spec import Dialect
from rollout_server.edge.stream.stream import StreamLimits, TrainerStream
from rollout_server.edge.stream.stream_rollout import StreamRollout
from rollout_server.runtime.rollout import Rollout

_log = logging.getLogger(__name__)
_LAST_SECONDS = 1.0
"""How long connections may take to end during a shutdown."""


class TooManyStreams(Busy):
    """There is no room for another stream."""

    reason = "TOO_MANY_STREAMS"


class StreamConnection:
    """One connection of a stream. `ending` is the error that ends it, or None."""

    def __init__(self, stream: TrainerStream) -> None:
        self.stream = stream
        self.ending: RolloutError | None = None

    def end(self, error: RolloutError) -> None:
        """End the connection with this error. Only the first call has an effect."""
        self.ending = self.ending or error
        self.stream.wake()

    def read(self, reader: asyncio.Task[None]) -> None:
        """Callback for the end of the reading task."""
        if not reader.cancelled():
            reader.exception()  # mark it as retrieved; `serve_connection` raises it unless the connection is over
        self.stream.wake()


class Streams:
    """All streams. Lives on one event loop. Keeps running rollouts also after their stream has ended.

    `server_id` begins the streams' ids, as it begins uids.
    """

    def __init__(self, limits: StreamLimits, server_id: str) -> None:
        self.limits = limits
        self._server_id = server_id
        self._streams: dict[str, TrainerStream] = {}
        self._connections: dict[str, StreamConnection] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._rollouts: dict[str, StreamRollout] = {}
        self._unreceived: list[Rollout] = []
        self._restored: asyncio.TimerHandle | None = None
        self._draining: RolloutError | None = None
        self._left = asyncio.Event()

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, caller: str) -> StreamConnection:
        """Open a stream. Raise `TooManyStreams`, and `Draining` during a shutdown."""
        if self._draining is not None:
            raise self._draining
        own = sum(stream.caller == caller for stream in self._streams.values())
        limits = self.limits
        if len(self._streams) >= limits.streams or own >= limits.of_caller:
            text = (
                f"there are {len(self._streams)} streams, {own} of them yours; the limits are {limits.streams} and "
                f"{limits.of_caller}. A disconnected stream counts for {limits.grace:g} s"
            )
            raise TooManyStreams(text, retry_after=1.0)
        stream = TrainerStream(f"{self._server_id}-{secrets.token_hex(16)}", caller, limits)
        self._streams[stream.id] = stream
        return self._connect(stream)

    def resume(self, stream_id: str, caller: str, last_seen: int) -> StreamConnection:
        """Resume a stream on a new connection, which replaces its current one.

        Raises `NotPossible` if the caller has no such stream, and InvalidRequest for an impossible `last_seen`.
        """
        if self._draining is not None:
            raise self._draining
        stream = self._streams.get(stream_id)
        if stream is None or stream.caller != caller or stream.closed:
            text = (
                f"you have no such stream: it was disconnected for more than {self.limits.grace:g} s, you closed it, or the server "
                "was restarted. Open another one, and repeat there the starts of your rollouts under their request ids"
            )
            raise NotPossible(text, reason="STREAM_EXPIRED")
        stream.check(last_seen)
        return self._connect(stream)

    def disconnect(self, connection: StreamConnection) -> None:
        """Handle the end of a connection. Its stream can be resumed for the grace period, unless the trainer closed it."""
        stream = connection.stream
        if self._connections.get(stream.id) is not connection:
            return  # another connection has resumed the stream
        del self._connections[stream.id]
        stream.disconnect()
        self._left.set()
        if stream.closed or self._draining is not None:
            self._expire(stream, "the trainer closed its stream" if stream.closed else "the server stops")
            return
        why = (
            f"the trainer's stream was disconnected and not resumed within {self.limits.grace:g} s (ROLLOUT_STREAM_GRACE_SECONDS), "
            "so there is no trainer; start the rollout again"
        )
        loop = asyncio.get_running_loop()
        self._timers[stream.id] = loop.call_later(self.limits.grace, self._expire, stream, why)

    def restore(self, rollouts: Iterable[Rollout]) -> None:
        """Keep those rollouts that an earlier process of the server started on streams and whose outcome was not acknowledged.

        Their completions wait until their trainer repeats their start on a stream of this process, and finished ones are not
        dropped until then: for the grace period, which `resume_restored` begins.
        """
        for rollout in rollouts:
            if rollout.spec.completions.dialect is Dialect.STREAM and not rollout.received:
                rollout.hold(self)
                self._unreceived.append(rollout)

    def resume_restored(self) -> None:
        """Begin the grace period of `restore`. Called once, when trainers can connect."""
        for rollout in self._unreceived:
            if rollout.outcome is None and rollout.uid not in self._rollouts:
                self._follow(rollout)
        if self._unreceived:
            self._restored = asyncio.get_running_loop().call_later(self.limits.grace, self._end_restored)

    def stream_rollout(self, uid: str) -> StreamRollout | None:
        """Return a rollout that was started on a stream, or None."""
        return self._rollouts.get(uid)

    def check(self, rollout: Rollout, stream: TrainerStream) -> None:
        """Raise `NotPossible` if a rollout cannot move to this stream: it is on another one that is connected."""
        stream_rollout = self._rollouts.get(rollout.uid)
        other = self._stream_of(stream_rollout) if stream_rollout is not None else None
        if other is not None and other is not stream and other.connected:
            text = (
                f"rollout {rollout.uid} is on another connected stream of yours; close that one, or use another request_id for "
                "another rollout"
            )
            raise NotPossible(text, reason="STREAM_TAKEN")

    def has(self, stream: TrainerStream) -> bool:
        """Return whether the stream is connected or can be resumed."""
        return stream.id in self._streams

    def add(self, rollout: Rollout, stream: TrainerStream) -> StreamRollout:
        """Put a rollout on this stream. The reply to its start announces it to the trainer.

        Raises `NotPossible` as `check` does.
        """
        self.check(rollout, stream)
        stream_rollout = self._rollouts.get(rollout.uid)
        if stream_rollout is not None and stream_rollout.stream is stream:
            return stream_rollout
        if stream_rollout is None:
            stream_rollout = self._follow(rollout)
            stream_rollout.stream = stream
        else:
            other = self._stream_of(stream_rollout)
            if other is not None:
                other.leave(stream_rollout)
            stream_rollout.move_to(stream)
        stream.add(stream_rollout)
        return stream_rollout

    def remove(self, stream_rollout: StreamRollout, why: str) -> None:
        """Remove a rollout from its stream."""
        stream = self._stream_of(stream_rollout)
        if stream is not None:
            stream.leave(stream_rollout)
        stream_rollout.fail(why)
        # The next process keeps an outcome that was not acknowledged: its trainer may ask for it.
        if stream_rollout.rollout.outcome is not None and self._draining is None:
            self._forget(stream_rollout)

    def confirm(self, rollout: Rollout) -> None:
        """Forget a rollout whose outcome was acknowledged."""
        rollout.release(self)
        stream_rollout = self._rollouts.get(rollout.uid)
        if stream_rollout is not None:
            self._forget(stream_rollout)

    async def drain(self, seconds: float) -> None:
        """Wait up to `seconds` until connected trainers have received their outcomes, then end all streams."""
        self._draining = Draining("the server is stopping; its streams end with it", retry_after=1.0)
        if self._restored is not None:
            self._restored.cancel()
        for stream_rollout in [each for each in self._rollouts.values() if each.rollout.is_suspended]:
            self.remove(stream_rollout, "the server stops")  # it has no outcome that its trainer could wait for
            stream_rollout.stop()
            self._forget(stream_rollout)
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
            former.end(Superseded("another connection has resumed this stream"))
        return connection

    def _expire(self, stream: TrainerStream, why: str) -> None:
        timer = self._timers.pop(stream.id, None)
        if timer is not None:
            timer.cancel()
        if self._streams.pop(stream.id, None) is None:
            return
        rollouts = list(stream.rollouts.values())
        if rollouts:
            _log.info("a stream of caller %s ended with %d rollouts: %s", stream.caller, len(rollouts), why)
        for stream_rollout in rollouts:
            self.remove(stream_rollout, why)

    def _end_restored(self) -> None:
        """End the wait of rollouts of an earlier process that no stream has taken over."""
        why = (
            f"the server was restarted, and the trainer did not start the rollout again on a new stream within "
            f"{self.limits.grace:g} s (ROLLOUT_STREAM_GRACE_SECONDS), so there is no trainer; start the rollout again"
        )
        waiting = [each for each in self._rollouts.values() if each.stream is None and not each.failure]
        if waiting:
            _log.info("no trainer took over %d rollouts of an earlier process in time", len(waiting))
        for stream_rollout in waiting:
            stream_rollout.fail(why)
        unreceived, self._unreceived = self._unreceived, []
        for rollout in unreceived:
            rollout.release(self)

    def _follow(self, rollout: Rollout) -> StreamRollout:
        stream_rollout = self._rollouts[rollout.uid] = StreamRollout(rollout, self._forget)
        if rollout.machine.outcome is None:  # an ended one may be about to be dropped
            rollout.hold(stream_rollout)
        return stream_rollout

    def _forget(self, stream_rollout: StreamRollout) -> None:
        if self._rollouts.get(stream_rollout.rollout.uid) is stream_rollout:
            del self._rollouts[stream_rollout.rollout.uid]
            stream_rollout.rollout.activity.on_change = None
            stream_rollout.rollout.release(stream_rollout)

    def _stream_of(self, stream_rollout: StreamRollout) -> TrainerStream | None:
        return stream_rollout.stream if isinstance(stream_rollout.stream, TrainerStream) else None
