"""Asking a gRPC trainer: what is asked again, and what it means where it refuses (completion_service.proto, D8).

A trainer serves CompletionService and is called here, or is a client itself and is asked over its own stream (`edge.stream`): the
same words then come in another wrapping.
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
from rollout_server.core.outcome import Category, Failure
from rollout_server.edge.grpc_channels import LARGEST_ANSWER, Channels
from rollout_server.edge.targets.rules import TargetRefused
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
from rollout_server.edge.wire.status_details import ledger_mismatch, reason, retry_delay
from rollout_server.runtime.errors import RolloutFailed
from rollout_server.runtime.ports import Credentials

_SERVICE = "/osmosis.rollout.v1.CompletionService"
_COMPLETE, _READ_LEDGER = f"{_SERVICE}/Complete", f"{_SERVICE}/ReadLedger"
_CONNECT_SECONDS = 10.0
LEDGER_SECONDS = 10.0
"""How long a trainer may take to show a segment."""
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
"""After these nobody knows whether the turn was generated."""
_NOT_TAKEN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)
"""With RetryInfo these say that nothing was generated."""
_TOO_LARGE = "message larger than max"
"""What gRPC itself says of a message over a limit: an answer at this end, which was generated then, or a request at the other."""


class BaseUnknown(Exception):
    """The trainer does not hold the base: it wants the whole history."""


class ToolsUnknown(Exception):
    """The trainer does not hold the tools that a digest names: it wants their list."""


class LedgerMismatch(Exception):
    """The trainer holds other tokens. `checkpoints` is what it holds after each turn."""

    def __init__(self, checkpoints: Sequence[Checkpoint]) -> None:
        super().__init__("the digests differ")
        self.checkpoints = checkpoints


TrainerTokens: TypeAlias = tuple[Tokens, Sequence[Author]]
"""The tokens of a segment as a trainer holds them, and who wrote each."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """What a trainer says instead of an answer, in the words of CompletionService.

    Args:
        text: its own words, not fit to be shown before secrets are taken out.
        reason: its stable word for what is wrong, or empty.
        retry_after: in how many seconds it wants to be asked again; None: it does not say.
        mismatch: what it holds after each turn, where it holds something else; else None.
    """

    code: grpc.StatusCode
    text: str = field(repr=False)
    reason: str = ""
    retry_after: float | None = None
    mismatch: Sequence[Checkpoint] | None = None

    @property
    def deferral(self) -> float | None:
        """In how many seconds it wants to be asked again, having generated nothing."""
        return self.retry_after if self.code in _NOT_TAKEN else None


@dataclass(slots=True)
class TurnCall:
    """One turn's call, with what decides over its repetitions: `deadline` on the monotonic clock, credentials for the metadata.

    `failures` counts attempts that came to nothing, `refusals` those that the trainer put off, and `refused_until` says how long
    those are waited for, from the first one on. `warnings` are (code, text), for the turn's record.
    """

    turn: int
    deadline: float | None
    credentials: Credentials = field(default=Credentials(), repr=False)
    attempts: int = 0
    failures: int = 0
    refusals: int = 0
    refused_until: float | None = None
    warnings: list[tuple[str, str]] = field(default_factory=list)


class TrainerClient(Protocol):
    """A trainer that is asked, in whichever way."""

    async def complete(self, request: Request, call: TurnCall) -> Response:
        """Calls until there is a response.

        Raises `BaseUnknown`, `ToolsUnknown`, `LedgerMismatch`, `MalformedCompletion` or `RolloutFailed`.
        """

    async def read_ledger(self, uid: str, segment_id: str, bearer: str) -> TrainerTokens | None:
        """A segment as the trainer holds it; None where it does not tell."""


@dataclass(frozen=True, slots=True)
class GrpcTrainerClient:
    """Calls one trainer. `timeout` in seconds, for one attempt; `replays`: the trainer answers a repeated key from memory."""

    channels: Channels
    url: str
    retries: RetryPolicy
    timeout: float
    replays: bool

    async def complete(self, request: Request, call: TurnCall) -> Response:
        """As `TrainerClient`."""
        while True:
            call.attempts += 1
            try:
                return await _once(self, request, call)
            except TargetRefused as error:
                raise RolloutFailed(Failure(Category.VALIDATION, f"turn {call.turn}: {error}", call.turn)) from error
            except OSError as error:  # no connection came about
                pause = _pause(call, self.retries, once_more=True)
                if pause is None:
                    raise RolloutFailed(_unreachable(error, call)) from error
            except grpc.aio.AioRpcError as error:
                rejection = _rejection(error)
                pause = _pause(call, self.retries, rejection, once_more=_is_retryable(rejection, self))
                if pause is None:
                    raise rejection_error(rejection, call, _advice(rejection, self)) from error
            await asyncio.sleep(pause)

    async def read_ledger(self, uid: str, segment_id: str, bearer: str) -> TrainerTokens | None:
        """As `TrainerClient`."""
        request = ledger_request(uid, segment_id).SerializeToString()
        try:
            async with self.channels.use(self.url) as channel:
                read: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(_READ_LEDGER)
                ledger: bytes = await read(request, metadata=_metadata(bearer), timeout=LEDGER_SECONDS)
            return await read_ledger(ledger)
        except (OSError, grpc.aio.AioRpcError, MalformedCompletion):
            return None


def retry_pause(rejection: Rejection, call: TurnCall, retries: RetryPolicy) -> float | None:
    """Seconds until a trainer is asked again that generated nothing, and counts it; None where it may not be."""
    return _pause(call, retries, rejection, once_more=False)


def rejection_error(rejection: Rejection, call: TurnCall, advice: str = "") -> Exception:
    """What a rejection comes to that is not asked again: one of what `TrainerClient.complete` raises.

    `advice` is what a person has to know beside the trainer's words, from its full stop on.
    """
    if rejection.code is grpc.StatusCode.FAILED_PRECONDITION:
        unknown = {"BASE_UNKNOWN": BaseUnknown, "TOOLS_UNKNOWN": ToolsUnknown}.get(rejection.reason)
        if unknown is not None:
            return unknown()
    if rejection.code is grpc.StatusCode.ABORTED and rejection.mismatch is not None:
        return LedgerMismatch(rejection.mismatch)
    deferral = rejection.deferral
    if deferral is not None:
        advice = f". It generated nothing and wants to be asked again in {deferral:g} s, which is longer than the rollout waits"
    message = redact(rejection.text.encode("utf-8", "replace"), call.credentials.secrets())
    text = f"turn {call.turn}: the trainer answered {rejection.code.name}: {message}{advice}"
    category = _CATEGORIES.get(rejection.code, Category.TRAINER_CLIENT)
    return RolloutFailed(Failure(Category.VALIDATION if _too_large(rejection) else category, text, call.turn))


async def _once(client: GrpcTrainerClient, request: Request, call: TurnCall) -> Response:
    """One attempt. OSError where no connection came about, so that nothing was generated."""
    left = client.timeout if call.deadline is None else min(client.timeout, call.deadline - time.monotonic())
    async with client.channels.use(client.url) as channel:
        await client.channels.connect(channel, min(_CONNECT_SECONDS, max(left, 0.001)))
        # Bytes in and out: gRPC would parse the answer on the event loop, whatever its number of fields.
        complete: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(_COMPLETE)
        metadata = _metadata(call.credentials.completions)
        response: bytes = await complete(request.SerializeToString(), metadata=metadata, timeout=max(left, 0.001))
    return await parse_response(response)


def _rejection(error: grpc.aio.AioRpcError) -> Rejection:
    return Rejection(error.code(), error.details() or "", reason(error), retry_delay(error), ledger_mismatch(error))


def _pause(
    call: TurnCall, retries: RetryPolicy, rejection: Rejection | None = None, *, once_more: bool
) -> float | None:
    """Seconds until the turn may be asked for again, and counts why; None where it may not, or that is too late."""
    deferral = rejection.deferral if rejection is not None else None
    until = call.deadline
    if deferral is not None:
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
    """What a person has to know beside the trainer's words."""
    if _too_large(rejection):
        return (
            f". This side takes answers of up to {LARGEST_ANSWER} bytes; what a trainer's server takes is its "
            "grpc.max_receive_message_length, 4 MiB unless it is set"
        )
    if rejection.code not in _LOST:
        return ""
    late = rejection.code is grpc.StatusCode.DEADLINE_EXCEEDED
    limit = f". An attempt may take {client.timeout:g} s (ROLLOUT_TRAINER_TIMEOUT_SECONDS)" if late else ""
    again = ", and asking again did not help" if client.replays else ", so it is not asked for again"
    return f"{limit}. The turn may have been generated{again}; only trainers that replay turn keys are asked twice"


def _unreachable(error: OSError, call: TurnCall) -> Failure:
    text = (
        f"turn {call.turn}: the trainer could not be reached in {call.attempts} attempts: {error}; is it running, and does the "
        "target name its host and port?"
    )
    return Failure(Category.NETWORK, text, call.turn)


def _metadata(bearer: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {bearer}"),) if bearer else ()
