"""Completion requests of both transports, from validation to response.

A turn is generated once and cancelled when no request waits for it. Its completion enters the ledger as a whole or not at all: the
parts of an aborted one are kept beside it until the last one is there. A repeated turn key gets the same response.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from array import array
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar, cast

from osmosis.rollout.v1 import completion_service_pb2 as pb
from osmosis.rollout.v1.message_pb2 import Message

from rollout_client.chat_messages import messages
from rollout_client.proto_fields import duration_seconds
from rollout_client.trainer.batches import BatchFailed
from rollout_client.trainer.completion import Parse, to_message, utf8_text
from rollout_client.trainer.errors import RefusedCall, internal_error, invalid_field, media_refused, try_again_later
from rollout_client.trainer.generation import (
    ABORT,
    Decode,
    Generate,
    Generated,
    SamplingParams,
    TryAgainLater,
    Turn,
    awaited,
    resolved,
    sampling_params,
    takes_turn,
    validate_generated,
)
from rollout_client.trainer.ledger import LedgerRun
from rollout_client.trainer.policy import PAUSE_SECONDS, AnnouncedPolicy
from rollout_client.trainer.prompts import Render, build_turn, check_request
from rollout_client.trainer.rollout_records import (
    Outcomes,
    PartialTurn,
    Record,
    Records,
    StoredCompletion,
    TurnPrompt,
)

_LOG: Final = logging.getLogger("rollout_client")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Model:
    """The user's functions. A trailing id of `end_ids` is removed before `decode`."""

    generate: Generate
    decode: Decode
    parse: Parse
    render: Render | None
    end_ids: Collection[int]


@dataclass(slots=True)
class _RunningTurn:
    """A turn in generation: its task, the digest of its request, and the number of requests waiting for it."""

    task: asyncio.Task[pb.CompleteResponse]
    digest: bytes
    waiting: int = 0


class Turns:
    """Generates turns, at most `generating` at the same time. Further turns wait in order."""

    def __init__(
        self, model: Model, records: Records, outcomes: Outcomes, generating: int, announced: AnnouncedPolicy
    ) -> None:
        self._model = model
        self._announced = announced
        self._call_generate = _turn_function(model.generate)
        self._records = records
        self._outcomes = outcomes
        self._slots = asyncio.Semaphore(generating)
        self._running: dict[str, _RunningTurn] = {}

    async def complete(self, request: pb.CompleteRequest) -> pb.CompleteResponse:
        """Return the completion of a turn. Raises `RefusedCall`. Cancelling the last waiting call cancels the generation."""
        check_request(request, renders=self._model.render is not None)
        key, digest = request.turn_key, _request_digest(request)
        record = self._records.find(request.uid)
        stored = record.completions.get(key) if record else None
        if stored is not None:
            _check_same_request(stored.request_digest, digest)
            return stored.response()
        turn = self._running.get(key)
        if turn is None:
            turn = self._running[key] = _RunningTurn(asyncio.create_task(self._generate(request, digest)), digest)
            turn.task.add_done_callback(lambda task: self._forget(key, task))
        else:
            _check_same_request(turn.digest, digest)
        return await self._wait(key, turn)

    async def close(self) -> None:
        """Cancel all generations."""
        tasks = [turn.task for turn in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _wait(self, key: str, turn: _RunningTurn) -> pb.CompleteResponse:
        turn.waiting += 1
        try:
            return await asyncio.shield(turn.task)
        except asyncio.CancelledError:
            waiter = asyncio.current_task()
            if turn.task.cancelled() and (waiter is None or not waiter.cancelling()):
                # The generation was cancelled, not this call. With a CancelledError, grpc.aio would never send a response.
                raise internal_error("generate", key) from None
            raise
        finally:
            turn.waiting -= 1
            if not turn.waiting and not turn.task.done():
                # Remove the turn first: a retry must start a new generation instead of joining the cancelled one.
                if self._running.get(key) is turn:
                    del self._running[key]
                turn.task.cancel()

    def _forget(self, key: str, task: asyncio.Task[pb.CompleteResponse]) -> None:
        turn = self._running.get(key)
        if turn is not None and turn.task is task:
            del self._running[key]
        if not task.cancelled():
            task.exception()  # mark as retrieved: asyncio logs an exception that no waiter retrieves

    async def _generate(self, request: pb.CompleteRequest, digest: bytes) -> pb.CompleteResponse:
        key, record = request.turn_key, self._records.open(request.uid)
        expires = time.monotonic() + duration_seconds(request.time_left) if request.HasField("time_left") else None
        part = await _user_code("render", key, build_turn(record, request, self._model.render))
        sampling = sampling_params(request.sampling)
        run, reason = await self._sample(key, self._turn(request, part, sampling), expires)
        runs = (*part.runs, run) if run.ids else part.runs
        # A completion that fills its limit is complete, even if the engine says that it was interrupted there.
        if reason == ABORT and sampling.max_tokens is not None and len(run.ids) >= sampling.max_tokens:
            reason = "length"
        text, message, calls = "", None, False
        if reason != ABORT:
            text = await _user_code("decode", key, self._text(PartialTurn(part.prompt, runs).ids()))
            message, calls = await _user_code("parse", key, self._parse(text, request.turn, record))
        running = self._running.get(key)
        if running is None or running.task is not asyncio.current_task():
            # The turn was cancelled but `generate` suppressed the cancellation. Its completion must not enter the ledger.
            raise asyncio.CancelledError
        # No await from here on: ledger, stored response and conversation change together.
        response = _response(part.prompt, run, "tool_calls" if calls and reason == "stop" else reason)
        if message is None:
            record.aborted[request.segment_id, request.turn] = replace(part, runs=runs)
            stored = _stored_abort(response, part.prompt, digest)
        else:
            response.raw_text = text
            stored = _add_turn(response, part.prompt, runs, message, digest)
        record.completions[key] = stored
        return stored.response()

    async def _sample(self, key: str, turn: Turn, expires: float | None) -> tuple[LedgerRun, str]:
        """Call `generate` when there is a free slot, and postpone the turn during a pause. Return its tokens and finish reason.

        `expires`: end of the rollout's time limit on the monotonic clock.
        """
        self._check_sampling()
        async with self._slots:
            self._check_sampling()
            policy = self._announced.policy
            if expires is not None:
                turn = replace(turn, seconds_left=max(0.0, expires - time.monotonic()))
            try:
                generated = policy.label(await awaited(self._call_generate(policy.stamp(turn)), "generate"))
                ids, logprobs = validate_generated(generated)
            except RefusedCall:
                raise
            except TryAgainLater as error:
                raise try_again_later(error.seconds) from None
            except BatchFailed:
                raise internal_error("generate_batch", key) from None
            except Exception:
                _LOG.exception("turn %s: generate failed", key)
                raise internal_error("generate", key) from None
        wanted = None if turn.sampling.logprobs is False else logprobs
        run = LedgerRun(turn.turn, True, ids, wanted, generated.policy_version, True, generated.policy_step)
        return run, generated.finish_reason

    def _check_sampling(self) -> None:
        """Postpone the turn if sampling is paused. It waits at the server then, whose limit for a response does not pass."""
        if self._announced.paused:
            raise try_again_later(PAUSE_SECONDS)

    def _turn(self, request: pb.CompleteRequest, part: PartialTurn, sampling: SamplingParams) -> Turn:
        """Return the argument of `generate`, without `seconds_left`."""
        group_id, index = self._outcomes.member(request.rollout_id)
        resumed = part.ids()
        return Turn(
            uid=request.uid,
            rollout_id=request.rollout_id,
            group_id=group_id,
            index=index,
            segment_id=request.segment_id,
            turn=request.turn,
            ids=[*part.prompt.ids(), *resumed],
            sampling=sampling,
            images=tuple(part.prompt.images),
            policy_step=request.policy_step if request.HasField("policy_step") else None,
            resumed=len(resumed),
            traceparent=request.traceparent,
        )

    async def _text(self, ids: array[int]) -> str:
        """Decode a completion without a trailing id of `end_ids`."""
        without_end = ids[:-1].tolist() if ids[-1] in self._model.end_ids else ids.tolist()
        return utf8_text(await resolved(self._model.decode(without_end)), "the return value of decode")

    async def _parse(self, text: str, turn: int, record: Record) -> tuple[Message, bool]:
        """Return the message for a text, and whether it has tool calls. Raises what `parse` raises, and TypeError."""
        completion = await resolved(self._model.parse(text))
        return to_message(completion, turn, typed=bool(record.typed)), bool(completion.tool_calls)


def _response(prompt: TurnPrompt, run: LedgerRun, reason: str) -> pb.CompleteResponse:
    """Return the response for the tokens of one call of `generate`, without message, checkpoint and prompt ids."""
    response = pb.CompleteResponse(
        finish_reason=reason, token_ids=run.ids, policy_version=run.policy_version, policy_step=run.policy_step
    )
    if run.logprobs is not None:
        response.logprobs.values.extend(run.logprobs)
    if prompt.conversation is None:
        response.prompt_checkpoint.CopyFrom(prompt.checkpoint.to_proto())
    return response


def _add_turn(
    response: pb.CompleteResponse, prompt: TurnPrompt, runs: Sequence[LedgerRun], message: Message, digest: bytes
) -> StoredCompletion:
    """Append a complete turn to the ledger and return its response to store."""
    response.message.CopyFrom(message)
    response.after.CopyFrom(prompt.record.add_turn(prompt, runs).to_proto())
    ledger = None
    if prompt.conversation is not None:
        prompt.record.conversations[prompt.segment_id] = (*prompt.conversation, *messages([message]))
        # Only responses in message mode contain prompt ids; they are rebuilt from the ledger instead of stored twice.
        ledger = prompt.ledger
    return StoredCompletion(digest, response.SerializeToString(), ledger, prompt.checkpoint.tokens)


def _stored_abort(response: pb.CompleteResponse, prompt: TurnPrompt, digest: bytes) -> StoredCompletion:
    """Return the response of an aborted call to store. The ledger does not have its prompt yet, so the response has it."""
    if prompt.conversation is not None:
        response.prompt_ids.values.extend(prompt.ids())
    return StoredCompletion(digest, response.SerializeToString())


def _turn_function(generate: Generate) -> Callable[[Turn], Awaitable[Generated]]:
    """Return `generate` as a function of a `Turn`. In its form with two arguments it cannot see images, so they are refused."""
    if takes_turn(generate):
        return cast(Callable[[Turn], Awaitable[Generated]], generate)
    of_ids = cast(Callable[[Sequence[int], SamplingParams], Awaitable[Generated]], generate)

    def call(turn: Turn) -> Awaitable[Generated]:
        if turn.images:
            raise media_refused(
                f"the prompt has {len(turn.images)} image(s), and generate(prompt_ids, sampling) does not see them; "
                "give the trainer a function generate(turn)"
            )
        return of_ids(turn.ids, turn.sampling)

    return call


async def _user_code(part: str, key: str, work: Awaitable[_T]) -> _T:
    """Await a function of the user. Its exceptions are logged; the server only learns which function failed."""
    try:
        return await work
    except RefusedCall:
        raise
    except Exception:
        _LOG.exception("turn %s: %s failed", key, part)
        raise internal_error(part, key) from None


def _request_digest(request: pb.CompleteRequest) -> bytes:
    """Return a digest of sampling, resumed ids and, in token mode, the prompt, with or without the history in the request."""
    digest = hashlib.sha256(request.sampling.SerializeToString(deterministic=True))
    if request.HasField("new_tokens"):
        digest.update(request.new_tokens.after.digest)
    digest.update(json.dumps([list(span.token_ids) for span in request.resumed]).encode() if request.resumed else b"")
    return digest.digest()


def _check_same_request(stored: bytes, digest: bytes) -> None:
    if stored != digest:
        raise invalid_field(
            "turn_key",
            "this turn was already requested with another prompt or other sampling; a key identifies one request",
        )
