"""Send and receive buffers of a stream. Sent items are numbered and kept until acknowledged; received items are deduplicated."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from grpc import StatusCode
from osmosis.rollout.v1.trainer_service_pb2 import TrainRequest

from rollout_client.errors import TooLarge


class StreamOutbox:
    """Send buffer. Numbered items are sent again after a reconnect until the server has acknowledged them.

    Args:
        largest: maximum size of one item in bytes that the server accepts; 0: unknown.
    """

    def __init__(self, largest: int = 0) -> None:
        self.largest = largest
        self._unacknowledged: deque[TrainRequest] = deque()
        self._unnumbered: deque[TrainRequest] = deque()
        self._sent = 0
        self._last = 0
        self._changed = asyncio.Event()
        self._processed: dict[int, asyncio.Future[None]] = {}

    def __len__(self) -> int:
        """Number of items that the server has not acknowledged."""
        return len(self._unacknowledged)

    def put(self, item: TrainRequest) -> int:
        """Number an item, queue it and return its sequence number.

        Raises `TooLarge` for an item above the server's limit: sending it would break the stream on every attempt.
        """
        size = item.ByteSize()
        if self.largest and size > self.largest:
            raise TooLarge(
                StatusCode.RESOURCE_EXHAUSTED,
                f"{item.WhichOneof('item')} has {size} bytes, the server accepts {self.largest}; send less or raise its limit",
            )
        self._last += 1
        item.sequence = self._last
        self._unacknowledged.append(item)
        self.notify()
        return self._last

    def put_unnumbered(self, item: TrainRequest) -> None:
        """Queue an item without a number. It is not sent again if the connection is lost."""
        self._unnumbered.append(item)
        self.notify()

    def processed(self, sequence: int) -> asyncio.Future[None]:
        """Return the future that is done when the server has acknowledged an item that was just queued."""
        return self._processed.setdefault(sequence, asyncio.get_running_loop().create_future())

    def unacknowledged(self) -> Sequence[TrainRequest]:
        """Return the items that the server has not acknowledged, in their order."""
        return tuple(self._unacknowledged)

    def acknowledge(self, sequence: int) -> None:
        """Drop the items up to this sequence number: the server has received them."""
        while self._unacknowledged and self._unacknowledged[0].sequence <= sequence:
            processed = self._processed.pop(self._unacknowledged.popleft().sequence, None)
            if processed is not None and not processed.done():
                processed.set_result(None)

    def reconnect(self, last_seen: int) -> None:
        """Continue on a new connection after `last_seen`, the last sequence number that the server received."""
        self.acknowledge(last_seen)
        self._unnumbered.clear()
        self._sent = last_seen

    def next_item(self) -> TrainRequest | None:
        """Return the next item to send; None if there is none."""
        if self._unnumbered:  # first, because the server waits for a ledger for only 10 s
            return self._unnumbered.popleft()
        if not self._unacknowledged or self._sent >= self._unacknowledged[-1].sequence:
            return None
        # Sequence numbers are consecutive, so the index of the next item follows from the first one.
        at = max(0, self._sent + 1 - self._unacknowledged[0].sequence)
        item = self._unacknowledged[at]
        self._sent = item.sequence
        return item

    def notify(self) -> None:
        """Wake the writer that waits for an item."""
        self._changed.set()

    async def wait(self, seconds: float | None = None) -> bool:
        """Wait until `notify` is called, at most so long. Return whether it was. There may be nothing to send then."""
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            return False
        self._changed.clear()
        return True


class StreamInbox:
    """Receive state. `last_seen` is the last sequence number received. Numbers increase; after a resume some may be missing."""

    def __init__(self) -> None:
        self.last_seen = 0
        self._acknowledged = 0

    def accept(self, sequence: int) -> bool:
        """Return False for a repeated item, otherwise note its sequence number and return True. 0: unnumbered."""
        if sequence and sequence <= self.last_seen:
            return False
        self.last_seen = sequence or self.last_seen
        return True

    @property
    def unacknowledged(self) -> int:
        """Number of items to acknowledge. After a resume it may be too large."""
        return self.last_seen - self._acknowledged

    def next_acknowledgement(self) -> int:
        """Return the sequence number to acknowledge."""
        self._acknowledged = self.last_seen
        return self.last_seen

    def reconnect(self) -> None:
        """Prepare for a new connection. The last acknowledgement may have been lost, so it is sent again."""
        self._acknowledged = 0
