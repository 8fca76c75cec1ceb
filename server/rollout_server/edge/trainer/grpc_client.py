"""Call a gRPC trainer: retries, and the meaning of its errors (completion_service.proto and docs/design.md, D8).

A trainer either serves CompletionService and is called here, or is itself a client and receives the same messages over its own
stream (`edge.stream`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import grpc

from rollout_server.core.checkpoint import Checkpoint
from rollout_server.core.ledger import Author, Tokens
from rollout_server.core.outcome import Category, Failure, FailureClass
from rollout_server.edge.grpc_channels import LARGEST_ANSWER, Channels, call_metadata
from rollout_server.edge.targets.rules import TargetRefused
from rollout_server.edge.tracing.conventions import ATTEMPT_FAILED
from rollout_server.edge.tracing.propagation import add_event
from rollout_server.edge.trainer.http_errors import redact
from rollout_server.edge.trainer.retry import RetryPolicy
from rollout_server.edge.wire.completion import (
    MalformedCompletion,
    Request,
    Response,
    ledger_request,
    parse_response,
    read_ledger,
)
from rollout_server.edge.wire.spec import duration
from rollout_server.edge.wire.status_details import ledger_mismatch, reason, retry_delay
from rollout_server.runtime.errors import RolloutFailed
from rollout_server.runtime.policy import SamplingGate
from rollout_server.runtime.ports import Credentials

_SERVICE = "/osmosis.rollout.v1.CompletionService"
_COMPLETE, _READ_LEDGER = f"{_SERVICE}/Complete", f"{_SERVICE}/ReadLedger"
_CONNECT_SECONDS = 10.0
LEDGER_SECONDS = 10.0
"""Deadline of ReadLedger."""
_CATEGORIES = {
    grpc.StatusCode.RESOURCE_EXHAUSTED: Category.RATE_LIMITED,
    grpc.StatusCode.UNAVAILABLE: Category.NETWORK,
    grpc.StatusCode.DEADLINE_EXCEEDED: Category.TIMEOUT,
    grpc.StatusCode.CANCELLED: Category.NETWORK,
    grpc.StatusCode.INTERNAL: Category.TRAINER_SERVER,
    grpc.StatusCode.UNKNOWN: Category.TRAINER_SERVER,
    grpc.StatusCode.DATA_LOSS: Category.TRAINER_SERVER,
    grpc.StatusCode.ABORTED: Category.TOKEN_DRIFT,
}
_LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
"""After these it is unknown whether the turn was generated."""
_NOT_TAKEN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)
"""With RetryInfo these mean that nothing was generated."""
_TOO_LARGE = "message larger than max"
"""gRPC's own text for a message over the size limit: a response at this end (the turn was generated), or a request at the other."""


class BaseUnknown(Exception):
    """The trainer does not hold the base checkpoint and needs the whole history."""


class ToolsUnknown(Exception):
    """The trainer does not hold the tools with this digest and needs their list."""


class LedgerMismatch(Exception):
    """The trainer holds other tokens than the server. `checkpoints` are the trainer's, one per turn."""

    def __init__(self, checkpoints: Sequence[Checkpoint]) -> None:
        super().__init__("the ledger digests differ")
        self.checkpoints = checkpoints


TrainerTokens: TypeAlias = tuple[Tokens, Sequence[Author]]
"""The tokens of a segment as the trainer holds them, and the author of each."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """An error that a trainer returns in place of a completion, as CompletionService defines it.

    Args:
        code: the gRPC status.
        text: the trainer's message; redact secrets before showing it.
        reason: the trainer's stable error reason; may be empty.
        retry_after: seconds until the trainer accepts a retry; None if it does not say.
        mismatch: the trainer's checkpoint after each turn if it holds other tokens; otherwise None.
    """

    code: grpc.StatusCode
    text: str = field(repr=False)
    reason: str = ""
    retry_after: float | None = None
    mismatch: Sequence[Checkpoint] | None = None

    @property
    def deferral(self) -> float | None:
        """Seconds until a retry, if the trainer generated nothing; otherwise None."""
        return self.retry_after if self.code in _NOT_TAKEN else None


@dataclass(slots=True)
class TurnCall:
    """The call of one turn, with the state of its retries.

    Args:
        turn: the turn's number.
        deadline: on the monotonic clock; None if the rollout has no time limit.
        credentials: for the call's metadata.
        attempts: number of attempts so far.
        failures: failed attempts, which count against the retry limit.
        refusals: attempts that the trainer deferred.
        refused_until: monotonic time until which deferred attempts are repeated, measured from the first one.
        warnings: (code, text) for the turn's record.
        gate: where the call waits while sampling is paused.
    """

    turn: int
    deadline: float | None
    credentials: Credentials = field(default=Credentials(), repr=False)
    attempts: int = 0
    failures: int = 0
    refusals: int = 0
    refused_until: float | None = None
    warnings: list[tuple[str, str]] = field(default_factory=list)
    gate: SamplingGate = field(default_factory=SamplingGate, repr=False)

    def resume(self) -> None:
        """Count the retries anew: a request for the rest of the turn follows."""
        self.failures, self.refusals, self.refused_until = 0, 0, None

    async def wait_while_paused(self) -> None:
        """Wait until requests may be sent. After a pause, deferred attempts have all of their time again."""
        if await self.gate.wait():
            self.refused_until = None

    def update(self, request: Request) -> None:
        """Set the request's `time_left` and `policy_step`. Call it for each sending: retries, queues and pauses take time."""
        if self.deadline is not None:
            request.time_left.CopyFrom(duration(max(0.0, self.deadline - time.monotonic())))
        if self.gate.step is not None:
            request.policy_step = self.gate.step


class TrainerClient(Protocol):
    """A connection to one trainer, over either transport."""

    async def complete(self, request: Request, call: TurnCall) -> Response:
        """Call until there is a response.

        Raises `BaseUnknown`, `ToolsUnknown`, `LedgerMismatch`, `MalformedCompletion` or `RolloutFailed`.
        """

    async def read_ledger(self, uid: str, segment_id: str, bearer: str) -> TrainerTokens | None:
        """Return the segment as the trainer holds it; None if the trainer does not report it."""


@dataclass(frozen=True, slots=True)
class GrpcTrainerClient:
    """Call one trainer that serves CompletionService.

    `timeout` is in seconds, per attempt. `replays`: the trainer returns the stored completion when a turn key is repeated.
    """

    channels: Channels
    url: str
    retries: RetryPolicy
    timeout: float
    replays: bool

    async def complete(self, request: Request, call: TurnCall) -> Response:
        """See `TrainerClient`."""
        while True:
            call.attempts += 1
            try:
                return await _once(self, request, call)
            except TargetRefused as error:
                text = f"turn {call.turn}: {error}"
                raise RolloutFailed(
                    Failure(Category.VALIDATION, text, call.turn, source=FailureClass.TRAINER)
                ) from error
            except OSError as error:  # no connection was established, so nothing was generated
                add_event(ATTEMPT_FAILED, {"error.type": type(error).__name__})
                pause = _pause(call, self.retries, once_more=True)
                if pause is None:
                    raise RolloutFailed(_unreachable(error, call)) from error
            except grpc.aio.AioRpcError as error:
                rejection = _rejection(error)
                add_event(ATTEMPT_FAILED, {"rpc.response.status_code": rejection.code.name})
                pause = _pause(call, self.retries, rejection, once_more=_is_retryable(rejection, self))
                if pause is None:
                    raise rejection_error(rejection, call, _advice(rejection, self)) from error
            await asyncio.sleep(pause)

    async def read_ledger(self, uid: str, segment_id: str, bearer: str) -> TrainerTokens | None:
        """See `TrainerClient`."""
        request = ledger_request(uid, segment_id).SerializeToString()
        try:
            async with self.channels.use(self.url) as channel:
                read: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(_READ_LEDGER)
                ledger: bytes = await read(request, metadata=call_metadata(bearer), timeout=LEDGER_SECONDS)
            return await read_ledger(ledger)
        except (OSError, grpc.aio.AioRpcError, MalformedCompletion):
            return None


def retry_pause(rejection: Rejection, call: TurnCall, retries: RetryPolicy) -> float | None:
    """Return the seconds until the retry of a call that the trainer deferred, and count it; None if no retry is allowed."""
    return _pause(call, retries, rejection, once_more=False)


def rejection_error(rejection: Rejection, call: TurnCall, advice: str = "") -> Exception:
    """Return the exception for a rejection that is not retried: one of those that `TrainerClient.complete` raises.

    `advice` is appended to the trainer's message; it begins with its own punctuation.
    """
    if rejection.code is grpc.StatusCode.FAILED_PRECONDITION:
        unknown = {"BASE_UNKNOWN": BaseUnknown, "TOOLS_UNKNOWN": ToolsUnknown}.get(rejection.reason)
        if unknown is not None:
            return unknown()
    if rejection.code is grpc.StatusCode.ABORTED and rejection.mismatch is not None:
        return LedgerMismatch(rejection.mismatch)
    deferral = rejection.deferral
    if deferral is not None:
        advice = (
            f". It generated nothing and defers the retry by {deferral:g} s, which is longer than the rollout waits"
        )
    message = redact(rejection.text.encode("utf-8", "replace"), call.credentials.secrets())
    text = f"turn {call.turn}: the trainer answered {rejection.code.name}: {message}{advice}"
    category = _CATEGORIES.get(rejection.code, Category.TRAINER_CLIENT)
    if _too_large(rejection):
        category = Category.VALIDATION
    # The deadline of a call is at most that of the rollout. If that has passed, the trainer is not to blame.
    over = call.deadline is not None and time.monotonic() >= call.deadline
    source = FailureClass.DEADLINE if category is Category.TIMEOUT and over else FailureClass.TRAINER
    return RolloutFailed(Failure(category, text, call.turn, source=source))


async def _once(client: GrpcTrainerClient, request: Request, call: TurnCall) -> Response:
    """Make one attempt. Raises OSError if no connection was established, so that nothing was generated."""
    async with client.channels.use(client.url) as channel:
        while True:
            await call.wait_while_paused()
            left = client.timeout if call.deadline is None else min(client.timeout, call.deadline - time.monotonic())
            await client.channels.connect(channel, min(_CONNECT_SECONDS, max(left, 0.001)))
            if call.gate.is_open:  # no pause began while the connection was established
                break
        # Raw bytes: with a deserializer, gRPC would parse even a huge response on the event loop.
        complete: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(_COMPLETE)
        metadata = call_metadata(call.credentials.completions)
        call.update(request)
        response: bytes = await complete(request.SerializeToString(), metadata=metadata, timeout=max(left, 0.001))
    return await parse_response(response)


def _rejection(error: grpc.aio.AioRpcError) -> Rejection:
    return Rejection(error.code(), error.details() or "", reason(error), retry_delay(error), ledger_mismatch(error))


def _pause(
    call: TurnCall, retries: RetryPolicy, rejection: Rejection | None = None, *, once_more: bool
) -> float | None:
    """Return the seconds until the turn may be requested again, and count the attempt; None if no retry is allowed in time."""
    deferral = rejection.deferral if rejection is not None else None
    until = call.deadline
    if deferral is not None:
        # A deferral of 0 s must not become a busy loop, so the pause also grows with the number of refusals.
        call.refusals += 1
        call.refused_until = until = call.refused_until or retries.refused_until(call.deadline)
        pause = max(deferral, min(1.0, 0.01 * 2.0 ** min(call.refusals, 8)))
    elif once_more and call.failures < retries.count:
        pause = retries.wait(call.failures)
        call.failures += 1
    else:
        return None
    return pause if until is None or time.monotonic() + pause < until else None


def _is_retryable(rejection: Rejection, client: GrpcTrainerClient) -> bool:
    if rejection.code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return not _too_large(rejection)
    return client.replays and rejection.code in _LOST


def _too_large(rejection: Rejection) -> bool:
    return rejection.code is grpc.StatusCode.RESOURCE_EXHAUSTED and _TOO_LARGE in rejection.text


def _advice(rejection: Rejection, client: GrpcTrainerClient) -> str:
    """Return what the reader of the error needs in addition to the trainer's message."""
    if _too_large(rejection):
        return (
            f". This server accepts responses of up to {LARGEST_ANSWER} bytes; a trainer's server accepts requests of up to its "
            "grpc.max_receive_message_length, 4 MiB by default"
        )
    if rejection.code not in _LOST:
        return ""
    late = rejection.code is grpc.StatusCode.DEADLINE_EXCEEDED
    limit = f". An attempt may take {client.timeout:g} s (ROLLOUT_TRAINER_TIMEOUT_SECONDS)" if late else ""
    again = ", and retries failed" if client.replays else ", so it is not retried"
    return f"{limit}. The turn may have been generated{again}; only trainers that replay turn keys are retried"


def _unreachable(error: OSError, call: TurnCall) -> Failure:
    text = (
        f"turn {call.turn}: the trainer could not be reached in {call.attempts} attempts: {error}; check that it is running, and "
        "that the target names its host and port"
    )
    return Failure(Category.NETWORK, text, call.turn, source=FailureClass.TRAINER)
