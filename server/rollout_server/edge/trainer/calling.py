"""Calling a trainer's CompletionService: what is asked again, and what a status means (completion_service.proto, D8)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc
from osmosis.rollout.v1 import completion_service_pb2_grpc

from rollout_server.core.checkpoint import Checkpoint
from rollout_server.core.ledger import Author, Tokens
from rollout_server.core.outcome import Category, Failure
from rollout_server.edge.channels import Channels
from rollout_server.edge.rpc.wire.completion import Request, Response, held_tokens, ledger_request
from rollout_server.edge.rpc.wire.detail import ledger_mismatch, reason, retry_delay
from rollout_server.edge.trainer.refusal import redacted
from rollout_server.edge.trainer.retry import Retries
from rollout_server.runtime.port import Failed

_CONNECT_SECONDS = 10.0
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


class BaseUnknown(Exception):
    """The trainer does not hold the base: it wants the whole history."""


class Mismatch(Exception):
    """The trainer holds other tokens. `checkpoints` is what it holds after each turn."""

    def __init__(self, checkpoints: Sequence[Checkpoint]) -> None:
        super().__init__("the digests differ")
        self.checkpoints = checkpoints


@dataclass(frozen=True, slots=True)
class Caller:
    """Calls one trainer. `timeout` in seconds, for one attempt; `replays`: the trainer answers a repeated key from memory."""

    channels: Channels
    url: str
    retries: Retries
    timeout: float
    replays: bool


@dataclass(slots=True)
class Call:
    """One turn's call, with what decides over its repetitions: `deadline` on the monotonic clock, `bearer` for the metadata."""

    turn: int
    deadline: float | None
    bearer: str = field(repr=False)
    attempts: int = 0


async def complete(caller: Caller, request: Request, call: Call) -> Response:
    """Asks until there is an answer. Raises `BaseUnknown`, `Mismatch` or `Failed`."""
    failures = 0
    while True:
        call.attempts += 1
        try:
            return await _once(caller, request, call)
        except OSError as error:
            if failures >= caller.retries.count:
                raise Failed(_unreachable(error, call)) from error
            pause = caller.retries.wait(failures)
        except grpc.aio.AioRpcError as error:
            told = _pause(error, caller, call, failures)
            if told is None:
                raise _ended(error, call) from error
            pause = told
        await asyncio.sleep(pause)
        failures += 1


async def read_ledger(caller: Caller, uid: str, segment_id: str, bearer: str) -> tuple[Tokens, Sequence[Author]] | None:
    """The tokens of a segment as the trainer holds them, and who wrote each; None where it does not tell."""
    request = ledger_request(uid, segment_id)
    try:
        async with caller.channels.use(caller.url) as channel:
            stub = completion_service_pb2_grpc.CompletionServiceStub(channel)
            return held_tokens(await stub.ReadLedger(request, metadata=_metadata(bearer), timeout=10.0))
    except (OSError, grpc.aio.AioRpcError):
        return None


async def _once(caller: Caller, request: Request, call: Call) -> Response:
    """One attempt. OSError where no connection came about, so that nothing was generated."""
    left = caller.timeout if call.deadline is None else min(caller.timeout, call.deadline - time.monotonic())
    async with caller.channels.use(caller.url) as channel:
        await caller.channels.connect(channel, min(_CONNECT_SECONDS, max(left, 0.001)))
        stub = completion_service_pb2_grpc.CompletionServiceStub(channel)
        answer: Response = await stub.Complete(request, metadata=_metadata(call.bearer), timeout=max(left, 0.001))
        return answer


def _pause(error: grpc.aio.AioRpcError, caller: Caller, call: Call, failures: int) -> float | None:
    """Seconds until the turn may be asked for again; None where it may not."""
    told = retry_delay(error)
    if error.code() in _NOT_TAKEN and told is not None:
        pause = max(told, 0.05)
        return pause if call.deadline is None or time.monotonic() + pause < call.deadline else None
    again = error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED or (caller.replays and error.code() in _LOST)
    return caller.retries.wait(failures) if again and failures < caller.retries.count else None


def _ended(error: grpc.aio.AioRpcError, call: Call) -> Exception:
    if error.code() is grpc.StatusCode.FAILED_PRECONDITION and reason(error) == "BASE_UNKNOWN":
        return BaseUnknown()
    mismatch = ledger_mismatch(error)
    if error.code() is grpc.StatusCode.ABORTED and mismatch is not None:
        return Mismatch(mismatch)
    said = redacted((error.details() or "").encode(), (call.bearer,) if call.bearer else ())
    text = f"turn {call.turn}: the trainer answered {error.code().name}: {said}"
    if error.code() in _LOST:
        text += ". The turn may have been generated; it is asked for again only where the trainer replays turn keys"
    return Failed(Failure(_CATEGORIES.get(error.code(), Category.TRAINER_CLIENT), text, call.turn))


def _unreachable(error: OSError, call: Call) -> Failure:
    text = f"turn {call.turn}: the trainer could not be reached in {call.attempts} attempts: {error}"
    return Failure(Category.NETWORK, text, call.turn)


def _metadata(bearer: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {bearer}"),) if bearer else ()
