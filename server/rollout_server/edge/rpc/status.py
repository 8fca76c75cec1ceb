"""Table of gRPC statuses for the errors of the core, with rich details."""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf.message import Message
from google.rpc import error_details_pb2
from google.rpc.status_pb2 import Status
from grpc import StatusCode

from rollout_server.core.error import (
    Busy,
    CallRefused,
    Conflict,
    Forbidden,
    Gone,
    InvalidRequest,
    NotFound,
    NotPossible,
    OutOfRange,
    RolloutError,
    Superseded,
    Unauthenticated,
    Unavailable,
    Violation,
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
    OutOfRange: StatusCode.OUT_OF_RANGE,
    Busy: StatusCode.RESOURCE_EXHAUSTED,
    Unavailable: StatusCode.UNAVAILABLE,
}
# gRPC sends statuses in HTTP/2 trailers, which are limited to 8 KB. They contain the message twice: percent-encoded, and in the
# base64 of the details. Lengths in bytes.
_LONGEST_MESSAGE = 1200
_LONGEST_TEXT = 300
_LONGEST_VIOLATIONS = 2000


def code_of(error: RolloutError) -> StatusCode:
    """Return the status code of an error."""
    if isinstance(error, CallRefused):
        return StatusCode.FAILED_PRECONDITION if error.reason == "ONE_CONVERSATION" else StatusCode.INVALID_ARGUMENT
    return next((code for kind, code in _CODES.items() if isinstance(error, kind)), StatusCode.INTERNAL)


def status_of(error: RolloutError, request_id: str) -> Status:
    """Return the rich status of an error: always ErrorInfo, BadRequest for invalid fields, RetryInfo for a temporary error."""
    metadata = {"request_id": request_id}
    if isinstance(error, Gone):
        metadata |= {"oldest": str(error.oldest), "newest": str(error.newest)}
    if isinstance(error, CallRefused) and error.maximum:
        metadata |= {"tokens": str(error.tokens), "maximum": str(error.maximum)}
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata)]
    if isinstance(error, InvalidRequest):
        details.append(_bad_request(error.violations))
    if isinstance(error, CallRefused) and error.field:
        details.append(_bad_request([Violation(error.field, error.message)]))
    if isinstance(error, Busy | Unavailable):
        details.append(error_details_pb2.RetryInfo(retry_delay=duration(error.retry_after)))
    return _status(code_of(error), _short(error.message, _LONGEST_MESSAGE), details)


def internal(request_id: str) -> Status:
    """Return the status for a bug of this server, without any details of it."""
    info = error_details_pb2.ErrorInfo(reason="INTERNAL", domain=DOMAIN, metadata={"request_id": request_id})
    text = f"internal error; the server's log has the reason under request {request_id}"
    return _status(StatusCode.INTERNAL, text, [info])


def _status(code: StatusCode, message: str, details: Sequence[Message]) -> Status:
    status = Status(code=code.value[0], message=message)
    for detail in details:
        status.details.add().Pack(detail)
    return status


def _bad_request(violations: Sequence[Violation]) -> error_details_pb2.BadRequest:
    """Return the invalid fields, as many as there is room for."""
    bad = error_details_pb2.BadRequest()
    for violation in violations:
        if bad.ByteSize() > _LONGEST_VIOLATIONS:
            break
        field, description = (_short(text, _LONGEST_TEXT) for text in (violation.field, violation.description))
        bad.field_violations.add(field=field, description=description)
    return bad


def _short(text: str, length: int) -> str:
    """Truncate a text to a length in encoded bytes. Percent-encoding takes three bytes for each byte but visible ASCII."""
    room = length
    for index, char in enumerate(text):
        room -= 1 if " " <= char <= "~" and char != "%" else 3 * len(char.encode("utf-8", "replace"))
        if room < 0:
            text = text[:index] + "..."
            break
    return text.encode("utf-8", "replace").decode("utf-8")
