from collections.abc import AsyncIterator

import pytest_asyncio

from tests.support.model_gateway import ModelGateway, ScriptedAgentService, model_gateway


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway() -> AsyncIterator[ModelGateway]:
    """One gateway for the tests of a module."""
    async with model_gateway() as opened:
        yield opened


@pytest_asyncio.fixture(loop_scope="module")
async def endpoint(gateway: ModelGateway) -> ModelGateway:
    """The gateway, in front of a service as it was at first."""
    vars(gateway.server).update(vars(ScriptedAgentService()))
    return gateway
