"""Responses with a completion: heartbeats while it is generated, and a confirmation once it was delivered."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, cast

import grpc
import msgspec
from osmosis.rollout.v1.agent_service_pb2 import CallModelRequest, ConfirmCompletionRequest, ModelCompletion
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rollout_gateway.calls import Calls, StreamEndedEarly
from rollout_gateway.model_api.apis import COMMENT, FrameEncoder, ModelShape
from rollout_gateway.model_api.call import ApiCall, Frame, reply_of
from rollout_gateway.model_api.errors import FAULTS, ModelError, model_error

if TYPE_CHECKING:
    from osmosis.rollout.v1.agent_service_pb2_grpc import AgentServiceAsyncStub

_LOG = logging.getLogger(__name__)
_JSON: Final = {"content-type": "application/json"}
_SSE: Final = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-store",
    "x-accel-buffering": "no",
}
_CONFIRM_SECONDS: Final = 2.0
# The end of a response is held back for this time. A connection that breaks meanwhile has certainly lost the completion.
_GAP_SECONDS: Final = 0.005
_STOPPING: Final = ModelError(503, "The gateway is shutting down; retry", "UNAVAILABLE")


def agent_rpcs(calls: Calls) -> "AgentServiceAsyncStub":
    """Return the rpcs of AgentService, which the calls of a request to a model endpoint have too."""
    return cast("AgentServiceAsyncStub", calls.rpc)


@dataclass(frozen=True, slots=True)
class Exchange:
    """One call: its API, its request as parsed, and the calls to the rollout server on its behalf."""

    shape: ModelShape
    call: ApiCall
    calls: Calls
    request_id: str
    #: The id of the completion, once it is being generated.
    begun: list[str] = field(default_factory=list)

    async def completion(self, request: CallModelRequest) -> ModelCompletion:
        """Call the model. Cancelling closes the call, not the completion. Raises AioRpcError and StreamEndedEarly."""
        stream, found = agent_rpcs(self.calls).CallModel(request, timeout=None), None
        try:
            async for item in stream:
                if item.HasField("completion"):
                    found = item.completion
                elif item.HasField("begun"):
                    self.begun.append(item.begun.completion_id)
        finally:
            stream.cancel()
        if found is None:
            raise StreamEndedEarly(self.calls.uid)
        return found

    async def confirm(self, completion: ModelCompletion) -> None:
        """Confirm that the completion was delivered. After a failure an equal request gets it again."""
        message = ConfirmCompletionRequest(uid=self.calls.uid, completion_id=completion.id)
        try:
            await agent_rpcs(self.calls).ConfirmCompletion(message, timeout=_CONFIRM_SECONDS)
        except grpc.aio.AioRpcError as error:
            _LOG.warning("request %s: the completion could not be confirmed: %s", self.request_id, error.code().name)


class CompletionResponse(Response):
    """A response with a completion, all at once.

    The last byte follows the confirmation, so that a client cannot send its next request before it. A client that disconnects
    earlier has not received the completion, and gets it again when it repeats the request.
    """

    def __init__(self, exchange: Exchange, completion: ModelCompletion) -> None:
        content = msgspec.json.encode(exchange.shape.response(exchange.call, reply_of(completion)))
        super().__init__(headers=_JSON | {"content-length": str(len(content))})
        self.exchange, self._completion, self._content = exchange, completion, content

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with _leaving(receive) as leaving:
            confirm = partial(self.exchange.confirm, self._completion)
            await _deliver(send, leaving, self._content[:-1], self._content[-1:], confirm)


class CompletionStream(Response):
    """A response as server-sent events. Heartbeats are sent until the task `completing` is done.

    A stream that fails ends with the API's error event and a cut connection: clients take one that ends cleanly for complete.
    """

    def __init__(self, exchange: Exchange, completing: asyncio.Task[ModelCompletion], heartbeat_seconds: float) -> None:
        super().__init__(headers=_SSE)
        del self.headers["content-length"]
        self.exchange, self._completing = exchange, completing
        self._heartbeat_seconds = heartbeat_seconds
        self._encoder = FrameEncoder(numbered=exchange.shape.numbered)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""
        try:
            async with _leaving(receive) as leaving:
                await self._stream(send, leaving)
        except asyncio.CancelledError:
            # Only a stopping listener cancels this task, and would end the stream cleanly.
            await self._fail(send, _STOPPING)
        finally:
            self._completing.cancel()
            await asyncio.gather(self._completing, return_exceptions=True)

    async def _stream(self, send: Send, leaving: asyncio.Task[None]) -> None:
        shape, call = self.exchange.shape, self.exchange.call
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        beats = 0
        while not self._completing.done() and not leaving.done():
            beat = shape.waiting(call, beats, *self.exchange.begun)
            await self._send(send, [beat])
            beats += beat is not COMMENT
            await asyncio.wait(
                (self._completing, leaving),
                timeout=self._heartbeat_seconds,
                return_when=asyncio.FIRST_COMPLETED,
            )
        if leaving.done():
            return
        try:
            completion = self._completing.result()
        except FAULTS as error:
            await self._fail(send, model_error(error, self.exchange.request_id, call.places))
            return
        frames = (shape.late if beats and shape.late else shape.frames)(call, reply_of(completion))
        first, last = self._encoder.encode(frames[:-1]), self._encoder.encode(frames[-1:])
        await _deliver(send, leaving, first, last, partial(self.exchange.confirm, completion))

    async def _send(self, send: Send, frames: Sequence[Frame]) -> None:
        await send({"type": "http.response.body", "body": self._encoder.encode(frames), "more_body": True})

    async def _fail(self, send: Send, error: ModelError) -> None:
        await self._send(send, self.exchange.shape.failure(self.exchange.call, error, *self.exchange.begun))


async def _deliver(
    send: Send,
    leaving: asyncio.Task[None],
    first: bytes,
    last: bytes,
    confirm: Callable[[], Awaitable[None]],
) -> None:
    """Send a body in two pieces, and confirm the completion between them if the client is still there."""
    await send({"type": "http.response.body", "body": first, "more_body": True})
    await asyncio.wait((leaving,), timeout=_GAP_SECONDS)
    if not leaving.done():
        await confirm()
        await send({"type": "http.response.body", "body": last, "more_body": False})


@asynccontextmanager
async def _leaving(receive: Receive) -> AsyncIterator[asyncio.Task[None]]:
    """Yield a task that is done once the client has disconnected."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task = asyncio.create_task(watch())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
