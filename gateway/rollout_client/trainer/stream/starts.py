"""Starts that wait for their answer: all rollouts of a group were accepted, or the start was refused."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from osmosis.rollout.v1.rollout_service_pb2 import StartRolloutResponse
from osmosis.rollout.v1.trainer_service_pb2 import TrainRefusal

from rollout_client.errors import RolloutError, refusal_error


@dataclass(slots=True)
class _Start:
    accepted: asyncio.Future[Mapping[str, str]]
    missing: set[str]
    uids: dict[str, str] = field(default_factory=dict)


class Starts:
    """By the sequence under which they were sent."""

    def __init__(self) -> None:
        self._starts: dict[int, _Start] = {}
        self._by_rollout: dict[str, _Start] = {}

    def expect(self, sequence: int, rollout_ids: Sequence[str]) -> asyncio.Future[Mapping[str, str]]:
        """The server's uids by rollout id, once all are there. Fails with RolloutError where the start was refused."""
        start = _Start(asyncio.get_running_loop().create_future(), set(rollout_ids))
        self._starts[sequence] = start
        self._by_rollout |= dict.fromkeys(rollout_ids, start)
        start.accepted.add_done_callback(lambda _: self._forget(sequence, rollout_ids))
        return start.accepted

    def started(self, response: StartRolloutResponse) -> None:
        """A rollout was accepted."""
        rollout_id = response.rollout.spec.rollout_id
        start = self._by_rollout.get(rollout_id)
        if start is None:
            return
        start.missing.discard(rollout_id)
        start.uids[rollout_id] = response.rollout.uid
        if not start.missing and not start.accepted.done():
            start.accepted.set_result(start.uids)

    def refused(self, refusal: TrainRefusal) -> None:
        """A start was refused."""
        start = self._starts.get(refusal.start_sequence)
        if start is not None and not start.accepted.done():
            start.accepted.set_exception(refusal_error(refusal.code, refusal.message, "REFUSED"))

    def fail(self, failure: RolloutError) -> None:
        """Nothing comes any more."""
        for start in tuple(self._starts.values()):
            if not start.accepted.done():
                start.accepted.set_exception(failure)

    def _forget(self, sequence: int, rollout_ids: Sequence[str]) -> None:
        self._starts.pop(sequence, None)
        for rollout_id in rollout_ids:
            self._by_rollout.pop(rollout_id, None)
