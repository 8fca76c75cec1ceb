"""A scripted server for the REST API, a gateway in front of it, and a reader of server-sent events on a plain socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
from osmosis.rollout.v1 import event_pb2
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from osmosis.rollout.v1.rollout_service_pb2_grpc import add_RolloutServiceServicer_to_server
from rollout_gateway.app import create_app
from rollout_gateway.settings import GatewaySettings
from starlette.types import ASGIApp, Receive, Scope, Send

from tests.support.gateways import http_client, listening
from tests.support.scripted_server import UID, Refusal, ScriptedServer

KEY = "the-server-key"
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hi."}],
    "completions": {"url": "http://trainer:9001"},
}


@dataclass
class PlainServer(ScriptedServer):
    """Respond to all rpcs. If `key` is set, all but GetServerInfo require it. `asked` holds the last request of each rpc."""

    key: str = ""
    rollout: pb.Rollout = field(default_factory=lambda: pb.Rollout(uid=UID, state=pb.ROLLOUT_STATE_RUNNING))
    attached: bool = False
    access: pb.ModelAccess | None = None
    page: pb.ListRolloutsResponse = field(default_factory=pb.ListRolloutsResponse)
    agents: list[pb.Agent] = field(default_factory=list)
    server: pb.GetServerInfoResponse = field(default_factory=lambda: pb.GetServerInfoResponse(running=3, queued=2))
    asked: dict[str, Any] = field(default_factory=dict)
    #: How a stream breaks after the event with this number, once each.
    breaks: dict[int, Refusal | None] = field(default_factory=dict)
    #: Streams stay open after the last event.
    stays: bool = False
    waiting: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)

    async def _asked(self, rpc: str, request: Any, context: Any) -> None:
        self.asked[rpc] = request
        await self._enter(rpc, context)
        if self.key and rpc != "GetServerInfo" and self.metadata[rpc].get("authorization") != f"Bearer {self.key}":
            await Refusal(grpc.StatusCode.UNAUTHENTICATED, "this is not one of the server's keys").abort(context)

    async def StartRollout(self, request: Any, context: Any) -> pb.StartRolloutResponse:
        await self._asked("StartRollout", request, context)
        return pb.StartRolloutResponse(
            rollout=self.rollout, attached=self.attached, tools=self.tools, access=self.access
        )

    async def GetRollout(self, request: Any, context: Any) -> pb.GetRolloutResponse:
        await self._asked("GetRollout", request, context)
        return pb.GetRolloutResponse(rollout=self.rollout, access=self.access if request.include_access else None)

    async def WaitRollout(self, request: Any, context: Any) -> pb.WaitRolloutResponse:
        await self._asked("WaitRollout", request, context)
        await self._wait()
        return pb.WaitRolloutResponse(rollout=self.rollout)

    async def ListRollouts(self, request: Any, context: Any) -> pb.ListRolloutsResponse:
        await self._asked("ListRollouts", request, context)
        return self.page

    async def CancelRollouts(self, request: Any, context: Any) -> pb.CancelRolloutsResponse:
        await self._asked("CancelRollouts", request, context)
        return pb.CancelRolloutsResponse(uids=[UID])

    async def AcknowledgeOutcome(self, request: Any, context: Any) -> pb.AcknowledgeOutcomeResponse:
        await self._asked("AcknowledgeOutcome", request, context)
        return pb.AcknowledgeOutcomeResponse()

    async def WatchRollout(self, request: Any, context: Any) -> AsyncIterator[pb.WatchRolloutResponse]:
        self.watches.append(request)
        await self._asked("WatchRollout", request, context)
        for event in self.events:
            if event.sequence == 0 or event.sequence > request.after_sequence:
                yield pb.WatchRolloutResponse(event=event)
            if event.sequence in self.breaks:
                refusal = self.breaks.pop(event.sequence)
                if refusal is not None:
                    await refusal.abort(context)
                return
        if self.stays:
            await self._wait()

    async def _wait(self) -> None:
        self.waiting.set()
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.left.set()
            raise

    async def DecodeTokens(self, request: Any, context: Any) -> pb.DecodeTokensResponse:
        await self._asked("DecodeTokens", request, context)
        return pb.DecodeTokensResponse()

    async def ListAgents(self, request: Any, context: Any) -> pb.ListAgentsResponse:
        await self._asked("ListAgents", request, context)
        return pb.ListAgentsResponse(agents=self.agents)

    async def GetServerInfo(self, request: Any, context: Any) -> pb.GetServerInfoResponse:
        await self._asked("GetServerInfo", request, context)
        return self.server


@dataclass(frozen=True)
class Plain:
    """A gateway on a real port, in front of a scripted server."""

    server: PlainServer
    http: httpx.AsyncClient
    host: str
    port: int

    async def start(self, value: Any = None, **options: Any) -> httpx.Response:
        """Request a rollout."""
        return await self.http.post("/v1/rollouts", json=BODY if value is None else value, **options)

    async def events(self, query: str = "", last: str | None = None, uid: str = UID) -> Sse:
        """Open a stream of events."""
        return await Sse.open(self.host, self.port, f"/v1/rollouts/{uid}/events{query}", last)


def mounted(app: ASGIApp, root_path: str) -> ASGIApp:
    """The application behind a proxy that strips a prefix of the path."""

    async def behind(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, "root_path": root_path, "path": root_path + scope["path"]}, receive, send)

    return behind


@contextlib.asynccontextmanager
async def scripted(server: PlainServer) -> AsyncIterator[str]:
    """Serve a scripted server and yield its address, a Unix socket with a short path."""
    with tempfile.TemporaryDirectory(prefix="gw") as folder:
        address = f"unix:{Path(folder) / 's'}"
        grpc_server = grpc.aio.server()
        add_RolloutServiceServicer_to_server(server, grpc_server)
        grpc_server.add_insecure_port(address)
        await grpc_server.start()
        try:
            yield address
        finally:
            await grpc_server.stop(None)


@contextlib.asynccontextmanager
async def plain_gateway(
    settings: GatewaySettings | None = None, *, metrics: Callable[[], bytes] | None = None, root_path: str = ""
) -> AsyncIterator[Plain]:
    """Run a gateway in front of a scripted server."""
    server = PlainServer()
    chosen = settings or GatewaySettings(max_body_bytes=100_000, max_metadata_bytes=1_000)
    async with (
        scripted(server) as address,
        grpc.aio.insecure_channel(address) as channel,
        listening(mounted(create_app(channel, chosen, metrics=metrics), root_path)) as (host, port),
        http_client(f"http://{host}:{port}") as client,
    ):
        yield Plain(server, client, host, port)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Poll until the condition holds."""
    while not await condition():  # noqa: ASYNC110  # the state is on the other side of a socket
        await asyncio.sleep(0.01)


@dataclass
class Frame:
    """One block of a stream of server-sent events: values by field name, comments under the empty name."""

    fields: dict[str, str]

    @property
    def is_event(self) -> bool:
        """A browser would dispatch it as an event."""
        return "data" in self.fields

    @property
    def json(self) -> dict[str, Any]:
        """The parsed `data` field."""
        return dict(json.loads(self.fields["data"]))


@dataclass
class Sse:
    """A reader of server-sent events on its own socket (WHATWG HTML, section 9.2)."""

    status: int
    headers: dict[str, str]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    rest: bytes = b""
    #: The response ended with its last chunk.
    ended: bool = False

    @classmethod
    async def open(
        cls, host: str, port: int, path: str, last: str | None = None, headers: Mapping[str, str] | None = None
    ) -> Sse:
        """Send the request and read the head of the response."""
        reader, writer = await asyncio.open_connection(host, port)
        more = dict(headers or {}) | ({} if last is None else {"last-event-id": last})
        fields = "".join(f"{name}: {value}\r\n" for name, value in more.items())
        writer.write(f"GET {path} HTTP/1.1\r\nhost: gateway\r\naccept: text/event-stream\r\n{fields}\r\n".encode())
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        status, *lines = head.strip().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        return cls(int(status.split()[1]), headers, reader, writer)

    async def frames(self) -> AsyncIterator[Frame]:
        """Yield all frames until the stream ends."""
        while True:
            while b"\n\n" in self.rest:
                block, _, self.rest = self.rest.partition(b"\n\n")
                yield _frame(block.decode())
            size = int(await self.reader.readline() or b"0", 16)
            self.rest += await self.reader.readexactly(size)
            if (await self.reader.readline()) == b"\r\n" and size == 0:
                self.ended = True
                return

    async def all(self) -> list[Frame]:
        """All events until the stream ends, with its last chunk."""
        found = [each async for each in self.frames() if each.is_event]
        assert self.ended
        assert not self.rest
        return found

    async def body(self) -> Any:
        """The JSON body of a response that is not a stream."""
        return json.loads(await self.reader.readexactly(int(self.headers["content-length"])))

    def kill(self) -> None:
        """Reset the connection: with a linger time of 0, close() sends RST."""
        self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


def _frame(block: str) -> Frame:
    fields: dict[str, str] = {}
    for line in block.split("\n"):
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        fields[name] = f"{fields[name]}\n{value}" if name in fields else value
    return Frame(fields)


def event(sequence: int, **fields: Any) -> event_pb2.RolloutEvent:
    """An event of a turn; a note unless a kind is given."""
    kinds = fields or {"note": event_pb2.Note(code="n", text=f"event {sequence}")}
    return event_pb2.RolloutEvent(sequence=sequence, turn=1, segment_id="0", **kinds)
