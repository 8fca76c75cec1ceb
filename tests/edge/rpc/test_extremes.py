"""Malicious callers and unusual hosts."""

from __future__ import annotations

import socket

import grpc
import pytest
from osmosis.rollout.v1 import event_pb2, message_pb2
from osmosis.rollout.v1 import rollout_service_pb2 as pb

from tests.support.agents import Idle
from tests.support.server_client import Caller, serving
from tests.support.start_requests import chat, json_message, start

DEPTHS = range(880, 1000)


@pytest.mark.parametrize("form", ["json", "chat"])
async def test_json_of_any_depth_is_taken_and_can_be_read_or_is_refused(caller: Caller, form: str) -> None:
    seen: set[grpc.StatusCode] = set()
    for depth in DEPTHS:
        nested = '{"a":' * depth + "1" + "}" * depth
        part = message_pb2.ContentPart(json=nested)
        message = chat("user", part) if form == "chat" else json_message(f'{{"role":"user","x":{nested}}}')
        try:
            uid = (await caller.start(start(messages=[message]))).rollout.uid
            await caller.finished(uid, pb.ROLLOUT_VIEW_MESSAGES)
            await caller.events(uid, detail=event_pb2.EVENT_DETAIL_MESSAGES)
        except grpc.aio.AioRpcError as error:
            seen.add(error.code())
    assert seen <= {grpc.StatusCode.INVALID_ARGUMENT}


def ipv6() -> bool:
    """Whether this machine has an IPv6 loopback."""
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.skipif(not ipv6(), reason="no IPv6 here")
async def test_a_server_listens_on_ipv6() -> None:
    async with serving(Idle(), host="::1") as caller:
        assert caller.server.grpc_port > 0
