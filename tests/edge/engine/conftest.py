"""A client of a real server, shared by all tests of a module."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio
from rollout_client import AsyncClient

from tests.edge.engine.rolling import connected


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client() -> AsyncIterator[AsyncClient]:
    async with connected() as client:
        yield client
