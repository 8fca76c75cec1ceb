"""The load of each API and floor: how its rollouts are prepared and run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from bench.judge.site import Running, Site, get, post
from bench.judge.workload import Api, Floor, Workload
from bench.programs.clients import Batch, Ends
from bench.programs.conversation import Facts
from bench.programs.drive import Order, Player, WrongRollout, floor_player, grpc_player, http_player, play_many
from bench.programs.endpoint import EndpointRollouts, ProxyRollouts
from bench.programs.trainer import JUDGED, UNJUDGED

Load = Callable[[int, int], AbstractAsyncContextManager[Callable[[], Awaitable[None]]]]
"""Prepares so many rollouts, so many at once, and yields the function that runs them. It raises `WrongRollout`."""


@dataclass(frozen=True, slots=True)
class Loads:
    """The loads of one workload."""

    site: Site
    workload: Workload
    facts: Facts
    tools: Sequence[Any]

    @classmethod
    async def of(cls, site: Site, workload: Workload) -> Loads:
        """Return the loads of a workload."""
        server = next(iter(site.servers.values()))
        facts = await get(site.http, f"{site.trainer.url}/conversations/{workload.conversation}", Facts)
        tools = (await get(site.http, f"{server.url}/tools", dict[str, Any]))["tools"]
        return cls(site, workload, facts, tools)

    def server(self, api: Api, server: Running) -> Load:
        """Return the load of an API of a server."""
        judged = self._http_order(JUDGED)
        match api:
            case Api.SYNC:
                return _driven(http_player(self.site.http, server.url, judged))
            case Api.INIT:
                return self._started_by_trainer("init", server.url)
            case Api.GRPC_HTTP:
                return _driven(grpc_player(server.channel, judged))
            case Api.MESSAGES | Api.TOKENS:
                order = self._grpc_order(self.workload.conversation)
                return _driven(grpc_player(server.channel, order, in_tokens=api is Api.TOKENS))
            case Api.STREAM:
                return self._started_by_trainer("stream", f"127.0.0.1:{server.grpc_port}")
            case Api.ENDPOINT:
                return _prepared(EndpointRollouts(self.site.http, server.url, judged, self.tools))

    def floor(self, floor: Floor, running: Running) -> Load:
        """Return the load of a floor."""
        unjudged = self._http_order(UNJUDGED)
        match floor:
            case Floor.HTTP:
                return _driven(http_player(self.site.http, running.url, unjudged))
            case Floor.PROXY:
                return _prepared(ProxyRollouts(self.site.http, running.url, unjudged, self.tools))
            case Floor.MESSAGES | Floor.TOKENS:
                mode = "messages" if floor is Floor.MESSAGES else "tokens"
                order = self._grpc_order(f"floor-{mode}-{self.workload.conversation}")
                return _driven(floor_player(running.channel, order))

    def _http_order(self, rule: str) -> Order:
        name = self.workload.conversation
        return Order(name, f"{self.site.trainer.url}/{rule}/{name}", self.facts)

    def _grpc_order(self, name: str) -> Order:
        return Order(name, f"grpc://127.0.0.1:{self.site.trainer.grpc_port}", self.facts)

    def _started_by_trainer(self, api: str, server: str) -> Load:
        @asynccontextmanager
        async def prepared(rollouts: int, concurrency: int) -> AsyncIterator[Callable[[], Awaitable[None]]]:
            batch = Batch(api, server, self.workload.conversation, rollouts, concurrency)
            yield lambda: _run_batch(self.site.http, self.site.trainer.url, batch)

        return prepared


async def _run_batch(http: aiohttp.ClientSession, trainer: str, batch: Batch) -> None:
    ends = await post(http, f"{trainer}/rollouts", batch, Ends)
    if ends.failed:
        raise WrongRollout(f"{ends.failed} of {batch.rollouts} rollouts: {ends.first}")


def _driven(play: Player) -> Load:
    @asynccontextmanager
    async def prepared(rollouts: int, concurrency: int) -> AsyncIterator[Callable[[], Awaitable[None]]]:
        yield lambda: play_many(play, rollouts, concurrency)

    return prepared


def _prepared(players: EndpointRollouts | ProxyRollouts) -> Load:
    @asynccontextmanager
    async def prepared(rollouts: int, concurrency: int) -> AsyncIterator[Callable[[], Awaitable[None]]]:
        async with players(rollouts) as play:
            yield lambda: play_many(play, rollouts, concurrency)

    return prepared
