"""Requests generated from the descriptors, and random bytes: refused with a reason or served, never an internal error.

Most requests are valid ones with some fields overwritten; entirely random ones are refused early.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio
from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from rollout_server.calculator import Calculator

from tests.support.agents import Idle
from tests.support.server_client import Caller, Refusal, serving, until
from tests.support.start_requests import spec, start

pytestmark = pytest.mark.asyncio(loop_scope="module")

SERVICE = pb.DESCRIPTOR.services_by_name["RolloutService"]
METHODS = sorted(SERVICE.methods_by_name)
LEAK = "leak-me-not"
KEPT = 50
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "60"))
"""Examples per rpc and kind of request; more of them find more."""
QUICK = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
FAULTS = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNAVAILABLE)


def deep(opening: str, closing: str, depth: int) -> str:
    """JSON nested this deep."""
    return opening * depth + "1" + closing * depth


TEXTS = [
    *("", " ", "\x00", "\n", "é🔑\u2028", "../../etc", "x" * 257, "y" * 200_000, "%s%n{}", '"', "idle", "calculator"),
    *(
        "http://127.0.0.1:9",
        "https://127.0.0.1:9/",
        "grpc://127.0.0.1:9",
        "http://[::1",
        "http://a:b@127.0.0.1",
        "file:///x",
    ),
    *("{}", "[]", "null", "{", '{"a":1e999}', '{"a":NaN}', '{"role":"user","content":"x"}', '{"role":1}', '"\\ud800"'),
    *(deep('{"a":', "}", 100), deep('{"a":', "}", 100_000), deep("[", "]", 50_000), "[" * 100_000),
    *('{"n":' + "9" * 5000 + "}", json.dumps({"k" * 1000: [0] * 10_000}), '{"a":1,"a":2}'),
]
INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (-(2**31), 2**31 - 1),
}
FLOATS = [0.0, -0.0, 1.0, -1.0, 0.5, 5e-324, 1.7e308, float("nan"), float("inf"), float("-inf")]


@dataclass
class Builder:
    """Fill messages at random. `uids` are those of existing rollouts."""

    chance: random.Random
    uids: list[str]

    def fill(self, descriptor: Descriptor, depth: int = 4, often: float = 0.4) -> Message:
        """A message with some fields set."""
        made = message_factory.GetMessageClass(descriptor)()
        for field in descriptor.fields:
            if self.chance.random() < often:
                self._set(made, field, depth)
        return made

    def _set(self, made: Message, field: FieldDescriptor, depth: int) -> None:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            self._set_map(made, field, depth)
        elif field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
            self._set_message(made, field, depth)
        elif field.is_repeated:
            count = self.chance.choice((1, 1, 2, 3, 70, 1001))
            value = self._value(field)
            getattr(made, field.name).extend(
                [value] * count if count > 3 else [self._value(field) for _ in range(count)]
            )
        else:
            setattr(made, field.name, self._value(field))

    def _set_message(self, made: Message, field: FieldDescriptor, depth: int) -> None:
        inner = field.message_type
        assert inner is not None
        if depth == 0:
            return
        if not field.is_repeated:
            getattr(made, field.name).CopyFrom(self.fill(inner, depth - 1))
            return
        for _ in range(self.chance.choice((1, 2, 5))):
            getattr(made, field.name).add().CopyFrom(self.fill(inner, depth - 1))

    def _set_map(self, made: Message, field: FieldDescriptor, depth: int) -> None:
        assert field.message_type is not None
        entries, value = getattr(made, field.name), field.message_type.fields_by_name["value"]
        inner = value.message_type
        for _ in range(self.chance.choice((1, 3, 65))):
            key = self._text("")[:400]
            if inner is None:
                entries[key] = self._value(value)
            else:
                entries[key].CopyFrom(self.fill(inner, max(depth - 1, 0)))

    def _value(self, field: FieldDescriptor) -> Any:
        kind = field.cpp_type
        if kind == FieldDescriptor.CPPTYPE_STRING:
            return b"\xff\x00" if field.type == FieldDescriptor.TYPE_BYTES else self._text(field.name)
        if kind in INTEGERS:
            low, high = INTEGERS[kind]
            return self.chance.choice((low, high, 0, 1, 2, 3, max(low, -1), 99, 1001, self.chance.randint(low, high)))
        if kind == FieldDescriptor.CPPTYPE_BOOL:
            return self.chance.random() < 0.5
        return self.chance.choice(FLOATS)

    def _text(self, name: str) -> str:
        if name.startswith("uid") and self.uids and self.chance.random() < 0.7:
            return self.chance.choice(self.uids)
        if self.chance.random() < 0.3:
            return f"{LEAK}-{self.chance.randint(0, 2**60)}"
        return self.chance.choice(TEXTS)


def good(name: str, uids: list[str]) -> Message:
    """A valid request."""
    uid = uids[-1]
    requests: dict[str, Callable[[], Message]] = {
        "StartRollout": start,
        "RunRollout": lambda: pb.RunRolloutRequest(start=pb.StartRolloutRequest(spec=spec())),
        "CancelRollouts": lambda: pb.CancelRolloutsRequest(selection=pb.Selection(uids=[uid])),
        "RedeliverOutcomes": lambda: pb.RedeliverOutcomesRequest(selection=pb.Selection(uids=[uid])),
    }
    if name in requests:
        return requests[name]()
    kind = message_factory.GetMessageClass(SERVICE.methods_by_name[name].input_type)
    return kind(uid=uid) if "uid" in kind.DESCRIPTOR.fields_by_name else kind()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[Caller]:
    """A server that may call only a closed port, and stores few rollouts."""
    limits = {"max_records": KEPT, "cleanup_seconds": 0.2, "max_queued": 1000, "targets": "127.0.0.1:9", "retries": 0}
    async with serving(
        Idle(), Calculator(), http=True, retry_base_seconds=0.01, delivery_retries=1, **limits
    ) as caller:
        yield caller


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def uids(server: Caller) -> list[str]:
    """Uids of rollouts that exist for a while."""
    return [(await server.start(start(agent="idle"))).rollout.uid for _ in range(3)]


async def send(server: Caller, name: str, payload: bytes) -> grpc.StatusCode:
    """Send bytes and return the status. Fails for a status that means an internal error or mentions one."""
    method = SERVICE.methods_by_name[name]
    path = f"/{SERVICE.full_name}/{name}"
    try:
        if method.server_streaming:
            stream: Any = server.channel.unary_stream(path)(payload, timeout=0.5)
            async for _ in stream:
                pass
        else:
            unary: Any = server.channel.unary_unary(path)
            await unary(payload, timeout=0.5 if name == "WaitRollout" else 30)
    except grpc.aio.AioRpcError as error:
        return checked(Refusal.of(error))
    return grpc.StatusCode.OK


def checked(refused: Refusal) -> grpc.StatusCode:
    """The code of a refusal, which must have a text and blame the caller."""
    assert refused.code not in FAULTS, refused
    assert len(refused.text) < 2000
    assert "Traceback" not in refused.text
    return refused.code


@pytest.mark.parametrize("name", METHODS)
@QUICK
@given(seed=st.integers(0, 2**64 - 1), wild=st.booleans())
async def test_requests_of_any_kind_are_answered_or_refused_in_words(
    server: Caller, uids: list[str], name: str, seed: int, wild: bool
) -> None:
    builder = Builder(random.Random(seed), uids)
    descriptor = SERVICE.methods_by_name[name].input_type
    if wild:
        request = builder.fill(descriptor)
    else:
        request = good(name, uids)
        request.MergeFrom(builder.fill(descriptor, often=0.08))
    await send(server, name, request.SerializeToString())


@pytest.mark.parametrize("name", METHODS)
@QUICK
@given(data=st.data())
async def test_bytes_of_any_kind_are_answered_or_refused_in_words(
    server: Caller, uids: list[str], name: str, data: st.DataObject
) -> None:
    payload = bytearray(good(name, uids).SerializeToString())
    if data.draw(st.booleans()):
        payload = bytearray(data.draw(st.binary(max_size=200)))
    for _ in range(data.draw(st.integers(0, 4))):
        place = data.draw(st.integers(0, len(payload)))
        payload[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=8))
    await send(server, name, bytes(payload))


async def test_the_fuzzer_comes_far_enough(server: Caller, uids: list[str]) -> None:
    """The fuzzer gets past validation: some of its requests are accepted, some are refused."""
    codes = set()
    for seed in range(150):
        request = start(agent="idle")
        request.MergeFrom(Builder(random.Random(seed), uids).fill(request.DESCRIPTOR, often=0.05))
        codes.add(await send(server, "StartRollout", request.SerializeToString()))
    assert {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT} <= codes


async def test_the_server_is_none_the_worse_for_it(server: Caller, uids: list[str]) -> None:
    """Afterwards the server serves, stores no more rollouts than allowed, and has no metrics with names from requests."""
    for seed in range(100):
        request = start(agent="idle")
        request.MergeFrom(Builder(random.Random(seed), uids).fill(request.DESCRIPTOR, often=0.05))
        await send(server, "StartRollout", request.SerializeToString())
    rollout = await server.play(start(agent="idle"))
    assert rollout.outcome.stop.reason == "stop"

    async def kept() -> int:
        return len((await server.stub.ListRollouts(pb.ListRolloutsRequest(page_size=1000))).rollouts)

    async def are_few() -> bool:
        return await kept() <= KEPT

    await until(are_few)
    assert (await server.stub.GetServerInfo(pb.GetServerInfoRequest())).finished > KEPT
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.server.http_port}", trust_env=False) as http:
        exposition = (await http.get("/metrics")).text
    assert "rollout_" in exposition
    assert LEAK not in exposition
    assert len(exposition.splitlines()) < 2000
