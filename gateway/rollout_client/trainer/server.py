"""A trainer that listens: CompletionService and OutcomeService on one port.

Turns that come over another way are answered by the same `Turns`, and outcomes settled by the same `Outcomes`.
"""

from __future__ import annotations

import hmac
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message
from osmosis.rollout.v1 import completion_service_pb2 as pb
from osmosis.rollout.v1 import outcome_service_pb2

from rollout_client.trainer.errors import RefusedCall
from rollout_client.trainer.rollout_records import Outcomes, Records
from rollout_client.trainer.turns import Turns

_LOG: Final = logging.getLogger("rollout_client")
_LARGEST_MESSAGE: Final = 64 * 1024 * 1024
_OPTIONS: Final = (
    ("grpc.so_reuseport", 0),  # a port that is taken is an error, not shared
    ("grpc.max_receive_message_length", _LARGEST_MESSAGE),
    ("grpc.max_send_message_length", _LARGEST_MESSAGE),
    # gRPC drops calls silently when more than 1,000 wait to be picked up.
    ("grpc.server.max_pending_requests", 100_000),
    ("grpc.server.max_pending_requests_hard_limit", 100_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
)
_WILDCARDS: Final = ("0.0.0.0", "[::]", "*")

_Q = TypeVar("_Q", bound=Message)
_A = TypeVar("_A", bound=Message)
_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


@dataclass(frozen=True, slots=True)
class Serving:
    """Where a trainer listens, and where the rollout server finds it.

    Args:
        listen: host:port; port 0 is any free one.
        address: host:port as the server is to call it; empty: the one that is listened on.
        credentials: TLS of the port; None: none.
        look: seconds between looks for a rollout whose outcome was not delivered.
    """

    listen: str = "127.0.0.1:0"
    address: str = ""
    credentials: grpc.ServerCredentials | None = field(default=None, repr=False)
    look: float = 30.0

    def __post_init__(self) -> None:
        host, separator, port = self.listen.rpartition(":")
        if not separator or not host or not port.isdigit():
            raise ValueError("listen must be host:port, such as 127.0.0.1:0; an IPv6 host stands in brackets")
        if host in _WILDCARDS and not self.address:
            raise ValueError("listen names every interface, so address must say where the server is to call")


class Listener:
    """Both services, from `open` to `close`. Every call must bring the `bearer`, which only rollouts of this trainer know."""

    def __init__(self, serving: Serving, turns: Turns, records: Records, outcomes: Outcomes) -> None:
        self.bearer = secrets.token_urlsafe(32)
        self.url = ""
        self._serving = serving
        self._turns = turns
        self._records = records
        self._outcomes = outcomes
        self._server = grpc.aio.server(options=_OPTIONS)
        self._server.add_generic_rpc_handlers((self._completions(), self._deliveries()))

    async def open(self) -> None:
        """Listens. Raises OSError if the address cannot be had."""
        serving = self._serving
        try:
            if serving.credentials is None:
                port = self._server.add_insecure_port(serving.listen)
            else:
                port = self._server.add_secure_port(serving.listen, serving.credentials)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {serving.listen}: {error}") from error
        await self._server.start()
        scheme = "grpc" if serving.credentials is None else "grpcs"
        self.url = f"{scheme}://{serving.address or serving.listen.rpartition(':')[0] + f':{port}'}"

    async def close(self) -> None:
        """Stops at once; generations are cancelled."""
        await self._server.stop(None)
        await self._turns.close()

    async def read_ledger(self, request: pb.ReadLedgerRequest) -> pb.ReadLedgerResponse:
        """A segment as it is held here."""
        ledger = self._records.ledger(request)
        if ledger is None:
            text = f"segment {request.segment_id!r} of rollout {request.uid!r} is not known here, or not any more"
            raise RefusedCall(grpc.StatusCode.NOT_FOUND, "SEGMENT_UNKNOWN", text)
        return ledger

    async def deliver(self, request: outcome_service_pb2.DeliverOutcomeRequest) -> Message:
        """Takes an outcome in, once; again it is acknowledged and nothing else."""
        if not request.HasField("rollout") or not request.rollout.HasField("outcome"):
            text = "rollout: a finished one must be delivered"
            raise RefusedCall(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", text)
        if not self._outcomes.settle(request.rollout):
            text = f"nobody here waits for rollout {request.rollout.uid!r}; another trainer may have started it"
            raise RefusedCall(grpc.StatusCode.NOT_FOUND, "ROLLOUT_UNKNOWN", text)
        return outcome_service_pb2.DeliverOutcomeResponse()

    def _completions(self) -> grpc.GenericRpcHandler:
        service = pb.DESCRIPTOR.services_by_name["CompletionService"].full_name
        return grpc.method_handlers_generic_handler(
            service,
            {
                "Complete": self._unary(self._turns.complete, pb.CompleteRequest),
                "ReadLedger": self._unary(self.read_ledger, pb.ReadLedgerRequest),
            },
        )

    def _deliveries(self) -> grpc.GenericRpcHandler:
        service = outcome_service_pb2.DESCRIPTOR.services_by_name["OutcomeService"].full_name
        delivery = self._unary(self.deliver, outcome_service_pb2.DeliverOutcomeRequest)
        return grpc.method_handlers_generic_handler(service, {"DeliverOutcome": delivery})

    def _unary(self, answer: Callable[[_Q], Awaitable[_A]], kind: type[_Q]) -> grpc.RpcMethodHandler[_Q, _A]:
        """A method: who may not call is refused, and no text of an unforeseen error leaves the process."""

        async def call(request: _Q, context: _Context) -> _A:
            try:
                self._authorize(context.invocation_metadata() or ())
                return await answer(request)
            except RefusedCall as error:
                refused = error
            except Exception:
                _LOG.exception("a call of the rollout server failed")
                refused = RefusedCall(
                    grpc.StatusCode.INTERNAL, "INTERNAL", "a fault of the trainer's, whose log has it"
                )
            await context.abort(refused.code, refused.text, refused.trailers())
            raise AssertionError("abort raises")

        return grpc.unary_unary_rpc_method_handler(
            call,
            request_deserializer=kind.FromString,
            response_serializer=_serialize,
        )

    def _authorize(self, metadata: Iterable[tuple[str, str | bytes]]) -> None:
        given = next((value for key, value in metadata if key == "authorization"), "")
        sent = given.encode() if isinstance(given, str) else given
        if not hmac.compare_digest(sent, f"Bearer {self.bearer}".encode()):
            text = "the bearer token is missing or not of this trainer; it travels in the rollout's credentials"
            raise RefusedCall(grpc.StatusCode.UNAUTHENTICATED, "BEARER", text)


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()
