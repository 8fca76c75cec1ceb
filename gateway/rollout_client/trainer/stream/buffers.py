"""The two ends of a stream: what is sent, numbered and kept until it is acknowledged, and what was received, each item once."""

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
        self._unacknowledged: deque[TrainRequest] = deque()
        self._unnumbered: deque[TrainRequest] = deque()
        self._sent = 0
        self._last = 0
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        """Items that the server did not take yet."""
        return len(self._unacknowledged)

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
        self._unacknowledged.append(item)
        self.notify()
        return self._last

    def put_unnumbered(self, item: TrainRequest) -> None:
        """Has an item without a number sent, which may get lost."""
        self._unnumbered.append(item)
        self.notify()

    def acknowledge(self, sequence: int) -> None:
        """The server took all up to this one."""
        while self._unacknowledged and self._unacknowledged[0].sequence <= sequence:
            self._unacknowledged.popleft()

    def reconnect(self, last_seen: int) -> None:
        """Another connection carries what follows the last item that the server saw."""
        self.acknowledge(last_seen)
        self._unnumbered.clear()
        self._sent = last_seen

    def next_item(self) -> TrainRequest | None:
        """What is to be sent now; None: nothing is."""
        if self._unnumbered:
            return self._unnumbered.popleft()
        if not self._unacknowledged or self._sent >= self._unacknowledged[-1].sequence:
            return None
        at = max(0, self._sent + 1 - self._unacknowledged[0].sequence)
        item = self._unacknowledged[at]
        self._sent = item.sequence
        return item

    def notify(self) -> None:
        """Wakes whoever waits for something to send."""
        self._changed.set()

    async def wait(self) -> None:
        """Waits until there may be something to send."""
        await self._changed.wait()
        self._changed.clear()


class StreamInbox:
    """`last_seen` is the last item that was taken in. Numbers rise; after a resume some are left out."""

    def __init__(self) -> None:
        self.last_seen = 0
        self._acknowledged = 0

    def accept(self, sequence: int) -> bool:
        """Whether an item is to be looked at; not, if it came before."""
        if sequence and sequence <= self.last_seen:
            return False
        self.last_seen = sequence or self.last_seen
        return True

    def next_acknowledgement(self) -> int | None:
        """What is to be acknowledged now; None: nothing is."""
        if self._acknowledged == self.last_seen:
            return None
        self._acknowledged = self.last_seen
        return self.last_seen

    def reconnect(self) -> None:
        """Another connection. Whether the last acknowledgement arrived is not known, so it is sent again."""
        self._acknowledged = 0
