"""Answers completion requests, whichever way they come: from checking one to the message that goes back.

A turn is generated for as long as anybody waits for it. Its answer enters the ledger in one go, or not at all, and is given again
to whoever repeats its key.
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

from rollout_client.results import messages
from rollout_client.trainer.completion import Parse, message_of, sendable
from rollout_client.trainer.generation import Decode, Generate, Generated, TryAgainLater, checked, sampling_of
from rollout_client.trainer.ledger import LedgerRun
from rollout_client.trainer.prompts import Render, check, prompt_of
from rollout_client.trainer.refusal import RefusedCall, failed, invalid, later
from rollout_client.trainer.rollout_records import Record, Records, StoredCompletion, TurnPrompt

_LOG: Final = logging.getLogger("rollout_client")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Model:
    """What a user gives: how to generate, and what ids and texts mean. `end_ids` end an answer and are no part of its text."""

    generate: Generate
    decode: Decode
    parse: Parse
    render: Render | None
    end_ids: Collection[int]


@dataclass(slots=True)
class _Going:
    """A turn that is being generated: what was asked, and how many wait for it."""

    task: asyncio.Task[pb.CompleteResponse]
    asked: bytes
    waiting: int = 0


class Turns:
    """Answers turns, `generating` of them at the same time; the others wait in order."""

    def __init__(self, model: Model, records: Records, generating: int) -> None:
        self._model = model
        self._records = records
        self._places = asyncio.Semaphore(generating)
        self._going: dict[str, _Going] = {}

    async def answer(self, request: pb.CompleteRequest) -> pb.CompleteResponse:
        """The answer of a turn. Raises `RefusedCall`. Cancelling the last one who waits cancels the generation."""
        check(request, renders=self._model.render is not None)
        key, asked = request.turn_key, _asked(request)
        record = self._records.find(request.uid)
        told = record.told.get(key) if record else None
        if told is not None:
            _same(told.asked, asked)
            return told.response()
        going = self._going.get(key)
        if going is None:
            going = self._going[key] = _Going(asyncio.create_task(self._turn(request, asked)), asked)
            going.task.add_done_callback(lambda task: self._ended(key, task))
        else:
            _same(going.asked, asked)
        return await self._wait(key, going)

    async def close(self) -> None:
        """Gives up what is being generated."""
        tasks = [going.task for going in self._going.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _wait(self, key: str, going: _Going) -> pb.CompleteResponse:
        going.waiting += 1
        try:
            return await asyncio.shield(going.task)
        except asyncio.CancelledError:
            waiter = asyncio.current_task()
            if going.task.cancelled() and (waiter is None or not waiter.cancelling()):
                # gRPC would leave its caller hanging.
                raise failed("generate", key) from None
            raise
        finally:
            going.waiting -= 1
            if not going.waiting and not going.task.done():
                if self._going.get(key) is going:
                    del self._going[key]
                going.task.cancel()

    def _ended(self, key: str, task: asyncio.Task[pb.CompleteResponse]) -> None:
        going = self._going.get(key)
        if going is not None and going.task is task:
            del self._going[key]
        if not task.cancelled():
            task.exception()  # looked at, also where nobody waits any more

    async def _turn(self, request: pb.CompleteRequest, asked: bytes) -> pb.CompleteResponse:
        key, record = request.turn_key, self._records.open(request.uid)
        prompt = _guarded("render", key, lambda: prompt_of(record, request, self._model.render))
        sampling = sampling_of(request.sampling)
        async with self._places:
            try:
                generated = await self._model.generate(prompt.ids(), sampling)
                ids, logprobs = checked(generated)
            except TryAgainLater as error:
                raise later(error.seconds) from None
            except Exception:
                _LOG.exception("generate failed for turn %s", key)
                raise failed("generate", key) from None
        going = self._going.get(key)
        if going is None or going.task is not asyncio.current_task():
            # It was cancelled, and the generation took no notice.
            raise asyncio.CancelledError
        run = LedgerRun(
            request.turn, True, ids, None if sampling.logprobs is False else logprobs, generated.policy_version, True
        )
        text = _guarded("decode", key, lambda: sendable(self._model.decode(self._said(ids)), "what decode returned"))
        message, calls = _guarded("parse", key, lambda: self._parsed(text, request.turn, record))
        response = self._response(prompt, message, run, generated)
        response.raw_text = text
        if calls and response.finish_reason == "stop":
            response.finish_reason = "tool_calls"
        ledger = None if prompt.conversation is None else prompt.ledger
        told = record.told[key] = StoredCompletion(asked, response.SerializeToString(), ledger, prompt.mark.tokens)
        return told.response()

    def _said(self, ids: array[int]) -> list[int]:
        """The ids without the one that ends the answer."""
        return ids[:-1].tolist() if ids[-1] in self._model.end_ids else ids.tolist()

    def _parsed(self, text: str, turn: int, record: Record) -> tuple[Message, bool]:
        """The message of a text, and whether it calls tools. Raises what `parse` does, and TypeError for what is no answer."""
        answer = self._model.parse(text)
        return message_of(answer, turn, typed=bool(record.typed)), bool(answer.tool_calls)

    def _response(
        self, prompt: TurnPrompt, message: Message, run: LedgerRun, generated: Generated
    ) -> pb.CompleteResponse:
        """The answer as it travels, without the prompt's ids. With it the turn enters the ledger."""
        response = pb.CompleteResponse(
            message=message,
            finish_reason=generated.finish_reason,
            token_ids=run.ids,
            policy_version=run.policy_version,
        )
        if run.logprobs is not None:
            response.logprobs.values.extend(run.logprobs)
        response.after.CopyFrom(prompt.record.take(prompt, run).proto())
        if prompt.conversation is None:
            response.prompt_checkpoint.CopyFrom(prompt.mark.proto())
        else:
            prompt.record.conversations[prompt.segment_id] = (*prompt.conversation, *messages([message]))
        return response


def _guarded(part: str, key: str, work: Callable[[], _T]) -> _T:
    """What a part of the user's returns. Its errors stay in the log."""
    try:
        return work()
    except RefusedCall:
        raise
    except Exception:
        _LOG.exception("%s failed for turn %s", part, key)
        raise failed(part, key) from None


def _asked(request: pb.CompleteRequest) -> bytes:
    """What makes two requests the same one, whether or not the history came along."""
    digest = hashlib.sha256(request.sampling.SerializeToString(deterministic=True))
    if request.HasField("new_tokens"):
        digest.update(request.new_tokens.after.digest)
    return digest.digest()


def _same(told: bytes, asked: bytes) -> None:
    if told != asked:
        raise invalid(
            "turn_key", "this turn was asked for with another prompt or sampling; a key stands for one request"
        )
