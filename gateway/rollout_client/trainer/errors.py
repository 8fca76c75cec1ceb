"""Errors that the trainer returns to the server, with the statuses of completion_service.proto. Used by both transports."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from osmosis.rollout.v1.completion_service_pb2 import LedgerMismatch

from rollout_client.error_details import STATUS_KEY
from rollout_client.errors import DOMAIN
from rollout_client.proto_fields import duration
from rollout_client.trainer.ledger import LedgerCheckpoint

# gRPC sends details in HTTP/2 trailers, which are limited to 8 KB.
_MOST_CHECKPOINTS = 64
_LONGEST_TEXT = 1000  # characters


class RefusedCall(Exception):
    """A call that ends with an error status.

    Args:
        code: gRPC status code.
        reason: stable error code.
        text: what was wrong, where, and what to do; cut to 1000 characters.
        details: details besides the ErrorInfo that every status has.
    """

    def __init__(self, code: grpc.StatusCode, reason: str, text: str, *details: Message) -> None:
        super().__init__(text[:_LONGEST_TEXT])
        self.code = code
        self.reason = reason
        self.text = text[:_LONGEST_TEXT]
        self.details = (ErrorInfo(reason=reason, domain=DOMAIN), *details)

    def trailers(self) -> tuple[tuple[str, bytes], ...]:
        """Return the trailing metadata with the rich status."""
        status = Status(code=self.code.value[0], message=self.text)
        for detail in self.details:
            status.details.add().Pack(detail)
        return ((STATUS_KEY, status.SerializeToString()),)


def invalid_field(field: str, text: str) -> RefusedCall:
    """Return the error for an invalid field of a request."""
    violation = BadRequest.FieldViolation(field=field, description=text[:_LONGEST_TEXT])
    return RefusedCall(
        grpc.StatusCode.INVALID_ARGUMENT,
        "INVALID_REQUEST",
        f"{field}: {text}",
        BadRequest(field_violations=[violation]),
    )


def media_refused(text: str) -> RefusedCall:
    """Return the error for media in a prompt that this trainer cannot generate from. They are never dropped."""
    return RefusedCall(grpc.StatusCode.UNIMPLEMENTED, "MEDIA", text)


def base_unknown(text: str) -> RefusedCall:
    """Return the error that makes the server send the whole history once, under the same turn key."""
    return RefusedCall(grpc.StatusCode.FAILED_PRECONDITION, "BASE_UNKNOWN", text)


def ledger_mismatch(text: str, checkpoints: Sequence[LedgerCheckpoint]) -> RefusedCall:
    """Return the error for ledgers that differ. It carries the trainer's checkpoints of up to 64 last turns."""
    detail = LedgerMismatch(checkpoints=[checkpoint.to_proto() for checkpoint in checkpoints[-_MOST_CHECKPOINTS:]])
    return RefusedCall(grpc.StatusCode.ABORTED, "LEDGER_MISMATCH", text, detail)


def try_again_later(seconds: float) -> RefusedCall:
    """Return the error for a turn that cannot be generated now. The server repeats the request after the delay."""
    delay = duration(seconds, "seconds")
    text = f"the trainer cannot generate now; retry in {seconds:g} s"
    return RefusedCall(grpc.StatusCode.RESOURCE_EXHAUSTED, "TRY_AGAIN_LATER", text, RetryInfo(retry_delay=delay))


def internal_error(part: str, turn_key: str) -> RefusedCall:
    """Return the error for an exception in the user's code. The exception itself is only in the trainer's log."""
    text = f"{part} failed in the trainer for turn {turn_key!r}; see its log, correct the function and start the rollout again"
    return RefusedCall(grpc.StatusCode.INTERNAL, f"{part.upper()}_FAILED", text)
