"""The way between a trainer and the rollout server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from osmosis.rollout.v1.rollout_service_pb2 import ROLLOUT_STATE_FINISHED, Rollout

from rollout_client.async_client import AsyncClient
from rollout_client.errors import NotFound
from rollout_client.spec import Credentials, Target
from rollout_client.trainer.serving import Listener


class Link(Protocol):
    """How rollouts are started. Their turns come to `Turns` and their outcomes to `Outcomes`, by whichever way this is."""

    async def open(self) -> None:
        """Makes the way. Raises OSError or RolloutError where there is none."""

    async def start(self, fields: Mapping[str, Any]) -> str:
        """Starts a rollout and returns its uid. Raises RolloutError, TypeError and ValueError."""

    async def look(self, uid: str) -> Rollout | None:
        """A rollout with its samples, if it has finished; None: it has not. Raises NotFound for one that the server lost."""

    async def cancel(self, rollout_id: str) -> None:
        """Ends a rollout, if it runs."""

    async def close(self) -> None:
        """Ends what is under way."""


class ServedLink:
    """The server is asked over `client`, and calls back at `listener`."""

    def __init__(self, client: AsyncClient, listener: Listener, *, own: bool) -> None:
        self._client = client
        self._listener = listener
        self._own = own

    async def open(self) -> None:
        await self._listener.open()

    async def start(self, fields: Mapping[str, Any]) -> str:
        listener = self._listener
        started = await self._client.start(
            **fields,
            request_id=fields["rollout_id"],
            completions=Target(listener.url, "grpc", replays_turn_keys=True),
            outcome=Target(listener.url, "grpc"),
            credentials=Credentials(completions_bearer=listener.bearer, outcome_bearer=listener.bearer),
        )
        return started.uid

    async def look(self, uid: str) -> Rollout | None:
        if (await self._client.get(uid)).state != ROLLOUT_STATE_FINISHED:
            return None
        rollout = await self._client.get(uid, view="samples")
        await self._client.acknowledge(uid)
        return rollout

    async def cancel(self, rollout_id: str) -> None:
        try:
            await self._client.cancel(rollout_ids=[rollout_id], reason="its trainer let go of it", timeout=5)
        except NotFound:
            return

    async def close(self) -> None:
        await self._listener.close()
        if self._own:
            await self._client.aclose()
