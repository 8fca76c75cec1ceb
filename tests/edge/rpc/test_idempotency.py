"""Request ids over the wire: the same id and payload gives the same rollout, at any time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from rollout_server.testing.tokenizer import TOY_TOKENIZER
from rollout_server.testing.trainer import StrictTrainer

from tests.support.agents import Gated
from tests.support.server_client import Caller, first, refusal
from tests.support.start_requests import HELLO, chat, json_message, metadata, seconds, spec, start, target

UNTIL_RECEIVED = pb.REQUEST_MEMORY_UNTIL_RECEIVED


def keyed(bearer: str = "", memory: int = 0, **changes: Any) -> pb.StartRolloutRequest:
    """A request with the id "id"."""
    request = pb.StartRolloutRequest(request_id="id", spec=spec(**changes), request_memory=memory)  # type: ignore[arg-type]
    request.credentials.completions_bearer = bearer
    return request


@pytest.mark.parametrize("agent", ["idle", "gated"])
async def test_fifty_at_the_same_time_are_one_rollout(caller: Caller, agent: str) -> None:
    started = await asyncio.gather(*(caller.start(start("id", agent=agent)) for _ in range(50)))
    assert len({response.rollout.uid for response in started}) == 1
    assert sorted(response.attached for response in started) == [False] + [True] * 49
    assert len((await caller.stub.ListRollouts(pb.ListRolloutsRequest())).rollouts) == 1


async def test_starts_and_runs_at_the_same_time_are_one_rollout(caller: Caller, gated: Gated) -> None:
    request = start("id", agent="gated")

    async def run() -> pb.StartRolloutResponse:
        items = await first(caller.stub.RunRollout(pb.RunRolloutRequest(start=request)), 1)
        started: pb.StartRolloutResponse = items[0].started
        return started

    started = await asyncio.gather(*(run() if n % 2 else caller.start(request) for n in range(20)))
    assert len({response.rollout.uid for response in started}) == 1
    assert sum(not response.attached for response in started) == 1


async def test_without_an_id_each_is_its_own(caller: Caller) -> None:
    started = await asyncio.gather(*(caller.start(start()) for _ in range(5)))
    assert len({response.rollout.uid for response in started}) == 5
    assert not any(response.attached for response in started)


CHANGES: list[dict[str, Any]] = [
    {"rollout_id": "other"},
    {"group_id": "other"},
    {"agent": "gated"},
    {"messages": [json_message(), json_message()]},
    {"messages": [chat("user", "Please calculate 5 plus 3, then multiply by 2.")]},
    {"sampling": {"temperature": 0}},
    {"limits": {"turns": 3}},
    {"metadata_json": metadata(x=1)},
    {"labels": {"x": "1"}},
    {"priority": 1},
    {"on_drift": 2},
]


@pytest.mark.parametrize("memory", [0, UNTIL_RECEIVED])
async def test_another_payload_under_a_known_id_is_refused(caller: Caller, memory: int) -> None:
    payload: dict[str, Any] = {"agent": "measured", "metadata_json": metadata(notes=1)}
    uid = (await caller.start(keyed(memory=memory, **payload))).rollout.uid
    for changes in CHANGES:
        other = keyed(memory=memory, **(payload | changes))
        running = caller.stub.RunRollout(pb.RunRolloutRequest(start=other))
        for refused in (await refusal(caller.start(other)), await refusal(running.read())):
            assert (refused.code, refused.reason) == (grpc.StatusCode.ALREADY_EXISTS, "REQUEST_ID_TAKEN"), changes
            assert "'id'" in refused.text
            assert uid in refused.text
    assert (await caller.get(uid)).state == pb.ROLLOUT_STATE_RUNNING


SAME: list[Callable[[], pb.StartRolloutRequest]] = [
    lambda: keyed(bearer="another"),
    lambda: keyed(cancel_after_detach=seconds(60)),
    lambda: keyed(
        messages=[json_message(' { "content" : "Please calculate 5 plus 3, then multiply by 2.", "role":"user"}')]
    ),
    lambda: keyed(completions=target("http://127.0.0.1:9/")),
    lambda: keyed(agent="idle"),
    lambda: keyed(limits={"time": seconds(600)}),
]


@pytest.mark.parametrize("again", SAME, ids=["credentials", "waiting", "white space", "slash", "default", "limit"])
async def test_what_says_the_same_is_the_same_payload(
    caller: Caller, again: Callable[[], pb.StartRolloutRequest]
) -> None:
    uid = (await caller.start(keyed(bearer="one"))).rollout.uid
    response = await caller.start(again())
    assert (response.attached, response.rollout.uid) == (True, uid)


async def test_the_same_id_for_another_trainer_is_another_rollout(caller: Caller) -> None:
    uid = (await caller.start(keyed())).rollout.uid
    other = await caller.start(keyed(completions=target("http://127.0.0.1:10")))
    assert not other.attached
    assert other.rollout.uid != uid


async def test_attaching_brings_a_fresh_credential(caller: Caller, gated: Gated) -> None:
    async with StrictTrainer(TOY_TOKENIZER, api_key="new") as trainer:
        where: dict[str, Any] = {
            "agent": "gated",
            "completions": target(trainer.url),
            "metadata_json": metadata(sample=True),
        }
        uid = (await caller.start(keyed(bearer="old", **where))).rollout.uid
        assert (await caller.start(keyed(bearer="new", **where))).attached
        assert (await caller.start(keyed(**where))).attached
        gated.gate.set()
        rollout = await caller.finished(uid)
        assert rollout.outcome.stop.reason == "stop"
        assert [request.headers["authorization"] for request in trainer.requests] == ["Bearer new"]
        assert b"new" not in rollout.SerializeToString()


async def test_an_id_stands_for_its_rollout_after_the_end(caller: Caller) -> None:
    uid = (await caller.play(keyed())).uid
    await caller.stub.AcknowledgeOutcome(pb.AcknowledgeOutcomeRequest(uid=uid))
    response = await caller.start(keyed())
    assert (response.attached, response.rollout.uid) == (True, uid)
    assert response.rollout.outcome.stop.reason == "stop"


async def test_until_received_an_id_is_free_once_its_outcome_was_acknowledged(caller: Caller) -> None:
    request = keyed(memory=UNTIL_RECEIVED)
    uid = (await caller.play(request)).uid
    for _ in range(2):
        response = await caller.start(request)
        assert (response.attached, response.rollout.uid) == (True, uid)
    await caller.stub.AcknowledgeOutcome(pb.AcknowledgeOutcomeRequest(uid=uid))
    started = await asyncio.gather(*(caller.start(request) for _ in range(10)))
    assert sorted(response.attached for response in started) == [False] + [True] * 9
    [again] = {response.rollout.uid for response in started}
    assert again != uid
    assert (await caller.get(uid)).outcome.stop.reason == "stop"


@pytest.mark.parametrize(("memory", "attached"), [(0, True), (UNTIL_RECEIVED, False)])
async def test_the_request_that_began_a_rollout_says_how_long_its_id_is_known(
    caller: Caller, memory: int, attached: bool
) -> None:
    uid = (await caller.play(keyed(memory=memory))).uid
    await caller.stub.AcknowledgeOutcome(pb.AcknowledgeOutcomeRequest(uid=uid))
    assert (await caller.start(keyed(memory=UNTIL_RECEIVED - memory))).attached is attached


async def test_a_refused_request_leaves_its_id_free(caller: Caller) -> None:
    assert (await refusal(caller.start(keyed(rollout_id="")))).code is grpc.StatusCode.INVALID_ARGUMENT
    response = await caller.start(keyed(messages=[json_message(HELLO)]))
    assert not response.attached


async def test_a_run_again_after_the_end_tells_everything_again(caller: Caller) -> None:
    request = pb.RunRolloutRequest(start=keyed())
    first_time, second_time = [[item async for item in caller.stub.RunRollout(request)] for _ in range(2)]
    assert first_time[1:] == second_time[1:]
    assert (first_time[0].started.attached, second_time[0].started.attached) == (False, True)
    assert second_time[0].started.rollout.state == pb.ROLLOUT_STATE_FINISHED
