"""Key check. The rollout server accepts the key before the gateway reads a body or describes a fault in it."""

import asyncio
import time
from hashlib import sha256
from typing import TYPE_CHECKING, Final, cast

import grpc
from osmosis.rollout.v1.agent_service_pb2 import GetModelAccessRequest
from osmosis.rollout.v1.rollout_service_pb2 import ListAgentsRequest

from rollout_gateway.calls import CallMetadata, Calls
from rollout_gateway.fleet.errors import too_late
from rollout_gateway.fleet.fleet import Fleet

if TYPE_CHECKING:
    from osmosis.rollout.v1.agent_service_pb2_grpc import AgentServiceAsyncStub
    from osmosis.rollout.v1.rollout_service_pb2_grpc import RolloutServiceAsyncStub

#: Statuses of a call whose key the server refuses.
STRANGER: Final = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
# The server checks the key of every call again, so during this time a revoked key can only send bodies and read metrics.
_ACCEPTED_SECONDS: Final = 1.0
_MOST_ACCEPTED: Final = 1024


class KeyCheck:
    """Lets the rollout server check API keys and keys of rollouts. Caches the SHA-256 of accepted keys for one second."""

    def __init__(self, server: "RolloutServiceAsyncStub | Fleet", seconds: float) -> None:
        self._server = server
        # Any call that requires a key would do; this is the cheapest.
        self._call = server.AnyAgents if isinstance(server, Fleet) else server.ListAgents
        self._seconds = seconds
        self._accepted: dict[bytes, float] = {}
        self._checks: dict[bytes, asyncio.Task[None]] = {}

    async def demand(self, calls: Calls) -> None:
        """Require that the server accepts the key of `calls`.

        Raises grpc.aio.AioRpcError if the server refuses the key, cannot be reached, or does not respond before the timeout
        of a call or the request's deadline.
        """
        if (check := self.check(calls)) is None:
            return
        try:
            async with asyncio.timeout(None if calls.ends is None else calls.ends - time.monotonic()):
                # Other requests wait for the same check, so this one's cancellation or deadline must not cancel it.
                await asyncio.shield(check)
        except TimeoutError:
            raise too_late() from None

    def check(self, calls: Calls) -> asyncio.Task[None] | None:
        """Return the check of the key of `calls`, which runs now; None if the server has accepted the key lately."""
        digest = sha256(f"{calls.uid} {dict(calls.metadata).get('authorization', '')}".encode()).digest()
        if self._accepted.get(digest, 0.0) > time.monotonic():
            return None
        if digest not in self._checks:
            self._checks[digest] = asyncio.create_task(self._check(digest, calls.metadata, calls.uid))
            # Retrieves the exception: all waiting requests may be gone, and asyncio would log it as never retrieved.
            self._checks[digest].add_done_callback(lambda done: done.cancelled() or done.exception())
        return self._checks[digest]

    async def _check(self, digest: bytes, metadata: CallMetadata, uid: str) -> None:
        try:
            if uid:
                await self._check_model_key(metadata, uid)
            else:
                await self._call(ListAgentsRequest(), metadata=metadata, timeout=self._seconds)
            if len(self._accepted) >= _MOST_ACCEPTED:
                self._accepted.clear()
            self._accepted[digest] = time.monotonic() + _ACCEPTED_SECONDS
        finally:
            del self._checks[digest]

    async def _check_model_key(self, metadata: CallMetadata, uid: str) -> None:
        rpc = cast("AgentServiceAsyncStub", self._server)
        try:
            await rpc.GetModelAccess(GetModelAccessRequest(uid=uid), metadata=metadata, timeout=self._seconds)
        except grpc.aio.AioRpcError as error:
            # The key is right, but its rollout has ended. The call itself reports it, or repeats what it did before the end.
            if error.code() is not grpc.StatusCode.FAILED_PRECONDITION:
                raise
