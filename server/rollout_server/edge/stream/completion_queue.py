"""The completions that a stream requests of its trainer: in which order, and how many at a time."""

from __future__ import annotations

from collections import OrderedDict

from rollout_server.edge.stream.pending_requests import PendingCompletion
from rollout_server.edge.stream.stream_rollout import StreamRollout
from rollout_server.edge.trainer.grpc_client import Rejection
from rollout_server.edge.wire.completion import Response


class PendingCompletions:
    """The completions of a stream: those that wait, the rollouts taking turns, and those that are under way.

    `credit` is how many may be under way: from when they are sent until they are answered or nobody waits for them any more.
    """

    def __init__(self) -> None:
        self.credit = 0
        self._waiting: OrderedDict[StreamRollout, None] = OrderedDict()
        self._under_way: dict[str, PendingCompletion] = {}

    def __len__(self) -> int:
        """The number of completions that were sent and have no response yet."""
        return len(self._under_way)

    def queue(self, stream_rollout: StreamRollout) -> None:
        """A rollout has one that waits. Until its turn comes it keeps its place."""
        self._waiting[stream_rollout] = None

    def next(self) -> tuple[PendingCompletion, StreamRollout] | None:
        """The next one, which is under way from here on; None where none waits or there is no credit."""
        while self._waiting and len(self._under_way) < self.credit:
            stream_rollout, _ = self._waiting.popitem(last=False)
            completion = stream_rollout.next_unsent()
            if completion is not None:
                self._under_way[completion.key] = completion
                self._waiting[stream_rollout] = (
                    None  # to the end of the line, which it leaves there if it wants no more
                )
                return completion, stream_rollout
        return None

    def respond(self, turn_key: str, response: Response | Rejection) -> bool:
        """Takes the response of the trainer. False: the completion is not under way."""
        completion = self._under_way.pop(turn_key, None)
        if completion is None or completion.response.done():
            return False
        completion.response.set_result(response)
        return True

    def release(self, completion: PendingCompletion) -> None:
        """Nobody waits for it any more."""
        if self._under_way.get(completion.key) is completion:
            del self._under_way[completion.key]

    def leave(self, stream_rollout: StreamRollout) -> None:
        """A rollout is here no more."""
        self._waiting.pop(stream_rollout, None)
        for completion in stream_rollout.completions.values():
            self.release(completion)
