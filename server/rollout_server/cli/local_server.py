"""Where commands play rollouts: the real server in this process, a client of it, and where no model is named, a stand-in."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollout_server.agent import Agent
from rollout_server.cli.completion_flags import CompletionFlags

if TYPE_CHECKING:
    from rollout_client import AsyncClient

    from rollout_server.authoring.endpoint import Endpoint
    from rollout_server.authoring.model_stubs import StandIn
    from rollout_server.settings import Settings

_TOY = "toy"
_RECORDS = 64


@dataclass(frozen=True, slots=True)
class LocalServer:
    """A server that serves, its client, and who completes."""

    client: AsyncClient
    endpoint: Endpoint
    stand_in: StandIn | None


@asynccontextmanager
async def stage(agents: Sequence[Agent], asked: CompletionFlags, places: int = 1) -> AsyncIterator[LocalServer]:
    """Serves agents for so many rollouts at a time. Raises `AuthorError`, and RuntimeError or OSError where it cannot be."""
    chosen = asked.stand_in()
    if chosen is None:
        endpoint = asked.endpoint()
        async with _served(agents, asked, places) as client:
            yield LocalServer(client, endpoint, None)
        return

    async def prepare(_client: AsyncClient) -> StandIn:
        return chosen

    async with stage_with(agents, prepare, asked, places) as here:
        yield here


@asynccontextmanager
async def stage_with(
    agents: Sequence[Agent],
    prepare: Callable[[AsyncClient], Awaitable[StandIn]],
    asked: CompletionFlags | None = None,
    places: int = 1,
) -> AsyncIterator[LocalServer]:
    """The same with a stand-in, which may be made of what the server says.

    The strict trainer speaks for it, over gRPC: it checks every token, and samples are complete.
    """
    from rollout_server.authoring.endpoint import Endpoint
    from rollout_server.testing.trainer import StrictTrainer

    asked = asked or CompletionFlags()
    async with _served(agents, asked, places) as client:
        chosen = await prepare(client)
        async with StrictTrainer(model=chosen.model, script=chosen.script, requests_kept=_RECORDS) as trainer:
            url, shown = f"grpc://{trainer.grpc_target}", f"a stand-in ({chosen.name})"
            endpoint = Endpoint(url, "grpc", tokenizer=_TOY, sampling=asked.sampling, limits=asked.limits, shown=shown)
            yield LocalServer(client, endpoint, chosen)


@asynccontextmanager
async def _served(agents: Sequence[Agent], asked: CompletionFlags, places: int) -> AsyncIterator[AsyncClient]:
    from rollout_client import AsyncClient

    from rollout_server.app import Server

    async with (
        Server(agents, _settings(asked, places)) as server,
        AsyncClient(f"127.0.0.1:{server.grpc_port}") as client,
    ):
        yield client


def _settings(asked: CompletionFlags, places: int) -> Settings:
    """The user's own settings of tokenizers, times and retries; but nobody else is served, and every endpoint is the user's."""
    from rollout_server.settings import load

    before = load()
    tokenizers = {_TOY: _TOY, **before.tokenizers, **asked.tokenizers}
    return load(
        host="127.0.0.1",
        grpc_port=0,
        http=False,
        metrics_port=None,
        drain_seconds=0,
        max_running=places,
        max_records=_RECORDS + places,
        api_key=None,
        admin_key=None,
        api_keys=(),
        api_keys_file=None,
        targets=(),
        tls_cert=None,
        tls_key=None,
        tls_client_ca=None,
        tokenizers=tokenizers,
    )
