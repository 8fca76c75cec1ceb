"""Deployments shared by the tests of a module: each test uses its own rollout ids."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.journeys.place import Deployment, place


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[1, 2], ids=["server", "fleet"])
async def here(request: pytest.FixtureRequest) -> AsyncIterator[Deployment]:
    """One server with its own gateway, and a separate gateway in front of two servers."""
    async with place(request.param) as opened:
        yield opened
        for gated, measured in opened.agents:
            gated.gate.set()
            measured.permits.release()
