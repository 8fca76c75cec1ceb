"""Places that a module's tests share: each test asks for rollouts under names of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.journeys.place import Deployment, place


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[1, 2], ids=["server", "fleet"])
async def here(request: pytest.FixtureRequest) -> AsyncIterator[Deployment]:
    """One server with its own gateway, and a gateway alone before two servers."""
    async with place(request.param) as opened:
        yield opened
        for gated, measured in opened.agents:
            gated.gate.set()
            measured.permits.release()
