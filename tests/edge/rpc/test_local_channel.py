"""Calls within the process behave like calls over a connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from typing import Any

import grpc
import pytest
from rollout_server.edge.rpc.local_channel import LocalChannel

MOST = 1000
_ambient: ContextVar[str] = ContextVar("ambient", default="")


class Service:
    """Methods that take and return bytes, and what has happened in them."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.produced = 0

    async def echo(self, request: bytes, context: Any) -> bytes:
        return request + dict(context.invocation_metadata()).get("name", "").encode()

    async def remaining(self, _: bytes, context: Any) -> bytes:
        left = context.time_remaining()
        return b"none" if left is None else b"%d" % left

    async def ambient(self, _: bytes, context: Any) -> bytes:
        return _ambient.get().encode()

    async def refuse(self, _: bytes, context: Any) -> bytes:
        await context.abort(grpc.StatusCode.NOT_FOUND, "there is none – really", (("reason", "GONE"),))
        return b""

    async def fail(self, _: bytes, context: Any) -> bytes:
        raise ValueError("a bug")

    async def hang(self, _: bytes, context: Any) -> bytes:
        try:
            await asyncio.Event().wait()
        finally:
            self.ended.set()
        return b""

    async def count(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        for number in range(int(request)):
            self.produced += 1
            yield b"%d" % number

    async def part(self, _: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b"first"
        await context.abort(grpc.StatusCode.ABORTED, "no more")

    def handler(self) -> grpc.GenericRpcHandler:
        """Return a handler of all methods."""
        unary = {name: getattr(self, name) for name in ("echo", "remaining", "ambient", "refuse", "fail", "hang")}
        streams = {name: getattr(self, name) for name in ("count", "part")}
        handlers = {
            **{name: grpc.unary_unary_rpc_method_handler(method, None, bytes) for name, method in unary.items()},
            **{name: grpc.unary_stream_rpc_method_handler(method, None, bytes) for name, method in streams.items()},
        }
        return grpc.method_handlers_generic_handler("test.Calls", handlers)


@pytest.fixture
async def service() -> Service:
    return Service()


@pytest.fixture
async def local(service: Service) -> LocalChannel:
    channel = LocalChannel((), MOST)
    channel.add_generic_rpc_handlers((service.handler(),))
    return channel


@pytest.fixture
async def connected(service: Service) -> AsyncIterator[grpc.aio.Channel]:
    server = grpc.aio.server(options=(("grpc.max_receive_message_length", MOST),))
    server.add_generic_rpc_handlers((service.handler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(None)


@pytest.fixture(params=["local", "connected"])
def channel(request: pytest.FixtureRequest, local: LocalChannel, connected: grpc.aio.Channel) -> Any:
    return {"local": local, "connected": connected}[request.param]


def unary(channel: Any, name: str) -> Callable[..., Any]:
    return channel.unary_unary(f"/test.Calls/{name}", bytes, bytes)  # type: ignore[no-any-return]


def stream(channel: Any, name: str) -> Callable[..., Any]:
    return channel.unary_stream(f"/test.Calls/{name}", bytes, bytes)  # type: ignore[no-any-return]


async def test_responses_arrive(channel: Any) -> None:
    assert await unary(channel, "echo")(b"hello ", metadata=(("name", "you"),)) == b"hello you"
    assert [each async for each in stream(channel, "count")(b"3")] == [b"0", b"1", b"2"]
    assert [each async for each in stream(channel, "count")(b"0")] == []


async def test_a_refusal_has_its_status_text_and_metadata(channel: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await unary(channel, "refuse")(b"")
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.NOT_FOUND, "there is none – really")
    assert dict(caught.value.trailing_metadata())["reason"] == "GONE"


async def test_responses_before_a_failure_arrive(channel: Any) -> None:
    responses = aiter(stream(channel, "part")(b""))
    assert await anext(responses) == b"first"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await anext(responses)
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.ABORTED, "no more")


async def test_a_deadline_ends_the_call_and_its_handler(channel: Any, service: Service) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await unary(channel, "hang")(b"", timeout=0.05)
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
    await service.ended.wait()


async def test_a_handler_knows_the_time_that_remains(channel: Any) -> None:
    assert await unary(channel, "remaining")(b"") == b"none"
    assert await unary(channel, "remaining")(b"", timeout=100.0) in (b"99", b"100")


async def test_a_caller_that_is_cancelled_cancels_the_handler(channel: Any, service: Service) -> None:
    async def call() -> None:
        await unary(channel, "hang")(b"")

    calling = asyncio.create_task(call())
    await asyncio.sleep(0.05)
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    await service.ended.wait()


async def test_a_cancelled_call_cancels_the_handler(channel: Any, service: Service) -> None:
    call = unary(channel, "hang")(b"")
    await asyncio.sleep(0.05)
    assert call.cancel()
    await service.ended.wait()
    assert not call.cancel()


async def test_an_unknown_method_and_a_large_request_are_refused(channel: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await unary(channel, "nothing")(b"")
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
    assert len(await unary(channel, "echo")(b"x" * MOST)) == MOST
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await unary(channel, "echo")(b"x" * (MOST + 1))
    text = f"SERVER: Received message larger than max ({MOST + 1} vs. {MOST})"
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, text)


async def test_a_bug_in_a_handler_has_a_status(channel: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await unary(channel, "fail")(b"")
    assert caught.value.code() is grpc.StatusCode.UNKNOWN


async def test_a_handler_does_not_inherit_context_variables(channel: Any) -> None:
    _ambient.set("of the HTTP request")
    assert await unary(channel, "ambient")(b"") == b""


async def test_a_stream_waits_for_its_reader(local: LocalChannel, service: Service) -> None:
    call = stream(local, "count")(b"100")
    await asyncio.sleep(0.05)
    assert service.produced == 2
    assert len([each async for each in call]) == 100


async def test_closing_ends_calls(local: LocalChannel, service: Service) -> None:
    call = unary(local, "hang")(b"")
    await asyncio.sleep(0.05)
    local.cancel()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is grpc.StatusCode.CANCELLED


async def test_closing_ends_a_stream_that_is_not_read(local: LocalChannel) -> None:
    call = stream(local, "count")(b"1")
    await asyncio.sleep(0.05)  # the response waits for its reader, and the end of the stream behind it
    local.cancel()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async with asyncio.timeout(10):
            [each async for each in call]
    assert caught.value.code() is grpc.StatusCode.CANCELLED
