"""Violations of laws, as they are found."""

from __future__ import annotations


class LawBroken(AssertionError):
    """A world broke a law. The text says which one and where."""


class Laws:
    """Collects what a world breaks. Raising where a violation is found could be swallowed by the code under test."""

    def __init__(self) -> None:
        self.broken: list[str] = []

    def require(self, holds: bool, text: str) -> None:
        """Note a violation unless the condition holds."""
        if not holds and text not in self.broken:
            self.broken.append(text)
