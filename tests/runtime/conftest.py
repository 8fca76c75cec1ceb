"""The runtime's tests run on a loop with virtual time, and create their rollouts in a harness."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

import pytest
from rollout_server.runtime.journal import MemoryJournal

from tests.support.group_harness import GroupHarness
from tests.support.journal import LateJournal
from tests.support.jumping_loop import JumpingLoop
from tests.support.runtime_harness import RuntimeHarness


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The event loop for the tests in this folder."""
    return {"jumping": JumpingLoop}


@pytest.fixture
async def new_world() -> AsyncIterator[Callable[..., RuntimeHarness]]:
    """A factory for harnesses. At the end each is closed, which checks that every rollout has ended exactly once."""
    worlds: list[RuntimeHarness] = []

    def make(*agents: object, **settings: object) -> RuntimeHarness:
        worlds.append(RuntimeHarness(*agents, **settings))  # type: ignore[arg-type]
        return worlds[-1]

    yield make
    for world in worlds:
        await world.close()


@pytest.fixture(params=[MemoryJournal, LateJournal])
async def harness(request: pytest.FixtureRequest) -> AsyncIterator[Callable[..., GroupHarness]]:
    """A factory for harnesses of groups, with each kind of journal. They are closed at the end."""
    made: list[GroupHarness] = []

    def make(*agents: object, **settings: object) -> GroupHarness:
        made.append(GroupHarness(*agents, journal=request.param(), **settings))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for each in made:
        await each.close()


@pytest.fixture(autouse=True)
async def no_task_is_left() -> AsyncIterator[None]:
    """Cancel what a test leaves running, such as a process that has crashed: the end of a rollout starts the next in the queue."""
    yield
    for _ in range(10):
        if others := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in others:
                task.cancel()
            await asyncio.wait(others, timeout=60)
