"""gRPC status to HTTP answer: the one table, and what the rich details add to it.

The server gives every status of its own a google.rpc.ErrorInfo. A status without one was made by the transport, whose
text names sockets and addresses, so it is replaced.

`Problem.response` answers in the shape of the two dialects, FastAPI's `{"detail": ...}`; `rest.errors` in that of the
plain API.
"""

import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from starlette.responses import JSONResponse

_LOG = logging.getLogger(__name__)

HTTP_STATUS: Final[Mapping[grpc.StatusCode, int]] = {
    grpc.StatusCode.OK: 200,
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.FAILED_PRECONDITION: 400,
    grpc.StatusCode.OUT_OF_RANGE: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.ALREADY_EXISTS: 409,
    grpc.StatusCode.ABORTED: 409,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    # A client that hangs up hears no answer, so this is for one that is there: the transport or a stopping server ended its call.
    grpc.StatusCode.CANCELLED: 503,
    grpc.StatusCode.UNKNOWN: 500,
    grpc.StatusCode.INTERNAL: 500,
    grpc.StatusCode.DATA_LOSS: 500,
    grpc.StatusCode.UNIMPLEMENTED: 501,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}

#: The word for a body, or an answer, over a limit.
TOO_LARGE: Final = "TOO_LARGE"
_INTERNAL: Final = "Internal server error"
_AWAY_SECONDS: Final = 1.0
_TRANSPORT_TEXTS: Final[Mapping[grpc.StatusCode, str]] = {
    grpc.StatusCode.CANCELLED: "The call to the rollout server was broken off; try again",
    grpc.StatusCode.UNAVAILABLE: "The rollout server is not available",
    grpc.StatusCode.DEADLINE_EXCEEDED: "The rollout server did not answer in time",
    grpc.StatusCode.UNIMPLEMENTED: "The rollout server does not offer this",
}
# gRPC's own words for a message over the limit of either side; RESOURCE_EXHAUSTED means "later" everywhere else.
_OVERSIZE: Final = "message larger than max"
_PATH_PART = re.compile(r"([^.\[\]]+)|\[(\d+)\]")

Loc = tuple[str | int, ...]
Fields = Mapping[tuple[str, ...], Loc]
_Detail = TypeVar("_Detail", bound=Message)


@dataclass(frozen=True, slots=True)
class Problem:
    """An HTTP error: its status, the value of `detail`, and headers.

    `code` is the stable word of the error and `retry_after` the seconds to wait, for answers that have a place for them.
    """

    status: int
    detail: str | list[dict[str, Any]]
    headers: Mapping[str, str] = field(default_factory=dict)
    code: str = ""
    retry_after: float | None = None

    def response(self) -> JSONResponse:
        """The answer `{"detail": ...}`."""
        return JSONResponse({"detail": self.detail}, self.status, dict(self.headers))


def problem(error: grpc.aio.AioRpcError, fields: Fields | None = None) -> Problem:
    """Translates a failed call.

    `fields` maps field paths of the request message to places in the HTTP body; with it, and where the server names the
    fields at fault, INVALID_ARGUMENT becomes 422 in FastAPI's shape.
    """
    code, details = error.code(), _details(error)
    info, bad = _unpacked(details, ErrorInfo()), _unpacked(details, BadRequest())
    word = info.reason if info is not None and info.reason else code.name
    if code is grpc.StatusCode.INVALID_ARGUMENT and bad is not None and bad.field_violations and fields is not None:
        return Problem(422, [_violation(each, fields) for each in bad.field_violations], code=word)
    text = error.details() or ""
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and _OVERSIZE in text:
        text = "The request or its answer is larger than the rollout server's limit for one message"
        return Problem(413, text, code=TOO_LARGE)
    status = HTTP_STATUS.get(code, 500)
    if status == 500:
        return Problem(500, _INTERNAL, code=grpc.StatusCode.INTERNAL.name)
    if code in _TRANSPORT_TEXTS and info is None:
        text = _TRANSPORT_TEXTS[code]
    wait = _retry_after(status, _unpacked(details, RetryInfo()))
    return Problem(status, text or code.name, _headers(status, wait), word, wait)


def logged_problem(error: grpc.aio.AioRpcError, request_id: str, fields: Fields | None = None) -> Problem:
    """Translates a failed call; where the fault is not the client's, the log gets the words it does not see.

    A server that stops, is away or is slow is no error: the caller may try again.
    """
    found = problem(error, fields)
    if found.status >= 500:
        level = logging.WARNING if found.status in (503, 504) else logging.ERROR
        _LOG.log(level, "request %s: the server answered %s: %s", request_id, error.code().name, error.details())
    return found


def answer_failed_call(error: grpc.aio.AioRpcError, request_id: str, fields: Fields | None = None) -> JSONResponse:
    """The answer of the dialects to a failed call."""
    return logged_problem(error, request_id, fields).response()


def body_location(path: str, fields: Fields) -> Loc:
    """The `loc` of a field path such as `start.spec.messages[2].json`.

    The longest known prefix is translated and what follows it is kept; an unknown path stays as it is.
    """
    parts = [int(index) if index else name for name, index in _PATH_PART.findall(path)]
    while parts and parts[0] in ("start", "spec"):
        parts.pop(0)
    for length in range(len(parts), 0, -1):
        found = fields.get(tuple(str(part) for part in parts[:length]))
        if found is not None:
            rest = (part for part in parts[length:] if part not in ("json", "chat"))
            return ("body", *found, *rest)
    return ("body", *parts)


def _retry_after(status: int, retry: RetryInfo | None) -> float | None:
    """In seconds. A server that is away says nothing, but it helps to come back."""
    if retry is not None:
        return float(retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9)
    return _AWAY_SECONDS if status == 503 else None


def _headers(status: int, wait: float | None) -> dict[str, str]:
    headers = {"www-authenticate": "Bearer"} if status == 401 else {}
    if wait is not None:
        # The header knows whole seconds only.
        headers["retry-after"] = str(max(1, math.ceil(wait)))
    return headers


def _violation(violation: BadRequest.FieldViolation, fields: Fields) -> dict[str, Any]:
    return {
        "type": "value_error",
        "loc": body_location(violation.field, fields),
        "msg": violation.description or "Invalid value",
    }


def _details(error: grpc.aio.AioRpcError) -> Status:
    """The rich status of an error; empty where it carries none, or one that cannot be read."""
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin" and isinstance(value, bytes):
            try:
                return Status.FromString(value)
            except DecodeError:
                break
    return Status()


def _unpacked(status: Status, into: _Detail) -> _Detail | None:
    for detail in status.details:
        if detail.Is(into.DESCRIPTOR):
            try:
                detail.Unpack(into)
            except DecodeError:
                return None
            return into
    return None
