"""Outcomes over gRPC: which codes acknowledge, refuse finally, or are retried; each attempt sends the same bytes."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import pytest
from osmosis.rollout.v1 import outcome_service_pb2 as pb
from osmosis.rollout.v1 import rollout_service_pb2
from rollout_server.core.spec import Dialect, Target
from rollout_server.edge.grpc_channels import Channels
from rollout_server.edge.outcome.grpc import GrpcCourier
from rollout_server.edge.rpc.tls import ClientTls
from rollout_server.edge.targets.resolver import CheckedLookup
from rollout_server.edge.targets.rules import TargetRules
from rollout_server.runtime.outcome_delivery import (
    DeliveryAcknowledged,
    DeliveryRefused,
    DeliveryUnsettled,
    PackedOutcome,
    Receipt,
)

from tests.support.outcome_receiver import Answer, grpc_receiver

SECRET = "sk-outcome-0123456789abcdef"
BODY = pb.DeliverOutcomeRequest(
    delivery_key="u1/outcome", rollout=rollout_service_pb2.Rollout(uid="u1", caller="ü")
).SerializeToString()
PROTO = Path(__file__).parents[3] / "protos/osmosis/rollout/v1/outcome_service.proto"
CODES = [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK]

Make = Callable[..., GrpcCourier]


def parcel(url: str, credential: str = SECRET) -> PackedOutcome:
    return PackedOutcome(Target(url, Dialect.GRPC), "u1/outcome", BODY, credential)


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    """`make(rules, timeout)`: a reporter that may call what the rules allow."""
    opened: list[Channels | CheckedLookup] = []

    def courier(rules: str = "", timeout: float = 20.0) -> GrpcCourier:
        lookup = CheckedLookup(TargetRules.parse(rules))
        channels = Channels(lookup, ClientTls(None))
        opened.extend((channels, lookup))
        return GrpcCourier(channels, timeout)

    yield courier
    for each in opened:
        await each.close()


def tried_again() -> set[str]:
    """The retried codes according to the contract's comment."""
    comment = (
        PROTO.read_text().partition("rpc DeliverOutcome")[0].rpartition("once.")[2].partition("it is sent again")[0]
    )
    return set(re.findall(r"[A-Z_]{5,}", comment))


async def met(courier: GrpcCourier, *answers: Answer) -> list[Receipt]:
    """The receipts of these attempts, which must be identical calls."""
    async with grpc_receiver(*answers) as receiver:
        receipts = [await courier.deliver(parcel(receiver.url)) for _ in answers]
        came = receiver.came
    assert [each.raw for each in came] == [BODY] * len(answers)
    assert {each.metadata["authorization"] for each in came} == {f"Bearer {SECRET}"}
    assert {each.request.delivery_key for each in came} == {"u1/outcome"}
    return receipts


def test_the_contract_names_codes() -> None:
    assert {"UNAVAILABLE", "INTERNAL", "CANCELLED"} <= tried_again() < {code.name for code in CODES}


@pytest.mark.parametrize("body", [b"", b"\xff no message at all", b"x" * 2**20])
async def test_ok_acknowledges_whatever_it_holds(make: Make, body: bytes) -> None:
    assert await met(make(), Answer(body=body)) == [DeliveryAcknowledged()]


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
async def test_codes_mean_what_the_contract_says(make: Make, code: grpc.StatusCode) -> None:
    first, second = await met(make(), Answer(code, "I do not like it"), Answer())
    assert isinstance(first, DeliveryUnsettled if code.name in tried_again() else DeliveryRefused)
    assert code.name in first.text
    assert "I do not like it" in first.text
    assert second == DeliveryAcknowledged()


async def test_a_receiver_without_the_service_refuses(make: Make) -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    receipt = await make().deliver(parcel(f"grpc://127.0.0.1:{port}"))
    await server.stop(0)
    assert isinstance(receipt, DeliveryRefused)
    assert "UNIMPLEMENTED" in receipt.text


async def test_silence_has_an_end(make: Make) -> None:
    (receipt,) = await met(make(timeout=0.3), Answer(silent=True))
    assert isinstance(receipt, DeliveryUnsettled)
    assert "DEADLINE_EXCEEDED" in receipt.text


async def test_a_receiver_that_comes_back_is_reached_again(make: Make) -> None:
    courier = make()
    async with grpc_receiver() as receiver:
        port, url = receiver.port, receiver.url
        assert await courier.deliver(parcel(url)) == DeliveryAcknowledged()
    assert isinstance(await courier.deliver(parcel(url)), DeliveryUnsettled)
    async with grpc_receiver(port=port) as receiver:
        assert await courier.deliver(parcel(url)) == DeliveryAcknowledged()
        assert [each.raw for each in receiver.came] == [BODY]


async def test_who_speaks_no_grpc_is_to_be_tried_again(make: Make) -> None:
    async def speak_http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(speak_http, "127.0.0.1", 0) as server:
        receipt = await make(timeout=5.0).deliver(parcel(f"grpc://127.0.0.1:{server.sockets[0].getsockname()[1]}"))
    assert isinstance(receipt, DeliveryUnsettled)


async def test_nobody_there_is_to_be_tried_again(make: Make) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        receipt = await make().deliver(parcel(f"grpc://127.0.0.1:{bound.getsockname()[1]}"))
    assert isinstance(receipt, DeliveryUnsettled)
    assert "UNAVAILABLE" in receipt.text


async def test_a_name_that_nobody_knows_is_to_be_tried_again(make: Make) -> None:
    assert isinstance(await make().deliver(parcel("grpc://receiver.invalid:1")), DeliveryUnsettled)


async def test_a_receiver_that_the_rules_do_not_allow_is_final_and_not_called(make: Make) -> None:
    async with grpc_receiver() as receiver:
        receipt = await make("10.0.0.0/8").deliver(parcel(f"grpc://localhost:{receiver.port}"))
        assert receiver.came == []
    assert isinstance(receipt, DeliveryRefused)
    assert "ROLLOUT_TARGETS" in receipt.text


async def test_without_a_credential_no_metadata(make: Make) -> None:
    async with grpc_receiver() as receiver:
        assert await make().deliver(parcel(receiver.url, "")) == DeliveryAcknowledged()
        assert "authorization" not in receiver.came[0].metadata


@pytest.mark.parametrize(
    "code", [grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.INTERNAL], ids=lambda code: code.name
)
async def test_an_echo_of_the_credential_is_taken_out(make: Make, code: grpc.StatusCode) -> None:
    (receipt,) = await met(make(), Answer(code, f"no such key: Bearer {SECRET} " * 20))
    assert isinstance(receipt, DeliveryRefused | DeliveryUnsettled)
    assert SECRET[:14] not in receipt.text
    assert len(receipt.text) < 600


async def test_many_at_once_share_a_channel_and_none_is_closed_under_another(make: Make) -> None:
    """Half of the calls fail in a way that releases the channel while the others still wait for their response."""
    courier = make()
    answers = [Answer(grpc.StatusCode.UNAVAILABLE) if number % 2 else Answer() for number in range(40)]
    async with grpc_receiver(*answers) as receiver:
        receipts = await asyncio.gather(*(courier.deliver(parcel(receiver.url)) for _ in answers))
    assert sum(receipt == DeliveryAcknowledged() for receipt in receipts) == 20
    assert sum(isinstance(receipt, DeliveryUnsettled) for receipt in receipts) == 20
