"""A minimal server side of token mode over gRPC: it renders, keeps a ledger and sends new tokens."""

import hashlib
import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from osmosis.rollout.v1 import completion_service_pb2 as pb
from osmosis.rollout.v1 import completion_service_pb2_grpc, message_pb2, token_pb2

from .conftest import QUESTION, run_tool

MODEL_BIT = 1 << 31
MAIN = token_pb2.SegmentOrigin(kind=token_pb2.SEGMENT_KIND_MAIN)


def digest(words: Sequence[int]) -> bytes:
    """SHA-256 as specified in token.proto (Checkpoint)."""
    return hashlib.sha256(struct.pack(f"<{len(words)}I", *words)).digest()


def as_json(message: Any) -> message_pb2.Message:
    return message_pb2.Message(json=json.dumps(message))


def other(reason: "token_pb2.MaskReason.ValueType", turn: int, ids: Sequence[int]) -> token_pb2.Span:
    """Tokens that the model did not generate."""
    return token_pb2.Span(author=token_pb2.AUTHOR_OTHER, mask_reason=reason, turn=turn, token_ids=ids)


@dataclass
class TokenCaller:
    """One segment. `render` returns a conversation's prompt; its part after the held tokens is the environment."""

    stub: "completion_service_pb2_grpc.CompletionServiceAsyncStub"
    render: Callable[[Sequence[Any]], list[int]]
    uid: str = "u"
    rollout_id: str = "r"
    segment_id: str = "0"
    origin: token_pb2.SegmentOrigin = field(default_factory=lambda: MAIN)
    messages: list[Any] = field(default_factory=lambda: list(QUESTION))
    known: int = 0
    turn: int = 0
    base: token_pb2.Checkpoint | None = None
    spans: list[token_pb2.Span] = field(default_factory=list)
    answers: list[pb.CompleteResponse] = field(default_factory=list)
    stop: int | None = None
    sampling: Any = None
    tools: Any = None

    @property
    def ids(self) -> list[int]:
        return [token for span in self.spans for token in span.token_ids]

    @property
    def words(self) -> list[int]:
        return words_of(self.spans)

    def new_spans(self) -> list[token_pb2.Span]:
        """The tokens between the last completion and the next one."""
        rest = self.render(self.messages)[len(self.ids) :]
        turn = self.turn + 1
        if not self.spans:
            return [other(token_pb2.MASK_REASON_PROMPT, turn, rest)]
        closing = []
        if self.stop is not None and self.ids[-1] != self.stop:
            closing, rest = [other(token_pb2.MASK_REASON_CLOSING, turn, rest[:1])], rest[1:]
        return [*closing, other(token_pb2.MASK_REASON_ENVIRONMENT, turn, rest)]

    def tokens(self, new: Sequence[token_pb2.Span], **changes: Any) -> pb.NewTokens:
        """The spans after the base, and the checkpoint after them, or an incorrect one with `changes`."""
        words = self.words + words_of(new)
        after = {"messages": len(self.messages), "tokens": len(words), "digest": digest(words)}
        return pb.NewTokens(spans=new, after=token_pb2.Checkpoint(**(after | changes)))

    def request(self, **changes: Any) -> pb.CompleteRequest:
        turn = self.turn + 1
        fields = {
            "uid": self.uid,
            "rollout_id": self.rollout_id,
            "segment_id": self.segment_id,
            "origin": None if self.answers else self.origin,
            "turn": turn,
            "turn_key": f"{self.uid}/{self.segment_id}/{turn}",
            "new_messages": [as_json(message) for message in self.messages[self.known :]],
            "base": self.base,
            "sampling": self.sampling,
            "tools": self.tools,
        }
        fields |= changes
        if "new_tokens" not in fields:
            fields["new_tokens"] = self.tokens(self.new_spans())
        return pb.CompleteRequest(**fields)

    def whole(self, **changes: Any) -> pb.CompleteRequest:
        """The same turn with the whole history instead of a base."""
        new = self.new_spans()
        tokens = pb.NewTokens(spans=[*self.spans, *new], after=self.tokens(new).after)
        return self.request(
            base=None, new_messages=[as_json(message) for message in self.messages], new_tokens=tokens, **changes
        )

    async def complete(self, request: pb.CompleteRequest | None = None) -> pb.CompleteResponse:
        """Run one turn of an honest trainer and its tools, and add it to the ledger."""
        new = self.new_spans()
        request = request or self.request(new_tokens=self.tokens(new))
        answer = await self.stub.Complete(request)
        self.take(new, answer, request)
        return answer

    def take(self, new: Sequence[token_pb2.Span], answer: pb.CompleteResponse, request: pb.CompleteRequest) -> None:
        self.spans += new
        assert answer.prompt_checkpoint == request.new_tokens.after
        logprobs = token_pb2.Logprobs(values=answer.logprobs.values)
        self.turn += 1
        self.spans.append(
            token_pb2.Span(
                author=token_pb2.AUTHOR_MODEL,
                turn=self.turn,
                token_ids=answer.token_ids,
                logprobs=logprobs,
                policy_version=answer.policy_version,
            )
        )
        self.messages.append(json.loads(answer.message.json))
        self.known = len(self.messages)
        words = self.words
        assert answer.after == token_pb2.Checkpoint(messages=self.known, tokens=len(words), digest=digest(words))
        assert len(answer.logprobs.values) == len(answer.token_ids)
        self.base = answer.after
        self.answers.append(answer)
        self.messages += [run_tool(call) for call in self.messages[-1].get("tool_calls") or ()]

    async def play(self, turns: int = 20) -> None:
        """Run turns until a completion calls no tools."""
        for _ in range(turns):
            await self.complete()
            if self.known == len(self.messages):
                return


def words_of(spans: Sequence[token_pb2.Span]) -> list[int]:
    """The words that the digest covers."""
    return [
        token | (MODEL_BIT if span.author == token_pb2.AUTHOR_MODEL else 0)
        for span in spans
        for token in span.token_ids
    ]
