"""Failures of calls to one of several servers: what they say about the others, and failures that a fleet makes itself."""

from collections.abc import Sequence
from typing import Final

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from rollout_client.errors import DOMAIN, failure_of

_Code = grpc.StatusCode
# A server that answers so has not said whether it knows what it was asked for.
_UNSURE: Final = frozenset(
    {_Code.UNAVAILABLE, _Code.DEADLINE_EXCEEDED, _Code.CANCELLED, _Code.RESOURCE_EXHAUSTED}
    | {_Code.UNIMPLEMENTED, _Code.UNKNOWN, _Code.INTERNAL, _Code.DATA_LOSS}
)


def is_lost(error: grpc.aio.AioRpcError) -> bool:
    """The connection failed; whether the server has taken the call, nobody knows."""
    return error.code() is _Code.UNAVAILABLE and not failure_of(error, "").from_server


def is_elsewhere(error: grpc.aio.AioRpcError) -> bool:
    """The server took nothing, and another one may: it drains, or lacks an agent that others have."""
    return is_missing(error) or failure_of(error, "").reason == "DRAINING"


def is_missing(error: grpc.aio.AioRpcError) -> bool:
    """The server does not have what it was asked for."""
    return error.code() is _Code.NOT_FOUND


def is_unsure(error: grpc.aio.AioRpcError) -> bool:
    """The server has not said whether it knows what it was asked for."""
    return error.code() in _UNSURE


def combined(
    failures: Sequence[grpc.aio.AioRpcError], count: int, consequence: str, *, over: bool
) -> grpc.aio.AioRpcError:
    """What it comes to that some of `count` servers have not said what they know; `over`: the time was up.

    A server that answered says it best; of those that did not, only how many they are is known.
    """
    for each in failures:
        if not is_lost(each) and each.code() is not _Code.DEADLINE_EXCEEDED:
            return each
    return too_late() if over else unreachable(len(failures), count, consequence)


def unreachable(away: int, count: int, consequence: str) -> grpc.aio.AioRpcError:
    """Some of the servers cannot be reached."""
    text = f"{away} of {count} rollout servers cannot be reached: {consequence}"
    return _failure(_Code.UNAVAILABLE, "SERVER_UNREACHABLE", text, RetryInfo(retry_delay=Duration(seconds=1)))


def invalid(field: str, description: str) -> grpc.aio.AioRpcError:
    """A field of a request is wrong."""
    bad = BadRequest(field_violations=[BadRequest.FieldViolation(field=field, description=description)])
    return _failure(_Code.INVALID_ARGUMENT, "INVALID_REQUEST", f"{field}: {description}", bad)


def unknown_rollout(uid: str) -> grpc.aio.AioRpcError:
    """No server knows it."""
    text = f"there is no rollout {uid!r}; finished ones are forgotten after a while"
    return _failure(_Code.NOT_FOUND, "ROLLOUT_NOT_FOUND", text)


def too_late() -> grpc.aio.AioRpcError:
    """What gRPC answers when a deadline has passed."""
    return grpc.aio.AioRpcError(_Code.DEADLINE_EXCEEDED, details="Deadline Exceeded")


def _failure(code: grpc.StatusCode, reason: str, text: str, *details: Message) -> grpc.aio.AioRpcError:
    status = Status(code=code.value[0], message=text)
    for detail in (ErrorInfo(reason=reason, domain=DOMAIN), *details):
        status.details.add().Pack(detail)
    trailing = grpc.aio.Metadata(("grpc-status-details-bin", status.SerializeToString()))
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details=text)
