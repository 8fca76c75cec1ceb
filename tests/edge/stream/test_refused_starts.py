"""Starts on a stream that the journal cannot store: what was refused leaves the stream, what was stored stays."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import grpc
import pytest

from tests.edge.stream.conftest import OpenPlace
from tests.edge.stream.trainer import start

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_only_what_was_refused_leaves_the_stream(open_place: OpenPlace, tmp_path: Path) -> None:
    place = await open_place(journal=str(tmp_path / "j"))
    trainer = place.trainer()
    await trainer.put(start=start("g", 2, "id", agent="held"))
    await trainer.until(lambda t: len(t.started) == 2)
    with closing(sqlite3.connect(tmp_path / "j" / "journal.sqlite3", isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        await trainer.put(start=start("g", 3, "id", agent="held"))
        await trainer.until(lambda t: len(t.refused) == 1)
        connection.execute("ROLLBACK")
    assert trainer.refused[0].code == grpc.StatusCode.UNAVAILABLE.value[0]
    streams = place.server._streams
    assert [*streams._rollouts] == [started.uid for started in trainer.started]
    place.held.gate.set()
    await trainer.until(lambda t: len(t.outcomes) == 2)
    assert [ended.outcome.stop.reason for ended in trainer.outcomes] == ["stop", "stop"]
