"""Who waits for which outcome. Outcomes may come more than once, and before the answer that says a rollout has started."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Final

from osmosis.rollout.v1.rollout_service_pb2 import Rollout

from rollout_client.errors import RolloutError

_REMEMBERED: Final = 10_000


class Outcomes:
    """Outcomes by the rollout id that the trainer gave. Those that came are remembered for a while."""

    def __init__(self) -> None:
        self._awaited: dict[str, asyncio.Future[Rollout]] = {}
        self._settled: OrderedDict[str, None] = OrderedDict()

    def expect(self, rollout_id: str) -> asyncio.Future[Rollout]:
        """The outcome of a rollout that is about to be started."""
        return self._awaited.setdefault(rollout_id, asyncio.get_running_loop().create_future())

    def awaits(self, rollout_id: str) -> bool:
        """Whether somebody still waits."""
        return rollout_id in self._awaited

    def settle(self, rollout: Rollout) -> bool:
        """Takes an outcome in. False: nobody here ever waited for it."""
        rollout_id = rollout.spec.rollout_id
        future = self._awaited.get(rollout_id)
        if future is not None and not future.done():
            future.set_result(rollout)
        return future is not None or rollout_id in self._settled

    def fail(self, rollout_id: str, error: RolloutError) -> None:
        """Nobody will ever tell the outcome."""
        future = self._awaited.get(rollout_id)
        if future is not None and not future.done():
            future.set_exception(error)
            future.exception()  # looked at, also where nobody waits any more

    def close(self, rollout_id: str) -> None:
        """Nobody waits any more; what still comes is acknowledged."""
        self._awaited.pop(rollout_id, None)
        self._settled[rollout_id] = None
        while len(self._settled) > _REMEMBERED:
            self._settled.popitem(last=False)
