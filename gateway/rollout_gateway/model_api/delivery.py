"""Responses with a completion: heartbeats while it is generated, and a confirmation once it was delivered."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, cast

import grpc
import msgspec
from osmosis.rollout.v1.agent_service_pb2 import CallModelRequest, ConfirmCompletionRequest, ModelCompletion
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rollout_gateway.calls import Calls, StreamEndedEarly, left
from rollout_gateway.model_api.apis import COMMENT, FrameEncoder, ModelShape
from rollout_gateway.model_api.call import ApiCall, reply_of
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
# The last byte is held back for this time: if the connection breaks meanwhile, the client has not received the completion.
_HELD_BACK_SECONDS: Final = 0.003
_FAILED: Final = ModelError(500, "Internal server error", "INTERNAL")
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
    confirmations: dict[asyncio.Task[None], str]
    #: The id of the completion, once it is being generated.
    begun: list[str] = field(default_factory=list)

    @property
    def reply_id(self) -> str:
        """The id of the completion; empty if unknown."""
        return "".join(self.begun[:1])

    async def completion(self, request: CallModelRequest) -> ModelCompletion:
        """Call the model. Cancelling closes the call, not the completion. Raises AioRpcError and StreamEndedEarly."""
        if earlier := [task for task, uid in self.confirmations.items() if uid == self.calls.uid]:
            await asyncio.wait(earlier)
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

    async def deliver(self, send: Send, leaving: asyncio.Task[Exception], body: bytes, completion_id: str) -> None:
        """Send a body. If the client is still there before the last byte, confirm the completion while it reads that.

        A call waits for the confirmations of its rollout, so no client's next request precedes them.
        """
        await _send(send, body[:-1])
        await _send(send, b"")  # returns once the connection takes more
        await asyncio.wait((leaving,), timeout=_HELD_BACK_SECONDS)
        if not leaving.done():
            confirming = asyncio.create_task(self._confirm(completion_id))
            self.confirmations[confirming] = self.calls.uid
            confirming.add_done_callback(self.confirmations.pop)
            await _send(send, body[-1:], more=False)

    async def _confirm(self, completion_id: str) -> None:
        # After a failure an equal request gets the completion again.
        message = ConfirmCompletionRequest(uid=self.calls.uid, completion_id=completion_id)
        try:
            await agent_rpcs(self.calls).ConfirmCompletion(message, timeout=_CONFIRM_SECONDS)
        except grpc.aio.AioRpcError as error:
            # Also after the last call of a rollout that has ended meanwhile.
            _LOG.info("request %s: the completion could not be confirmed: %s", self.request_id, error.code().name)


class CompletionResponse(Response):
    """A response with a completion, all at once."""

    def __init__(self, exchange: Exchange, completion: ModelCompletion) -> None:
        content = msgspec.json.encode(exchange.shape.response(exchange.call, reply_of(completion)))
        super().__init__(headers=_JSON | {"content-length": str(len(content))})
        self.exchange, self._completion, self._content = exchange, completion, content

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with _leaving(receive) as leaving:
            await self.exchange.deliver(send, leaving, self._content, self._completion.id)


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

    async def _stream(self, send: Send, leaving: asyncio.Task[Exception]) -> None:
        shape, call = self.exchange.shape, self.exchange.call
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        beats = 0  # comments apart
        while not self._completing.done() and not leaving.done():
            beat = shape.waiting(call, beats, self.exchange.reply_id)
            await _send(send, self._encoder.encode([beat]))
            beats += beat is not COMMENT
            await asyncio.wait(
                (self._completing, leaving), timeout=self._heartbeat_seconds, return_when=asyncio.FIRST_COMPLETED
            )
        if leaving.done():
            return
        try:
            completion = self._completing.result()
            frames = (shape.late if beats and shape.late else shape.frames)(call, reply_of(completion))
            content = self._encoder.encode(frames)
        except FAULTS as error:
            await self._fail(send, model_error(error, self.exchange.request_id, call.places, shape.paths))
        except Exception:
            _LOG.exception("request %s: a stream failed", self.exchange.request_id)
            await self._fail(send, _FAILED)
        else:
            await self.exchange.deliver(send, leaving, content, completion.id)

    async def _fail(self, send: Send, error: ModelError) -> None:
        frames = self.exchange.shape.failure(self.exchange.call, error, self.exchange.reply_id)
        await _send(send, self._encoder.encode(frames))


async def _send(send: Send, body: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


@asynccontextmanager
async def _leaving(receive: Receive) -> AsyncIterator[asyncio.Task[Exception]]:
    """Yield a task that is done once the client has disconnected."""
    task = asyncio.create_task(left(receive))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
