"""Reads the rich status of a failed gRPC call: the google.rpc.Status in its trailing metadata, and the details in it."""

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
    """The part of grpc.Call and grpc.aio.AioRpcError that is the same."""

    def code(self) -> StatusCode: ...
    def details(self) -> str | None: ...
    def trailing_metadata(self) -> Any: ...


def rich_status(error: FailedCall) -> Status:
    """The status with its details; an empty one where there is none that can be read."""
    for key, value in error.trailing_metadata() or ():
        if key == STATUS_KEY and isinstance(value, bytes):
            try:
                return Status.FromString(value)
            except DecodeError:
                break
    return Status()


def find_detail(status: Status, into: _Detail) -> _Detail | None:
    """The first detail of the type of `into`, parsed into it; None where there is none, or it cannot be parsed."""
    for detail in status.details:
        if detail.Is(into.DESCRIPTOR):
            try:
                detail.Unpack(into)
            except DecodeError:
                return None
            return into
    return None


def retry_after(status: Status) -> float | None:
    """Seconds to wait before the next attempt, 0 or more, from the status's RetryInfo; None where it has none."""
    retry = find_detail(status, RetryInfo())
    return max(0.0, duration_seconds(retry.retry_delay)) if retry is not None else None
