"""Failures of calls to one of several servers: what they say about the others, and failures that a fleet makes itself."""

from collections.abc import Sequence
from typing import Final

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from rollout_gateway.status import problem

_DOMAIN: Final = "rollout.osmosis"
_DRAINING: Final = "DRAINING"
# A server that answers so has not said whether it knows what it was asked for.
_UNSURE: Final = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.DATA_LOSS,
    }
)


def is_lost(error: grpc.aio.AioRpcError) -> bool:
    """The connection failed; whether the server has taken the call, nobody knows."""
    # The word is the server's own reason where it answered, and the name of the code where the transport did.
    code = grpc.StatusCode.UNAVAILABLE
    return error.code() is code and problem(error).code == code.name


def is_elsewhere(error: grpc.aio.AioRpcError) -> bool:
    """The server took nothing, and another one may: it drains, or lacks an agent that others have."""
    return error.code() is grpc.StatusCode.NOT_FOUND or problem(error).code == _DRAINING


def is_unsure(error: grpc.aio.AioRpcError) -> bool:
    """The server has not said whether it knows what it was asked for."""
    return error.code() in _UNSURE


def combined(
    failures: Sequence[grpc.aio.AioRpcError], count: int, consequence: str, *, over: bool
) -> grpc.aio.AioRpcError:
    """What it comes to that some of `count` servers have not said what they know; `over`: the time was up.

    A server that answered says it best; of those that did not, only how many they are is known.
    """
    late = grpc.StatusCode.DEADLINE_EXCEEDED
    answered = next((each for each in failures if not is_lost(each) and each.code() is not late), None)
    return answered or (too_late() if over else unreachable(len(failures), count, consequence))


def unreachable(away: int, count: int, consequence: str) -> grpc.aio.AioRpcError:
    """Some of the servers cannot be reached."""
    text = f"{away} of {count} rollout servers cannot be reached: {consequence}"
    retry = RetryInfo(retry_delay=Duration(seconds=1))
    return _failure(grpc.StatusCode.UNAVAILABLE, "SERVER_UNREACHABLE", text, retry)


def invalid(field: str, description: str) -> grpc.aio.AioRpcError:
    """A field of a request is wrong."""
    bad = BadRequest(field_violations=[BadRequest.FieldViolation(field=field, description=description)])
    return _failure(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", f"{field}: {description}", bad)


def unknown_rollout(uid: str) -> grpc.aio.AioRpcError:
    """No server knows it."""
    text = f"there is no rollout {uid!r}; finished ones are forgotten after a while"
    return _failure(grpc.StatusCode.NOT_FOUND, "ROLLOUT_NOT_FOUND", text)


def too_late() -> grpc.aio.AioRpcError:
    """What gRPC answers when a deadline has passed."""
    return grpc.aio.AioRpcError(grpc.StatusCode.DEADLINE_EXCEEDED, details="Deadline Exceeded")


def _failure(code: grpc.StatusCode, reason: str, text: str, *details: Message) -> grpc.aio.AioRpcError:
    number: int = code.value[0]
    status = Status(code=number, message=text)
    for detail in (ErrorInfo(reason=reason, domain=_DOMAIN), *details):
        packed = AnyMessage()
        packed.Pack(detail)
        status.details.append(packed)
    trailing = grpc.aio.Metadata(("grpc-status-details-bin", status.SerializeToString()))
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details=text)
