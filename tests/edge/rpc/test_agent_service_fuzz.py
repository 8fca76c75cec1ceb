"""Random requests to a model endpoint: refused with a reason or served, never an internal error; the rollout lives."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from google.protobuf import message_factory
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from osmosis.rollout.v1 import agent_service_pb2 as pb
from osmosis.rollout.v1 import rollout_service_pb2, spec_pb2

from tests.edge.rpc.test_agent_service import bearer, prompt
from tests.edge.rpc.test_model_calls import Elsewhere, Endpoint
from tests.edge.rpc.test_proto_fuzz import Builder, checked
from tests.support.engine_model import EngineModel
from tests.support.engines import MODEL, VllmEngine
from tests.support.engines import serving as serving_engine
from tests.support.server_client import Refusal, serving
from tests.support.start_requests import start

pytestmark = pytest.mark.asyncio(loop_scope="module")

SERVICE = pb.DESCRIPTOR.services_by_name["AgentService"]
USER = {"role": "user", "content": "What is 5 plus 3?"}
TOOL = {"type": "function", "id": "a", "function": {"name": "f", "arguments": "{}"}}
VALUES: list[Any] = [
    *(None, "", "x", 1, [], {}, [[]], [{}], [TOOL], [{"type": "text", "text": "x"}], [{"type": "image_url"}]),
    *(
        [
            {"type": "image_url", "image_url": {"url": url}}
            for url in ("data:image/png;base64,AAAA", "http://127.0.0.1:9")
        ],
    ),
    *([{"type": "function", "function": {"name": 3}}], "\ud800", "<think>a</think>b", {"a": [1e300]}),
]
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def endpoint() -> AsyncIterator[Endpoint]:
    """A model endpoint with an engine behind it. Rollouts without limits of turns or bytes."""
    engine = VllmEngine(EngineModel(["It is 8."]))
    target = {"dialect": spec_pb2.DIALECT_VLLM, "model": MODEL}
    async with serving_engine(engine), serving(Elsewhere()) as caller:
        limits = spec_pb2.Limits(turns=10_000)
        started = await caller.start(start(completions=spec_pb2.Target(url=engine.url, **target), limits=limits))
        yield Endpoint(caller, started.rollout.uid, started.access.key)


def history(chance: random.Random) -> list[str]:
    """Messages in the shape of chat completions, some with fields of any kind."""
    made = []
    for _ in range(chance.choice((1, 2, 5))):
        message: dict[str, Any] = {"role": chance.choice(("system", "developer", "user", "assistant", "tool", "user"))}
        for name in ("content", "tool_calls", "tool_call_id", "reasoning_content", "refusal", "name"):
            if chance.random() < 0.3:
                message[name] = chance.choice(VALUES)
        made.append(json.dumps(message))
    return made


async def send(endpoint: Endpoint, name: str, request: Message) -> grpc.StatusCode:
    """Send a request and return its status, which must blame the caller."""
    method, metadata = SERVICE.methods_by_name[name], bearer(endpoint.key)
    path, payload = f"/{SERVICE.full_name}/{name}", request.SerializeToString()
    try:
        if method.server_streaming:
            stream: Any = endpoint.caller.channel.unary_stream(path)(payload, timeout=30, metadata=metadata)
            async for _ in stream:
                pass
        else:
            unary: Any = endpoint.caller.channel.unary_unary(path)
            await unary(payload, timeout=30, metadata=metadata)
    except grpc.aio.AioRpcError as error:
        return checked(Refusal.of(error))
    return grpc.StatusCode.OK


@pytest.mark.parametrize("name", sorted(set(SERVICE.methods_by_name) - {"FinishRollout"}))
@QUICK
@given(seed=st.integers(0, 2**64 - 1), wild=st.booleans())
async def test_requests_of_any_kind_are_answered_or_refused_in_words(
    endpoint: Endpoint, name: str, seed: int, wild: bool
) -> None:
    chance = random.Random(seed)
    kind = message_factory.GetMessageClass(SERVICE.methods_by_name[name].input_type)
    request: Any = Builder(chance, [endpoint.uid]).fill(kind.DESCRIPTOR, often=0.4 if wild else 0.05)
    request.uid = endpoint.uid
    if "prompt" in kind.DESCRIPTOR.fields_by_name and not wild:
        request.prompt.CopyFrom(prompt(*history(chance)))
    await send(endpoint, name, request)


async def test_the_rollout_lives_and_the_fuzzer_comes_far_enough(endpoint: Endpoint) -> None:
    codes = set()
    for seed in range(100):
        request = pb.CallModelRequest(uid=endpoint.uid, prompt=prompt(*history(random.Random(seed))))
        codes.add(await send(endpoint, "CallModel", request))
    assert {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT} <= codes
    assert codes <= {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT}
    assert (await endpoint.call(json.dumps(USER))).finish_reason == "stop"
    rollout = await endpoint.caller.get(endpoint.uid)
    assert rollout.state == rollout_service_pb2.ROLLOUT_STATE_RUNNING


@QUICK
@given(seed=st.integers(0, 2**64 - 1))
async def test_results_of_any_kind_are_accepted_or_refused_in_words(endpoint: Endpoint, seed: int) -> None:
    request: Any = Builder(random.Random(seed), []).fill(pb.FinishRolloutRequest.DESCRIPTOR)
    request.uid = endpoint.uid
    await send(endpoint, "FinishRollout", request)
