"""Rich status of a failed gRPC call: the google.rpc.Status in its trailing metadata, and the status's details."""

from __future__ import annotations

from typing import Any, Final, Protocol, TypeVar

from google.protobuf.message import DecodeError, Message
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from grpc import StatusCode

from rollout_client.proto_fields import duration_seconds

STATUS_KEY: Final = "grpc-status-details-bin"
_Detail = TypeVar("_Detail", bound=Message)


class FailedCall(Protocol):
    """The methods that grpc.Call and grpc.aio.AioRpcError have in common."""

    def code(self) -> StatusCode: ...
    def details(self) -> str | None: ...
    def trailing_metadata(self) -> Any: ...


def rich_status(error: FailedCall) -> Status:
    """Return the rich status of an error; an empty Status if it has none or it cannot be parsed."""
    for key, value in error.trailing_metadata() or ():
        if key == STATUS_KEY and isinstance(value, bytes):
            try:
                return Status.FromString(value)
            except DecodeError:
                break
    return Status()


def find_detail(status: Status, into: _Detail) -> _Detail | None:
    """Parse the first detail of the type of `into` into it and return it; None if there is none or it cannot be parsed."""
    for detail in status.details:
        if detail.Is(into.DESCRIPTOR):
            try:
                detail.Unpack(into)
            except DecodeError:
                return None
            return into
    return None


def retry_after(status: Status) -> float | None:
    """Return the seconds to wait before the next attempt, 0 or more, from the RetryInfo detail; None without one."""
    retry = find_detail(status, RetryInfo())
    return max(0.0, duration_seconds(retry.retry_delay)) if retry is not None else None
