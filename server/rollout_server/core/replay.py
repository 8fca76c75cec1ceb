"""A recording is a replay: the same records give the same outcome."""

from __future__ import annotations

from collections.abc import Iterable

from rollout_server.core.machine import IllegalRecord, Machine
from rollout_server.core.record import DriftFound, Record, SegmentOpened


def replay(machine: Machine, records: Iterable[Record]) -> Machine:
    """Feeds a log to a fresh machine. Raises `IllegalRecord` where what follows is not what the log says."""
    logged: list[Record] = []
    for record in records:
        if isinstance(record, SegmentOpened | DriftFound):
            logged.append(record)
        elif machine.accept(record) != (*logged, record):
            raise IllegalRecord(f"the log says {logged!r} before {record!r}")
        else:
            logged.clear()
    if logged:
        raise IllegalRecord(f"the log ends with {logged!r}, which no record led to")
    return machine
