"""Errors of the model endpoint, in the shape and with the statuses that stop each API's clients, or let them retry."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

import grpc
from fastapi.exceptions import RequestValidationError
from google.rpc.error_details_pb2 import ErrorInfo
from rollout_client.error_details import find_detail, rich_status
from rollout_client.errors import failure_of
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from rollout_gateway.calls import ClientDisconnected, StreamEndedEarly
from rollout_gateway.http.request_body import Overloaded
from rollout_gateway.json_body import InvalidBody
from rollout_gateway.model_api.call import UnreadableReply
from rollout_gateway.model_api.fields import InvalidCall
from rollout_gateway.status import logged_problem

TOO_LONG: Final = "CONTEXT_LENGTH_EXCEEDED"
OVER: Final = "ROLLOUT_OVER"
_INVALID: Final = "INVALID_REQUEST"
_STATUSES: Final[Mapping[grpc.StatusCode, int]] = {
    # Some clients retry 401 without end.
    grpc.StatusCode.UNAUTHENTICATED: 403,
    # A server without model endpoints. Clients would retry 501.
    grpc.StatusCode.UNIMPLEMENTED: 404,
}
_MESSAGES_TYPES: Final[Mapping[int, str]] = {
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_FIELD: Final = re.compile(r"(?:prompt\.)?messages\[(\d+)\](.*)", re.DOTALL)
#: Exceptions that become an error response.
FAULTS: Final = (
    *(InvalidCall, InvalidBody, RequestValidationError, HTTPException, Overloaded, StreamEndedEarly),
    *(grpc.aio.AioRpcError, ClientDisconnected, ClientDisconnect, UnreadableReply),
)


@dataclass(frozen=True, slots=True)
class ModelError:
    """A failed request. `place` is the invalid field's path in the body, `reason` a stable error code."""

    status: int
    message: str
    reason: str
    place: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    #: Numbers of tokens of the prompt, and the most that the model allows; empty: unknown.
    tokens: str = ""
    maximum: str = ""

    def openai(self) -> dict[str, Any]:
        """Return the body in OpenAI's shape."""
        message = self.message
        if self.tokens and self.maximum:
            limit = f"This model's maximum context length is {self.maximum} tokens."
            message = f"{limit} However, your messages resulted in {self.tokens} tokens."
        kind = {429: "rate_limit_error", 403: "permission_error"}.get(self.status, "invalid_request_error")
        error = {"message": message, "type": "server_error" if self.status >= 500 else kind}
        return {"error": error | {"param": self.place or None, "code": self.reason.lower()}}

    def anthropic(self) -> dict[str, Any]:
        """Return the body in Anthropic's shape."""
        message = self.message
        if self.reason == TOO_LONG:
            numbers = f": {self.tokens} tokens > {self.maximum} maximum" if self.tokens and self.maximum else ""
            message = f"prompt is too long{numbers}"
        kind = _MESSAGES_TYPES.get(self.status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": message}}


def model_error(
    error: Exception, request_id: str, places: Sequence[str] = (), paths: Mapping[str, str] = MappingProxyType({})
) -> ModelError:
    """Translate an exception of `FAULTS`.

    `places` are the paths in the body of the prompt's messages, `paths` those of other fields that have other names there.
    """
    if isinstance(error, grpc.aio.AioRpcError):
        return _refusal(error, request_id, places, paths)
    match error:
        case InvalidCall():
            found = ModelError(400, str(error), _INVALID, error.place)
        case InvalidBody():
            found = ModelError(400, str(error.violations[0]["msg"]), _INVALID, "body")
        case RequestValidationError():
            found = ModelError(400, "the path names no rollout", _INVALID)
        case HTTPException():
            found = ModelError(error.status_code, error.detail, _INVALID, headers=error.headers or {})
        case Overloaded():
            text = "Other requests use all memory for request bodies; retry later"
            found = ModelError(503, text, "OVERLOADED", headers={"retry-after": "1"})
        case StreamEndedEarly():
            text = "The rollout server ended the call before there was a completion; retry"
            found = ModelError(503, text, "UNAVAILABLE", headers={"retry-after": "1"})
        case UnreadableReply():
            # It is the same on each retry.
            text, headers = f"The model's message cannot be read: {error}", {"x-should-retry": "false"}
            found = ModelError(500, text, "UNREADABLE_COMPLETION", headers=headers)
        case _:
            # The client is gone. The status only reaches the metrics.
            found = ModelError(499, "the client disconnected", "DISCONNECTED")
    return found


def _refusal(
    error: grpc.aio.AioRpcError, request_id: str, places: Sequence[str], paths: Mapping[str, str]
) -> ModelError:
    problem, failure = logged_problem(error, request_id), failure_of(error, request_id)
    status = _STATUSES.get(error.code(), problem.status)
    headers = {name: value for name, value in problem.headers.items() if name != "www-authenticate"}
    if failure.reason == OVER:
        return ModelError(410, failure.message, OVER, headers={"x-should-retry": "false"})
    info = find_detail(rich_status(error), ErrorInfo()) or ErrorInfo()
    numbers = {"tokens": info.metadata.get("tokens", ""), "maximum": info.metadata.get("maximum", "")}
    text, place = str(problem.detail), ""
    for invalid in failure.fields[:1]:
        place = _body_path(invalid.field, places, paths)
        text = f"{place}: {invalid.description}"
    return ModelError(status, text, problem.code, place, headers, **numbers)


def _body_path(path: str, places: Sequence[str], paths: Mapping[str, str]) -> str:
    """Return the path in the body of a field of the call."""
    found = _FIELD.fullmatch(path)
    if found and int(found[1]) < len(places):
        return places[int(found[1])] + found[2].removeprefix(".json")
    shown = path.removeprefix("prompt.").removeprefix("sampling.").removeprefix("extra_json.")
    return paths.get(shown, shown)
