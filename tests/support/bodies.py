"""Start requests for rollouts, over HTTP and over gRPC."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import grpc
from osmosis.rollout.v1 import event_pb2, message_pb2, rollout_service_pb2, rollout_service_pb2_grpc, spec_pb2
from osmosis.rollout.v1.rollout_service_pb2 import RunRolloutResponse, StartRolloutRequest

TOKENIZER = "toy"
QUESTION = "Please calculate 5 plus 3, and then multiply the result by 2."


def body(
    rollout_id: str, url: str, question: str = QUESTION, changes: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """A body for `POST /rollout`. A change to None omits the field."""
    whole = {
        "rollout_id": rollout_id,
        "server_url": url,
        "messages": [{"role": "user", "content": question}],
        "sampling_params": {"temperature": 0.7, "max_tokens": 512, "logprobs": True},
        "tokenizer_name": TOKENIZER,
    } | dict(changes or {})
    return {key: value for key, value in whole.items() if value is not None}


def start_request(rollout_id: str, server_url: str, question: str = QUESTION) -> StartRolloutRequest:
    """The same request over gRPC. Each call starts a new rollout."""
    spec = spec_pb2.RolloutSpec(
        rollout_id=rollout_id,
        messages=[message_pb2.Message(json=json.dumps({"role": "user", "content": question}))],
        completions=spec_pb2.Target(url=server_url),
        sampling=spec_pb2.Sampling(temperature=0.7, max_tokens=512, logprobs=True),
        tokenizer=spec_pb2.Tokenizer(name=TOKENIZER),
    )
    return StartRolloutRequest(spec=spec)


def run(
    stub: rollout_service_pb2_grpc.RolloutServiceAsyncStub, request: StartRolloutRequest
) -> grpc.aio.UnaryStreamCall[Any, RunRolloutResponse]:
    """Start a rollout whose events include messages."""
    asked = rollout_service_pb2.RunRolloutRequest(start=request, detail=event_pb2.EVENT_DETAIL_MESSAGES)
    return stub.RunRollout(asked)


@asynccontextmanager
async def rpc(port: int) -> AsyncIterator[rollout_service_pb2_grpc.RolloutServiceAsyncStub]:
    """A stub on its own channel."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield rollout_service_pb2_grpc.RolloutServiceStub(channel)


def tool_texts(messages: list[dict[str, Any]]) -> list[str]:
    """Contents of the tool results, in order."""
    return [message["content"] for message in messages if message["role"] == "tool"]
