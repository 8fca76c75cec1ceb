"""A journal in a directory of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from rollout_server.edge.journal import SqliteJournal


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "journal"


@pytest.fixture
async def journal(directory: Path) -> AsyncIterator[SqliteJournal]:
    async with SqliteJournal(directory) as journal:
        await journal.load()
        yield journal
