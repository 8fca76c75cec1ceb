"""One stage per test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.durability.server import Forker
from tests.durability.stage import Stage, stage


@pytest.fixture(scope="session")
def forker() -> Iterator[Forker]:
    """The process that forks the servers of all tests."""
    forking = Forker()
    yield forking
    forking.close()


@pytest.fixture
async def here(forker: Forker, tmp_path: Path) -> AsyncIterator[Stage]:
    """A running server with its journal, trainers, receiver and clients."""
    async with stage(forker, tmp_path) as opened:
        yield opened
