"""Who may send a body, and hear what is wrong with a request: the server looks at the key first."""

import asyncio
import time
from hashlib import sha256
from typing import TYPE_CHECKING, Final

import grpc
from osmosis.rollout.v1.rollout_service_pb2 import ListAgentsRequest

from rollout_gateway.calls import CallMetadata, Calls
from rollout_gateway.fleet.errors import too_late
from rollout_gateway.fleet.fleet import Fleet

if TYPE_CHECKING:
    from osmosis.rollout.v1.rollout_service_pb2_grpc import RolloutServiceAsyncStub

#: The statuses of a call whose key is none of the server's.
STRANGER: Final = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
# The server looks at the key of each call again; this is only for how long bodies may still be sent, and metrics read, under one
# that was revoked.
_ACCEPTED_SECONDS: Final = 1.0
_MOST_ACCEPTED: Final = 1024


class KeyCheck:
    """Has the server look at keys. Those that it accepted are remembered for a second, by their hashes."""

    def __init__(self, server: "RolloutServiceAsyncStub | Fleet", seconds: float) -> None:
        # Any call that wants a key will do, and no other costs less.
        self._call = server.AnyAgents if isinstance(server, Fleet) else server.ListAgents
        self._seconds = seconds
        self._accepted: dict[bytes, float] = {}
        self._checks: dict[bytes, asyncio.Task[None]] = {}

    async def demand(self, calls: Calls) -> None:
        """Raises grpc.aio.AioRpcError where the server refuses the key, or cannot be asked in time.

        That is within the seconds of a call, and before the request's deadline.
        """
        metadata, ends = calls.metadata, calls.ends
        digest = sha256(dict(metadata).get("authorization", "").encode()).digest()
        if self._accepted.get(digest, 0.0) > time.monotonic():
            return
        if digest not in self._checks:
            self._checks[digest] = asyncio.create_task(self._check(digest, metadata))
            # Nobody may be left who waits for it and fetches its exception.
            self._checks[digest].add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            async with asyncio.timeout(None if ends is None else ends - time.monotonic()):
                # Others wait for it too, when this request's client leaves or its time is over.
                await asyncio.shield(self._checks[digest])
        except TimeoutError:
            raise too_late() from None

    async def _check(self, digest: bytes, metadata: CallMetadata) -> None:
        try:
            await self._call(ListAgentsRequest(), metadata=metadata, timeout=self._seconds)
            if len(self._accepted) >= _MOST_ACCEPTED:
                self._accepted.clear()
            self._accepted[digest] = time.monotonic() + _ACCEPTED_SECONDS
        finally:
            del self._checks[digest]
