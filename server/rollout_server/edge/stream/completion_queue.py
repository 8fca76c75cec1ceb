"""The completions that a stream requests from its trainer: their order, and how many run at a time."""

from __future__ import annotations

from collections import OrderedDict

from rollout_server.edge.stream.pending_requests import PendingCompletion
from rollout_server.edge.stream.stream_rollout import StreamRollout
from rollout_server.edge.trainer.grpc_client import Rejection
from rollout_server.edge.wire.completion import Response


class PendingCompletions:
    """The completions of a stream: waiting ones, taken from the rollouts in turn (round-robin), and requested ones.

    `credit` is the maximum number of requested completions: those that were sent, have no response, and are still needed.
    """

    def __init__(self) -> None:
        self.credit = 0
        self._waiting: OrderedDict[StreamRollout, None] = OrderedDict()
        self._under_way: dict[str, PendingCompletion] = {}

    def __len__(self) -> int:
        """Return the number of completions that were sent and have no response yet."""
        return len(self._under_way)

    @property
    def has_credit(self) -> bool:
        """Whether another completion may be requested."""
        return len(self._under_way) < self.credit

    @property
    def can_request(self) -> bool:
        """Whether `next` may return a completion."""
        return bool(self._waiting) and self.has_credit

    def queue(self, stream_rollout: StreamRollout) -> None:
        """Queue a rollout that has a waiting completion. A rollout that is already queued keeps its position."""
        self._waiting[stream_rollout] = None

    def next(self) -> tuple[PendingCompletion, StreamRollout] | None:
        """Return the next completion and count it as requested; None if none waits or there is no credit."""
        while self._waiting and self.has_credit:
            stream_rollout, _ = self._waiting.popitem(last=False)
            completion = stream_rollout.next_unsent()
            if completion is not None:
                self._under_way[completion.key] = completion
                # Back to the end of the queue. If it has no other completion by then, `next` skips it.
                self._waiting[stream_rollout] = None
                return completion, stream_rollout
        return None

    def respond(self, turn_key: str, response: Response | Rejection) -> bool:
        """Pass on the trainer's response. Return False if the completion is not requested."""
        completion = self._under_way.pop(turn_key, None)
        if completion is None or completion.response.done():
            return False
        completion.response.set_result(response)
        return True

    def release(self, completion: PendingCompletion) -> None:
        """Free the credit of a completion that is not needed any more."""
        if self._under_way.get(completion.key) is completion:
            del self._under_way[completion.key]

    def leave(self, stream_rollout: StreamRollout) -> None:
        """Remove a rollout that leaves the stream."""
        self._waiting.pop(stream_rollout, None)
        for completion in stream_rollout.completions.values():
            self.release(completion)
