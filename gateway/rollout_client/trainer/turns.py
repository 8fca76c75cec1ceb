"""Completion requests of both transports, from validation to response.

A turn is generated once and cancelled when no request waits for it. Its completion enters the ledger as a whole or not at all. A
repeated turn key gets the same response.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from array import array
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final, TypeVar

from osmosis.rollout.v1 import completion_service_pb2 as pb
from osmosis.rollout.v1.message_pb2 import Message

from rollout_client.chat_messages import messages
from rollout_client.trainer.completion import Parse, to_message, utf8_text
from rollout_client.trainer.errors import RefusedCall, internal_error, invalid_field, try_again_later
from rollout_client.trainer.generation import (
    Decode,
    Generate,
    Generated,
    TryAgainLater,
    sampling_params,
    validate_generated,
)
from rollout_client.trainer.ledger import LedgerRun
from rollout_client.trainer.prompts import Render, build_prompt, check_request
from rollout_client.trainer.rollout_records import Record, Records, StoredCompletion, TurnPrompt

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

    def __init__(self, model: Model, records: Records, generating: int) -> None:
        self._model = model
        self._records = records
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
        prompt = _call_user_code("render", key, lambda: build_prompt(record, request, self._model.render))
        sampling = sampling_params(request.sampling)
        async with self._slots:
            try:
                generated = await self._model.generate(prompt.ids(), sampling)
                ids, logprobs = validate_generated(generated)
            except TryAgainLater as error:
                raise try_again_later(error.seconds) from None
            except Exception:
                _LOG.exception("turn %s: generate failed", key)
                raise internal_error("generate", key) from None
        turn = self._running.get(key)
        if turn is None or turn.task is not asyncio.current_task():
            # The turn was cancelled but `generate` suppressed the cancellation. Its completion must not enter the ledger.
            raise asyncio.CancelledError
        # No await from here on: ledger, stored response and conversation change together.
        run = LedgerRun(
            request.turn, True, ids, None if sampling.logprobs is False else logprobs, generated.policy_version, True
        )
        text = _call_user_code(
            "decode", key, lambda: utf8_text(self._model.decode(self._text_ids(ids)), "the return value of decode")
        )
        message, calls = _call_user_code("parse", key, lambda: self._parse(text, request.turn, record))
        response = self._response(prompt, message, run, generated)
        response.raw_text = text
        if calls and response.finish_reason == "stop":
            response.finish_reason = "tool_calls"
        # Only responses in message mode contain prompt ids; they are rebuilt from the ledger instead of stored twice.
        ledger = None if prompt.conversation is None else prompt.ledger
        stored = record.completions[key] = StoredCompletion(
            digest, response.SerializeToString(), ledger, prompt.checkpoint.tokens
        )
        return stored.response()

    def _text_ids(self, ids: array[int]) -> list[int]:
        """Return the ids without a trailing id of `end_ids`."""
        return ids[:-1].tolist() if ids[-1] in self._model.end_ids else ids.tolist()

    def _parse(self, text: str, turn: int, record: Record) -> tuple[Message, bool]:
        """Return the message for a text, and whether it has tool calls. Raises what `parse` raises, and TypeError."""
        completion = self._model.parse(text)
        return to_message(completion, turn, typed=bool(record.typed)), bool(completion.tool_calls)

    def _response(
        self, prompt: TurnPrompt, message: Message, run: LedgerRun, generated: Generated
    ) -> pb.CompleteResponse:
        """Append the turn to the ledger and return its response, without the prompt ids."""
        response = pb.CompleteResponse(
            message=message,
            finish_reason=generated.finish_reason,
            token_ids=run.ids,
            policy_version=run.policy_version,
        )
        if run.logprobs is not None:
            response.logprobs.values.extend(run.logprobs)
        response.after.CopyFrom(prompt.record.add_turn(prompt, run).to_proto())
        if prompt.conversation is None:
            response.prompt_checkpoint.CopyFrom(prompt.checkpoint.to_proto())
        else:
            prompt.record.conversations[prompt.segment_id] = (*prompt.conversation, *messages([message]))
        return response


def _call_user_code(part: str, key: str, work: Callable[[], _T]) -> _T:
    """Call a function of the user. Its exceptions are logged; the server only learns which function failed."""
    try:
        return work()
    except RefusedCall:
        raise
    except Exception:
        _LOG.exception("turn %s: %s failed", key, part)
        raise internal_error(part, key) from None


def _request_digest(request: pb.CompleteRequest) -> bytes:
    """Return a digest of the sampling parameters and, in token mode, the prompt, with or without the history in the request."""
    digest = hashlib.sha256(request.sampling.SerializeToString(deterministic=True))
    if request.HasField("new_tokens"):
        digest.update(request.new_tokens.after.digest)
    return digest.digest()


def _check_same_request(stored: bytes, digest: bytes) -> None:
    if stored != digest:
        raise invalid_field(
            "turn_key",
            "this turn was already requested with another prompt or other sampling; a key identifies one request",
        )
