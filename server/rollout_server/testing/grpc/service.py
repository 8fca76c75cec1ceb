"""CompletionService (completion_service.proto) as unary calls to `Completions`, and its grpc.aio server."""

import asyncio
import hmac
from collections.abc import Mapping
from typing import Any, Final, TypeAlias

import grpc
from osmosis.rollout.v1 import completion_service_pb2 as pb
from osmosis.rollout.v1 import completion_service_pb2_grpc

from rollout_server.testing.grpc.completions import Completions, SilenceError
from rollout_server.testing.grpc.status import StatusError, abort, status_of_fault

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


_LARGEST_MESSAGE: Final = 64 * 1024 * 1024
_OPTIONS: Final = (
    ("grpc.so_reuseport", 0),  # a port in use raises an error instead of being shared
    ("grpc.max_receive_message_length", _LARGEST_MESSAGE),
    ("grpc.max_send_message_length", _LARGEST_MESSAGE),
    # By default gRPC silently drops calls if more than 1,000 are waiting to be accepted, or one waits for 30 s.
    ("grpc.server.max_pending_requests", 100_000),
    ("grpc.server.max_pending_requests_hard_limit", 100_000),
    ("grpc.server_max_unrequested_time_in_server", 86_400),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
)


class CompletionService(completion_service_pb2_grpc.CompletionServiceServicer):
    """Checks the API key, converts errors to statuses and executes faults that lose a completion."""

    def __init__(self, completions: Completions, api_key: str | None) -> None:
        self._completions = completions
        self._api_key = api_key

    async def Complete(self, request: pb.CompleteRequest, context: _Context) -> pb.CompleteResponse:
        """Return the completion of a turn, also for a repeated request."""
        metadata = _metadata(context)
        self._completions.record_request(request, metadata)
        try:
            self._authorize(metadata)
            response = await self._completions.complete(request)
            await self._lose(request.turn_key)
            return response
        except SilenceError:
            await asyncio.Event().wait()  # until the caller cancels or the server stops
            raise
        except StatusError as error:
            return await abort(context, error)

    async def ReadLedger(self, request: pb.ReadLedgerRequest, context: _Context) -> pb.ReadLedgerResponse:
        """Return a segment as the trainer stores it."""
        try:
            self._authorize(_metadata(context))
            return self._completions.ledger(request)
        except StatusError as error:
            return await abort(context, error)

    async def _lose(self, turn_key: str) -> None:
        """Raise StatusError if the script says that the generated completion is lost."""
        fault = self._completions.pop_lost(turn_key)
        if fault:
            await asyncio.sleep(fault.delay)
            raise status_of_fault(fault)

    def _authorize(self, metadata: Mapping[str, str]) -> None:
        wanted = f"Bearer {self._api_key}".encode()
        if self._api_key is not None and not hmac.compare_digest(metadata.get("authorization", "").encode(), wanted):
            raise StatusError(grpc.StatusCode.UNAUTHENTICATED, "API_KEY", "Invalid or missing API key")


def _metadata(context: _Context) -> Mapping[str, str]:
    return {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}


def target(host: str, port: int) -> str:
    """Return host:port for a URL or a gRPC target, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class CompletionServer:
    """A gRPC server for a CompletionService, from `open` to `close`."""

    def __init__(self, service: CompletionService) -> None:
        self._server = grpc.aio.server(options=_OPTIONS)
        completion_service_pb2_grpc.add_CompletionServiceServicer_to_server(service, self._server)

    async def open(self, host: str, port: int) -> int:
        """Start listening and return the port; `port` 0 selects any free one. Raises OSError if the address cannot be bound."""
        try:
            bound = self._server.add_insecure_port(target(host, port))
        except RuntimeError as error:
            raise OSError(f"cannot listen on {target(host, port)}: {error}") from error
        await self._server.start()
        return bound

    async def close(self) -> None:
        """Stop at once and cancel open calls."""
        await self._server.stop(None)
