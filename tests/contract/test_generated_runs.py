"""The generated code works with the installed runtime: it imports, messages survive the wire, stubs call servicers.

It runs in every environment, from the oldest grpcio and protobuf on, so it imports nothing else.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from google.protobuf import json_format, message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from osmosis.rollout import v1
from osmosis.rollout.v1 import (
    completion_service_pb2_grpc,
    message_pb2,
    outcome_service_pb2_grpc,
    rollout_service_pb2,
    rollout_service_pb2_grpc,
    spec_pb2,
    token_pb2,
    tool_service_pb2_grpc,
    trainer_service_pb2,
    trainer_service_pb2_grpc,
)

MODULES = sorted(m.name for m in pkgutil.iter_modules(v1.__path__, "osmosis.rollout.v1."))
SERVICES = {
    "RolloutService": rollout_service_pb2_grpc,
    "TrainerService": trainer_service_pb2_grpc,
    "CompletionService": completion_service_pb2_grpc,
    "OutcomeService": outcome_service_pb2_grpc,
    "ToolService": tool_service_pb2_grpc,
}


def message_types() -> list[Descriptor]:
    """Every message of the contract, without map entries."""
    files = [importlib.import_module(name).DESCRIPTOR for name in MODULES if name.endswith("_pb2")]
    return [descriptor for file in files for descriptor in file.message_types_by_name.values()]


SCALARS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.CPPTYPE_INT32: st.integers(-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: st.integers(-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: st.sampled_from((0, 2**31 - 1, 2**32 - 1)) | st.integers(0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: st.integers(0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_DOUBLE: st.floats(allow_nan=False),
    # JSON rounds the largest value up, out of range.
    FieldDescriptor.CPPTYPE_FLOAT: st.floats(-(2.0**99), 2.0**99, width=32),
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
}
# Durations and timestamps have their own bounds.
TIMES = {"google.protobuf.Duration": st.integers(-(2**33), 2**33), "google.protobuf.Timestamp": st.integers(0, 2**33)}


def values(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    """Values for a field; messages as constructor arguments."""
    if field.message_type is not None:
        if field.message_type.full_name in TIMES:
            return TIMES[field.message_type.full_name].map(lambda seconds: {"seconds": seconds})
        return arguments(field.message_type, depth - 1)
    if field.enum_type is not None:
        return st.sampled_from([value.number for value in field.enum_type.values])
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return st.binary(max_size=8) if field.type == FieldDescriptor.TYPE_BYTES else st.text(max_size=8)
    return SCALARS[field.cpp_type]


def arguments(descriptor: Descriptor, depth: int) -> st.SearchStrategy[dict[str, Any]]:
    """Some fields of a message, at most one of each oneof."""
    optional: dict[str, st.SearchStrategy[Any]] = {}
    for field in descriptor.fields:
        if field.message_type is not None and depth <= 0:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            entry = field.message_type.fields_by_name
            optional[field.name] = st.dictionaries(values(entry["key"], 0), values(entry["value"], depth), max_size=2)
        elif field.is_repeated:
            optional[field.name] = st.lists(values(field, depth), max_size=2)
        else:
            optional[field.name] = values(field, depth)
    alternatives = [{f.name for f in oneof.fields} for oneof in descriptor.oneofs]
    return st.fixed_dictionaries({}, optional=optional).map(lambda chosen: _one_of_each(chosen, alternatives))


def _one_of_each(chosen: dict[str, Any], alternatives: list[set[str]]) -> dict[str, Any]:
    dropped = {name for names in alternatives for name in sorted(names & chosen.keys())[1:]}
    return {name: value for name, value in chosen.items() if name not in dropped}


@pytest.mark.parametrize("name", MODULES)
def test_every_generated_module_imports(name: str) -> None:
    importlib.import_module(name)


@pytest.mark.parametrize("descriptor", message_types(), ids=lambda d: d.name)
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(data=st.data())
def test_every_message_survives_the_wire(descriptor: Descriptor, data: st.DataObject) -> None:
    kind = message_factory.GetMessageClass(descriptor)
    message: Message = kind(**data.draw(arguments(descriptor, 1)))
    sent = message.SerializeToString()
    assert kind.FromString(sent) == message
    assert len(sent) == message.ByteSize()
    assert json_format.Parse(json_format.MessageToJson(message), kind()) == message


def test_unset_and_zero_are_told_apart() -> None:
    unset, zero = spec_pb2.Sampling(), spec_pb2.Sampling(temperature=0.0)
    for sampling, present in ((unset, False), (zero, True)):
        arrived = spec_pb2.Sampling.FromString(sampling.SerializeToString())
        assert arrived.HasField("temperature") is present


def test_a_message_has_one_form() -> None:
    message = message_pb2.Message(json="{}")
    message.chat.role = "user"
    assert message.WhichOneof("form") == "chat"


def test_ids_and_logprobs_keep_every_bit() -> None:
    span = token_pb2.Span(token_ids=[0, 2**31 - 1], logprobs=token_pb2.Logprobs(values=[-0.1, -0.0]))
    arrived = token_pb2.Span.FromString(span.SerializeToString())
    assert list(arrived.token_ids) == [0, 2**31 - 1]
    assert [value.hex() for value in arrived.logprobs.values] == [value.hex() for value in span.logprobs.values]


def test_an_unknown_event_of_a_newer_sender_is_skipped_and_kept() -> None:
    newer = b"\xfa\x07\x02hi"  # field 127, two bytes
    info = rollout_service_pb2.GetServerInfoResponse(version="1")
    arrived = rollout_service_pb2.GetServerInfoResponse.FromString(info.SerializeToString() + newer)
    assert arrived.version == "1"
    assert arrived.SerializeToString().endswith(newer)


class Rollouts(rollout_service_pb2_grpc.RolloutServiceServicer):
    """One unary and one streaming method; the others are as generated."""

    def GetServerInfo(self, request: Any, context: Any) -> Any:  # noqa: N802
        return rollout_service_pb2.GetServerInfoResponse(version="1.2")

    def WatchRollout(self, request: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        for sequence in range(request.after_sequence + 1, 4):
            response = rollout_service_pb2.WatchRolloutResponse()
            response.event.sequence = sequence
            yield response


class Trainers(trainer_service_pb2_grpc.TrainerServiceServicer):
    """Acknowledge every item."""

    def Train(self, request_iterator: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        for item in request_iterator:
            acknowledge = trainer_service_pb2.TrainAcknowledge(sequence=item.sequence)
            yield trainer_service_pb2.TrainResponse(acknowledge=acknowledge)


@pytest.fixture
def channel() -> Iterator[grpc.Channel]:
    """A channel to a server of all services."""
    server = grpc.server(ThreadPoolExecutor(2))
    for name, module in SERVICES.items():
        servicer = {"RolloutService": Rollouts, "TrainerService": Trainers}.get(
            name, getattr(module, f"{name}Servicer")
        )
        getattr(module, f"add_{name}Servicer_to_server")(servicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    server.stop(None)


def test_stubs_and_servicers_talk(channel: grpc.Channel) -> None:
    stub = rollout_service_pb2_grpc.RolloutServiceStub(channel)
    info = stub.GetServerInfo(rollout_service_pb2.GetServerInfoRequest(), timeout=10)
    assert info.version == "1.2"
    events = stub.WatchRollout(rollout_service_pb2.WatchRolloutRequest(uid="u", after_sequence=1), timeout=10)
    assert [response.event.sequence for response in events] == [2, 3]


def test_a_stream_goes_both_ways(channel: grpc.Channel) -> None:
    stub = trainer_service_pb2_grpc.TrainerServiceStub(channel)
    items = (trainer_service_pb2.TrainRequest(sequence=n) for n in (1, 2))
    assert [item.acknowledge.sequence for item in stub.Train(items, timeout=10)] == [1, 2]


@pytest.mark.parametrize("name", SERVICES)
def test_what_nobody_wrote_is_unimplemented(channel: grpc.Channel, name: str) -> None:
    """This also shows that every rpc of the contract has a stub."""
    stub = getattr(SERVICES[name], f"{name}Stub")(channel)
    module = importlib.import_module(SERVICES[name].__name__.removesuffix("_grpc"))
    for method in module.DESCRIPTOR.services_by_name[name].methods:
        call = getattr(stub, method.name)
        if method.client_streaming or method.server_streaming or method.name == "GetServerInfo":
            continue
        request = message_factory.GetMessageClass(method.input_type)()
        with pytest.raises(grpc.RpcError) as caught:
            call(request, timeout=10)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
