"""What a trainer sends: numbered, and kept until the server says that it took it."""

from __future__ import annotations

import asyncio
from collections import deque

from grpc import StatusCode
from osmosis.rollout.v1.trainer_service_pb2 import TrainRequest

from rollout_client.errors import TooLarge


class StreamOutbox:
    """Items that must not be lost, in order.

    Args:
        largest: bytes that the server takes in one item; 0: not known.
    """

    def __init__(self, largest: int = 0) -> None:
        self.largest = largest
        self._kept: deque[TrainRequest] = deque()
        self._passing: deque[TrainRequest] = deque()
        self._sent = 0
        self._last = 0
        self._stirred = asyncio.Event()

    def __len__(self) -> int:
        """Items that the server did not take yet."""
        return len(self._kept)

    def put(self, item: TrainRequest) -> int:
        """Numbers an item and has it sent. Returns its sequence. Raises `TooLarge` for one that would only break the stream."""
        size = item.ByteSize()
        if self.largest and size > self.largest:
            raise TooLarge(
                StatusCode.RESOURCE_EXHAUSTED,
                f"{item.WhichOneof('item')} has {size} bytes, the server takes {self.largest}; ask for less, or raise its limit",
            )
        self._last += 1
        item.sequence = self._last
        self._kept.append(item)
        self.stir()
        return self._last

    def mention(self, item: TrainRequest) -> None:
        """Has an item without a number sent, which may get lost."""
        self._passing.append(item)
        self.stir()

    def taken(self, sequence: int) -> None:
        """The server took all up to this one."""
        while self._kept and self._kept[0].sequence <= sequence:
            self._kept.popleft()

    def begin(self, last_seen: int) -> None:
        """Another connection carries what follows the last item that the server saw."""
        self.taken(last_seen)
        self._passing.clear()
        self._sent = last_seen

    def next(self) -> TrainRequest | None:
        """What is to be sent now; None: nothing is."""
        if self._passing:
            return self._passing.popleft()
        if not self._kept or self._sent >= self._kept[-1].sequence:
            return None
        at = max(0, self._sent + 1 - self._kept[0].sequence)
        item = self._kept[at]
        self._sent = item.sequence
        return item

    def stir(self) -> None:
        """Wakes whoever waits for something to send."""
        self._stirred.set()

    async def stirred(self) -> None:
        """Waits until there may be something to send."""
        await self._stirred.wait()
        self._stirred.clear()
