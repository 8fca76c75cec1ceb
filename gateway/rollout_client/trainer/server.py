"""Trainer that listens: serves CompletionService and OutcomeService on one port.

The streaming transport uses the same `Turns` and `Outcomes`.
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
    ("grpc.so_reuseport", 0),  # a port in use is an error; by default gRPC would share it
    ("grpc.max_receive_message_length", _LARGEST_MESSAGE),
    ("grpc.max_send_message_length", _LARGEST_MESSAGE),
    # By default gRPC silently drops calls when more than 1,000 wait to be accepted.
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
    """Address on which a trainer listens, and address at which the rollout server calls it.

    Args:
        listen: host:port to listen on; port 0: any free port.
        address: host:port that the rollout server calls; empty: the one of `listen`.
        credentials: TLS credentials of the port; None: no TLS.
        look: seconds between two requests for the state of a rollout whose outcome was not delivered.

    Raises ValueError if `listen` is not host:port, or is a wildcard address such as 0.0.0.0 without `address`.
    """

    listen: str = "127.0.0.1:0"
    address: str = ""
    credentials: grpc.ServerCredentials | None = field(default=None, repr=False)
    look: float = 30.0

    def __post_init__(self) -> None:
        host, separator, port = self.listen.rpartition(":")
        if not separator or not host or not port.isdigit():
            raise ValueError("listen must be host:port, such as 127.0.0.1:0; put an IPv6 host in brackets")
        if host in _WILDCARDS and not self.address:
            raise ValueError("listen is a wildcard address, which the server cannot call; set address to a host:port")


class Listener:
    """Both services, from `open` to `close`. Every call must carry `bearer`, which only this trainer's rollouts receive."""

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
        """Start listening. Raises OSError if the address cannot be bound."""
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
        """Stop at once, without grace period, and cancel all generations."""
        await self._server.stop(None)
        await self._turns.close()

    async def read_ledger(self, request: pb.ReadLedgerRequest) -> pb.ReadLedgerResponse:
        """Serve ReadLedger: the trainer's ledger of a segment."""
        ledger = self._records.ledger(request)
        if ledger is None:
            text = (
                f"segment {request.segment_id!r} of rollout {request.uid!r} is unknown to this trainer, or was dropped"
            )
            raise RefusedCall(grpc.StatusCode.NOT_FOUND, "SEGMENT_UNKNOWN", text)
        return ledger

    async def deliver(self, request: outcome_service_pb2.DeliverOutcomeRequest) -> Message:
        """Serve DeliverOutcome. A repeated delivery is acknowledged and ignored."""
        if not request.HasField("rollout") or not request.rollout.HasField("outcome"):
            text = "rollout: must be a finished rollout with its outcome"
            raise RefusedCall(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", text)
        if not self._outcomes.settle(request.rollout):
            text = f"this trainer did not start rollout {request.rollout.uid!r}; check the outcome target of its spec"
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

    def _unary(self, method: Callable[[_Q], Awaitable[_A]], kind: type[_Q]) -> grpc.RpcMethodHandler[_Q, _A]:
        """Return a handler that checks the bearer token and hides the text of unexpected exceptions from the caller."""

        async def call(request: _Q, context: _Context) -> _A:
            try:
                self._authorize(context.invocation_metadata() or ())
                return await method(request)
            except RefusedCall as error:
                refused = error
            except Exception:
                _LOG.exception("%s from the rollout server failed", kind.DESCRIPTOR.name)
                refused = RefusedCall(
                    grpc.StatusCode.INTERNAL, "INTERNAL", "internal error of the trainer; see its log"
                )
            await context.abort(refused.code, refused.text, refused.trailers())
            raise AssertionError("unreachable: abort raises")

        return grpc.unary_unary_rpc_method_handler(
            call,
            request_deserializer=kind.FromString,
            response_serializer=_serialize,
        )

    def _authorize(self, metadata: Iterable[tuple[str, str | bytes]]) -> None:
        given = next((value for key, value in metadata if key == "authorization"), "")
        sent = given.encode() if isinstance(given, str) else given
        if not hmac.compare_digest(sent, f"Bearer {self.bearer}".encode()):
            text = "the bearer token is missing or wrong; send the one in the rollout's credentials"
            raise RefusedCall(grpc.StatusCode.UNAUTHENTICATED, "BEARER", text)


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()
