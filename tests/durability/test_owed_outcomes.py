"""Outcomes that a server owes after a restart: one caller's receiver that is down keeps no other caller from starting rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from rollout_server.edge.api_keys import entry_of

from tests.support.server_client import Caller, refusal, serving, until
from tests.support.start_requests import NOWHERE, start, target

ALICE, BOB = "key-of-alice-0123", "key-of-bob-4567"


def bearing(key: str) -> Sequence[tuple[str, str]]:
    """The metadata with an API key."""
    return (("authorization", f"Bearer {key}"),)


async def owe(caller: Caller, key: str, count: int) -> None:
    """Start rollouts whose outcomes do not arrive, and wait until they are tried."""
    request = start(outcome=target(NOWHERE))
    uids = [(await caller.stub.StartRollout(request, metadata=bearing(key))).rollout.uid for _ in range(count)]

    async def wait() -> bool:
        listed = await caller.stub.ListRollouts(
            pb.ListRolloutsRequest(selection=pb.Selection(uids=uids)), metadata=bearing(key)
        )
        return all(rollout.delivery.HasField("next_attempt_time") for rollout in listed.rollouts)

    await until(wait)


async def test_a_receiver_that_is_down_keeps_no_other_caller_out(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "api_keys": (entry_of("alice", ALICE), entry_of("bob", BOB)),
        "max_records": 2,
        "retry_base_seconds": 1000,
        "retry_max_seconds": 1000,
        "journal": str(tmp_path / "j"),
    }
    async with serving(**settings) as caller:
        await owe(caller, ALICE, 2)
    async with serving(**settings) as caller:
        for _ in range(2):
            refused = await refusal(owe(caller, ALICE, 1))
            assert refused.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "2 outcomes wait for their receivers, at most 2 may; 2 are yours" in refused.text
        await owe(caller, BOB, 1)
        refused = await refusal(owe(caller, BOB, 1))
        assert "1 are yours, your share is 1; ask again later" in refused.text
