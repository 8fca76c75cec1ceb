"""The statuses of the contract, with their details, and request ids."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from osmosis.rollout.v1 import rollout_service_pb2 as pb

from tests.edge.rpc.conftest import OpenServer
from tests.support.agents import Breaking, Crumbling, Gated, Idle
from tests.support.server_client import REQUEST_ID, Caller, Refusal, first, refusal
from tests.support.start_requests import metadata, seconds, start

UNKNOWN = "0123456789abcdef0123"


def right(refused: Refusal, code: grpc.StatusCode, reason: str) -> None:
    """Assert what all refusals have in common."""
    assert (refused.code, refused.reason, refused.domain) == (code, reason, "rollout.osmosis")
    assert refused.metadata["request_id"] == refused.request_id != ""


async def test_what_has_not_finished_cannot_be_acknowledged(caller: Caller) -> None:
    uid = (await caller.start(start(agent="gated"))).rollout.uid
    refused = await refusal(caller.stub.AcknowledgeOutcome(pb.AcknowledgeOutcomeRequest(uid=uid)))
    right(refused, grpc.StatusCode.FAILED_PRECONDITION, "ROLLOUT_NOT_FINISHED")


@pytest.mark.parametrize(
    ("method", "request_"),
    [
        ("GetRollout", pb.GetRolloutRequest(uid=UNKNOWN)),
        ("WaitRollout", pb.WaitRolloutRequest(uid=UNKNOWN)),
        ("AcknowledgeOutcome", pb.AcknowledgeOutcomeRequest(uid=UNKNOWN)),
        ("CancelRollouts", pb.CancelRolloutsRequest(selection=pb.Selection(uids=[UNKNOWN]))),
        ("RedeliverOutcomes", pb.RedeliverOutcomesRequest(selection=pb.Selection(uids=[UNKNOWN]))),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_rollout_that_is_not_there_is_not_found(caller: Caller, method: str, request_: Any) -> None:
    refused = await refusal(getattr(caller.stub, method)(request_))
    right(refused, grpc.StatusCode.NOT_FOUND, "ROLLOUT_NOT_FOUND")
    assert UNKNOWN in refused.text


async def test_watching_a_rollout_that_is_not_there_is_not_found(caller: Caller) -> None:
    right(await refusal(caller.watch(UNKNOWN).read()), grpc.StatusCode.NOT_FOUND, "ROLLOUT_NOT_FOUND")


async def test_one_uid_that_is_not_there_cancels_nobody(caller: Caller) -> None:
    uid = (await caller.start(start(agent="gated"))).rollout.uid
    request = pb.CancelRolloutsRequest(selection=pb.Selection(uids=[uid, UNKNOWN]))
    right(await refusal(caller.stub.CancelRollouts(request)), grpc.StatusCode.NOT_FOUND, "ROLLOUT_NOT_FOUND")
    waited = await caller.stub.WaitRollout(pb.WaitRolloutRequest(uid=uid, timeout=seconds(0.05)))
    assert waited.rollout.state == pb.ROLLOUT_STATE_RUNNING


AGENT_CALLS: list[Callable[[Caller], Any]] = [
    lambda caller: caller.stub.StartRollout(start(agent="nobody")),
    lambda caller: caller.stub.RunRollout(pb.RunRolloutRequest(start=start(agent="nobody"))).read(),
    lambda caller: caller.stub.ListTools(pb.ListToolsRequest(agent="nobody")),
]


@pytest.mark.parametrize("call", AGENT_CALLS, ids=["start", "run", "tools"])
async def test_an_unknown_agent_is_not_found(caller: Caller, call: Callable[[Caller], Any]) -> None:
    refused = await refusal(call(caller))
    right(refused, grpc.StatusCode.NOT_FOUND, "AGENT_NOT_FOUND")
    assert "'nobody'" in refused.text
    assert "idle" in refused.text


async def test_one_more_than_can_wait_comes_again_later(open_server: OpenServer, gated: Gated) -> None:
    caller = await open_server(gated, max_running=1, max_queued=1)
    uids = [(await caller.start(start("first" if n else ""))).rollout.uid for n in range(2)]
    refused = await refusal(caller.start(start("second")))
    right(refused, grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_ROLLOUTS")
    assert refused.retry_after == 1.0
    assert (await caller.start(start("first"))).rollout.uid == uids[1]
    gated.gate.set()
    for uid in uids:
        await caller.finished(uid)
    assert not (await caller.start(start("second"))).attached


async def test_a_draining_server_takes_nobody_and_still_serves_the_others(
    open_server: OpenServer, gated: Gated
) -> None:
    caller = await open_server(gated)
    uid = (await caller.start(start("known"))).rollout.uid
    draining = asyncio.create_task(caller.server.drain())
    await asyncio.sleep(0)
    refused = await refusal(caller.start(start()))
    right(refused, grpc.StatusCode.UNAVAILABLE, "DRAINING")
    assert refused.retry_after is not None
    assert refused.retry_after > 0
    assert (await caller.start(start("known"))).attached
    gated.gate.set()
    assert (await caller.finished(uid)).outcome.stop.reason == "stop"
    await draining


async def test_a_status_arrives_whatever_was_asked_for(caller: Caller) -> None:
    for name in ("\N{GRINNING FACE}" * 1000, "ü%" * 1000, "\x01" * 1000, "x" * 100_000):
        for _ in range(20):  # clients drop statuses of more than 8 KB with a probability that grows with their size
            refused = await refusal(caller.stub.ListTools(pb.ListToolsRequest(agent=name)))
            right(refused, grpc.StatusCode.NOT_FOUND, "AGENT_NOT_FOUND")


@pytest.mark.parametrize("method", ["ListTools", "ListAgents"])
async def test_a_fault_of_ours_shows_nothing_of_its_insides(
    open_server: OpenServer, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    breaking = Breaking()
    caller = await open_server(breaking)
    breaking.tool.broken = True
    refused = await refusal(getattr(caller.stub, method)(getattr(pb, f"{method}Request")()))
    right(refused, grpc.StatusCode.INTERNAL, "INTERNAL")
    assert Crumbling.SECRET not in refused.text
    assert refused.request_id in refused.text
    record = next(record for record in caplog.records if record.levelname == "ERROR")
    assert record.exc_info is not None
    assert vars(record)["request_id"] == refused.request_id
    await caller.stub.GetServerInfo(pb.GetServerInfoRequest())


async def test_a_fault_in_a_stream_shows_nothing_of_its_insides(open_server: OpenServer) -> None:
    breaking = Breaking()
    caller = await open_server(Idle(), breaking)
    await caller.start(start("id", agent="breaking"))
    breaking.tool.broken = True
    running = caller.stub.RunRollout(pb.RunRolloutRequest(start=start("id", agent="breaking")))
    refused = await refusal(running.read())
    right(refused, grpc.StatusCode.INTERNAL, "INTERNAL")
    assert Crumbling.SECRET not in refused.text


@pytest.mark.parametrize("sent", ["mine", "x" * 128, "a b~!{}"])
async def test_a_request_id_comes_back(caller: Caller, sent: str) -> None:
    call = caller.stub.GetServerInfo(pb.GetServerInfoRequest(), metadata=((REQUEST_ID, sent),))
    await call
    assert dict(await call.trailing_metadata())[REQUEST_ID] == sent
    refused = await refusal(caller.stub.GetRollout(pb.GetRolloutRequest(uid="x"), metadata=((REQUEST_ID, sent),)))
    assert refused.request_id == refused.metadata["request_id"] == sent
    watching = caller.stub.WatchRollout(pb.WatchRolloutRequest(uid="x"), metadata=((REQUEST_ID, sent),))
    assert (await refusal(watching.read())).metadata["request_id"] == sent


@pytest.mark.parametrize("sent", [None, "", "x" * 129])
async def test_a_call_without_a_fit_request_id_gets_one(caller: Caller, sent: str | None) -> None:
    given: list[str] = []
    for _ in range(2):
        call = caller.stub.ListAgents(
            pb.ListAgentsRequest(), metadata=((REQUEST_ID, sent),) if sent is not None else ()
        )
        await call
        given.append(str(dict(await call.trailing_metadata())[REQUEST_ID]))
    assert "" not in given
    assert sent not in given
    assert len(set(given)) == 2


async def test_a_stream_tells_its_request_id_before_its_first_item(caller: Caller, gated: Gated) -> None:
    request = pb.RunRolloutRequest(start=start(agent="gated", metadata_json=metadata(before=1)))
    running = caller.stub.RunRollout(request, metadata=((REQUEST_ID, "mine"),))
    assert dict(await running.initial_metadata())[REQUEST_ID] == "mine"
    gated.gate.set()
    assert len(await first(running, 4)) == 4
