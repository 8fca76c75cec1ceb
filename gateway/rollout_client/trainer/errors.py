"""Turns that are not answered: the statuses that completion_service.proto prescribes, whichever way they travel."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from google.protobuf.any_pb2 import Any as Packed
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from osmosis.rollout.v1.completion_service_pb2 import LedgerMismatch

from rollout_client.error_details import STATUS_KEY
from rollout_client.errors import DOMAIN
from rollout_client.proto_fields import duration
from rollout_client.trainer.ledger import LedgerCheckpoint

# Details travel in HTTP/2 trailers, which hold 8 KB.
_MOST_MARKS = 64
_LONGEST_TEXT = 1000  # characters


class RefusedCall(Exception):
    """A call that ends with a status.

    Args:
        code: the gRPC status.
        reason: a stable word for the cause.
        text: what was wrong, where, and what to do.
        details: beside the ErrorInfo that every status carries.
    """

    def __init__(self, code: grpc.StatusCode, reason: str, text: str, *details: Message) -> None:
        super().__init__(text[:_LONGEST_TEXT])
        self.code = code
        self.reason = reason
        self.text = text[:_LONGEST_TEXT]
        self.details = (ErrorInfo(reason=reason, domain=DOMAIN), *details)

    def trailers(self) -> tuple[tuple[str, bytes], ...]:
        """The rich status as gRPC sends it."""
        status = Status(code=self.code.value[0], message=self.text)
        for detail in self.details:
            packed = Packed()
            packed.Pack(detail)
            status.details.append(packed)
        return ((STATUS_KEY, status.SerializeToString()),)


def invalid_field(field: str, text: str) -> RefusedCall:
    """A field that breaks the contract."""
    violation = BadRequest.FieldViolation(field=field, description=text[:_LONGEST_TEXT])
    return RefusedCall(
        grpc.StatusCode.INVALID_ARGUMENT,
        "INVALID_REQUEST",
        f"{field}: {text}",
        BadRequest(field_violations=[violation]),
    )


def base_unknown(text: str) -> RefusedCall:
    """The server is to send the whole history once."""
    return RefusedCall(grpc.StatusCode.FAILED_PRECONDITION, "BASE_UNKNOWN", text)


def ledger_mismatch(text: str, checkpoints: Sequence[LedgerCheckpoint]) -> RefusedCall:
    """The two records part. What is held here after each turn goes along, the last turns first to stay."""
    held = LedgerMismatch(checkpoints=[checkpoint.to_proto() for checkpoint in checkpoints[-_MOST_MARKS:]])
    return RefusedCall(grpc.StatusCode.ABORTED, "LEDGER_MISMATCH", text, held)


def try_again_later(seconds: float) -> RefusedCall:
    """Nothing was generated; ask again."""
    delay = duration(seconds, "seconds")
    text = f"the trainer cannot generate now; ask again in {seconds:g} s"
    return RefusedCall(grpc.StatusCode.RESOURCE_EXHAUSTED, "TRY_AGAIN_LATER", text, RetryInfo(retry_delay=delay))


def internal_error(part: str, turn_key: str) -> RefusedCall:
    """A fault of the trainer's own code; its text stays in its log."""
    text = f"{part} failed in the trainer, whose log has it under {turn_key!r}; correct it there and start the rollout anew"
    return RefusedCall(grpc.StatusCode.INTERNAL, f"{part.upper()}_FAILED", text)
