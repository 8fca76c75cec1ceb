"""CompletionService of the bench trainer: prepared responses, in message mode and in token mode.

All rollouts of a conversation have the same tokens, so the checkpoints of each turn are prepared, too. In both modes the base of a
request must be the checkpoint after the previous completion. Its digest covers all tokens and their authors, and thus the mask. In
token mode the checkpoint of the prompt must be equal as well.

A rollout id begins with the name of its conversation: "10x1000-...". Ids that begin with "floor-messages-" or "floor-tokens-" are
those of the floor, which accounts for no tokens.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import msgspec
from osmosis.rollout.v1 import completion_service_pb2 as pb
from osmosis.rollout.v1 import message_pb2, token_pb2

from bench.programs.conversation import Conversation, Turn
from bench.programs.hold import Hold
from bench.programs.tally import Tally

_METHOD = "/osmosis.rollout.v1.CompletionService/Complete"
_MODEL_BIT = 1 << 31
FLOOR_MESSAGES, FLOOR_TOKENS = "floor-messages", "floor-tokens"


class WrongRequest(Exception):
    """A request that does not continue its rollout as scripted."""


@dataclass(frozen=True, slots=True)
class PreparedTurn:
    """The responses of one turn in both modes, and what its request must hold."""

    in_messages: pb.CompleteResponse
    in_tokens: pb.CompleteResponse
    base: token_pb2.Checkpoint | None
    prompt: token_pb2.Checkpoint
    new_messages: Sequence[Mapping[str, Any]]
    last: bool


def prepare_turns(conversation: Conversation) -> Sequence[PreparedTurn]:
    """Prepare the turns of a conversation."""
    digest, base, held = hashlib.sha256(), None, 0
    prepared = []
    for messages, turn in conversation.turns.items():
        digest.update(_packed(turn.prompt[held:]))
        prompt = token_pb2.Checkpoint(messages=messages, tokens=len(turn.prompt), digest=digest.digest())
        digest.update(_packed([_MODEL_BIT | token for token in turn.completion]))
        held = len(turn.prompt) + len(turn.completion)
        after = token_pb2.Checkpoint(messages=messages + 1, tokens=held, digest=digest.digest())
        # A request has no completion that the trainer itself generated.
        new = turn.tail if base is None else turn.tail[1:]
        last = messages + 1 == conversation.facts.messages
        prepared.append(PreparedTurn(*_responses(turn, prompt, after), base, prompt, new, last))
        base = after
    return prepared


def _packed(ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(ids)}I", *ids)


def _responses(
    turn: Turn, prompt: token_pb2.Checkpoint, after: token_pb2.Checkpoint
) -> tuple[pb.CompleteResponse, pb.CompleteResponse]:
    in_tokens = pb.CompleteResponse(
        message=message_pb2.Message(json=msgspec.json.encode(turn.reply).decode()),
        finish_reason=turn.finish,
        token_ids=turn.completion,
        logprobs=token_pb2.Logprobs(values=turn.logprobs),
        prompt_checkpoint=prompt,
        after=after,
    )
    in_messages = pb.CompleteResponse()
    in_messages.CopyFrom(in_tokens)
    in_messages.prompt_ids.values.extend(turn.prompt)
    return in_messages, in_tokens


class Completions:
    """Answers requests of all conversations. The number of the turn identifies it, so there is no state per rollout."""

    def __init__(self, conversations: Mapping[str, Conversation], tally: Tally, hold: Hold) -> None:
        self._turns = {name: prepare_turns(each) for name, each in conversations.items()}
        self._tally = tally
        self._hold = hold

    async def answer(self, request: pb.CompleteRequest, size: int) -> pb.CompleteResponse:
        """Return the completion of a request of `size` bytes. Raises WrongRequest."""
        self._tally.receive(request.rollout_id, size)
        name, _, rest = request.rollout_id.partition("-")
        if name == "floor":
            mode, name, _ = rest.split("-", 2)
            turn = self._turns[name][request.turn - 1]
            response = turn.in_messages if mode == "messages" else turn.in_tokens
        else:
            turn = self._turns[name][request.turn - 1]
            self._check(request, turn)
            response = turn.in_tokens if request.HasField("new_tokens") else turn.in_messages
        await self._hold.passed(last=turn.last)
        self._tally.answer(request.rollout_id, last=turn.last)
        return response

    def _check(self, request: pb.CompleteRequest, turn: PreparedTurn) -> None:
        if [msgspec.json.decode(message.json) for message in request.new_messages] != turn.new_messages:
            raise self._wrong(f"turn {request.turn}: the new messages are not those of the script", mask=False)
        if request.HasField("base") != (turn.base is not None) or not _same(request.base, turn.base):
            raise self._wrong(f"turn {request.turn}: the base has {request.base.tokens} other tokens", mask=True)
        if request.HasField("new_tokens") and not _same(request.new_tokens.after, turn.prompt):
            raise self._wrong(f"turn {request.turn}: the prompt has other tokens than the trainer's", mask=True)
        self._tally.counts.masks_accepted += 1

    def _wrong(self, fault: str, *, mask: bool) -> WrongRequest:
        self._tally.refuse(fault, mask=mask)
        return WrongRequest(fault)


def _same(checkpoint: token_pb2.Checkpoint, expected: token_pb2.Checkpoint | None) -> bool:
    return expected is None or (checkpoint.tokens, checkpoint.digest) == (expected.tokens, expected.digest)


class CompletionHandler(grpc.GenericRpcHandler):
    """Serves the completions over unary gRPC. Requests arrive as bytes, whose number is part of the traffic."""

    def __init__(self, completions: Completions) -> None:
        self._completions = completions

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Return the handler of `Complete`."""
        if handler_call_details.method != _METHOD:
            return None
        return grpc.unary_unary_rpc_method_handler(
            self._complete, response_serializer=pb.CompleteResponse.SerializeToString
        )

    async def _complete(self, content: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> pb.CompleteResponse:
        try:
            return await self._completions.answer(pb.CompleteRequest.FromString(content), len(content))
        except WrongRequest as wrong:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(wrong))
