"""Transport of a trainer that is only a client: everything is sent over one stream."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, Final

import grpc
from osmosis.rollout.v1.rollout_service_pb2 import Rollout, StartRolloutRequest

from rollout_client._async.client import AsyncClient
from rollout_client.errors import RolloutError, Unavailable
from rollout_client.retry import Attempts
from rollout_client.spec import rollout_spec
from rollout_client.trainer.stream.session import StreamSession, TrainerSide
from rollout_client.trainer.transport import CANCEL_REASON, group_rollout_ids

_LOG: Final = logging.getLogger("rollout_client")
_LOOK_SECONDS: Final = 5.0
"""Time to wait for a rollout whose stream was lost. It may still finish; if it needs its trainer, it fails at once."""


class StreamTransport:
    """Transport over a stream. After a stream was lost, the next start opens a new one. See `Transport` for the methods.

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
        self._stream: StreamSession | None = None
        self._watchers: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        await self._open_session()

    async def start(self, fields: Mapping[str, Any], name: str, n: int) -> Mapping[str, str]:
        request = StartRolloutRequest(request_id=name, spec=rollout_spec({**fields, "rollout_id": name}))
        channel = self._client._channel
        attempts = Attempts(channel.settings.retry)
        while True:
            try:
                # Safe to repeat: because of the request id, another stream takes over the rollouts that an earlier one started.
                return await (await self._open_session()).start(request, group_rollout_ids(name, n))
            except RolloutError as failure:
                await channel.pause(attempts.on_failure(failure))

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
            self._stream.cancel(rollout_id)

    async def close(self) -> None:
        if self._stream is not None:
            await self._stream.close()
        for task in self._watchers:
            task.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        await self._side.turns.close()
        if self._own:
            await self._client.aclose()

    async def _open_session(self) -> StreamSession:
        """Return the current stream, and open one if there is none or it has ended."""
        async with self._opening:
            if self._stream is None or self._stream.connection.over.done():
                largest = (await self._client.server_info()).max_request_bytes
                stream = StreamSession(self._client._channel, self._side, largest)
                await stream.connection.open()
                self._stream = stream
                task = asyncio.create_task(self._watch(stream))
                self._watchers.add(task)
                task.add_done_callback(self._watchers.discard)
            return self._stream

    async def _watch(self, stream: StreamSession) -> None:
        """Wait for the end of a stream. If it was lost, settle the starts, generations and outcomes that wait for it."""
        try:
            await asyncio.shield(stream.connection.over)
        except RolloutError as error:
            failure = error
        except Exception as error:
            _LOG.exception("the stream to the server failed")
            failure = Unavailable(grpc.StatusCode.UNAVAILABLE, f"the stream to the server failed: {error}")
        else:
            return
        await stream.fail(failure)
        await asyncio.gather(*(self._settle_lost(*each, failure) for each in tuple(stream.running.items())))

    async def _settle_lost(self, uid: str, rollout_id: str, failure: RolloutError) -> None:
        """Settle a rollout whose stream was lost: with its outcome from RolloutService, otherwise with the failure."""
        outcomes = self._side.outcomes
        try:
            if failure.from_server:  # it is reachable, so it may still have the outcome
                rollout = await self._client.wait(uid, timeout=_LOOK_SECONDS, view="samples")
                outcomes.settle(rollout)
                await self._client.acknowledge(uid, timeout=_LOOK_SECONDS)
                return
        except TimeoutError:
            # It is still running, and no trainer can complete its next turn.
            await self._client.cancel(uid, reason=CANCEL_REASON, timeout=_LOOK_SECONDS)
        except RolloutError:
            pass
        text = f"rollout {rollout_id!r} was running when its stream to the server was lost; start it again: {failure.message}"
        outcomes.fail(
            rollout_id, type(failure)(failure.code, text, reason=failure.reason, request_id=failure.request_id)
        )
