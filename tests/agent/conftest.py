"""Runtime harnesses on the real event loop: threads do not follow a virtual clock."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.runtime_harness import RuntimeHarness


@pytest.fixture
async def new_world() -> AsyncIterator[type[RuntimeHarness]]:
    """A factory for harnesses, which are checked against the laws at the end."""
    made: list[RuntimeHarness] = []

    class Made(RuntimeHarness):
        def __init__(self, *args: object, **fields: object) -> None:
            super().__init__(*args, **fields)  # type: ignore[arg-type]
            made.append(self)

    yield Made
    for world in made:
        await world.close()
