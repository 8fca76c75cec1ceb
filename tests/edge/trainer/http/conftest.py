"""The trainer client on both event loops: the product runs on uvloop, and the two report broken connections differently."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

import pytest
from rollout_server.edge.grpc_loop import loop_factory
from rollout_server.edge.tokens.cache import Tokenizers
from rollout_server.edge.tokens.loader import LoaderSettings
from rollout_server.edge.trainer.http_client import HttpClient, HttpSettings
from rollout_server.edge.trainer.http_masked_sampler import MaskedTrainers
from rollout_server.edge.trainer.http_plain_sampler import PlainTrainers
from rollout_server.edge.trainer.retry import RetryPolicy
from rollout_server.testing.tokenizer import TOY_TOKENIZER


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Each test once on each loop that there is."""
    ours = loop_factory()
    return {"asyncio": asyncio.SelectorEventLoop} | ({"uvloop": ours} if ours is not None else {})


@pytest.fixture
async def connect() -> AsyncIterator[Callable[[HttpSettings], HttpClient]]:
    """`connect(settings)`: a client that is closed in the end."""
    clients: list[HttpClient] = []

    def make(settings: HttpSettings) -> HttpClient:
        clients.append(HttpClient(settings))
        return clients[-1]

    yield make
    for client in clients:
        await client.close()


@pytest.fixture
def client(connect: Callable[[HttpSettings], HttpClient]) -> HttpClient:
    """A client that loses patience after 20 s."""
    return connect(HttpSettings(timeout=20.0))


@pytest.fixture
async def trainers(client: HttpClient) -> AsyncIterator[MaskedTrainers]:
    """What samplers of the synchronous dialect share; the tokenizer "toy" is the built-in one."""
    tokenizers = Tokenizers(LoaderSettings(directories={"toy": TOY_TOKENIZER}, local_files_only=True))
    yield MaskedTrainers(client, tokenizers)
    await tokenizers.close()


@pytest.fixture
def plain(client: HttpClient) -> PlainTrainers:
    """What samplers of the asynchronous dialect share; they ask again up to three times, and soon."""
    return PlainTrainers(client, RetryPolicy(count=3, first=0.01, most=0.02))
