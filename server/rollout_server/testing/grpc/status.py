"""gRPC statuses of the strict trainer: those of completion_service.proto, and those of scripted faults."""

from typing import Any, Final, NoReturn

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from google.rpc.status_pb2 import Status
from osmosis.rollout.v1 import completion_service_pb2 as pb

from rollout_server.testing.grpc.ledger import Mark
from rollout_server.testing.grpc.wire import checkpoint
from rollout_server.testing.script import Fault, FaultKind

DOMAIN: Final = "rollout.osmosis"
# Details are sent in HTTP/2 trailers, which are limited to 8 KB.
_MOST_CHECKPOINTS: Final = 64
_LONGEST_TEXT: Final = 1000
_DETAILS_KEY: Final = "grpc-status-details-bin"
_CODES: Final = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    409: grpc.StatusCode.ABORTED,
    422: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    500: grpc.StatusCode.INTERNAL,
    501: grpc.StatusCode.UNIMPLEMENTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}


class StatusError(Exception):
    """A call ends with a status. `details` are added to the ErrorInfo that every status has."""

    def __init__(self, code: grpc.StatusCode, reason: str, text: str, *details: Message) -> None:
        super().__init__(text)
        self.code = code
        self.text = text[:_LONGEST_TEXT]
        self.details = (error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN), *details)


def invalid(field: str, text: str) -> StatusError:
    """Return the error for a field of the request that violates the contract."""
    violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=text[:_LONGEST_TEXT])
    detail = error_details_pb2.BadRequest(field_violations=[violation])
    return StatusError(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", f"{field}: {text}", detail)


def base_unknown(text: str) -> StatusError:
    """Return the error for an unknown base. The caller then sends the whole history once."""
    return StatusError(grpc.StatusCode.FAILED_PRECONDITION, "BASE_UNKNOWN", text)


def mismatch(text: str, marks: list[Mark]) -> StatusError:
    """Return the error for digests that differ, with the trainer's last `_MOST_CHECKPOINTS` checkpoints."""
    detail = pb.LedgerMismatch(checkpoints=[checkpoint(mark) for mark in marks[-_MOST_CHECKPOINTS:]])
    return StatusError(grpc.StatusCode.ABORTED, "LEDGER_MISMATCH", text, detail)


def status_of_fault(fault: Fault) -> StatusError:
    """Return the gRPC status that corresponds to a scripted HTTP fault.

    An HTTP status is mapped by the usual table, with Retry-After as RetryInfo. A reset connection is UNAVAILABLE, as every gRPC
    client reports it. A truncated response is INTERNAL.
    """
    if fault.kind is FaultKind.STATUS:
        code = _CODES.get(fault.status, grpc.StatusCode.UNKNOWN)
        seconds = fault.headers.get("retry-after", "")
        details = [error_details_pb2.RetryInfo(retry_delay=Duration(seconds=int(seconds)))] if seconds.isdigit() else []
        return StatusError(code, f"HTTP_{fault.status}", fault.body, *details)
    code = grpc.StatusCode.INTERNAL if fault.kind is FaultKind.TRUNCATED else grpc.StatusCode.UNAVAILABLE
    return StatusError(code, fault.kind.name, f"the trainer fails on purpose: {fault.kind}")


async def abort(context: "grpc.aio.ServicerContext[Any, Any]", error: StatusError) -> NoReturn:
    """End the call with a rich status. Always raises."""
    number, _ = error.code.value
    status = Status(code=number, message=error.text)
    for detail in error.details:
        status.details.add().Pack(detail)
    await context.abort(error.code, error.text, ((_DETAILS_KEY, status.SerializeToString()),))
    raise AssertionError("abort raises")
