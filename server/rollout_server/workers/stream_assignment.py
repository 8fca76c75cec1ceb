"""On which worker a trainer's stream is or will be."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

_MOST_REMEMBERED: Final = 10_000


class StreamAssignment:
    """Chooses the workers of streams.

    A trainer whose stream was lost with its worker resumes it, is told that it has expired, opens another one on the same
    connection and repeats its starts there. That must be on the same worker, whose journal has the rollouts. So each connection
    remembers the workers of the streams that it resumed, in their order, for the new streams that it opens.

    Args:
        index: number of this worker.
        count_streams: returns the numbers of streams of the workers that respond.
    """

    def __init__(self, index: int, count_streams: Callable[[], Awaitable[Mapping[int, int]]]) -> None:
        self._index = index
        self._count_streams = count_streams
        self._workers: dict[str, int] = {}
        self._resumed: OrderedDict[str, list[int]] = OrderedDict()

    def know(self, server_ids: Sequence[str]) -> None:
        """Store the server ids of the workers, in their order."""
        self._workers = {server_id: index for index, server_id in enumerate(server_ids)}

    async def choose(self, stream_id: str, peer: str) -> int | None:
        """Return the worker of a stream; None: this one. `stream_id` is empty for a new stream."""
        target = self._resume(stream_id, peer) if stream_id else await self._open(peer)
        return None if target == self._index else target

    def _resume(self, stream_id: str, peer: str) -> int:
        target = self._workers.get(stream_id.rpartition("-")[0])
        if target is None:  # of a worker that had no journal: it is gone
            return self._index
        targets = self._resumed.setdefault(peer, [])
        self._resumed.move_to_end(peer)
        if target not in targets:
            targets.append(target)
        if len(self._resumed) > _MOST_REMEMBERED:
            self._resumed.popitem(last=False)
        return target

    async def _open(self, peer: str) -> int:
        targets = self._resumed.get(peer)
        if targets:
            return targets.pop(0)
        counts = await self._count_streams()
        # Of equal ones this worker: it needs no hop.
        return min(counts, key=lambda index: (counts[index], index != self._index), default=self._index)
