"""The way between a trainer and the rollout server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from osmosis.rollout.v1.rollout_service_pb2 import ROLLOUT_STATE_FINISHED, Rollout

from rollout_client._async.client import AsyncClient
from rollout_client.errors import NotFound
from rollout_client.spec import Credentials, Target
from rollout_client.trainer.server import Listener

CANCEL_REASON = "its trainer let go of it"


class Transport(Protocol):
    """How rollouts are started. Their turns come to `Turns` and their outcomes to `Outcomes`, by whichever way this is."""

    async def open(self) -> None:
        """Makes the way. Raises OSError or RolloutError where there is none."""

    async def start(self, fields: Mapping[str, Any], name: str, n: int) -> Mapping[str, str]:
        """Starts the `n` rollouts that are called `group_rollout_ids(name, n)`, and returns their uids by these names.

        Raises RolloutError, TypeError and ValueError; then some of them may run.
        """

    async def wait_finished(self, uid: str, outcome: asyncio.Future[Rollout]) -> Rollout:
        """A rollout once it has finished; a delivered one is in `outcome`. Raises RolloutError where its end cannot be known."""

    async def cancel(self, rollout_id: str) -> None:
        """Ends a rollout, if it runs."""

    async def close(self) -> None:
        """Ends what is under way."""


def group_rollout_ids(name: str, n: int) -> Sequence[str]:
    """The ids of a group's rollouts, as `TrainStart` has them."""
    return [f"{name}/{index}" for index in range(n)] if n > 1 else [name]


class CallbackTransport:
    """The server is asked over `client`, and calls back at `listener`. Where outcomes do not get through, it looks for them.

    Args:
        look: seconds between two looks.
        own: the client is closed with the link.
    """

    def __init__(self, client: AsyncClient, listener: Listener, look: float, *, own: bool) -> None:
        self._client = client
        self._listener = listener
        self._look = look
        self._own = own

    async def open(self) -> None:
        await self._listener.open()

    async def start(self, fields: Mapping[str, Any], name: str, n: int) -> Mapping[str, str]:
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
                if not outcome.done():  # else it was delivered meanwhile, and forgotten there
                    raise
            else:
                if rollout is not None:
                    return rollout

    async def cancel(self, rollout_id: str) -> None:
        try:
            await self._client.cancel(rollout_ids=[rollout_id], reason=CANCEL_REASON, timeout=5)
        except NotFound:
            return

    async def close(self) -> None:
        await self._listener.close()
        if self._own:
            await self._client.aclose()

    async def _fetch_finished(self, uid: str) -> Rollout | None:
        """A rollout that has finished, which is noted as received; None: it has not. Raises RolloutError."""
        if (await self._client.get(uid)).state != ROLLOUT_STATE_FINISHED:
            return None
        rollout = await self._client.get(uid, view="samples")
        with contextlib.suppress(NotFound):  # it was delivered meanwhile
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
