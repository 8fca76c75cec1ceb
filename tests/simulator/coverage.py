"""What a run of worlds reached: each record in each state of its conversation, and each fault."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Final, TypeAlias

from rollout_server.core import record as records
from rollout_server.core.conversation import State
from rollout_server.core.machine import Machine
from rollout_server.core.record import Forked, Input, Record

from tests.simulator.faults import Fault

Cell: TypeAlias = tuple[State, str]
"""A state, and the name of a record that was applied in it."""

KINDS: Final = tuple(
    name for name, kind in vars(records).items() if isinstance(kind, type) and kind.__module__ == records.__name__
)
_COMMANDS = ("Asked", "Appended")
_RESULTS = ("Answered", "GivenUp", "SegmentOpened", "DriftFound")

UNREACHABLE: Final[dict[tuple[State, tuple[str, ...]], str]] = {
    (State.ENDED, KINDS): "nothing is recorded after the end",
    (
        State.ASKING,
        ("Accepted", *_COMMANDS, "ToolStarted", "ToolReturned"),
    ): "the conversation waits for its completion",
    (State.CALLING, ("Accepted", *_COMMANDS, *_RESULTS)): "the conversation waits for its tools",
    (State.OPEN, (*_RESULTS, "ToolReturned")): "the conversation waits for nothing",
    (
        State.CLOSED,
        ("Accepted", *_COMMANDS, *_RESULTS, "ToolStarted", "ToolReturned"),
    ): "a closed conversation does not go on",
    (State.CLOSED, ("Resumed",)): "only agents that cannot be replayed give up their main conversation",
}
"""Records that cannot come in a state, with the reason."""

NOT_SIMULATED: Final = {
    "CaptureSettled": "no agent of the worlds opens a model endpoint",
    "ModelCalled": "no agent of the worlds calls a further model",
}
"""Records that no world has, with the reason."""


class CoveredMachine:
    """A machine that counts which records it accepts in which states."""

    def __init__(self, cells: Counter[Cell], machine: Machine) -> None:
        self.machine = machine
        self._cells = cells

    def accept(self, record: Input) -> tuple[Record, ...]:
        """Count and accept a record. What follows from it counts with the same state."""
        of = replace(record, segment_id=record.of) if isinstance(record, Forked) else record
        state = self.machine.find(of).state
        logged = self.machine.accept(record)
        for each in logged:
            self._cells[state, type(each).__name__] += 1
        return logged


def unreachable_reason(state: State, kind: str) -> str:
    """Return why no world reaches a cell; empty if one should."""
    reasons = (reason for (where, kinds), reason in UNREACHABLE.items() if where is state and kind in kinds)
    return NOT_SIMULATED.get(kind) or next(reasons, "")


def missing(cells: Counter[Cell], faults: Counter[Fault]) -> Iterator[str]:
    """Yield what was not reached although it can be, and what was reached although the table says that it cannot."""
    for state in State:
        for kind in KINDS:
            reachable = not unreachable_reason(state, kind)
            if reachable != bool(cells[state, kind]):
                yield f"{kind} in state {state.name} was {'never' if reachable else 'unexpectedly'} reached"
    yield from (f"never happened: {fault.value}" for fault in Fault if not faults[fault])


def table(cells: Counter[Cell], faults: Counter[Fault]) -> str:
    """Return the counts as text; "-" stands for what cannot be reached."""
    states = [state for state in State if state is not State.ENDED]
    lines = [f"{'record':16}" + "".join(f"{state.name:>10}" for state in states)]
    for kind in KINDS:
        counts = ("-" if unreachable_reason(state, kind) else str(cells[state, kind]) for state in states)
        lines.append(f"{kind:16}" + "".join(f"{count:>10}" for count in counts))
    lines += [f"{faults[fault]:10}  {fault.value}" for fault in Fault]
    return "\n".join(lines)
