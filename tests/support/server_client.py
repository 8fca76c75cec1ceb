"""A client of a server in this process, and a parser for its error statuses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from osmosis.rollout.v1 import event_pb2
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from osmosis.rollout.v1.rollout_service_pb2_grpc import RolloutServiceStub
from rollout_server.agent import Agent
from rollout_server.app import Server

from tests.support.agents import Idle
from tests.support.start_requests import settings

REQUEST_ID = "x-request-id"
CHANNEL_OPTIONS = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # By default channels of one process share their connections; a test about one connection would affect the others.
    ("grpc.use_local_subchannel_pool", 1),
)
Stream: TypeAlias = "grpc.aio.UnaryStreamCall[Any, Any]"
View: TypeAlias = "pb.RolloutView.ValueType"
Detail: TypeAlias = "event_pb2.EventDetail.ValueType"
DETAILS = (event_pb2.EVENT_DETAIL_BASIC, event_pb2.EVENT_DETAIL_MESSAGES, event_pb2.EVENT_DETAIL_FULL)


@dataclass(frozen=True)
class Refusal:
    """A status with its error details. `request_id` is taken from the trailing metadata."""

    code: grpc.StatusCode
    text: str
    request_id: str
    reason: str = ""
    domain: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
    fields: Mapping[str, str] = field(default_factory=dict)
    retry_after: float | None = None

    @classmethod
    def of(cls, error: grpc.aio.AioRpcError) -> Refusal:
        """Parse the error of a call. Fails if the status in the details differs from the call's status."""
        given = dict(error.trailing_metadata() or ()).get(REQUEST_ID, "")
        found: dict[str, Any] = {}
        status = rpc_status.from_call(error)
        for detail in status.details if status is not None else ():
            found |= _read(detail)
        return cls(error.code(), error.details() or "", str(given), **found)


def _read(detail: Any) -> dict[str, Any]:
    info, wrong, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    if detail.Unpack(info):
        return {"reason": info.reason, "domain": info.domain, "metadata": dict(info.metadata)}
    if detail.Unpack(wrong):
        return {"fields": {v.field: v.description for v in wrong.field_violations}}
    assert detail.Unpack(retry)
    return {"retry_after": retry.retry_delay.ToTimedelta().total_seconds()}


async def refusal(call: Awaitable[object]) -> Refusal:
    """Await a call that must fail, and return its refusal."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return Refusal.of(caught.value)


@dataclass(frozen=True)
class Caller:
    """A server and a channel to it."""

    server: Server
    channel: grpc.aio.Channel

    @property
    def stub(self) -> Any:
        """A stub of the service."""
        return RolloutServiceStub(self.channel)

    @property
    def address(self) -> str:
        """The address of the gRPC port."""
        return f"127.0.0.1:{self.server.grpc_port}"

    async def start(self, request: pb.StartRolloutRequest) -> pb.StartRolloutResponse:
        """Start a rollout."""
        response: pb.StartRolloutResponse = await self.stub.StartRollout(request)
        return response

    async def get(self, uid: str, view: View = pb.ROLLOUT_VIEW_BASIC) -> pb.Rollout:
        """Read a rollout."""
        response: pb.GetRolloutResponse = await self.stub.GetRollout(pb.GetRolloutRequest(uid=uid, view=view))
        return response.rollout

    async def finished(self, uid: str, view: View = pb.ROLLOUT_VIEW_FULL) -> pb.Rollout:
        """Wait for a rollout's end, attached to it."""
        while True:
            rollout: pb.Rollout = (await self.stub.WaitRollout(pb.WaitRolloutRequest(uid=uid, view=view))).rollout
            if rollout.state == pb.ROLLOUT_STATE_FINISHED:
                return rollout

    async def ended(self, uid: str) -> pb.Rollout:
        """Wait for a rollout's end by polling, without attaching to it."""

        async def has_ended() -> bool:
            return (await self.get(uid)).state == pb.ROLLOUT_STATE_FINISHED

        await until(has_ended)
        return await self.get(uid)

    async def play(self, request: pb.StartRolloutRequest, view: View = pb.ROLLOUT_VIEW_FULL) -> pb.Rollout:
        """Start a rollout and wait for its end."""
        return await self.finished((await self.start(request)).rollout.uid, view)

    def watch(self, uid: str, after: int = 0, detail: Detail = event_pb2.EVENT_DETAIL_BASIC, **call: Any) -> Stream:
        """Open a watch."""
        watching: Stream = self.stub.WatchRollout(
            pb.WatchRolloutRequest(uid=uid, after_sequence=after, detail=detail), **call
        )
        return watching

    async def events(
        self, uid: str, after: int = 0, detail: Detail = event_pb2.EVENT_DETAIL_BASIC
    ) -> list[event_pb2.RolloutEvent]:
        """All events after a sequence number, to the end."""
        return [item.event async for item in self.watch(uid, after, detail)]


@asynccontextmanager
async def serving(*agents: Agent, **changes: Any) -> AsyncIterator[Caller]:
    """A server with these agents, and a channel to it."""
    async with (
        Server(agents or (Idle(),), settings(**changes)) as server,
        grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc_port}", options=CHANNEL_OPTIONS) as channel,
    ):
        yield Caller(server, channel)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Poll until the condition holds."""
    while True:
        if await condition():
            return
        await asyncio.sleep(0.01)


async def settled(tasks: int) -> None:
    """Wait until at most this many tasks exist. (grpc replaces some of its own tasks at each call.)"""

    async def are_gone() -> bool:
        return len(asyncio.all_tasks()) <= tasks

    await until(are_gone)


async def first(items: AsyncIterator[Any] | Stream, count: int) -> list[Any]:
    """The first items of a stream, which stays open."""
    iterator = items.__aiter__()
    return [await anext(iterator) for _ in range(count)]


def kinds(events: Iterable[event_pb2.RolloutEvent]) -> list[str | None]:
    """The kinds of events."""
    return [event.WhichOneof("event") for event in events]
