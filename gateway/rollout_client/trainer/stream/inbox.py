"""What came from the server: each numbered item once, and how far that was acknowledged."""

from __future__ import annotations


class Inbox:
    """`seen` is the last item that was taken in. Numbers rise; after a resume some are left out."""

    def __init__(self) -> None:
        self.seen = 0
        self._acknowledged = 0

    def take(self, sequence: int) -> bool:
        """Whether an item is to be looked at; not, if it came before."""
        if sequence and sequence <= self.seen:
            return False
        self.seen = sequence or self.seen
        return True

    def acknowledge(self) -> int | None:
        """What is to be acknowledged now; None: nothing is."""
        if self._acknowledged == self.seen:
            return None
        self._acknowledged = self.seen
        return self.seen

    def begin(self) -> None:
        """Another connection. Whether the last acknowledgement arrived is not known, so it is sent again."""
        self._acknowledged = 0
