"""The runtime's tests run on a loop whose time jumps, and make their rollouts in a small world of their own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

import pytest

from tests.support.jumping_loop import JumpingLoop
from tests.support.runtime_harness import RuntimeHarness


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Tells pytest-asyncio which loop the tests beside this file want."""
    return {"jumping": JumpingLoop}


@pytest.fixture
async def new_world() -> AsyncIterator[Callable[..., RuntimeHarness]]:
    """Makes worlds, and closes them in the end: whatever a test was about, every rollout of it has ended exactly once."""
    worlds: list[RuntimeHarness] = []

    def make(*agents: object, **settings: object) -> RuntimeHarness:
        worlds.append(RuntimeHarness(*agents, **settings))  # type: ignore[arg-type]
        return worlds[-1]

    yield make
    for world in worlds:
        await world.close()
