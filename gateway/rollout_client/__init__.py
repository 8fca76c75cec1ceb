"""gRPC client of a rollout server: `Client` for synchronous code, `AsyncClient` for asyncio.

The package depends only on grpcio, protobuf and googleapis-common-protos, so it fits into a trainer's environment. Calls return
protobuf messages of the package `osmosis.rollout.v1`. A call that fails raises `RolloutError`. A rollout that fails raises
nothing until `raise_for_failure` is called with it.

    with Client("localhost:50051") as client:
        started = client.start(messages=[...], completions="http://localhost:9001", tokenizer="Qwen/Qwen3-8B")
        train_on = samples(client.wait(started.uid, timeout=600, view="samples"))
"""

from __future__ import annotations

from osmosis.rollout.v1.event_pb2 import RolloutEvent
from osmosis.rollout.v1.group_pb2 import GroupResult
from osmosis.rollout.v1.message_pb2 import Message, Tool
from osmosis.rollout.v1.outcome_pb2 import Outcome
from osmosis.rollout.v1.rollout_service_pb2 import Agent, GetServerInfoResponse, GroupOutcome, Rollout
from osmosis.rollout.v1.spec_pb2 import RolloutSpec

from rollout_client._async.client import AsyncClient
from rollout_client._async.events import AsyncEventStream, AsyncGroupStream, AsyncRunStream
from rollout_client._sync.client import Client
from rollout_client._sync.events import EventStream, GroupStream, RunStream
from rollout_client.chat_messages import RenderedPrompt, messages
from rollout_client.connection import Tls
from rollout_client.errors import (
    Busy,
    Conflict,
    DeadlineExceeded,
    EventsGone,
    FieldError,
    InvalidRequest,
    NotFinished,
    NotFound,
    NotPossible,
    PermissionDenied,
    RolloutError,
    RolloutFailed,
    ServerFault,
    TooLarge,
    Unauthenticated,
    Unavailable,
)
from rollout_client.event_cursor import ModelAccess, Started, StartedGroup
from rollout_client.requests import SelectionFields, WorkResult
from rollout_client.retry import Retry
from rollout_client.samples import SampleSpan, TrainingSample, only_trainable, raise_for_failure, samples
from rollout_client.spec import Credentials, Limits, Sampling, SpecFields, StartFields, Target, Tokenizer

__all__ = [
    "Agent",
    "AsyncClient",
    "AsyncEventStream",
    "AsyncGroupStream",
    "AsyncRunStream",
    "Busy",
    "Client",
    "Conflict",
    "Credentials",
    "DeadlineExceeded",
    "EventStream",
    "EventsGone",
    "FieldError",
    "GetServerInfoResponse",
    "GroupOutcome",
    "GroupResult",
    "GroupStream",
    "InvalidRequest",
    "Limits",
    "Message",
    "ModelAccess",
    "NotFinished",
    "NotFound",
    "NotPossible",
    "Outcome",
    "PermissionDenied",
    "RenderedPrompt",
    "Retry",
    "Rollout",
    "RolloutError",
    "RolloutEvent",
    "RolloutFailed",
    "RolloutSpec",
    "RunStream",
    "SampleSpan",
    "Sampling",
    "SelectionFields",
    "ServerFault",
    "SpecFields",
    "StartFields",
    "Started",
    "StartedGroup",
    "Target",
    "Tls",
    "Tokenizer",
    "TooLarge",
    "Tool",
    "TrainingSample",
    "Unauthenticated",
    "Unavailable",
    "WorkResult",
    "messages",
    "only_trainable",
    "raise_for_failure",
    "samples",
]
