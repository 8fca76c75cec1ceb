"""The asks of a stream: those that wait, the rollouts taking turns, and those that are under way."""

from __future__ import annotations

from collections import OrderedDict

from rollout_server.edge.stream.stream_rollout import PendingCompletion, StreamRollout
from rollout_server.edge.trainer.grpc_client import Rejection
from rollout_server.edge.wire.completion import Response


class PendingCompletions:
    """`credit` is how many may be under way: from when they are sent until they are answered or nobody waits for them any more."""

    def __init__(self) -> None:
        self.credit = 0
        self._waiting: OrderedDict[StreamRollout, None] = OrderedDict()
        self._under_way: dict[str, PendingCompletion] = {}

    def __len__(self) -> int:
        """Those under way."""
        return len(self._under_way)

    def want(self, seat: StreamRollout) -> None:
        """A rollout has one that waits. Until its turn comes it keeps its place."""
        self._waiting[seat] = None

    def next(self) -> tuple[PendingCompletion, StreamRollout] | None:
        """The next one, which is under way from here on; None where none waits or there is no credit."""
        while self._waiting and len(self._under_way) < self.credit:
            seat, _ = self._waiting.popitem(last=False)
            errand = seat.waiting()
            if errand is not None:
                self._under_way[errand.key] = errand
                self._waiting[seat] = None  # to the end of the line, which it leaves there if it wants no more
                return errand, seat
        return None

    def answered(self, turn_key: str, said: Response | Rejection) -> bool:
        """Takes what a trainer says. False: the ask is not under way."""
        errand = self._under_way.pop(turn_key, None)
        if errand is None or errand.answer.done():
            return False
        errand.answer.set_result(said)
        return True

    def over(self, errand: PendingCompletion) -> None:
        """Nobody waits for it any more."""
        if self._under_way.get(errand.key) is errand:
            del self._under_way[errand.key]

    def leave(self, seat: StreamRollout) -> None:
        """A rollout is here no more."""
        self._waiting.pop(seat, None)
        for errand in seat.errands.values():
            self.over(errand)
