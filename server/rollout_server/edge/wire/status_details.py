"""Parser of the rich error details in a gRPC status that a called endpoint returned."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2
from google.rpc.status_pb2 import Status
from osmosis.rollout.v1 import completion_service_pb2

from rollout_server.core.checkpoint import Checkpoint
from rollout_server.edge.wire.completion import checkpoint_from_proto
from rollout_server.edge.wire.spec import seconds

_KEY = "grpc-status-details-bin"
_Detail = TypeVar(
    "_Detail", error_details_pb2.RetryInfo, error_details_pb2.ErrorInfo, completion_service_pb2.LedgerMismatch
)


def retry_delay(error: grpc.aio.AioRpcError) -> float | None:
    """Return the seconds to wait before a retry; None if the status has no RetryInfo."""
    found = _detail(error, error_details_pb2.RetryInfo)
    return None if found is None else max(0.0, seconds(found.retry_delay))


def reason(error: grpc.aio.AioRpcError) -> str:
    """Return the reason in the status's ErrorInfo; empty if there is none."""
    found = _detail(error, error_details_pb2.ErrorInfo)
    return "" if found is None else found.reason


def ledger_mismatch(error: grpc.aio.AioRpcError) -> Sequence[Checkpoint] | None:
    """Return the trainer's checkpoint after each turn, from the status's LedgerMismatch; None if there is none."""
    found = _detail(error, completion_service_pb2.LedgerMismatch)
    return None if found is None else [checkpoint_from_proto(checkpoint) for checkpoint in found.checkpoints]


def _detail(error: grpc.aio.AioRpcError, kind: Callable[[], _Detail]) -> _Detail | None:
    for detail in _details(error):
        found = kind()
        try:
            if detail.Is(found.DESCRIPTOR) and detail.Unpack(found):
                return found
        except DecodeError:
            return None
    return None


def _details(error: grpc.aio.AioRpcError) -> Iterator[Any]:
    for key, value in error.trailing_metadata() or ():
        if key == _KEY and isinstance(value, bytes):
            try:
                yield from Status.FromString(value).details
            except DecodeError:
                return
