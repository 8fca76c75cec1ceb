"""CompletionService in message mode (completion_service.proto), on the same judge as the HTTP face.

There is no mask on this wire: the trainer derives it. What is judged is the history, and that base and turn key are what
they should be. An answered turn key gets the same answer again and generates nothing; a turn that failed, or a key that
was never answered, is judged as if for the first time.
"""

import asyncio
import hmac
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import grpc
from osmosis.rollout.v1 import completion_service_pb2 as pb
from osmosis.rollout.v1 import completion_service_pb2_grpc, message_pb2

from rollout_server.testing import completion_wire
from rollout_server.testing.call import Call
from rollout_server.testing.completion_segments import Segments, messages_of
from rollout_server.testing.completion_status import StatusError, abort, invalid, status_of_fault
from rollout_server.testing.desk import Desk, ToolsUnavailableError
from rollout_server.testing.engine import Failed
from rollout_server.testing.judge import ROLLOUTS_KEPT
from rollout_server.testing.renderer import Tools
from rollout_server.testing.script import Fault, FaultKind
from rollout_server.testing.verdict import RefusedError

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_ANSWERS_KEPT: Final = 16 * ROLLOUTS_KEPT


@dataclass(frozen=True, slots=True)
class SeenCompletion:
    """A request for a completion as it came over gRPC, with the text part of its metadata."""

    request: pb.CompleteRequest
    metadata: Mapping[str, str]


class _SilenceError(Exception):
    """No answer, until the caller gives up."""


class CompletionService(completion_service_pb2_grpc.CompletionServiceServicer):
    """Message mode only: `new_tokens` is UNIMPLEMENTED. Statuses are those of completion_service.proto.

    Every request for a completion goes into `requests` first, whatever becomes of it.
    """

    def __init__(self, desk: Desk, api_key: str | None, requests: "deque[SeenCompletion]") -> None:
        self._desk = desk
        self._api_key = api_key
        self._requests = requests
        self._segments = Segments(ROLLOUTS_KEPT)
        self._turns: dict[str, asyncio.Task[pb.CompleteResponse]] = {}
        self._lost: dict[str, Fault] = {}

    async def Complete(self, request: pb.CompleteRequest, context: _Context) -> pb.CompleteResponse:
        """Answers one turn, or the same turn again."""
        metadata = _metadata(context)
        self._requests.append(SeenCompletion(request, metadata))
        try:
            self._authorize(metadata)
            _check(request)
            answer = await asyncio.shield(self._turn(request))
            await self._lose(request.turn_key)
            return answer
        except _SilenceError:
            await asyncio.Event().wait()
            raise
        except StatusError as error:
            return await abort(context, error)

    async def ReadLedger(self, request: pb.ReadLedgerRequest, context: _Context) -> pb.ReadLedgerResponse:
        """Shows a segment as it is held here."""
        try:
            self._authorize(_metadata(context))
        except StatusError as error:
            return await abort(context, error)
        held = self._segments.find(request.uid, request.segment_id)
        if held is None:
            text = f"segment {request.segment_id!r} of rollout {request.uid!r} is not known here"
            return await abort(context, StatusError(grpc.StatusCode.NOT_FOUND, "SEGMENT_UNKNOWN", text))
        return completion_wire.ledger(held, request.offset)

    async def close(self) -> None:
        """Gives up the turns that are held back."""
        for turn in self._turns.values():
            turn.cancel()
        await asyncio.gather(*self._turns.values(), return_exceptions=True)

    def _turn(self, request: pb.CompleteRequest) -> "asyncio.Task[pb.CompleteResponse]":
        """The turn of this key. It outlives a caller that gives up, as a generation does, and one that failed is over."""
        turn = self._turns.get(request.turn_key)
        if turn is None or (turn.done() and turn.exception() is not None):
            turn = self._turns[request.turn_key] = asyncio.create_task(self._answer(request))
            while len(self._turns) > _ANSWERS_KEPT:
                self._turns.pop(next(iter(self._turns))).cancel()
        return turn

    async def _lose(self, turn_key: str) -> None:
        """StatusError where the answer that was generated is not to arrive; the turn's next attempt gets it."""
        fault = self._lost.pop(turn_key, None)
        if fault:
            await asyncio.sleep(fault.delay)
            raise status_of_fault(fault)

    async def _answer(self, request: pb.CompleteRequest) -> pb.CompleteResponse:
        if self._segments.is_new(request.uid):
            # The verdict of a name is that of the rollout that took it last.
            self._desk.judge.start_anew(request.rollout_id)
        held = self._segments.segment(request)
        messages = messages_of(request, held)
        call = Call(
            request.rollout_id, messages, tools=await self._tools(request), masked=False, judged_as=held.rollout_key
        )
        try:
            result = await self._desk.complete(call)
        except RefusedError as error:
            raise StatusError(
                grpc.StatusCode.INVALID_ARGUMENT, error.refusal.reason.name, error.refusal.text
            ) from error
        if isinstance(result, Failed):
            return await _failure(result)
        if result.lost:
            self._lost[request.turn_key] = result.lost
        mark = held.add(request.turn, messages, result.answer)
        await asyncio.sleep(result.reply.delay)
        wants_logprobs = request.sampling.logprobs or not request.sampling.HasField("logprobs")
        return completion_wire.response(
            result.answer, result.reply, mark, typed=held.typed, with_logprobs=wants_logprobs
        )

    async def _tools(self, request: pb.CompleteRequest) -> Tools | None:
        named = self._segments.tools(request)
        if named is not None:
            return named if self._desk.tools.rendered else None
        try:
            return await self._desk.tools.get()
        except ToolsUnavailableError as error:
            raise StatusError(grpc.StatusCode.INTERNAL, "TOOLS_UNAVAILABLE", str(error)) from error

    def _authorize(self, metadata: Mapping[str, str]) -> None:
        wanted = f"Bearer {self._api_key}".encode()
        if self._api_key is not None and not hmac.compare_digest(metadata.get("authorization", "").encode(), wanted):
            raise StatusError(grpc.StatusCode.UNAUTHENTICATED, "API_KEY", "Invalid or missing API key")


def _check(request: pb.CompleteRequest) -> None:
    """StatusError for a request that no state can make right."""
    if request.HasField("new_tokens"):
        raise StatusError(grpc.StatusCode.UNIMPLEMENTED, "TOKEN_MODE", "this trainer has no token mode")
    if not request.uid or not request.rollout_id.strip():
        raise invalid("rollout_id" if request.uid else "uid", "is missing")
    if request.turn < 1:
        raise invalid("turn", "counts from 1")
    key = f"{request.uid}/{request.segment_id}/{request.turn}"
    if request.turn_key != key:
        raise invalid("turn_key", f"is {request.turn_key!r}, but this turn's key is {key!r}")


async def _failure(result: Failed) -> pb.CompleteResponse:
    """Commits a scripted fault: raises its status, or returns what HTTP would answer with status 200."""
    fault = result.fault
    await asyncio.sleep(fault.delay)
    match fault.kind:
        case FaultKind.SILENCE:
            raise _SilenceError
        case FaultKind.EMPTY_CHOICES | FaultKind.NULL_MESSAGE:
            return pb.CompleteResponse(finish_reason="stop", token_ids=result.answer.token_ids)
        case FaultKind.STATUS if fault.status == 200:
            return pb.CompleteResponse(message=message_pb2.Message(json=fault.body), finish_reason="stop")
    raise status_of_fault(fault)


def _metadata(context: _Context) -> Mapping[str, str]:
    return {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
