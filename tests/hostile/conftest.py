"""A separate server process for each test, with keys, and a trainer for tests that need one."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from rollout_server.testing.model.calculator import CalculatorModel
from rollout_server.testing.trainer import StrictTrainer

from tests.hostile import target as targets
from tests.hostile.target import Target


@pytest.fixture
async def target() -> AsyncIterator[Target]:
    """A fresh server that requires `targets.KEY`."""
    async with targets.target() as fresh:
        yield fresh


@pytest.fixture
async def trainer(target: Target) -> AsyncIterator[StrictTrainer]:
    """A strict trainer that judges the server's requests."""
    async with StrictTrainer(model=CalculatorModel(), tools_from=target.url, tools_key=targets.KEY) as strict:
        yield strict
