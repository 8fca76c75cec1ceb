"""Keys over gRPC on a real server: callers see their own rollouts, an admin sees all, and some rpcs need no key."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import struct
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from osmosis.rollout.v1 import group_pb2
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from rollout_server.edge.api_keys import entry_of

from tests.keys.test_keyring import put
from tests.support.agents import Gated, Idle
from tests.support.server_client import Caller, Refusal, refusal, serving, until
from tests.support.start_requests import start

pytestmark = pytest.mark.asyncio(loop_scope="module")

ALICE, BOB, ADMIN = "key-of-alice-0123", "key-of-bob-4567", "key-of-admin-89ab"
ENTRIES = (entry_of("alice", ALICE), entry_of("bob", BOB))
SECRETS = (ALICE, BOB, ADMIN, *(hashlib.sha256(key.encode()).hexdigest() for key in (ALICE, BOB, ADMIN)))


def bearing(key: str) -> Sequence[tuple[str, str]]:
    return (("authorization", f"Bearer {key}"),)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[Caller]:
    async with serving(Gated(), Idle(), api_keys=ENTRIES, admin_key=ADMIN) as caller:
        yield caller


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def uid(server: Caller) -> str:
    """A waiting rollout of Alice's."""
    started = await server.stub.StartRollout(start("alices"), metadata=bearing(ALICE))
    found: str = started.rollout.uid
    return found


def calls(uid: str) -> dict[str, Any]:
    """The calls that concern one rollout."""
    return {
        "GetRollout": pb.GetRolloutRequest(uid=uid, view=pb.ROLLOUT_VIEW_FULL),
        "WatchRollout": pb.WatchRolloutRequest(uid=uid),
        "WaitRollout": pb.WaitRolloutRequest(uid=uid),
        "CancelRollouts": pb.CancelRolloutsRequest(selection=pb.Selection(uids=[uid])),
        "AcknowledgeOutcome": pb.AcknowledgeOutcomeRequest(uid=uid),
        "RedeliverOutcomes": pb.RedeliverOutcomesRequest(selection=pb.Selection(uids=[uid])),
        "DecodeTokens": pb.DecodeTokensRequest(uid=uid, segment_id="0"),
    }


ABOUT_ONE = list(calls(""))
KEYED = {
    **calls("x"),
    "StartRollout": start(),
    "RunRollout": pb.RunRolloutRequest(start=start()),
    "ListRollouts": pb.ListRolloutsRequest(),
    "StartGroup": group_pb2.StartGroupRequest(spec=start().spec, count=2),
    "WatchGroup": pb.WatchGroupRequest(group_id="x"),
    "GetGroup": group_pb2.GetGroupRequest(group_id="x"),
    "RenderPrompt": pb.RenderPromptRequest(spec=start().spec),
    "SetPolicy": pb.SetPolicyRequest(policy={}),
    "ListTools": pb.ListToolsRequest(),
    "ListAgents": pb.ListAgentsRequest(),
}


async def answered(server: Caller, name: str, request: Any, key: str | None = None, **call: Any) -> Any:
    """The response, or the first item of a stream."""
    if key is not None:
        call["metadata"] = bearing(key)
    called = getattr(server.stub, name)(request, **call)
    if name in ("WatchRollout", "RunRollout", "WatchGroup"):
        try:
            return await called.read()
        finally:
            called.cancel()
    return await called


def check_silent(refused: Refusal) -> None:
    """Assert that a refusal contains no key and no hash of one."""
    for secret in SECRETS:
        assert secret not in repr(refused)


async def test_the_methods_are_all_of_the_contract() -> None:
    methods = pb.DESCRIPTOR.services_by_name["RolloutService"].methods_by_name
    assert KEYED.keys() | {"GetServerInfo"} == set(methods)


@pytest.mark.parametrize("name", ABOUT_ONE)
async def test_a_rollout_of_somebody_else_does_not_exist(server: Caller, uid: str, name: str) -> None:
    theirs = await refusal(answered(server, name, calls(uid)[name], BOB))
    nobodys = await refusal(answered(server, name, calls("0" * len(uid))[name], BOB))
    assert (theirs.code, theirs.reason) == (nobodys.code, nobodys.reason)
    assert theirs.code is grpc.StatusCode.NOT_FOUND
    assert theirs.text.replace(uid, "") == nobodys.text.replace("0" * len(uid), "")
    check_silent(theirs)
    still = await answered(server, "GetRollout", calls(uid)["GetRollout"], ALICE)
    assert still.rollout.state != pb.ROLLOUT_STATE_FINISHED


@pytest.mark.parametrize("key", [ALICE, ADMIN])
async def test_its_owner_and_an_admin_see_it(server: Caller, uid: str, key: str) -> None:
    got = await answered(server, "GetRollout", calls(uid)["GetRollout"], key)
    assert (got.rollout.uid, got.rollout.caller) == (uid, "alice")
    item = await answered(server, "WatchRollout", calls(uid)["WatchRollout"], key)
    assert item.event.sequence == 1


async def test_a_group_of_somebody_else_does_not_exist(server: Caller) -> None:
    request = group_pb2.StartGroupRequest(spec=start(agent="idle", group_id="theirs").spec, count=2)
    group = (await answered(server, "StartGroup", request, ALICE)).group
    get, watch = group_pb2.GetGroupRequest(group_id="theirs"), pb.WatchGroupRequest(group_id="theirs")
    for name, look in (("GetGroup", get), ("WatchGroup", watch)):
        refused = await refusal(answered(server, name, look, BOB))
        assert (refused.code, refused.reason) == (grpc.StatusCode.NOT_FOUND, "GROUP_NOT_FOUND")
        check_silent(refused)
    for key in (ALICE, ADMIN):
        assert (await answered(server, "GetGroup", get, key)).group.caller == "alice"
        assert (await answered(server, "WatchGroup", watch, key)).outcome.rollout.caller == "alice"
    own = (await answered(server, "StartGroup", request, BOB)).group
    assert own.members[0].uid != group.members[0].uid
    assert (await answered(server, "GetGroup", get, BOB)).group.members[0].uid == own.members[0].uid


async def listed(server: Caller, key: str, **selection: Any) -> list[str]:
    request = pb.ListRolloutsRequest(selection=pb.Selection(**selection))
    return [each.uid for each in (await answered(server, "ListRollouts", request, key)).rollouts]


async def test_lists_hold_ones_own(server: Caller, uid: str) -> None:
    bobs = (await answered(server, "StartRollout", start("bobs"), BOB)).rollout.uid
    for selection in ({}, {"all": True}, {"uids": [uid, bobs]}, {"rollout_ids": ["r"]}):
        assert uid in await listed(server, ALICE, **selection)
        assert bobs not in await listed(server, ALICE, **selection)
        assert bobs in await listed(server, BOB, **selection)
        assert uid not in await listed(server, BOB, **selection)
        assert {uid, bobs} <= set(await listed(server, ADMIN, **selection))
    assert await listed(server, ALICE, callers=["alice"]) == await listed(server, ALICE)
    assert bobs not in await listed(server, ADMIN, callers=["alice"])
    assert await listed(server, BOB, uids=[uid]) == []


@pytest.mark.parametrize("callers", [["alice"], ["bob", "alice"], ["nobody"], [""]])
async def test_to_ask_for_others_by_name_needs_the_admin_key(server: Caller, callers: list[str]) -> None:
    selection = pb.Selection(callers=callers)
    for name, request in (
        ("ListRollouts", pb.ListRolloutsRequest(selection=selection)),
        ("CancelRollouts", pb.CancelRolloutsRequest(selection=selection)),
    ):
        refused = await refusal(answered(server, name, request, BOB))
        assert refused.code is grpc.StatusCode.PERMISSION_DENIED
        check_silent(refused)


async def test_to_cancel_all_means_ones_own_and_for_an_admin_everybodys(server: Caller) -> None:
    one, two = [
        (await answered(server, "StartRollout", start(f"to cancel {key}"), key)).rollout.uid for key in (ALICE, BOB)
    ]
    every = pb.CancelRolloutsRequest(selection=pb.Selection(uids=[one, two]))
    assert (await refusal(answered(server, "CancelRollouts", every, ALICE))).code is grpc.StatusCode.NOT_FOUND
    all_ = pb.CancelRolloutsRequest(selection=pb.Selection(all=True, labels={}), reason="tidy")
    cancelled = (await answered(server, "CancelRollouts", all_, BOB)).uids
    assert two in cancelled
    assert one not in cancelled
    assert one in (await answered(server, "CancelRollouts", every, ADMIN)).uids


async def test_two_callers_may_use_the_same_request_id(server: Caller) -> None:
    one = await answered(server, "StartRollout", start("same", agent="idle"), ALICE)
    two = await answered(server, "StartRollout", start("same", agent="idle", rollout_id="another"), BOB)
    again = await answered(server, "StartRollout", start("same", agent="idle"), ALICE)
    assert (one.attached, two.attached, again.attached) == (False, False, True)
    assert one.rollout.uid == again.rollout.uid != two.rollout.uid


@pytest.mark.parametrize("name", KEYED)
@pytest.mark.parametrize("key", [None, "", "nonsense", ALICE[:-1], f"{ALICE},{BOB}"])
async def test_without_a_key_nothing_is_answered(server: Caller, name: str, key: str | None) -> None:
    refused = await refusal(answered(server, name, KEYED[name], key))
    assert (refused.code, refused.reason) == (grpc.StatusCode.UNAUTHENTICATED, "KEY_NEEDED")
    assert refused.metadata["request_id"] == refused.request_id
    check_silent(refused)
    assert "nonsense" not in repr(refused)


@pytest.mark.parametrize(
    "metadata",
    [
        (("authorization-bin", f"Bearer {ALICE}".encode()),),
        (("authorization-bin", b"\xff\xfe\x00"),),
        (("x-api-key", ALICE),),
        (("authorization", f"Basic {ALICE}"),),
        (("authorization", f"Bearer {ALICE}"), ("authorization", "Bearer nonsense")),
    ],
)
async def test_a_key_stands_in_its_header_or_nowhere(server: Caller, metadata: Any) -> None:
    refused = await refusal(answered(server, "ListAgents", pb.ListAgentsRequest(), metadata=metadata))
    assert refused.code is grpc.StatusCode.UNAUTHENTICATED
    check_silent(refused)


async def test_a_key_is_asked_for_before_the_request_is_read(server: Caller) -> None:
    """No error reveals how this server would parse a request, or that it would refuse to read it."""
    method = f"/{pb.DESCRIPTOR.services_by_name['RolloutService'].full_name}/StartRollout"
    call: Any = server.channel.unary_unary(method)
    assert (await refusal(call(b"\xff" * 100))).code is grpc.StatusCode.UNAUTHENTICATED
    wrong = await refusal(call(b"\xff" * 100, metadata=bearing(ALICE)))
    assert wrong.code is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("key", [None, "nonsense", ALICE])
async def test_what_is_open_needs_none(server: Caller, key: str | None) -> None:
    call = {} if key is None else {"metadata": bearing(key)}
    told = await server.stub.GetServerInfo(pb.GetServerInfoRequest(), **call)
    assert told.keys_required
    health: Any = health_pb2_grpc.HealthStub(server.channel)  # type: ignore[no-untyped-call]
    checked = await health.Check(health_pb2.HealthCheckRequest(), **call)
    assert checked.status == health_pb2.HealthCheckResponse.SERVING
    reflection: Any = reflection_pb2_grpc.ServerReflectionStub(server.channel)  # type: ignore[no-untyped-call]
    asking = reflection.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]), **call)
    names = {service.name for service in (await asking.read()).list_services_response.service}
    assert "osmosis.rollout.v1.RolloutService" in names


async def test_without_keys_there_is_no_such_demand() -> None:
    async with serving(Idle()) as server:
        assert not (await server.stub.GetServerInfo(pb.GetServerInfoRequest())).keys_required
        started = await answered(server, "StartRollout", start(), "anything")
        assert started.rollout.caller == "anonymous"
        assert (await answered(server, "GetRollout", calls(started.rollout.uid)["GetRollout"])).rollout.uid


async def test_a_file_of_keys_is_replaced_under_a_running_server(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys"
    put(file, ENTRIES[0])
    async with serving(Idle(), api_keys_file=file) as server:

        async def lets_in(key: str) -> bool:
            try:
                await answered(server, "ListAgents", pb.ListAgentsRequest(), key)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAUTHENTICATED:
                    raise
                return False
            return True

        assert (await lets_in(ALICE), await lets_in(BOB)) == (True, False)
        put(file, ENTRIES[1], "a line that is no entry")

        async def complained() -> bool:
            return "stay unchanged" in caplog.text

        await until(complained)
        assert (await lets_in(ALICE), await lets_in(BOB)) == (True, False)
        put(file, ENTRIES[1])

        async def turned() -> bool:
            return await lets_in(BOB)

        await until(turned)
        assert not await lets_in(ALICE)


async def raw_call(port: int, authorization: bytes) -> bytes:
    """The server's response to a call with arbitrary header bytes, which gRPC's own clients do not send."""

    def literal(name: bytes, value: bytes) -> bytes:
        return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value

    def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
        return len(payload).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, stream) + payload

    path = b"/osmosis.rollout.v1.RolloutService/ListAgents"
    fields = [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", path),
        (b":authority", b"a"),
        (b"te", b"trailers"),
    ]
    fields += [(b"content-type", b"application/grpc"), (b"authorization", authorization)]
    block = b"".join(literal(*each) for each in fields)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0) + frame(1, 4, 1, block) + frame(0, 1, 1, bytes(5))
    )
    got = b""
    try:
        while frame(1, 5, 1)[3:] not in got and (more := await asyncio.wait_for(reader.read(2**16), 10)):
            got += more
    finally:
        writer.close()
    return got


@pytest.mark.parametrize("value", ["Bearer schlüssel", "Bearer 🔑", "ключ"], ids=["latin", "emoji", "cyrillic"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16-le"])
async def test_bytes_beyond_ascii_are_no_key_and_no_fault_of_ours(
    server: Caller, value: str, encoding: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    got = await raw_call(server.server.grpc_port, value.encode(encoding))
    assert b"grpc-status" in got
    assert b"INTERNAL" not in got
    assert await answered(server, "ListAgents", pb.ListAgentsRequest(), ALICE)
    # gRPC logs header bytes that are not UTF-8. `logs.set_up` suppresses that, which test_planted_secrets checks.
    expected = ("grpc.", "rollout_server.edge.api_keys")
    assert [record for record in caplog.records if not record.name.startswith(expected)] == []
