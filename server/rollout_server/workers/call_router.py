"""Which worker handles a gRPC call that came over the public port.

Each rpc has a rule:

* a start goes to the worker that its request id selects, and stays here without one;
* a call about a rollout or a group goes to the worker that its id names. A group id that a caller chose is asked for everywhere;
* calls about the rollouts of a caller, and about the service, go to all workers;
* calls that every worker answers alike stay here;
* a trainer's stream stays on the worker that opened it, which its id names. A new one goes to the worker with the fewest.

A call for this worker runs its handler directly. Others are passed on over the private sockets, with the caller's metadata and
deadline; the status, its details and a cancellation pass through.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from hashlib import sha256
from typing import Any, Final, NoReturn, TypeAlias

import grpc
from osmosis.rollout.v1 import agent_service_pb2
from osmosis.rollout.v1.trainer_service_pb2_grpc import TrainerServiceStub
from rollout_gateway.fleet.errors import is_lost
from rollout_gateway.fleet.fleet import Fleet

from rollout_server.edge.api_keys import bare_key
from rollout_server.edge.model_keys import named_uid
from rollout_server.edge.rpc.caller import AGENTS, SERVICE, TRAINERS, AdmitModel, authorization
from rollout_server.edge.rpc.server import CallRouter
from rollout_server.workers.stream_assignment import StreamAssignment

_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
_Method: TypeAlias = Callable[[Any, Any], Any]
_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

STARTS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "StartRollout": lambda request: request,
    "StartGroup": lambda request: request,
    "RunRollout": lambda request: request.start,
}
ON_ALL: Final = frozenset({"ListRollouts", "CancelRollouts", "RedeliverOutcomes", "SetPolicy", "GetServerInfo"})
ON_ANY: Final = frozenset({"ListTools", "ListAgents", "RenderPrompt"})
OF_GROUP: Final = frozenset({"WatchGroup", "GetGroup"})
_SERVICES: Final = (SERVICE, AGENTS)
_OF_AGENTS: Final = f"/{AGENTS}/"
_TRAIN: Final = f"/{TRAINERS}/Train"
_HELLO_SECONDS: Final = 30.0
_ALL_SECONDS: Final = 30.0
"""How long a call to all workers may take. One that hangs must not hold those of callers without a deadline for ever."""
_KEY_SECONDS: Final = 10.0
"""How long another worker may take to check the key of a model endpoint."""
_MOST_KEYS: Final = 10_000
_OF_CONNECTION: Final = frozenset({"user-agent", "te", "content-type", "host"})
_STATUS: Final = "grpc-status-details-bin"


class WorkerRouter(CallRouter):
    """Passes calls on to other workers.

    Args:
        fleet: all workers.
        channels: theirs, in their order.
        index: number of this worker.
        count_streams: returns the numbers of streams of the workers that respond.
    """

    def __init__(
        self,
        fleet: Fleet,
        channels: Sequence[grpc.aio.Channel],
        index: int,
        count_streams: Callable[[], Awaitable[Mapping[int, int]]],
    ) -> None:
        self._fleet = fleet
        self._routing = fleet.routing
        self._members = fleet.routing.members
        self._own = self._members[index]
        self._trainers = [TrainerServiceStub(channel) for channel in channels]
        self._streams = StreamAssignment(index, count_streams)
        self._accepted: OrderedDict[bytes, None] = OrderedDict()  # digests of headers with keys of other workers

    def know(self, server_ids: Sequence[str]) -> None:
        """Store the server ids of the workers, in their order."""
        for server_id, member in zip(server_ids, self._members, strict=True):
            self._routing.remember(f"{server_id}-", member)
        self._streams.know(server_ids)

    def admit_model(self, admit: AdmitModel, header: str) -> str | None:
        """Return the uid to which a model key belongs. Only the worker that has the rollout knows the keys of earlier processes."""
        found = admit(header)
        return named_uid(bare_key(header)) if found is None and _digest(header) in self._accepted else found

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        """Return the handler of one call, which decides where it runs."""
        if handler_call_details.method.startswith(_OF_AGENTS):
            await self._check_model_key(handler_call_details.invocation_metadata)
        handler = await continuation(handler_call_details)
        service, _, name = handler_call_details.method[1:].partition("/")
        if handler is None or (service not in _SERVICES and handler_call_details.method != _TRAIN) or name in ON_ANY:
            return handler
        method: Any = handler  # grpc's types describe synchronous handlers
        parse, write = method.request_deserializer, method.response_serializer
        if handler.request_streaming:
            return grpc.stream_stream_rpc_method_handler(self._trained(method.stream_stream), parse, write)
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(self._streamed(name, method.unary_stream), parse, write)
        return grpc.unary_unary_rpc_method_handler(self._called(name, method.unary_unary), parse, write)

    async def _check_model_key(self, metadata: Any) -> None:
        """Ask the worker of another one's key whether it accepts it, before the request of the call is read.

        The answer holds for later calls: that worker checks the key of each of them once more.
        """
        header = authorization(metadata or ()) or ""
        uid = named_uid(bare_key(header))
        if not uid or self._routing.owner_seen(uid) in (None, self._own):
            return
        digest = _digest(header)
        if digest not in self._accepted:
            request = agent_service_pb2.GetModelAccessRequest(uid=uid)
            try:
                await self._fleet.GetModelAccess(request, metadata=(("authorization", header),), timeout=_KEY_SECONDS)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.PERMISSION_DENIED:
                    return
                # Anything else is not about the key. The call will be passed on, and report what is wrong there.
        self._accepted[digest] = None
        self._accepted.move_to_end(digest)
        if len(self._accepted) > _MOST_KEYS:
            self._accepted.popitem(last=False)

    def is_here(self, name: str, request: Any) -> bool:
        """Return whether this worker's handler can handle a request alone."""
        if name in ON_ALL:
            return False
        if name in STARTS:
            return self._routing.first(STARTS[name](request)) in (None, self._own)
        if name in OF_GROUP:
            return self._routing.owner_seen(request.group_id) is self._own
        # All server ids are known, so a uid with another one is of no worker: the handler here refuses it.
        return self._routing.owner_seen(request.uid) in (None, self._own)

    def _called(self, name: str, method: _Method) -> _Method:
        def call(request: Any, context: _Context) -> Any:
            if self.is_here(name, request):
                return method(request, context)
            return self._forward(name, request, context)

        return call

    def _streamed(self, name: str, method: _Method) -> _Method:
        def call(request: Any, context: _Context) -> Any:
            if self.is_here(name, request):
                return method(request, context)
            return self._relay(getattr(self._fleet, name)(request, **_options(context)), context)

        return call

    async def _forward(self, name: str, request: Any, context: _Context) -> Any:
        options = _options(context)
        if name in ON_ALL:
            left = options["timeout"]
            options["timeout"] = _ALL_SECONDS if left is None else min(left, _ALL_SECONDS)
        try:
            return await getattr(self._fleet, name)(request, **options)
        except grpc.aio.AioRpcError as error:
            # That of `_ALL_SECONDS`: at the caller's own deadline gRPC has ended the call already.
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                text = f"a worker did not respond within {_ALL_SECONDS:g} s"
                await context.abort(grpc.StatusCode.UNAVAILABLE, text)
            await _abort(context, error)

    async def _relay(self, call: Any, context: _Context) -> AsyncGenerator[Any, None]:
        try:
            async for item in call:
                yield item
        except grpc.aio.AioRpcError as error:
            await _abort(context, error)
        finally:
            call.cancel()  # leaving the loop does not cancel a call; after its end this has no effect

    def _trained(self, method: _Method) -> _Method:
        async def call(items: AsyncIterator[Any], context: _Context) -> AsyncIterator[Any]:
            first = asyncio.ensure_future(anext(items))
            try:
                # The handler reports a hello that is wrong or does not come.
                await asyncio.wait({first}, timeout=_HELLO_SECONDS)
                hello = first.result().hello if first.done() and first.exception() is None else None
                target = None if hello is None else await self._streams.choose(hello.stream_id, context.peer())
                given = _Items(first, items)
                if target is None:
                    responses = method(given.read(), context)
                else:
                    stream = self._trainers[target].Train(given.read(), **_options(context))
                    responses = self._relay_train(stream, given, context)
                async with aclosing(responses):
                    async for response in responses:
                        yield response
            finally:
                first.cancel()

        return call

    async def _relay_train(self, call: Any, given: _Items, context: _Context) -> AsyncGenerator[Any, None]:
        async with aclosing(self._relay(call, context)) as responses:
            try:
                async for response in responses:
                    yield response
            except BaseException:
                if given.error is not None:  # gRPC cancels a call whose items fail
                    raise given.error from None
                raise


class _Items:
    """Items of a trainer, of which the first was read already."""

    def __init__(self, first: asyncio.Future[Any], others: AsyncIterator[Any]) -> None:
        self._first, self._others = first, others
        self.error: Exception | None = None
        """What reading them has raised."""

    async def read(self) -> AsyncIterator[Any]:
        """Yield all items."""
        try:
            yield await self._first
            async for item in self._others:
                yield item
        except StopAsyncIteration:  # there was no first item
            return
        except Exception as error:
            self.error = error
            raise


def _digest(header: str) -> bytes:
    return sha256(header.encode("utf-8", "surrogatepass")).digest()


def _options(context: _Context) -> dict[str, Any]:
    metadata = _passed_on(context.invocation_metadata())
    return {"metadata": metadata, "timeout": context.time_remaining()}


def _passed_on(metadata: Any) -> tuple[tuple[str, str | bytes], ...]:
    """Return the metadata without what belongs to one connection."""
    return tuple(
        (name, value)
        for name, value in metadata or ()
        if name == _STATUS or not (name in _OF_CONNECTION or name.startswith(("grpc-", ":")))
    )


async def _abort(context: _Context, error: grpc.aio.AioRpcError) -> NoReturn:
    """End the call with the status that another worker or the fleet gave it."""
    if is_lost(error):
        # Without details, as gRPC reports a lost connection: the worker may have received the call.
        await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection to the worker of this call was lost")
    await context.abort(error.code(), error.details() or "", _passed_on(error.trailing_metadata()))
    raise AssertionError("abort raises")
