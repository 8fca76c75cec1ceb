"""A model that answers when the test says so."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence

from rollout_server.testing.model.calculator import CalculatorModel
from rollout_server.testing.script import ScriptedReply


class GatedModel:
    """The calculator's model behind a gate. It stands in the trainer's only thread, so one question waits at a time."""

    def __init__(self) -> None:
        self._model = CalculatorModel()
        self._open = threading.Event()
        self._asked = threading.Semaphore(0)

    def reply(self, messages: Sequence[Mapping[str, object]]) -> ScriptedReply:
        """The calculator's answer, once the gate is open."""
        self._asked.release()
        self._open.wait()
        return self._model.reply(messages)

    async def asked(self) -> None:
        """Waits for the next question to stand before the gate; each question counts once."""
        await asyncio.to_thread(self._asked.acquire)

    def open(self) -> None:
        """Lets this question and all later ones through."""
        self._open.set()
