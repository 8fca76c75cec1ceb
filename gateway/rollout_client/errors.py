"""Exceptions of failed calls: `RolloutError` with status code, fields and retry advice, and a subclass per kind of failure.

The server adds a google.rpc.ErrorInfo with its domain to every status it creates. A status without one comes from gRPC on either
side, or from a proxy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, cast

from google.rpc.error_details_pb2 import BadRequest, ErrorInfo
from grpc import StatusCode

from rollout_client.error_details import FailedCall, find_detail, retry_after, rich_status

if TYPE_CHECKING:
    import grpc
    from osmosis.rollout.v1.rollout_service_pb2 import Rollout

DOMAIN: Final = "rollout.osmosis"
# gRPC reports an oversized message as RESOURCE_EXHAUSTED, with this text. Otherwise the code means "retry later".
_OVERSIZE: Final = "message larger than max"


@dataclass(frozen=True, slots=True)
class FieldError:
    """One invalid field of a request.

    Args:
        field: path of the field, such as "spec.messages[0].role".
        description: what is wrong with it and how to correct it.
    """

    field: str
    description: str


class RolloutError(Exception):
    """A failed call. A rollout that was accepted and fails later is no failed call: see `raise_for_failure`.

    Args:
        code: gRPC status code.
        message: description for people.
        reason: stable error code of the server, such as "ROLLOUT_NOT_FOUND"; empty if gRPC or a proxy created the status.
        fields: invalid fields of the request.
        retry_after: seconds to wait before a retry; None if the server gave no time.
        request_id: id of the call, under which the server logs it.

    The attribute `attempts` counts the attempts that failed in a row.
    """

    def __init__(
        self,
        code: StatusCode,
        message: str,
        *,
        reason: str = "",
        fields: tuple[FieldError, ...] = (),
        retry_after: float | None = None,
        request_id: str = "",
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.reason = reason
        self.fields = fields
        self.retry_after = retry_after
        self.request_id = request_id
        self.attempts = 1

    @property
    def from_server(self) -> bool:
        """Whether the server created this status. If not, gRPC or a proxy did."""
        return bool(self.reason)

    @property
    def retryable(self) -> bool:
        """Whether the same call may succeed later. The client has already retried it as `Retry` and the timeout allow."""
        if self.from_server:
            busy = self.code is StatusCode.RESOURCE_EXHAUSTED and self.retry_after is not None
            return busy or self.code is StatusCode.UNAVAILABLE
        return self.code in _BROKEN

    def __str__(self) -> str:
        missing = [f"{each.field}: {each.description}" for each in self.fields if each.field not in self.message]
        text = "; ".join([self.message or "the server gave no reason", *missing])
        where = [f"{self.code.name} {self.reason}".rstrip()]
        if self.retry_after is not None:
            where.append(f"try again after {self.retry_after:g} s")
        if self.attempts > 1:
            where.append(f"{self.attempts} attempts")
        if self.request_id:
            where.append(f"request {self.request_id}")
        return f"{text} [{', '.join(where)}]"

    def __reduce__(self) -> tuple[object, ...]:
        """Support pickling, so that worker processes can raise these errors in their parent."""
        return _unpickled, (type(self), self.message, dict(self.__dict__))


def _unpickled(kind: type[RolloutError], message: str, state: Mapping[str, object]) -> RolloutError:
    error = kind.__new__(kind, message)
    error.__dict__.update(state)
    return error


class RolloutFailed(Exception):
    """A rollout that failed or was cancelled. Raised by `raise_for_failure`, and by no call.

    Args:
        message: what was wrong, where, and what to do; for a cancelled rollout its reason.
        failure_class: who has to act, such as "engine"; "cancelled" for a cancelled rollout.
        category: the kind of failure, such as "network"; empty for a cancelled rollout.
        turn: the turn in which the rollout failed, from 1; 0: before the first, or cancelled.
        uid: the server's id of the rollout; empty if unknown.
    """

    def __init__(self, message: str, failure_class: str, category: str = "", turn: int = 0, uid: str = "") -> None:
        super().__init__(message, failure_class, category, turn, uid)
        self.message = message
        self.failure_class = failure_class
        self.category = category
        self.turn = turn
        self.uid = uid

    def __str__(self) -> str:
        where = " ".join(filter(None, (self.failure_class, self.category, self.uid and f"rollout {self.uid}")))
        return f"{self.message} [{where}]"


class InvalidRequest(RolloutError):
    """Fields of the request are invalid; `fields` lists them."""


class Unauthenticated(RolloutError):
    """The API key is missing or unknown to the server."""


class PermissionDenied(RolloutError):
    """The API key does not permit this call."""


class NotFound(RolloutError):
    """The rollout or agent does not exist, or belongs to another caller. Finished rollouts expire after a retention time."""


class Conflict(RolloutError):
    """The request id was already used with a different spec."""


class NotPossible(RolloutError):
    """The server cannot run this rollout, or the rollout's state does not allow the call."""


class EventsGone(RolloutError):
    """The requested events are not stored. They were dropped, or the sequence number lies beyond the last event.

    `oldest` and `newest` are the sequence numbers of the first and last stored event; None if unknown.
    """

    oldest: int | None = None
    newest: int | None = None


class Busy(RolloutError):
    """The server is at capacity. `retry_after` is the number of seconds to wait."""


class TooLarge(RolloutError):
    """The message exceeds a size limit. For requests it is `server_info().max_request_bytes`."""


class Unavailable(RolloutError):
    """The server is unreachable, starting or draining, or the connection broke. The request may have been executed."""


class DeadlineExceeded(RolloutError, TimeoutError):
    """The call's timeout expired. The rollout continues."""


class NotFinished(DeadlineExceeded):
    """`wait` timed out before the rollout finished. `rollout` is its last known state; None without any response."""

    rollout: Rollout | None = None


class ServerFault(RolloutError):
    """Internal error of the server. The server logs the details under `request_id`."""


_ERROR_CLASSES: Final[Mapping[StatusCode, type[RolloutError]]] = MappingProxyType(
    {
        StatusCode.INVALID_ARGUMENT: InvalidRequest,
        StatusCode.UNAUTHENTICATED: Unauthenticated,
        StatusCode.PERMISSION_DENIED: PermissionDenied,
        StatusCode.NOT_FOUND: NotFound,
        StatusCode.ALREADY_EXISTS: Conflict,
        StatusCode.FAILED_PRECONDITION: NotPossible,
        StatusCode.OUT_OF_RANGE: EventsGone,
        StatusCode.RESOURCE_EXHAUSTED: Busy,
        StatusCode.UNAVAILABLE: Unavailable,
        StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
        StatusCode.INTERNAL: ServerFault,
        StatusCode.UNKNOWN: ServerFault,
        StatusCode.DATA_LOSS: ServerFault,
    }
)
_CODES: Final[Mapping[int, StatusCode]] = MappingProxyType({each.value[0]: each for each in StatusCode})
# Codes with which gRPC reports a broken connection or a reset stream, provided this side did not cancel the call.
_BROKEN: Final = frozenset({StatusCode.UNAVAILABLE, StatusCode.INTERNAL, StatusCode.UNKNOWN, StatusCode.CANCELLED})


def failure_of(error: grpc.RpcError, request_id: str) -> RolloutError:
    """Return the exception for a failed call. `request_id` is the id that was sent, in case the status has none."""
    call = cast(FailedCall, error)
    status = rich_status(call)
    info, bad = find_detail(status, ErrorInfo()), find_detail(status, BadRequest())
    if info is not None and (info.domain != DOMAIN or not info.reason):
        info = None
    code, message = call.code(), call.details() or ""
    failure = _error_class(code, message, from_server=info is not None)(
        code,
        message,
        reason=info.reason if info is not None else "",
        fields=tuple(FieldError(each.field, each.description) for each in bad.field_violations) if bad else (),
        retry_after=retry_after(status),
        request_id=(info.metadata["request_id"] if info is not None else "") or request_id,
    )
    if isinstance(failure, EventsGone) and info is not None:
        failure.oldest, failure.newest = (_number(info.metadata[key]) for key in ("oldest", "newest"))
    return failure


def refusal_error(code: int, message: str, reason: str) -> RolloutError:
    """Return the exception for a refusal inside a stream.

    Args:
        code: a google.rpc.Code. RESOURCE_EXHAUSTED is retryable at once.
        message: description for people.
        reason: error code, chosen by this client.
    """
    status = _CODES.get(code, StatusCode.UNKNOWN)
    later = 0.0 if status is StatusCode.RESOURCE_EXHAUSTED else None
    return _error_class(status, message, from_server=True)(status, message, reason=reason, retry_after=later)


def _error_class(code: StatusCode, message: str, *, from_server: bool) -> type[RolloutError]:
    if not from_server and code in _BROKEN:
        return Unavailable
    if not from_server and code is StatusCode.RESOURCE_EXHAUSTED and _OVERSIZE in message:
        return TooLarge
    return _ERROR_CLASSES.get(code, RolloutError)


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() else None
