"""Completions over gRPC (completion_service.proto), unary or on a stream. They use the same judge as the HTTP API.

gRPC requests carry no mask: the trainer derives it. The judge verifies the history, the base and the turn key. In token mode it
also verifies the author of each token, the digests, and the environment tokens (`token_mode`, `token_mode_check`).

The turn key of an answered turn returns the same completion again. If keys are not replayed, a new completion replaces the old
one. A turn that failed is judged as if it were requested for the first time.
"""

import asyncio
import hashlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import grpc
from osmosis.rollout.v1 import completion_service_pb2 as pb
from osmosis.rollout.v1 import message_pb2

from rollout_server.testing.checks.judge import ROLLOUTS_KEPT
from rollout_server.testing.checks.renderer import Message, Tools
from rollout_server.testing.checks.turn import CompletionCall
from rollout_server.testing.checks.verdict import Refusal, RefusalReason, RefusedError
from rollout_server.testing.grpc import wire
from rollout_server.testing.grpc.aborts import AbortedTurns
from rollout_server.testing.grpc.ledger import HeldSegment
from rollout_server.testing.grpc.segments import Segments, messages_of
from rollout_server.testing.grpc.status import StatusError, invalid, status_of_fault
from rollout_server.testing.grpc.token_mode import ContinuedPrompt, continue_segment
from rollout_server.testing.model.engine import CompletedCall, FailedCall
from rollout_server.testing.model.engine_thread import EngineThread, ToolsUnavailableError
from rollout_server.testing.script import Fault, FaultKind, Lie

_TURNS_KEPT: Final = 16 * ROLLOUTS_KEPT


TOO_LARGE: Final = 1 << 31
BORROWED: Final = frozenset({Lie.OTHER_TURN, Lie.REPLAYED_TURN})
"""The lies that copy an earlier completion."""


@dataclass(frozen=True, slots=True)
class SeenCompletion:
    """A completion request received over gRPC, with its text metadata; empty on a stream."""

    request: pb.CompleteRequest
    metadata: Mapping[str, str]


class SilenceError(Exception):
    """The trainer sends no response until the caller gives up."""


class Completions:
    """Answers completion requests in message mode, and in token mode if a segment begins with `new_tokens`.

    Statuses are those of completion_service.proto. `requests` records every request before it is judged.
    """

    def __init__(self, engine_thread: EngineThread, requests: "deque[SeenCompletion]", *, replays_keys: bool) -> None:
        self._engine_thread = engine_thread
        self._requests = requests
        self._replays_keys = replays_keys
        self._segments = Segments()
        self._turns: dict[str, asyncio.Task[pb.CompleteResponse]] = {}
        self._lost: dict[str, Fault] = {}
        self._aborted = AbortedTurns()
        self._second: dict[str, pb.CompleteResponse] = {}
        self._earlier: dict[str, pb.CompleteResponse] = {}

    def record_request(self, request: pb.CompleteRequest, metadata: Mapping[str, str]) -> None:
        """Record that a request was received."""
        self._requests.append(SeenCompletion(request, metadata))

    async def complete(self, request: pb.CompleteRequest) -> pb.CompleteResponse:
        """Return the completion of a turn, also for a repeated request.

        Raises StatusError if the request is refused or fails, and SilenceError if no response is to be sent.
        """
        turn_key = _checked_turn_key(request)
        if request.turn_key != turn_key:
            return self._aborted.resume(request, turn_key)
        # The shield keeps the generation running if the caller gives up: its retry then gets the same completion.
        return await asyncio.shield(self._turn(request))

    def pop_lost(self, turn_key: str) -> Fault | None:
        """Return the fault that loses the completion just generated, once; None: none. A retry of the turn gets the completion."""
        return self._lost.pop(turn_key, None)

    def pop_second_response(self, turn_key: str) -> pb.CompleteResponse | None:
        """Return a second completion of the same turn, once; None if only one is sent."""
        return self._second.pop(turn_key, None)

    def ledger(self, request: pb.ReadLedgerRequest) -> pb.ReadLedgerResponse:
        """Return a segment as the trainer stores it. Raises StatusError if it does not."""
        segment = self._segments.find(request.uid, request.segment_id)
        if segment is None or segment.forgotten:
            text = f"segment {request.segment_id!r} of rollout {request.uid!r} is unknown to this trainer"
            raise StatusError(grpc.StatusCode.NOT_FOUND, "SEGMENT_UNKNOWN", text)
        return wire.ledger(segment, request.offset)

    async def close(self) -> None:
        """Cancel the turns that are still running."""
        for turn in self._turns.values():
            turn.cancel()
        await asyncio.gather(*self._turns.values(), return_exceptions=True)

    def _turn(self, request: pb.CompleteRequest) -> "asyncio.Task[pb.CompleteResponse]":
        """Return the task that generates this turn: a running or reusable one, else a new one.

        The task outlives a caller that gives up, as a generation of a real engine does. A failed task is replaced.
        """
        turn = self._turns.get(request.turn_key)
        is_answered = turn is not None and turn.done() and turn.exception() is None
        if turn is None or (turn.done() and not (is_answered and self._replays_keys)):
            if is_answered:
                self._segments.step_back(request)
            turn = self._turns[request.turn_key] = asyncio.create_task(self._complete(request))
            while len(self._turns) > _TURNS_KEPT:
                self._turns.pop(next(iter(self._turns))).cancel()
        return turn

    async def _complete(self, request: pb.CompleteRequest) -> pb.CompleteResponse:
        if self._segments.is_new(request.uid):
            # Several rollouts may use the same rollout_id: its verdict is that of the latest one.
            self._engine_thread.judge.start_anew(request.rollout_id)
        segment = self._segments.segment(request)
        before = segment.copy()
        messages = messages_of(request, segment)
        tokens = self._continue_segment(request, segment, messages)
        call = CompletionCall(
            request.rollout_id,
            messages,
            tools=await self._tools(request),
            masked=False,
            verdict_key=segment.rollout_key,
            token_prompt=tokens.token_prompt if tokens else None,
            max_tokens=request.sampling.max_tokens or None if tokens else None,
            again=segment.undone == request.turn,
        )
        try:
            result = await self._engine_thread.complete(call)
        except RefusedError as error:
            raise StatusError(
                grpc.StatusCode.INVALID_ARGUMENT, error.refusal.reason.name, error.refusal.text
            ) from error
        if isinstance(result, FailedCall):
            return await _failure(result)
        if result.lost:
            self._lost[request.turn_key] = result.lost
        details = _append_completion(request, messages, segment, tokens, result)
        segment.before, segment.undone = before, 0
        if result.reply.forgets:
            self._segments.forget(request.uid)
        await asyncio.sleep(result.reply.delay)
        wants_logprobs = request.sampling.logprobs or not request.sampling.HasField("logprobs")
        honest = wire.response(details, typed=segment.typed, with_logprobs=wants_logprobs)
        if result.reply.aborts:
            return self._aborted.begin(request, honest, result.reply.aborts)
        return self._sent_response(request, call, result.reply.lie, honest)

    def _sent_response(
        self, request: pb.CompleteRequest, call: CompletionCall, lie: Lie | None, honest: pb.CompleteResponse
    ) -> pb.CompleteResponse:
        """Return the honest response, or one with the scripted lie, which is recorded in the verdict."""
        earlier = self._earlier.pop(request.uid, None) or next(reversed(self._earlier.values()), None)
        self._earlier[request.uid] = honest
        while len(self._earlier) > ROLLOUTS_KEPT:
            del self._earlier[next(iter(self._earlier))]
        if lie is None or (lie is Lie.TOO_LONG and call.max_tokens is None):
            return honest
        if earlier is None and lie in BORROWED:
            raise StatusError(grpc.StatusCode.INTERNAL, "SCRIPT", f"there is no earlier completion for the lie {lie}")
        self._engine_thread.judge.record_lie(call.key, lie.value)
        if lie is Lie.ANSWERED_TWICE:
            self._second[request.turn_key] = apply_lie(Lie.CHANGED_ID, honest, honest, request.turn)
        return apply_lie(lie, honest, earlier or honest, request.turn)

    def _continue_segment(
        self, request: pb.CompleteRequest, segment: HeldSegment, messages: Sequence[Message]
    ) -> ContinuedPrompt | None:
        """Return the tokens of the request; None in message mode.

        Raises the StatusError of `continue_segment` and records it in the verdict.
        """
        if not request.HasField("new_tokens"):
            return None
        try:
            return continue_segment(request, segment, self._segments.parent(request), messages)
        except StatusError as error:
            self._engine_thread.judge.refuse(
                segment.rollout_key, Refusal(request.turn, RefusalReason.TOKENS, error.text)
            )
            raise

    async def _tools(self, request: pb.CompleteRequest) -> Tools | None:
        tools_named = self._segments.tools(request)
        if tools_named is not None:
            return tools_named if self._engine_thread.tools.rendered else None
        try:
            return await self._engine_thread.tools.get()
        except ToolsUnavailableError as error:
            raise StatusError(grpc.StatusCode.INTERNAL, "TOOLS_UNAVAILABLE", str(error)) from error


def _append_completion(
    request: pb.CompleteRequest,
    messages: Sequence[Message],
    segment: HeldSegment,
    tokens: ContinuedPrompt | None,
    result: CompletedCall,
) -> wire.ResponseDetails:
    """Append a completion to its segment and return the contents of the response."""
    completion = result.completion
    policy = result.reply.policy_version or f"policy-{request.turn}"
    if tokens is None:
        after = segment.add(request.turn, messages, completion, policy)
        return wire.ResponseDetails(completion, result.reply, policy, after)
    tokens.enter(segment)
    after = segment.append_completion(request.turn, messages, completion, policy)
    return wire.ResponseDetails(completion, result.reply, policy, after, tokens.prompt)


def _checked_turn_key(request: pb.CompleteRequest) -> str:
    """Return the key of the request's turn. Raise StatusError for a request that is invalid in any state of the trainer."""
    if not request.uid or not request.rollout_id.strip():
        raise invalid("rollout_id" if request.uid else "uid", "is missing")
    if request.turn < 1:
        raise invalid("turn", "counts from 1")
    key = f"{request.uid}/{request.segment_id}/{request.turn}"
    rest = request.turn_key.removeprefix(f"{key}/")
    if request.turn_key != key and (rest == request.turn_key or not rest.isdecimal()):
        raise invalid("turn_key", f"is {request.turn_key!r}, but this turn's key is {key!r}")
    return key


async def _failure(result: FailedCall) -> pb.CompleteResponse:
    """Execute a scripted fault: raise its status, or return the response if the fault has HTTP status 200."""
    fault = result.fault
    await asyncio.sleep(fault.delay)
    match fault.kind:
        case FaultKind.SILENCE:
            raise SilenceError
        case FaultKind.EMPTY_CHOICES | FaultKind.NULL_MESSAGE:
            return pb.CompleteResponse(finish_reason="stop", token_ids=result.completion.token_ids)
        case FaultKind.STATUS if fault.status == 200:
            return pb.CompleteResponse(message=message_pb2.Message(json=fault.body), finish_reason="stop")
    raise status_of_fault(fault)


def apply_lie(lie: Lie, honest: pb.CompleteResponse, earlier: pb.CompleteResponse, turn: int) -> pb.CompleteResponse:
    """Return the response of a turn with a lie. `earlier` is the response of an earlier turn, for the `BORROWED` lies.

    Lies about ids do not change a response without ids.
    """
    response = pb.CompleteResponse()
    response.CopyFrom(earlier if lie in BORROWED else honest)
    middle = len(response.token_ids) // 2
    match lie:
        case Lie.CHANGED_ID if response.token_ids:
            response.token_ids[middle] ^= 1
        case Lie.DROPPED_ID if response.token_ids:
            del response.token_ids[middle]
            del response.logprobs.values[middle : middle + 1]
        case Lie.OVERSIZED_ID if response.token_ids:
            response.token_ids[middle] += TOO_LARGE
        case Lie.SHORT_LOGPROBS:
            del response.logprobs.values[-1:]
        case Lie.OTHER_TURN:
            _keep_checkpoints(response, honest)
        case Lie.STALE_POLICY:
            response.policy_version = f"policy-{max(0, turn - 2)}"
        case Lie.PROMPT_DIGEST if honest.HasField("prompt_checkpoint"):
            response.prompt_checkpoint.digest = _other_digest(response.prompt_checkpoint.digest)
        case Lie.AFTER_DIGEST:
            response.after.digest = _other_digest(response.after.digest)
        case Lie.NO_CHECKPOINTS:
            response.ClearField("after")
            response.ClearField("prompt_checkpoint")
    return response


def _keep_checkpoints(response: pb.CompleteResponse, honest: pb.CompleteResponse) -> None:
    response.after.CopyFrom(honest.after)
    response.policy_version = honest.policy_version
    if honest.HasField("prompt_checkpoint"):
        response.prompt_checkpoint.CopyFrom(honest.prompt_checkpoint)
    else:
        response.prompt_ids.CopyFrom(honest.prompt_ids)


def _other_digest(digest: bytes) -> bytes:
    return hashlib.sha256(digest).digest()
