"""The trainer client on both event loops: the server runs on uvloop, and the two report broken connections differently."""

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
    """Each test runs once on each available loop."""
    ours = loop_factory()
    return {"asyncio": asyncio.SelectorEventLoop} | ({"uvloop": ours} if ours is not None else {})


@pytest.fixture
async def connect() -> AsyncIterator[Callable[[HttpSettings], HttpClient]]:
    """`connect(settings)`: a client that is closed at the end."""
    clients: list[HttpClient] = []

    def make(settings: HttpSettings) -> HttpClient:
        clients.append(HttpClient(settings))
        return clients[-1]

    yield make
    for client in clients:
        await client.close()


@pytest.fixture
def client(connect: Callable[[HttpSettings], HttpClient]) -> HttpClient:
    """A client with a timeout of 20 s."""
    return connect(HttpSettings(timeout=20.0))


@pytest.fixture
async def trainers(client: HttpClient) -> AsyncIterator[MaskedTrainers]:
    """The shared parts of samplers of the synchronous HTTP API; the tokenizer "toy" is the built-in one."""
    tokenizers = Tokenizers(LoaderSettings(directories={"toy": TOY_TOKENIZER}, local_files_only=True))
    yield MaskedTrainers(client, tokenizers)
    await tokenizers.close()


@pytest.fixture
def plain(client: HttpClient) -> PlainTrainers:
    """The shared parts of samplers of the asynchronous HTTP API, with up to three quick retries."""
    return PlainTrainers(client, RetryPolicy(count=3, first=0.01, most=0.02))
