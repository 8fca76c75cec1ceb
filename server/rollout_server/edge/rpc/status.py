"""Errors of the core -> gRPC statuses with rich details: one table."""

from __future__ import annotations

from google.protobuf.any_pb2 import Any
from google.rpc import error_details_pb2
from google.rpc.status_pb2 import Status
from grpc import StatusCode

from rollout_server.core.error import (
    Busy,
    Conflict,
    Draining,
    Forbidden,
    Gone,
    InvalidRequest,
    NotFound,
    NotPossible,
    RolloutError,
    Superseded,
    Unauthenticated,
)
from rollout_server.edge.wire.spec import duration

DOMAIN = "rollout.osmosis"
_CODES: dict[type[RolloutError], StatusCode] = {
    InvalidRequest: StatusCode.INVALID_ARGUMENT,
    Unauthenticated: StatusCode.UNAUTHENTICATED,
    Forbidden: StatusCode.PERMISSION_DENIED,
    NotFound: StatusCode.NOT_FOUND,
    Conflict: StatusCode.ALREADY_EXISTS,
    NotPossible: StatusCode.FAILED_PRECONDITION,
    Superseded: StatusCode.ABORTED,
    Gone: StatusCode.OUT_OF_RANGE,
    Busy: StatusCode.RESOURCE_EXHAUSTED,
    Draining: StatusCode.UNAVAILABLE,
}
# Statuses travel in HTTP/2 trailers, which are limited to 8 KB: the message percent-encoded, the details in base64 and the
# message in them once more. Lengths in bytes.
_LONGEST_MESSAGE = 1200
_LONGEST_TEXT = 300
_LONGEST_VIOLATIONS = 2000


def code_of(error: RolloutError) -> StatusCode:
    """The status code of an error."""
    return next((code for kind, code in _CODES.items() if isinstance(error, kind)), StatusCode.INTERNAL)


def status_of(error: RolloutError, request_id: str) -> Status:
    """The rich status of an error: ErrorInfo always, BadRequest for fields, RetryInfo where waiting helps."""
    metadata = {"request_id": request_id}
    if isinstance(error, Gone):
        metadata |= {"oldest": str(error.oldest), "newest": str(error.newest)}
    details = [_pack(error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata))]
    if isinstance(error, InvalidRequest):
        details.append(_pack(_bad_request(error)))
    if isinstance(error, Busy | Draining):
        details.append(_pack(error_details_pb2.RetryInfo(retry_delay=duration(error.retry_after))))
    number: int = code_of(error).value[0]
    return Status(code=number, message=_short(error.message, _LONGEST_MESSAGE), details=details)


def internal(request_id: str) -> Status:
    """The status of a fault of ours: nothing of its insides."""
    info = error_details_pb2.ErrorInfo(reason="INTERNAL", domain=DOMAIN, metadata={"request_id": request_id})
    text = f"internal error; the server's log has it under request {request_id}"
    number: int = StatusCode.INTERNAL.value[0]
    return Status(code=number, message=text, details=[_pack(info)])


def _bad_request(error: InvalidRequest) -> error_details_pb2.BadRequest:
    """The fields that are wrong, as many as there is room for."""
    bad = error_details_pb2.BadRequest()
    for violation in error.violations:
        if bad.ByteSize() > _LONGEST_VIOLATIONS:
            break
        field, description = (_short(text, _LONGEST_TEXT) for text in (violation.field, violation.description))
        bad.field_violations.add(field=field, description=description)
    return bad


def _short(text: str, length: int) -> str:
    """The text cut to a length in bytes as they are on the wire, where all but visible ASCII takes three for each byte."""
    room = length
    for index, char in enumerate(text):
        room -= 1 if " " <= char <= "~" and char != "%" else 3 * len(char.encode("utf-8", "replace"))
        if room < 0:
            text = text[:index] + "..."
            break
    return text.encode("utf-8", "replace").decode("utf-8")


def _pack(
    detail: error_details_pb2.ErrorInfo | error_details_pb2.BadRequest | error_details_pb2.RetryInfo,
) -> Any:
    packed = Any()
    packed.Pack(detail)
    return packed
