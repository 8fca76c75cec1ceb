"""One server for all agents that go wrong, as long as the suite lasts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from rollout_server.local_stack import LocalStack, LoopThread

from tests.authoring import wrong
from tests.authoring.theatre import Honest, Theatre


@pytest.fixture(scope="session")
def theatre() -> Iterator[Theatre]:
    """A server with an honest agent and all that are not."""
    honest = Honest()
    agents = (honest, *wrong.wrong_agents())
    with LoopThread() as loop, LocalStack(loop, *agents, http=False, tool_output_bytes=20_000) as stage:
        yield Theatre(stage, honest)
        wrong.LET_GO.set()
