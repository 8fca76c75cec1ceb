"""A rollout server for the trainer library's tests, over a real channel, with its own ledger and digests."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from google.rpc.error_details_pb2 import RetryInfo
from osmosis.rollout.v1 import completion_service_pb2 as pb
from osmosis.rollout.v1 import message_pb2, spec_pb2, token_pb2
from osmosis.rollout.v1.completion_service_pb2_grpc import CompletionServiceStub
from osmosis.rollout.v1.outcome_service_pb2_grpc import OutcomeServiceStub
from rollout_client.error_details import find_detail, rich_status
from rollout_client.errors import RolloutError, failure_of
from rollout_client.trainer import Parse, Serving, parsers
from rollout_client.trainer.policy import AnnouncedPolicy
from rollout_client.trainer.prompts import Render
from rollout_client.trainer.rollout_records import Outcomes, Records
from rollout_client.trainer.server import Listener
from rollout_client.trainer.turns import Model, Turns

from tests.support.toy_model import END, ToyModel, decode

OTHER, MODEL = token_pb2.AUTHOR_OTHER, token_pb2.AUTHOR_MODEL


@dataclass
class Asker:
    """A segment in the server's view: (id, by model) of each token, and the agreed checkpoint."""

    stub: Any
    uid: str = "u1"
    segment: str = "0"
    tokens: list[tuple[int, bool]] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    base: token_pb2.Checkpoint | None = None
    messages: int = 0
    turn: int = 1

    def checkpoint(self, new: list[tuple[int, bool]], messages: int) -> token_pb2.Checkpoint:
        """The checkpoint after more tokens."""
        held = [*self.tokens, *new]
        words = b"".join((token | by_model << 31).to_bytes(4, "little") for token, by_model in held)
        return token_pb2.Checkpoint(messages=messages, tokens=len(held), digest=hashlib.sha256(words).digest())

    def request(self, ids: list[int], **changes: Any) -> pb.CompleteRequest:
        """A request for the next turn, with new environment tokens."""
        new = [(token, False) for token in ids]
        fields: dict[str, Any] = {
            "uid": self.uid,
            "rollout_id": "r1",
            "segment_id": self.segment,
            "turn": self.turn,
            "turn_key": f"{self.uid}/{self.segment}/{self.turn}",
            "base": self.base,
            "new_messages": [message_pb2.Message(json='{"role":"user","content":"Hi"}')],
            "new_tokens": pb.NewTokens(
                spans=[token_pb2.Span(author=OTHER, turn=self.turn, token_ids=ids)],
                after=self.checkpoint(new, self.messages + 1),
            ),
            "sampling": spec_pb2.Sampling(temperature=1.0),
        }
        fields |= changes
        return pb.CompleteRequest(**{name: value for name, value in fields.items() if value is not None})

    def whole(self, ids: list[int], **changes: Any) -> pb.CompleteRequest:
        """The same request with the whole history."""
        request = self.request(ids, base=None, **changes)
        history = [
            token_pb2.Span(author=MODEL if by_model else OTHER, turn=turn, token_ids=[token])
            for (token, by_model), turn in zip(self.tokens, self.turns, strict=True)
        ]
        spans = [*history, *request.new_tokens.spans]
        del request.new_tokens.spans[:]
        request.new_tokens.spans.extend(spans)
        return request

    def took(self, request: pb.CompleteRequest, response: pb.CompleteResponse) -> None:
        """Add a turn. Asserts that both checkpoints equal this side's."""
        new = [(token, False) for token in request.new_tokens.spans[-1].token_ids]
        assert response.prompt_checkpoint == request.new_tokens.after == self.checkpoint(new, self.messages + 1)
        answer = [(token, True) for token in response.token_ids]
        assert response.after == self.checkpoint([*new, *answer], self.messages + 2)
        self.tokens += [*new, *answer]
        self.turns += [self.turn] * len([*new, *answer])
        self.base, self.messages, self.turn = response.after, self.messages + 2, self.turn + 1

    async def ask(self, ids: list[int]) -> pb.CompleteResponse:
        """Run a turn that succeeds."""
        request = self.request(ids)
        response: pb.CompleteResponse = await self.stub.Complete(request)
        self.took(request, response)
        return response


@dataclass
class Stand:
    """A trainer's services on a free port."""

    model: ToyModel
    records: Records
    outcomes: Outcomes
    listener: Listener
    completions: Any
    deliveries: Any

    def asker(self, **fields: Any) -> Asker:
        """A server with one rollout."""
        return Asker(self.completions, **fields)


@dataclass(frozen=True)
class Limits:
    """Limits and other options of the services."""

    generating: int = 8
    remembered: int = 8
    render: Render | None = None
    parse: Parse = parsers.hermes
    bearer: str | None = None


@asynccontextmanager
async def standing(model: Any = None, limits: Limits = Limits()) -> AsyncIterator[Stand]:
    """Serve both services."""
    toy = model or ToyModel()
    records, outcomes = Records(limits.remembered), Outcomes()
    turns = Turns(
        Model(toy, decode, limits.parse, limits.render, {END}), records, outcomes, limits.generating, AnnouncedPolicy()
    )
    listener = Listener(Serving(), turns, records, outcomes)
    await listener.open()
    bearer = listener.bearer if limits.bearer is None else limits.bearer
    interceptor = _Bearer(f"Bearer {bearer}")
    async with grpc.aio.insecure_channel(listener.url.removeprefix("grpc://"), interceptors=[interceptor]) as channel:
        stubs = CompletionServiceStub(channel), OutcomeServiceStub(channel)
        try:
            yield Stand(toy, records, outcomes, listener, *stubs)
        finally:
            await listener.close()


async def refusal(call: Any) -> RolloutError:
    """The error of a call that must fail."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return failure_of(error, "")
    raise AssertionError("the call succeeded")


async def held_after(call: Any) -> list[int]:
    """The tokens of each checkpoint in a LedgerMismatch."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        detail = find_detail(rich_status(error), pb.LedgerMismatch())
        if error.code() is grpc.StatusCode.ABORTED and detail is not None:
            return [checkpoint.tokens for checkpoint in detail.checkpoints]
    raise AssertionError("the call did not end with a LedgerMismatch")


async def retry_info(call: Any) -> RetryInfo | None:
    """The RetryInfo of a refusal."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return find_detail(rich_status(error), RetryInfo())
    raise AssertionError("the call succeeded")


class _Bearer(grpc.aio.UnaryUnaryClientInterceptor):
    """Add a bearer token to each call."""

    def __init__(self, value: str) -> None:
        self._value = value

    async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        metadata = client_call_details.metadata or grpc.aio.Metadata()
        metadata.add("authorization", self._value)
        return await continuation(client_call_details._replace(metadata=metadata), request)
