"""`Transport`, the interface between a trainer and the rollout server, and the transport in which the server calls back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from osmosis.rollout.v1.rollout_service_pb2 import ROLLOUT_STATE_FINISHED, Rollout

from rollout_client._async.client import AsyncClient
from rollout_client.errors import NotFound, RolloutError
from rollout_client.spec import Credentials, Target
from rollout_client.trainer.policy import AnnouncedPolicy
from rollout_client.trainer.server import Listener

CANCEL_REASON = "cancelled by its trainer"
_FAREWELL_SECONDS = 5.0
"""Time for ending a pause on close."""


class Transport(Protocol):
    """Starts and cancels rollouts. It passes their completion requests to `Turns` and their outcomes to `Outcomes`."""

    async def open(self) -> None:
        """Connect or listen. Raises RolloutError if the server is unreachable, OSError if the address cannot be bound."""

    async def start(self, fields: Mapping[str, Any], name: str, n: int) -> Mapping[str, str]:
        """Start `n` rollouts with the ids `group_rollout_ids(name, n)` and return their uids by these ids.

        Raises RolloutError, TypeError and ValueError. Some of the rollouts may run in that case.
        """

    async def wait_finished(self, uid: str, outcome: asyncio.Future[Rollout]) -> Rollout:
        """Return a rollout once it has finished. `outcome` receives delivered outcomes.

        Raises RolloutError if the outcome is lost.
        """

    async def announce(self) -> None:
        """Announce the trainer's policy as it is now, for all its rollouts, and wait until the server has processed it.

        Raises RolloutError.
        """

    async def cancel(self, rollout_id: str) -> None:
        """Cancel a rollout if it is running."""

    async def close(self) -> None:
        """Disconnect or stop listening, and cancel all generations."""


def group_rollout_ids(name: str, n: int) -> Sequence[str]:
    """Return the rollout ids of a group as the server derives them (trainer_service.proto, TrainStart)."""
    return [f"{name}/{index}" for index in range(n)] if n > 1 else [name]


class CallbackTransport:
    """Transport that starts rollouts through `client` and receives the server's calls at `listener`. See `Transport`.

    Args:
        client: client of the server.
        listener: receives completion requests and outcomes.
        announced: the trainer's policy.
        look: seconds between two requests for the state of a rollout, in case a delivery did not arrive.
        own: close the client together with the transport.
    """

    def __init__(
        self, client: AsyncClient, listener: Listener, announced: AnnouncedPolicy, look: float, *, own: bool
    ) -> None:
        self._client = client
        self._listener = listener
        self._announced = announced
        self._look = look
        self._own = own
        self._announcing = asyncio.Lock()
        self._has_announced = False

    async def open(self) -> None:
        await self._listener.open()

    async def start(self, fields: Mapping[str, Any], name: str, n: int) -> Mapping[str, str]:
        if not self._has_announced:
            await self.announce()  # ends a pause that an earlier process left at this address
        rollout_ids = group_rollout_ids(name, n)
        tasks = [asyncio.create_task(self._start(fields, rollout_id)) for rollout_id in rollout_ids]
        try:
            return dict(zip(rollout_ids, await asyncio.gather(*tasks), strict=True))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def wait_finished(self, uid: str, outcome: asyncio.Future[Rollout]) -> Rollout:
        while True:
            await asyncio.wait((outcome,), timeout=self._look)
            if outcome.done():
                return outcome.result()
            try:
                rollout = await self._fetch_finished(uid)
            except NotFound:
                # If the outcome was delivered during this request, the server may already have dropped the rollout.
                if not outcome.done():
                    raise
            else:
                if rollout is not None:
                    return rollout

    async def announce(self) -> None:
        async with self._announcing:
            policy, paused = self._announced.policy, self._announced.paused
            await self._client.set_policy(
                version=policy.version, step=policy.step, paused=paused, completions_url=self._listener.url
            )
            self._has_announced = True

    async def cancel(self, rollout_id: str) -> None:
        try:
            await self._client.cancel(rollout_ids=[rollout_id], reason=CANCEL_REASON, timeout=5)
        except NotFound:
            return

    async def close(self) -> None:
        if self._announced.paused:  # the server would keep the pause for the next trainer at this address
            self._announced.change("", None, paused=False)
            with contextlib.suppress(RolloutError, TimeoutError):
                await asyncio.wait_for(self.announce(), _FAREWELL_SECONDS)
        await self._listener.close()
        if self._own:
            await self._client.aclose()

    async def _fetch_finished(self, uid: str) -> Rollout | None:
        """Return a finished rollout and acknowledge its outcome; None if it has not finished. Raises RolloutError."""
        if (await self._client.get(uid)).state != ROLLOUT_STATE_FINISHED:
            return None
        rollout = await self._client.get(uid, view="samples")
        with contextlib.suppress(NotFound):  # it was delivered and dropped during the requests above
            await self._client.acknowledge(uid)
        return rollout

    async def _start(self, fields: Mapping[str, Any], rollout_id: str) -> str:
        listener = self._listener
        started = await self._client.start(
            **fields,
            rollout_id=rollout_id,
            request_id=rollout_id,
            completions=Target(listener.url, "grpc", replays_turn_keys=True),
            outcome=Target(listener.url, "grpc"),
            credentials=Credentials(completions_bearer=listener.bearer, outcome_bearer=listener.bearer),
        )
        return started.uid
