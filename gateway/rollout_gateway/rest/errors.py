"""Errors of the REST API. All layers use one shape.

`{"error": {"code", "message", "request_id", "fields": [{"field", "message"}], "retry_after"}}`: `code` is a stable error
code, `message` says what was wrong and what to do, and `fields` are named as in the body or query. `retry_after` is in
seconds, and absent if a retry cannot help.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import msgspec
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Scope

from rollout_gateway.rest import body
from rollout_gateway.status import TOO_LARGE, Problem

INVALID: Final = "INVALID_REQUEST"
_MAX_FIELD: Final = 300
_IN_MESSAGE: Final = 5

# Error code and message for the statuses that lower layers raise without a code. "" keeps the message of that layer.
_BY_STATUS: Final[Mapping[int, tuple[str, str]]] = MappingProxyType(
    {
        400: (INVALID, ""),
        404: ("PATH_NOT_FOUND", "This path does not exist; /openapi.json lists all paths"),
        405: (
            "METHOD_NOT_ALLOWED",
            "This path does not support this method; the Allow header lists one that it supports",
        ),
        408: ("REQUEST_TOO_SLOW", ""),
        413: (TOO_LARGE, ""),
        500: ("INTERNAL", ""),
    }
)
# What to do, for transport and internal errors, whose messages do not say it.
_ADVICE: Final[Mapping[str, str]] = MappingProxyType(
    {
        "UNAVAILABLE": "retry after Retry-After seconds",
        "DEADLINE_EXCEEDED": "retry; repeat a start with the same request id",
        "INTERNAL": "find the cause in the log by the request id",
        TOO_LARGE: "send or request less at once",
    }
)
# Of objects in whose place clients send a text, as the Python client may.
_EXAMPLES: Final[Mapping[str, str]] = MappingProxyType(
    {
        body.EndpointBody.__name__: ', such as {"url": "http://localhost:9001"}',
        body.Tokenizer.__name__: ', such as {"name": "Qwen/Qwen3-8B"}',
    }
)


def uses_plain_errors(exceptions: Iterable[BaseRoute]) -> Callable[[Scope], bool]:
    """Return a predicate on requests: true if errors have the REST API's shape, false on the paths of `exceptions`."""
    others = {route.path for route in exceptions if isinstance(route, Route)}
    return lambda scope: scope["path"].removeprefix(scope.get("root_path", "")) not in others


def plain_response(problem: Problem, request_id: str) -> Response:
    """Return the response to a failed request, in the REST API's shape."""
    return Response(_content(problem, request_id), problem.status, dict(problem.headers), media_type="application/json")


def http_problem(status: int, detail: str, headers: Mapping[str, str] | None) -> Problem:
    """Return the error for an HTTP status that a layer below the routes raised."""
    code, text = _BY_STATUS.get(status, (f"HTTP_{status}", ""))
    return Problem(status, text or detail, headers or {}, code)


def _content(problem: Problem, request_id: str) -> bytes:
    error: dict[str, Any] = {"code": problem.code, "message": problem.detail, "request_id": request_id, "fields": []}
    if not isinstance(problem.detail, str):
        fields = [_field(each) for each in problem.detail]
        error |= {"code": problem.code or INVALID, "message": _summary(fields), "fields": fields}
    elif problem.code in _ADVICE:
        error["message"] = f"{problem.detail}; {_ADVICE[problem.code]}"
    if problem.retry_after is not None:
        error["retry_after"] = problem.retry_after
    return msgspec.json.encode({"error": error})


def _field(violation: Mapping[str, Any]) -> dict[str, str]:
    text = violation["msg"]
    if violation["type"] == "model_type":  # pydantic's own text names a class of this package
        text = "Input should be a JSON object" + _EXAMPLES.get(violation["ctx"]["class_name"], "")
    return {"field": field_path(violation["loc"])[:_MAX_FIELD], "message": text}


def field_path(loc: Sequence[str | int]) -> str:
    """Return a place such as `("body", "messages", 0, "role")` as `messages[0].role`. A single part stays as it is."""
    inner = list(loc[1:]) or list(loc)
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in inner).removeprefix(".")


def _summary(fields: Sequence[Mapping[str, str]]) -> str:
    first = "; ".join(f"{each['field']}: {each['message']}" for each in fields[:_IN_MESSAGE])
    return first if len(fields) <= _IN_MESSAGE else f"{first}; and {len(fields) - _IN_MESSAGE} more"
