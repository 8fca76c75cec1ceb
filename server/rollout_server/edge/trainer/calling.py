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
from rollout_server.edge.channels import LARGEST_ANSWER, Channels
from rollout_server.edge.rpc.wire.completion import Request, Response, held_tokens, ledger_request
from rollout_server.edge.rpc.wire.detail import ledger_mismatch, reason, retry_delay
from rollout_server.edge.trainer.refusal import redacted
from rollout_server.edge.trainer.retry import Retries
from rollout_server.runtime.port import Credentials, Failed

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
_TOO_LARGE = "message larger than max"
"""What gRPC itself says of a message over a limit: an answer at this end, which was generated then, or a request at the other."""


class BaseUnknown(Exception):
    """The trainer does not hold the base: it wants the whole history."""


class ToolsUnknown(Exception):
    """The trainer does not hold the tools that a digest names: it wants their list."""


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
    """One turn's call, with what decides over its repetitions: `deadline` on the monotonic clock, credentials for the metadata.

    `failures` counts attempts that came to nothing, `refusals` those that the trainer put off.
    """

    turn: int
    deadline: float | None
    credentials: Credentials = field(default=Credentials(), repr=False)
    attempts: int = 0
    failures: int = 0
    refusals: int = 0


async def complete(caller: Caller, request: Request, call: Call) -> Response:
    """Asks until there is an answer. Raises `BaseUnknown`, `ToolsUnknown`, `Mismatch` or `Failed`."""
    while True:
        call.attempts += 1
        try:
            return await _once(caller, request, call)
        except (OSError, grpc.aio.AioRpcError) as error:
            pause = _pause(error, caller, call)
            if pause is None:
                raise _ended(error, caller, call) from error
        await asyncio.sleep(pause)


async def read_ledger(caller: Caller, uid: str, segment_id: str, bearer: str) -> tuple[Tokens, Sequence[Author]] | None:
    """The tokens of a segment as the trainer holds them, and who wrote each; None where it does not tell."""
    request = ledger_request(uid, segment_id)
    try:
        async with caller.channels.use(caller.url) as channel:
            stub = completion_service_pb2_grpc.CompletionServiceStub(channel)
            ledger = await stub.ReadLedger(request, metadata=_metadata(bearer), timeout=10.0)
        return await asyncio.to_thread(held_tokens, ledger)
    except (OSError, grpc.aio.AioRpcError):
        return None


async def _once(caller: Caller, request: Request, call: Call) -> Response:
    """One attempt. OSError where no connection came about, so that nothing was generated."""
    left = caller.timeout if call.deadline is None else min(caller.timeout, call.deadline - time.monotonic())
    async with caller.channels.use(caller.url) as channel:
        await caller.channels.connect(channel, min(_CONNECT_SECONDS, max(left, 0.001)))
        stub = completion_service_pb2_grpc.CompletionServiceStub(channel)
        answer: Response = await stub.Complete(
            request, metadata=_metadata(call.credentials.completions), timeout=max(left, 0.001)
        )
        return answer


def _pause(error: OSError | grpc.aio.AioRpcError, caller: Caller, call: Call) -> float | None:
    """Seconds until the turn may be asked for again, and counts why; None where it may not, or the rollout is over by then."""
    told = _put_off(error)
    if told is not None:
        call.refusals += 1
        pause = max(told, min(1.0, 0.01 * 2.0 ** min(call.refusals, 8)))
    elif call.failures < caller.retries.count and _may_be_asked_again(error, caller):
        pause = caller.retries.wait(call.failures)
        call.failures += 1
    else:
        return None
    return pause if call.deadline is None or time.monotonic() + pause < call.deadline else None


def _put_off(error: OSError | grpc.aio.AioRpcError) -> float | None:
    """In how many seconds a trainer wants to be asked again, having generated nothing."""
    return retry_delay(error) if isinstance(error, grpc.aio.AioRpcError) and error.code() in _NOT_TAKEN else None


def _may_be_asked_again(error: OSError | grpc.aio.AioRpcError, caller: Caller) -> bool:
    if isinstance(error, OSError):  # no connection came about
        return True
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return not _too_large(error)
    return caller.replays and error.code() in _LOST


def _too_large(error: grpc.aio.AioRpcError) -> bool:
    return error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and _TOO_LARGE in (error.details() or "")


def _ended(error: OSError | grpc.aio.AioRpcError, caller: Caller, call: Call) -> Exception:
    if isinstance(error, OSError):
        return Failed(_unreachable(error, call))
    if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
        unknown = {"BASE_UNKNOWN": BaseUnknown, "TOOLS_UNKNOWN": ToolsUnknown}.get(reason(error))
        if unknown is not None:
            return unknown()
    mismatch = ledger_mismatch(error)
    if error.code() is grpc.StatusCode.ABORTED and mismatch is not None:
        return Mismatch(mismatch)
    said = redacted((error.details() or "").encode("utf-8", "replace"), call.credentials.secrets())
    text = f"turn {call.turn}: the trainer answered {error.code().name}: {said}{_remark(error, caller)}"
    category = Category.VALIDATION if _too_large(error) else _CATEGORIES.get(error.code(), Category.TRAINER_CLIENT)
    return Failed(Failure(category, text, call.turn))


def _remark(error: grpc.aio.AioRpcError, caller: Caller) -> str:
    """What a person has to know beside the trainer's words."""
    told = _put_off(error)
    if told is not None:
        return f". It generated nothing and wants to be asked again in {told:g} s; the rollout's time is over by then"
    if _too_large(error):
        return (
            f". This side takes answers of up to {LARGEST_ANSWER} bytes; what a trainer's server takes is its "
            "grpc.max_receive_message_length, 4 MiB unless it is set"
        )
    if error.code() not in _LOST:
        return ""
    late = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    limit = f". An attempt may take {caller.timeout:g} s (ROLLOUT_TRAINER_TIMEOUT_SECONDS)" if late else ""
    again = ", and asking again did not help" if caller.replays else ", so it is not asked for again"
    return f"{limit}. The turn may have been generated{again}; only trainers that replay turn keys are asked twice"


def _unreachable(error: OSError, call: Call) -> Failure:
    text = (
        f"turn {call.turn}: the trainer could not be reached in {call.attempts} attempts: {error}; is it running, and does the "
        "target name its host and port?"
    )
    return Failure(Category.NETWORK, text, call.turn)


def _metadata(bearer: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {bearer}"),) if bearer else ()
