"""What a worker adds to a server: the other workers, and the end that it shares with them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final, cast

import grpc
from rollout_gateway.channel import ServerChannel
from rollout_gateway.fleet.fleet import Fleet

from rollout_server.edge.rpc.local_channel import LocalChannel
from rollout_server.workers.call_router import WorkerRouter
from rollout_server.workers.link import ParentLink
from rollout_server.workers.metrics_page import SharedMetricsPort, merged_page
from rollout_server.workers.questions import METRICS, STREAMS, QuestionSocket, query

_OPTIONS: Final = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # A worker that was started again is there within seconds.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.min_reconnect_backoff_ms", 1_000),
)


class Worker:
    """This worker's access to the others. Made on the event loop."""

    def __init__(self, link: ParentLink) -> None:
        plan = link.plan
        self._link = link
        self._channels = [
            # The name and not the path orders the workers for a start: duplicates must reach the same one after a restart, too.
            ServerChannel(f"worker-{index}", partial(grpc.aio.insecure_channel, plan.address(index), _OPTIONS))
            for index in range(plan.count)
        ]
        self.fleet = Fleet(self._channels, failover=False)
        self.router = WorkerRouter(self.fleet, self._channels, plan.index, self._streams_of_all)
        self.secret = bytes.fromhex(plan.secret)
        self.gateway_key = plan.gateway_key
        self.socket: Path = plan.socket(plan.index)
        self._stack = AsyncExitStack()

    @asynccontextmanager
    async def joined(
        self,
        channel: LocalChannel,
        server_id: str,
        agents: Sequence[str],
        metrics: Callable[[], bytes],
        streams: Callable[[], int],
    ) -> AsyncIterator[None]:
        """Report that the server can be reached over its socket, and wait until all can. Others are answered in the block.

        Args:
            channel: reaches the server without its socket.
            server_id: the beginning of the server's uids.
            agents: the names of its agents.
            metrics: returns its metrics, in any thread.
            streams: returns the number of its trainers' streams, in any thread.
        """
        plan, link = self._link.plan, self._link
        self.fleet.routing.serve_here(self.fleet.routing.members[plan.index], cast(grpc.aio.Channel, channel))
        responses = {METRICS: metrics, STREAMS: lambda: str(streams()).encode()}
        with QuestionSocket(plan.question_socket(plan.index), responses):
            link.send(up=server_id, agents=agents)
            self.router.know(await link.joined())
            link.on_servers = self.router.know
            yield

    async def open_metrics(self, host: str) -> None:
        """Open the port of the metrics, if there is one. Raises OSError."""
        port = self._link.plan.metrics_port
        if port is not None:
            self._stack.push_async_callback(SharedMetricsPort(host, port, self._merged).stop)

    async def page(self, own: bytes) -> bytes:
        """Return the metrics of all workers; `own` are those of this one."""
        return await asyncio.to_thread(self._merged, own)

    async def leave(self) -> None:
        """Report that all rollouts of this worker have ended, and wait until the others need it no more."""
        self._link.send(drained=True)
        await self._link.released()

    async def close(self) -> None:
        """Close what this object opened."""
        await self._stack.aclose()
        for channel in self._channels:
            await channel.close()

    def _merged(self, own: bytes | None = None) -> bytes:
        pages = self._responses(METRICS)
        if own is not None:
            pages[self._link.plan.index] = own
        return merged_page(pages)

    async def _streams_of_all(self) -> Mapping[int, int]:
        """Return the numbers of streams of the workers that respond, by their indexes."""
        responses = await asyncio.to_thread(self._responses, STREAMS)
        return {index: int(text) for index, text in responses.items() if text}

    def _responses(self, question: bytes) -> dict[int, bytes | None]:
        plan = self._link.plan
        return query([plan.question_socket(index) for index in range(plan.count)], question)
