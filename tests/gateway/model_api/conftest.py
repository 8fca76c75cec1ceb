from collections.abc import AsyncIterator

import pytest

from tests.support.model_gateway import ModelGateway, model_gateway


@pytest.fixture
async def endpoint() -> AsyncIterator[ModelGateway]:
    async with model_gateway() as opened:
        yield opened
