"""Transport of a trainer that is only a client: everything is sent over one stream."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

import grpc
from osmosis.rollout.v1.rollout_service_pb2 import Rollout, StartRolloutRequest

from rollout_client._async.client import AsyncClient
from rollout_client.errors import RolloutError, Unavailable
from rollout_client.retry import Attempts
from rollout_client.spec import rollout_spec
from rollout_client.trainer.stream.connection import EXPIRED
from rollout_client.trainer.stream.pending import GroupStart, PendingCompletions
from rollout_client.trainer.stream.session import StreamSession, TrainerSide
from rollout_client.trainer.transport import group_rollout_ids

_LOG: Final = logging.getLogger("rollout_client")


class StreamTransport:
    """Transport over a stream. See `Transport` for the methods.

    If the server does not know the stream any more, because it was restarted or the grace time is over, another stream takes its
    place: it begins with the announced policy and repeats the starts of the unfinished rollouts, under the same request ids. The
    server continues those that it has and starts the others again. After any other end of a stream, its rollouts have failed, and
    the next start opens a new one.

    Args:
        client: client whose connection carries the stream.
        side: the trainer's state.
        own: close the client together with the transport.
    """

    def __init__(self, client: AsyncClient, side: TrainerSide, *, own: bool) -> None:
        self._client = client
        self._side = side
        self._own = own
        self._opening = asyncio.Lock()
        self._completions = PendingCompletions(side.turns)
        self._stream: StreamSession | None = None
        self._watchers: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        await self._open_session()

    async def start(self, fields: Mapping[str, Any], name: str, n: int) -> Mapping[str, str]:
        request = StartRolloutRequest(request_id=name, spec=rollout_spec({**fields, "rollout_id": name}))
        return await self._start(request, group_rollout_ids(name, n))

    async def wait_finished(self, uid: str, outcome: asyncio.Future[Rollout]) -> Rollout:
        # Cancelling this call must not cancel the future: the cancellation of the rollout still waits for its outcome.
        return await asyncio.shield(outcome)

    async def announce(self) -> None:
        async with self._opening:  # a stream that is being opened may begin with what was announced before
            stream = self._stream
        # Without a stream no rollout runs, and the next stream begins with what was announced.
        if stream is not None and not stream.connection.over.done():
            await stream.announce()

    async def cancel(self, rollout_id: str) -> None:
        if self._stream is not None:
            self._stream.cancel([rollout_id])

    async def close(self) -> None:
        for task in self._watchers:
            task.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        if self._stream is not None:
            await self._stream.connection.close()
        await self._completions.close()
        await self._side.turns.close()
        if self._own:
            await self._client.aclose()

    async def _open_session(self) -> StreamSession:
        """Return the current stream, and open one if there is none or it has ended."""
        async with self._opening:
            if self._stream is None or self._stream.connection.over.done():
                largest = (await self._client.server_info()).max_request_bytes
                stream = StreamSession(self._client._channel, self._side, self._completions, largest)
                await stream.connection.open()
                self._stream = stream
                task = asyncio.create_task(self._watch(stream))
                self._watchers.add(task)
                task.add_done_callback(self._watchers.discard)
            return self._stream

    async def _start(self, request: StartRolloutRequest, rollout_ids: Sequence[str]) -> Mapping[str, str]:
        channel = self._client._channel
        attempts = Attempts(channel.settings.retry)
        while True:
            try:
                # Safe to repeat: because of the request id, another stream takes over the rollouts that an earlier one started.
                return await (await self._open_session()).start(request, rollout_ids)
            except RolloutError as failure:
                await channel.pause(attempts.on_failure(failure))

    async def _watch(self, stream: StreamSession) -> None:
        """Wait for the end of a stream. If the server does not know it any more, replace it; otherwise its rollouts fail."""
        try:
            await asyncio.shield(stream.connection.over)
        except Exception as error:
            failure = _failure_of(error)
        else:
            return
        if failure.reason == EXPIRED:
            _LOG.warning("%s; its rollouts are started again on another stream", failure.message)
            # As UNAVAILABLE, because the starts that wait for a response are repeated on another stream, too.
            code, request_id = grpc.StatusCode.UNAVAILABLE, failure.request_id
            stream.fail(Unavailable(code, failure.message, reason=EXPIRED, request_id=request_id))
            await self._replace(stream)
            return
        stream.fail(failure)
        for start in stream.running:
            self._fail(start, failure)
        await self._completions.close()

    async def _replace(self, lost: StreamSession) -> None:
        """Let another stream take over the rollouts of a lost one, and send the cancellations that may not have arrived."""
        is_over, repeated = self._side.outcomes.is_over, list[GroupStart]()
        for start in lost.running:
            if all(map(is_over, start.rollout_ids)):
                self._cancel_completions(start)
            else:
                repeated.append(start)
        if not (repeated or lost.cancelled):
            return
        try:
            await self._open_session()
        except Exception as error:
            for start in repeated:
                self._fail(start, _failure_of(error))
            return
        await asyncio.gather(*map(self._repeat, repeated))
        if lost.cancelled and self._stream is not None:
            self._stream.cancel(lost.cancelled)

    async def _repeat(self, start: GroupStart) -> None:
        """Start the rollouts of a lost stream again: the server continues those that it has."""
        try:
            uids = await self._start(start.request, start.rollout_ids)
        except Exception as error:
            self._fail(start, _failure_of(error))
            return
        anew = [rollout_id for rollout_id, uid in start.uids.items() if uids[rollout_id] != uid]
        for rollout_id in anew:
            self._completions.cancel(start.uids[rollout_id])
            if self._side.outcomes.is_over(rollout_id):  # the server has forgotten it, but not others of its group
                await self.cancel(rollout_id)

    def _fail(self, start: GroupStart, failure: RolloutError) -> None:
        """Fail the outcomes of a group whose stream was lost."""
        self._cancel_completions(start)
        for rollout_id in start.rollout_ids:
            text = f"rollout {rollout_id!r} was running when its stream to the server was lost; start it again: {failure.message}"
            lost = type(failure)(failure.code, text, reason=failure.reason, request_id=failure.request_id)
            self._side.outcomes.fail(rollout_id, lost)

    def _cancel_completions(self, start: GroupStart) -> None:
        for uid in start.uids.values():
            self._completions.cancel(uid)


def _failure_of(error: Exception) -> RolloutError:
    """Return what the rollouts of a stream fail with."""
    if isinstance(error, RolloutError):
        return error
    _LOG.error("the stream to the server failed", exc_info=error)
    return Unavailable(grpc.StatusCode.UNAVAILABLE, f"the stream to the server failed: {error}")
