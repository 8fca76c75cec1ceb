"""Errors of the plain API: one shape for all of them, whoever found the fault.

`{"error": {"code", "message", "request_id", "fields": [{"field", "message"}], "retry_after"}}`: `code` is a stable word,
`message` says what was wrong and what to do, `fields` are named as in the body or query, `retry_after` is in seconds and
absent where waiting does not help.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import msgspec
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Scope

from rollout_gateway.status import TOO_LARGE, Problem

INVALID: Final = "INVALID_REQUEST"
_MAX_FIELD: Final = 300
_IN_MESSAGE: Final = 5

# What layers that know nothing of this API find wrong: the code, and words that say what to do; "" keeps theirs.
_BY_STATUS: Final[Mapping[int, tuple[str, str]]] = MappingProxyType(
    {
        400: (INVALID, ""),
        404: ("PATH_NOT_FOUND", "There is nothing at this path; /openapi.json lists what there is"),
        405: ("METHOD_NOT_ALLOWED", "This path does not know this method; the Allow header lists one it does know"),
        408: ("REQUEST_TOO_SLOW", ""),
        413: (TOO_LARGE, ""),
        500: ("INTERNAL", ""),
    }
)
# What to do about errors whose own words do not say it: of the transport, and of faults of ours.
_ADVICE: Final[Mapping[str, str]] = MappingProxyType(
    {
        "UNAVAILABLE": "try again after Retry-After",
        "DEADLINE_EXCEEDED": "try again, a start with the same request id",
        "INTERNAL": "the log has it under the request id",
        TOO_LARGE: "send, or ask for, less at once",
    }
)


def uses_plain_errors(dialects: Iterable[BaseRoute]) -> Callable[[Scope], bool]:
    """Says of a request whether its errors have the plain API's shape: all have it but those of the dialects' routes."""
    others = [route.path_regex for route in dialects if isinstance(route, Route)]

    def is_plain(scope: Scope) -> bool:
        path: str = scope["path"].removeprefix(scope.get("root_path", ""))
        return not any(other.match(path) for other in others)

    return is_plain


def plain_response(problem: Problem, request_id: str) -> Response:
    """The answer to a failed request."""
    return Response(_content(problem, request_id), problem.status, dict(problem.headers), media_type="application/json")


def http_problem(status: int, detail: str, headers: Mapping[str, str] | None = None) -> Problem:
    """What layers find wrong that know of HTTP only."""
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
    return {"field": field_path(violation["loc"])[:_MAX_FIELD], "message": violation["msg"]}


def field_path(loc: Sequence[str | int]) -> str:
    """A place such as `("body", "messages", 0, "role")` as `messages[0].role`; the first part alone, as it is."""
    inner = list(loc[1:]) or list(loc)
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in inner)
    return path.removeprefix(".")


def _summary(fields: Sequence[Mapping[str, str]]) -> str:
    told = "; ".join(f"{each['field']}: {each['message']}" for each in fields[:_IN_MESSAGE])
    return told if len(fields) <= _IN_MESSAGE else f"{told}; and {len(fields) - _IN_MESSAGE} more"
