"""A model that waits for the test before it completes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence

from rollout_server.testing.model.calculator import CalculatorModel
from rollout_server.testing.script import ScriptedReply


class GatedModel:
    """The calculator's model behind a gate. It blocks the trainer's only thread, so one request waits at a time."""

    def __init__(self) -> None:
        self._model = CalculatorModel()
        self._open = threading.Event()
        self._asked = threading.Semaphore(0)

    def reply(self, messages: Sequence[Mapping[str, object]]) -> ScriptedReply:
        """Return the calculator's completion once the gate is open."""
        self._asked.release()
        self._open.wait()
        return self._model.reply(messages)

    async def asked(self) -> None:
        """Wait until the next request is waiting at the gate. Each request counts once."""
        await asyncio.to_thread(self._asked.acquire)

    def open(self) -> None:
        """Open the gate for this request and all later ones."""
        self._open.set()
