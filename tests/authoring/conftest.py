"""One server for all faulty agents, for the whole suite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from rollout_server.local_stack import LocalStack, LoopThread

from tests.authoring import wrong
from tests.authoring.theatre import Honest, Theatre


@pytest.fixture(scope="session")
def theatre() -> Iterator[Theatre]:
    """A server with one correct agent and all faulty ones."""
    honest = Honest()
    agents = (honest, *wrong.wrong_agents())
    with LoopThread() as loop, LocalStack(loop, *agents, http=False, tool_output_bytes=20_000) as stage:
        yield Theatre(stage, honest)
        wrong.LET_GO.set()
