"""Groups on several servers: each is on one server, and found there from every gateway, whoever made its id."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from osmosis.rollout.v1.group_pb2 import GetGroupRequest, GroupResult, StartGroupRequest

from tests.gateway.fleet.fleets import Fleets, fleets
from tests.support.server_client import refusal
from tests.support.start_requests import start


@pytest.fixture
async def world() -> AsyncIterator[Fleets]:
    async with fleets() as made:
        yield made


def group_start(request_id: str = "", **changes: str) -> StartGroupRequest:
    """A request for four rollouts of the agent `gated`."""
    spec = start(**changes).spec
    return StartGroupRequest(request_id=request_id, spec=spec, count=4)


@pytest.mark.parametrize("group_id", ["", "plain", "step-7/prompt-3"])
async def test_a_group_is_found_wherever_it_is(world: Fleets, group_id: str) -> None:
    started = (await world.fleet.StartGroup(group_start(group_id=group_id))).group
    assert len([1 for place in world.places if await place.rollouts()]) == 1
    assert group_id in ("", started.group_id)
    another = await world.another()
    for fleet in (world.fleet, another, await world.another()):
        found = (await fleet.GetGroup(GetGroupRequest(group_id=started.group_id))).group
        assert found.members == started.members
    following = [pb.WatchGroupRequest(group_id=started.group_id, after_sequence=after) for after in (0, 2)]
    fresh = await world.another()

    async def items(request: pb.WatchGroupRequest) -> list[int]:
        found = [item async for item in fresh.WatchGroup(request)]
        assert found[-1].result == GroupResult(asked=4, usable=4, completed=4)
        return [item.sequence for item in found]

    reading = [asyncio.create_task(items(request)) for request in following[:1]]
    for place in world.places:
        place.gated.gate.set()
    assert await reading[0] == [1, 2, 3, 4, 5]
    assert await items(following[1]) == [3, 4, 5]


async def test_groups_of_one_name_with_a_hyphen_are_on_different_servers(world: Fleets) -> None:
    """A caller's ids may look as if they began with a server's id."""
    for number in range(12):
        await world.fleet.StartGroup(group_start(group_id=f"grpo-{number}"))
    assert len([1 for place in world.places if await place.rollouts()]) > 1
    for number in range(12):
        found = await world.fleet.GetGroup(GetGroupRequest(group_id=f"grpo-{number}"))
        assert found.group.group_id == f"grpo-{number}"


async def test_a_repeated_start_reaches_the_same_server(world: Fleets) -> None:
    started = await world.fleet.StartGroup(group_start("key"))
    again = await (await world.another()).StartGroup(group_start("key"))
    assert (started.attached, again.attached) == (False, True)
    assert again.group.group_id == started.group.group_id
    selection = pb.Selection(group_id=started.group.group_id)
    cancelled = await world.fleet.CancelRollouts(pb.CancelRolloutsRequest(selection=selection))
    assert sorted(cancelled.uids) == sorted(member.uid for member in started.group.members)


async def test_an_unknown_group_is_on_no_server(world: Fleets) -> None:
    refused = await refusal(world.fleet.GetGroup(GetGroupRequest(group_id="nothing")))
    assert refused.code is grpc.StatusCode.NOT_FOUND
