"""SIGTERM and Ctrl-C for programs that serve until they are told to stop."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from contextlib import suppress


class StopSignals:
    """Handles SIGTERM and SIGINT on the running event loop.

    Attributes:
        first: set by the first of them, which asks the program to finish its work and stop.
        second: set by the second one, which asks it to stop at once.
        again: called by the second one.
    """

    def __init__(self) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()
        self.again: Callable[[], None] = lambda: None
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            with suppress(NotImplementedError):  # Windows has no signal handlers on the loop
                loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        if self.first.is_set():
            self.second.set()
            self.again()
        self.first.set()
