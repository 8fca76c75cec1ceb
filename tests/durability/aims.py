"""Moments at which the server is killed, and the shared record of what the trainers generated."""

from __future__ import annotations

import asyncio
import re
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Moment(StrEnum):
    """Where the server is killed, as seen from outside."""

    ASKED = "a trainer receives a turn"
    ANSWERED = "a trainer has answered a turn"
    DELIVERED = "the receiver has the outcome and has not acknowledged it"
    ACKNOWLEDGED = "the receiver has acknowledged the outcome"
    STARTED = "the start was acknowledged"
    TOOL_BEFORE = "a tool begins"
    TOOL_MIDDLE = "a tool is between two side effects"
    TOOL_AFTER = "a tool returns"
    TIME = "at a random time"


@dataclass(frozen=True)
class Aim:
    """Kill the server at this moment of this case, `delay` seconds later. `turn` and `tool` where the moment has one."""

    moment: Moment
    case: int
    turn: int = 0
    tool: str = ""
    delay: float = 0.0


@dataclass
class Gun:
    """Kills the server once, when the aim's moment comes. Moments are reported from any thread."""

    kill: Callable[[], None]
    loop: asyncio.AbstractEventLoop
    aim: Aim | None = None
    fired: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def load(self, aim: Aim) -> None:
        """Wait for this aim from now on."""
        self.fired.clear()
        self.aim = aim

    def report(self, moment: Moment, case: int, turn: int = 0) -> None:
        """Kill the server if this is the aim. Without a delay it is dead when this returns."""
        with self._lock:
            aim = self.aim
            if aim is None or (aim.moment, aim.case, aim.turn) != (moment, case, turn):
                return
            self.aim = None
        if aim.delay:
            self.loop.call_soon_threadsafe(self.loop.call_later, aim.delay, self._fire)
        else:
            self._fire()

    def _fire(self) -> None:
        self.kill()
        self.fired.set()


@dataclass(frozen=True)
class Case:
    """What a rollout has to do: `steps` are names of tools, joined with + if they are called in one turn."""

    number: int
    steps: Sequence[str]

    @property
    def question(self) -> str:
        """The user's message."""
        return f"Case {self.number}: {' '.join(self.steps)}."

    @classmethod
    def of(cls, text: str) -> Case:
        """Read the case from a text that contains its question."""
        found = re.search(r"Case (\d+): ([a-z+ ]+)\.", text)
        assert found is not None, text
        return cls(int(found[1]), found[2].split())

    def calls(self, turn: int) -> Sequence[tuple[str, Mapping[str, Any]]]:
        """Names and arguments of the calls of a turn, from 1; none in the last turn."""
        if turn > len(self.steps):
            return ()
        tools = self.steps[turn - 1].split("+")
        return [(tool, {"case": self.number, "step": 10 * turn + index}) for index, tool in enumerate(tools)]

    def text(self, turn: int) -> str:
        """The text of a turn."""
        return f"Turn {turn} of case {self.number}." if turn <= len(self.steps) else f"Case {self.number} is done."


@dataclass
class Generations:
    """How often each turn of each case was generated in this round. Written in several threads."""

    gun: Gun
    counts: Counter[tuple[int, int]] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, case: int, turn: int) -> None:
        """Count a generation. The trainer has the request and has not answered it."""
        with self.lock:
            self.counts[case, turn] += 1
        self.gun.report(Moment.ASKED, case, turn)
        self.gun.report(Moment.ANSWERED, case, turn)  # its aim always has a delay
