"""An independent gRPC trainer: it computes digests as specified in token.proto, and returns incorrect data on request."""

from __future__ import annotations

import asyncio
import hashlib
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from google.rpc.status_pb2 import Status
from osmosis.rollout.v1 import completion_service_pb2 as pb
from osmosis.rollout.v1 import completion_service_pb2_grpc, message_pb2, token_pb2

Context = Any
Act = Callable[[pb.CompleteRequest, pb.CompleteResponse], None]


@dataclass(frozen=True)
class Fault:
    """A status to return instead of a response."""

    code: grpc.StatusCode
    text: str = "no"
    details: Sequence[Message] = ()


def info(reason: str) -> error_details_pb2.ErrorInfo:
    return error_details_pb2.ErrorInfo(reason=reason, domain="rollout.osmosis")


BASE_UNKNOWN = Fault(grpc.StatusCode.FAILED_PRECONDITION, "no base", (info("BASE_UNKNOWN"),))


@dataclass
class GrpcTrainer(completion_service_pb2_grpc.CompletionServiceServicer):
    """Complete every turn with the ids in `answer`.

    Each of the first calls raises one of `faults`. `lies` change the response of a turn. If `silent`, calls never return;
    `asked` and `left` are set when such a call arrives and when its caller cancels it.
    """

    answer: Sequence[int]
    faults: list[Fault] = field(default_factory=list)
    lies: dict[int, Act] = field(default_factory=dict)
    shows_ledger: bool = True
    requests: list[pb.CompleteRequest] = field(default_factory=list)
    authorizations: list[str] = field(default_factory=list)
    spans: list[token_pb2.Span] = field(default_factory=list)
    url: str = ""
    silent: bool = False
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)

    async def Complete(self, request: pb.CompleteRequest, context: Context) -> pb.CompleteResponse:
        self.requests.append(request)
        self.authorizations.append(dict(context.invocation_metadata()).get("authorization", ""))
        if self.silent:
            await self.wait()
        if self.faults:
            await abort(context, self.faults.pop(0))
        if not request.HasField("base"):
            self.spans.clear()
        self.spans += request.new_tokens.spans
        response = pb.CompleteResponse(
            message=message_pb2.Message(json=f'{{"role": "assistant", "content": "Turn {request.turn}."}}'),
            finish_reason="stop",
            token_ids=self.answer,
            logprobs=token_pb2.Logprobs(values=[-0.5] * len(self.answer)),
            policy_version="v1",
            prompt_checkpoint=self.checkpoint(),
        )
        self.spans.append(token_pb2.Span(author="AUTHOR_MODEL", turn=request.turn, token_ids=self.answer))
        response.after.CopyFrom(self.checkpoint())
        if request.turn in self.lies:
            self.lies[request.turn](request, response)
        return response

    async def wait(self) -> None:
        self.asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.left.set()

    async def ReadLedger(self, request: pb.ReadLedgerRequest, context: Context) -> pb.ReadLedgerResponse:
        if not self.shows_ledger:
            await abort(context, Fault(grpc.StatusCode.UNIMPLEMENTED))
        return pb.ReadLedgerResponse(spans=self.spans)

    def checkpoint(self) -> token_pb2.Checkpoint:
        words = [  # token.proto, Checkpoint: id | (author is MODEL) << 31, little-endian
            token | (span.author == token_pb2.AUTHOR_MODEL) << 31 for span in self.spans for token in span.token_ids
        ]
        digest = hashlib.sha256(struct.pack(f"<{len(words)}I", *words)).digest()
        return token_pb2.Checkpoint(tokens=len(words), digest=digest)


async def abort(context: Context, fault: Fault) -> None:
    status = Status(code=fault.code.value[0], message=fault.text)
    for detail in fault.details:
        status.details.add().Pack(detail)
    await context.abort(fault.code, fault.text, (("grpc-status-details-bin", status.SerializeToString()),))


@asynccontextmanager
async def serving(trainer: GrpcTrainer) -> AsyncIterator[GrpcTrainer]:
    server = grpc.aio.server()
    completion_service_pb2_grpc.add_CompletionServiceServicer_to_server(trainer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    trainer.url = f"grpc://127.0.0.1:{port}"
    try:
        yield trainer
    finally:
        await server.stop(0)
