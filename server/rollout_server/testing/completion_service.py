"""CompletionService (completion_service.proto), on the same judge as the HTTP face.

There is no mask on this wire: the trainer derives it. What is judged is the history, that base and turn key are what
they should be, and in token mode who wrote which token, the digests, and the tokens that nobody generated here
(`completion_tokens`, `continuation`). An answered turn key gets the same answer again and generates nothing; a turn that
failed, or a key that was never answered, is judged as if for the first time.
"""

import asyncio
import hmac
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import grpc
from osmosis.rollout.v1 import completion_service_pb2 as pb
from osmosis.rollout.v1 import completion_service_pb2_grpc, message_pb2

from rollout_server.testing import completion_wire
from rollout_server.testing.call import Call
from rollout_server.testing.completion_ledger import SegmentLedger
from rollout_server.testing.completion_segments import Segments, messages_of
from rollout_server.testing.completion_status import StatusError, abort, invalid, status_of_fault
from rollout_server.testing.completion_tokens import Continued, continued
from rollout_server.testing.desk import Desk, ToolsUnavailableError
from rollout_server.testing.engine import Answered, Failed
from rollout_server.testing.judge import ROLLOUTS_KEPT
from rollout_server.testing.lies import BORROWED, twisted
from rollout_server.testing.renderer import Message, Tools
from rollout_server.testing.script import Fault, FaultKind, Lie
from rollout_server.testing.verdict import Refusal, RefusalReason, RefusedError

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
    """Message mode, and token mode where a segment begins with `new_tokens`. Statuses are those of completion_service.proto.

    Every request for a completion goes into `requests` first, whatever becomes of it.
    """

    def __init__(self, desk: Desk, api_key: str | None, requests: "deque[SeenCompletion]") -> None:
        self._desk = desk
        self._api_key = api_key
        self._requests = requests
        self._segments = Segments(ROLLOUTS_KEPT)
        self._turns: dict[str, asyncio.Task[pb.CompleteResponse]] = {}
        self._lost: dict[str, Fault] = {}
        self._earlier: dict[str, pb.CompleteResponse] = {}

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
        if held is None or held.forgotten:
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
        tokens = self._continued(request, held, messages)
        call = Call(
            request.rollout_id,
            messages,
            tools=await self._tools(request),
            masked=False,
            judged_as=held.rollout_key,
            given=tokens.given if tokens else None,
            max_tokens=request.sampling.max_tokens or None if tokens else None,
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
        told = _taken(request, messages, held, tokens, result)
        if result.reply.forgets:
            self._segments.forget(request.uid)
        await asyncio.sleep(result.reply.delay)
        wants_logprobs = request.sampling.logprobs or not request.sampling.HasField("logprobs")
        honest = completion_wire.response(told, typed=held.typed, with_logprobs=wants_logprobs)
        return self._told(request, call, result.reply.lie, honest)

    def _told(
        self, request: pb.CompleteRequest, call: Call, lie: Lie | None, honest: pb.CompleteResponse
    ) -> pb.CompleteResponse:
        """What is sent: the honest answer, or one with a lie in it, of which the verdict then tells."""
        earlier = self._earlier.pop(request.uid, None) or next(reversed(self._earlier.values()), None)
        self._earlier[request.uid] = honest
        while len(self._earlier) > ROLLOUTS_KEPT:
            del self._earlier[next(iter(self._earlier))]
        if lie is None or (lie is Lie.TOO_LONG and call.max_tokens is None):
            return honest
        if earlier is None and lie in BORROWED:
            raise StatusError(grpc.StatusCode.INTERNAL, "SCRIPT", f"there is no earlier answer for the lie {lie}")
        self._desk.judge.record_lie(call.key, lie.value)
        return twisted(lie, honest, earlier or honest, request.turn)

    def _continued(
        self, request: pb.CompleteRequest, held: SegmentLedger, messages: Sequence[Message]
    ) -> Continued | None:
        """The call's tokens; None in message mode. StatusError as `continued`, which is then part of the verdict."""
        if not request.HasField("new_tokens"):
            return None
        try:
            return continued(request, held, self._segments.parent(request), messages)
        except StatusError as error:
            self._desk.judge.refuse(held.rollout_key, Refusal(request.turn, RefusalReason.TOKENS, error.text))
            raise

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


def _taken(
    request: pb.CompleteRequest,
    messages: Sequence[Message],
    held: SegmentLedger,
    tokens: Continued | None,
    result: Answered,
) -> completion_wire.Told:
    """Takes an answer into its segment."""
    answer = result.answer
    policy = result.reply.policy_version or f"policy-{request.turn}"
    if tokens is None:
        after = held.add(request.turn, messages, answer, policy)
        return completion_wire.Told(answer, result.reply, policy, after)
    tokens.enter(held)
    after = held.answered(request.turn, messages, answer, policy)
    return completion_wire.Told(answer, result.reply, policy, after, tokens.prompt)


def _check(request: pb.CompleteRequest) -> None:
    """StatusError for a request that no state can make right."""
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
