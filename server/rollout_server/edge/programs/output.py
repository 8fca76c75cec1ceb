"""The bounded output of a program."""

from __future__ import annotations

_HALF = 64 * 1024
"""Bytes kept of the beginning, and of the end."""


class ProgramOutput:
    """Beginning and end of what a program has written; what lies between is counted and dropped."""

    def __init__(self) -> None:
        self._head = bytearray()
        self._tail = bytearray()
        self._dropped = 0

    def add(self, chunk: bytes) -> None:
        """Append bytes."""
        room = _HALF - len(self._head)
        self._head += chunk[:room]
        self._tail += chunk[room:]
        excess = max(0, len(self._tail) - _HALF)
        del self._tail[:excess]
        self._dropped += excess

    @property
    def text(self) -> str:
        """The output as text, with a line that says how much was dropped."""
        if not self._dropped:
            return (self._head + self._tail).decode(errors="replace")
        head, tail = self._head.decode(errors="replace"), self._tail.decode(errors="replace")
        return f"{head}\n... {self._dropped:,} bytes left out ...\n{tail}"
