"""Translation of gRPC statuses to HTTP errors: one table, and the rich error details.

The server attaches a google.rpc.ErrorInfo to every status that it creates. A status without one comes from the transport.
Its text names sockets and addresses, so it is replaced.

`Problem.response` uses FastAPI's shape `{"detail": ...}`, as the synchronous and asynchronous HTTP APIs require.
`rest.errors` writes the REST API's shape.
"""

import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
from rollout_client.errors import TooLarge, failure_of
from starlette.responses import JSONResponse

_LOG = logging.getLogger(__name__)

_CODES: Final[Mapping[int, str]] = {
    200: "OK",
    400: "INVALID_ARGUMENT FAILED_PRECONDITION OUT_OF_RANGE",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    409: "ALREADY_EXISTS ABORTED",
    429: "RESOURCE_EXHAUSTED",
    500: "UNKNOWN INTERNAL DATA_LOSS",
    501: "UNIMPLEMENTED",
    # CANCELLED: the transport or a stopping server ended the call. After a client's disconnect there is no response at all.
    503: "UNAVAILABLE CANCELLED",
    504: "DEADLINE_EXCEEDED",
}
HTTP_STATUS: Final = {grpc.StatusCode[name]: status for status, names in _CODES.items() for name in names.split()}

#: Error code of a body or response that exceeds a limit.
TOO_LARGE: Final = "TOO_LARGE"
_INTERNAL: Final = "Internal server error"
_AWAY_SECONDS: Final = 1.0
_TRANSPORT_TEXTS: Final[Mapping[grpc.StatusCode, str]] = {
    grpc.StatusCode.CANCELLED: "The call to the rollout server was interrupted; try again",
    grpc.StatusCode.UNAVAILABLE: "The rollout server is not available",
    grpc.StatusCode.DEADLINE_EXCEEDED: "The rollout server did not answer in time",
    grpc.StatusCode.UNIMPLEMENTED: "The rollout server does not support this",
}
_PATH_PART = re.compile(r"([^.\[\]]+)|\[(\d+)\]")

Loc = tuple[str | int, ...]
Fields = Mapping[tuple[str, ...], Loc]


@dataclass(frozen=True, slots=True)
class Problem:
    """An HTTP error: its status, the value of `detail`, and headers.

    `code` is the stable error code and `retry_after` the seconds to wait. Only the REST API sends them in the body.
    """

    status: int
    detail: str | list[dict[str, Any]]
    headers: Mapping[str, str] = field(default_factory=dict)
    code: str = ""
    retry_after: float | None = None

    def response(self) -> JSONResponse:
        """Return the response `{"detail": ...}`."""
        return JSONResponse({"detail": self.detail}, self.status, dict(self.headers))


def problem(error: grpc.aio.AioRpcError, fields: Fields | None = None) -> Problem:
    """Translate a failed call to an HTTP error.

    `fields` maps field paths of the request message to places in the HTTP body. If it is given and the server names the
    invalid fields, INVALID_ARGUMENT becomes 422 in FastAPI's shape.
    """
    code, failure = error.code(), failure_of(error, "")
    text, word = failure.message, failure.reason or code.name
    if code is grpc.StatusCode.INVALID_ARGUMENT and failure.fields and fields is not None:
        # dict.fromkeys drops duplicates: several fields of the message may come from one field of the body.
        faults = dict.fromkeys(
            (body_location(each.field, fields), each.description or "Invalid value") for each in failure.fields
        )
        return Problem(422, [{"type": "value_error", "loc": loc, "msg": text} for loc, text in faults], code=word)
    if isinstance(failure, TooLarge):
        text = "The request or its response is larger than the rollout server's limit for one message"
        return Problem(413, text, code=TOO_LARGE)
    status = HTTP_STATUS.get(code, 500)
    if status == 500:
        return Problem(500, _INTERNAL, code=grpc.StatusCode.INTERNAL.name)
    if not failure.from_server:
        text = _TRANSPORT_TEXTS.get(code, text)
    wait = failure.retry_after
    if wait is None and status == 503:
        # An unreachable server sends no retry delay, but a retry can help.
        wait = _AWAY_SECONDS
    return Problem(status, text or code.name, _headers(status, wait), word, wait)


def logged_problem(error: grpc.aio.AioRpcError, request_id: str, fields: Fields | None = None) -> Problem:
    """Translate a failed call. A 5xx is logged with the details that the client does not see.

    503 and 504 are logged as warnings: the server is stopping, unreachable or slow, and the client can retry.
    """
    found = problem(error, fields)
    if found.status >= 500:
        level = logging.WARNING if found.status in (503, 504) else logging.ERROR
        _LOG.log(
            level, "request %s: the rollout server returned %s: %s", request_id, error.code().name, error.details()
        )
    return found


def body_location(path: str, fields: Fields) -> Loc:
    """Return the `loc` of a field path such as `start.spec.messages[2].json`.

    The longest known prefix is translated and the rest is kept. An unknown path stays as it is.
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


def _headers(status: int, wait: float | None) -> dict[str, str]:
    headers = {"www-authenticate": "Bearer"} if status == 401 else {}
    if wait is not None:
        # The header allows whole seconds only.
        headers["retry-after"] = str(max(1, math.ceil(wait)))
    return headers
