"""Errors of calls to one server of a fleet: whether other servers are tried, and errors that the fleet raises itself."""

from collections.abc import Sequence
from typing import Final

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from rollout_client.errors import DOMAIN, failure_of

_Code = grpc.StatusCode
# Statuses that do not show whether the server has the requested rollout or agent.
_UNSURE: Final = frozenset(
    {_Code.UNAVAILABLE, _Code.DEADLINE_EXCEEDED, _Code.CANCELLED, _Code.RESOURCE_EXHAUSTED}
    | {_Code.UNIMPLEMENTED, _Code.UNKNOWN, _Code.INTERNAL, _Code.DATA_LOSS}
)


def is_lost(error: grpc.aio.AioRpcError) -> bool:
    """Return whether the connection failed. The server may have received the call."""
    return error.code() is _Code.UNAVAILABLE and not failure_of(error, "").from_server


def is_elsewhere(error: grpc.aio.AioRpcError) -> bool:
    """Return whether the server refused a start that another server may accept: it drains, or lacks the agent."""
    return is_missing(error) or failure_of(error, "").reason == "DRAINING"


def is_missing(error: grpc.aio.AioRpcError) -> bool:
    """Return whether the server does not have the requested rollout or agent."""
    return error.code() is _Code.NOT_FOUND


def is_unsure(error: grpc.aio.AioRpcError) -> bool:
    """Return whether the error does not show if the server has the requested rollout or agent."""
    return error.code() in _UNSURE


def combined(
    failures: Sequence[grpc.aio.AioRpcError], count: int, consequence: str, *, over: bool
) -> grpc.aio.AioRpcError:
    """Return the error of a call that failed on some of `count` servers; `over`: the deadline has passed.

    A status that a server sent is the most specific. Without one, only the number of unreachable servers is known.
    """
    for each in failures:
        if not is_lost(each) and each.code() is not _Code.DEADLINE_EXCEEDED:
            return each
    return too_late() if over else unreachable(len(failures), count, consequence)


def unreachable(away: int, count: int, consequence: str) -> grpc.aio.AioRpcError:
    """Return the error for `away` of `count` servers that cannot be reached; `consequence` completes its message."""
    text = f"{away} of {count} rollout servers cannot be reached: {consequence}"
    return _failure(_Code.UNAVAILABLE, "SERVER_UNREACHABLE", text, RetryInfo(retry_delay=Duration(seconds=1)))


def invalid(field: str, description: str) -> grpc.aio.AioRpcError:
    """Return the error for one wrong field of a request."""
    bad = BadRequest(field_violations=[BadRequest.FieldViolation(field=field, description=description)])
    return _failure(_Code.INVALID_ARGUMENT, "INVALID_REQUEST", f"{field}: {description}", bad)


def unknown_rollout(uid: str) -> grpc.aio.AioRpcError:
    """Return the error for a uid that no server has."""
    text = f"there is no rollout {uid!r}; finished ones are forgotten after a while"
    return _failure(_Code.NOT_FOUND, "ROLLOUT_NOT_FOUND", text)


def too_late() -> grpc.aio.AioRpcError:
    """Return the error that gRPC raises when a deadline has passed."""
    return grpc.aio.AioRpcError(_Code.DEADLINE_EXCEEDED, details="Deadline Exceeded")


def _failure(code: grpc.StatusCode, reason: str, text: str, *details: Message) -> grpc.aio.AioRpcError:
    status = Status(code=code.value[0], message=text)
    for detail in (ErrorInfo(reason=reason, domain=DOMAIN), *details):
        status.details.add().Pack(detail)
    trailing = grpc.aio.Metadata(("grpc-status-details-bin", status.SerializeToString()))
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details=text)
