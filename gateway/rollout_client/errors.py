"""What a call may fail with: one exception type with code, fields and retry advice, and a subclass for what callers tell apart.

The server puts a google.rpc.ErrorInfo of its domain into every status of its own. A status without one was made on the way:
by gRPC on either side, or by a proxy.
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
# gRPC's own words for a message over the limit of either side; RESOURCE_EXHAUSTED means "later" everywhere else.
_OVERSIZE: Final = "message larger than max"


@dataclass(frozen=True, slots=True)
class FieldError:
    """One field of a request that is wrong: its path, such as `spec.messages[0].role`, and what to do about it."""

    field: str
    description: str


class RolloutError(Exception):
    """A call that failed. (A rollout that was accepted and then went wrong is no error: its outcome says what happened.)

    Args:
        code: the gRPC status.
        message: for a person.
        reason: a stable word of the server's, such as "ROLLOUT_NOT_FOUND"; empty where the status was made on the way.
        fields: the fields of the request that are wrong.
        retry_after: seconds after which the server expects to have room; None where it does not say.
        request_id: of the call, as it stands in the server's log.

    `attempts` counts the requests that were sent without success.
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
        """The server said so itself; otherwise gRPC or a proxy did."""
        return bool(self.reason)

    @property
    def retryable(self) -> bool:
        """The same call may well succeed later. The client has then tried already, for as long as it was allowed to."""
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
        """Errors travel between processes, as those of workers do."""
        return _unpickled, (type(self), self.message, dict(self.__dict__))


def _unpickled(kind: type[RolloutError], message: str, state: Mapping[str, object]) -> RolloutError:
    error = kind.__new__(kind, message)
    error.__dict__.update(state)
    return error


class InvalidRequest(RolloutError):
    """Fields of the request are wrong; `fields` names each."""


class Unauthenticated(RolloutError):
    """The server wants an API key, or does not know this one."""


class PermissionDenied(RolloutError):
    """The API key does not allow this."""


class NotFound(RolloutError):
    """There is no such rollout or agent, or it is another caller's. Finished rollouts are forgotten after a while."""


class Conflict(RolloutError):
    """The request id is known with another payload."""


class NotPossible(RolloutError):
    """This server cannot run such a rollout, or the rollout's state does not allow the call."""


class EventsGone(RolloutError):
    """The events asked for are not kept. `oldest` and `newest` are the sequence numbers that are, None where unknown."""

    oldest: int | None = None
    newest: int | None = None


class Busy(RolloutError):
    """Too many rollouts wait; `retry_after` says for how long to stay away."""


class TooLarge(RolloutError):
    """The request is larger than the server takes; see `max_request_bytes` of `server_info()`."""


class Unavailable(RolloutError):
    """The server cannot be reached, starts, or drains; or the connection broke. What was sent may or may not have been done."""


class DeadlineExceeded(RolloutError, TimeoutError):
    """The call's time was over. The rollout goes on."""


class NotFinished(DeadlineExceeded):
    """A wait was over before the rollout was. `rollout` is its latest known state, None where the server never answered."""

    rollout: Rollout | None = None


class ServerFault(RolloutError):
    """A fault of the server's; its text is in the server's log under `request_id`."""


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
# What gRPC reports when a connection breaks or a stream is reset, if nobody on this side cancelled the call.
_BROKEN: Final = frozenset({StatusCode.UNAVAILABLE, StatusCode.INTERNAL, StatusCode.UNKNOWN, StatusCode.CANCELLED})


def failure_of(error: grpc.RpcError, request_id: str) -> RolloutError:
    """The exception for a call that failed; `request_id` is the one that was sent with it."""
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
    """The exception for what a server refused within a stream, with a google.rpc.Code and a word of ours as the reason."""
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
