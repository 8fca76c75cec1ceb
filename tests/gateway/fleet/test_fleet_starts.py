"""Starts with several servers: duplicates reach the same server; unreachable and draining servers are skipped."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import cast

import grpc
import pytest
from osmosis.rollout.v1 import event_pb2
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from osmosis.rollout.v1.rollout_service_pb2_grpc import RolloutServiceStub
from rollout_gateway.channel import open_channel
from rollout_gateway.fleet.fleet import Fleet, stub_of
from rollout_gateway.fleet.members import Member, ranked

from tests.gateway.fleet.fleets import FleetMember, Fleets, fleets
from tests.support.server_client import refusal, until
from tests.support.start_requests import start

Code = grpc.StatusCode


@pytest.fixture
async def world() -> AsyncIterator[Fleets]:
    async with fleets() as made:
        yield made


def first_for(world: Fleets, request_id: str) -> FleetMember:
    """The server to which the hash assigns a start."""
    members = [Member(open_channel(place.proxy.address)) for place in world.places]
    url = start(request_id).spec.completions.url
    return world.at(ranked(members, (url, request_id))[0].address)


async def test_duplicates_meet_through_any_gateway(world: Fleets) -> None:
    ids = [f"request-{number}" for number in range(16)]
    another = await world.another()
    answers = await asyncio.gather(*(each.StartRollout(start(id_)) for id_ in ids for each in (world.fleet, another)))
    assert len({answer.rollout.uid for answer in answers}) == len(ids)
    assert sum(answer.attached for answer in answers) == len(ids)
    assert {answer.rollout.uid for answer in answers} == {rollout.uid for _, rollout in await world.all()}
    assert len({place.proxy.address for place, _ in await world.all()}) > 1


async def test_starts_without_an_id_are_spread_and_never_meet(world: Fleets) -> None:
    answers = await asyncio.gather(*(world.fleet.StartRollout(start()) for _ in range(64)))
    assert len({answer.rollout.uid for answer in answers}) == 64
    assert len({place.proxy.address for place, _ in await world.all()}) == 3


async def test_a_server_in_the_same_process_gets_all_starts_without_an_id_and_needs_no_connection(
    world: Fleets,
) -> None:
    here, routing = world.places[0], world.fleet.routing
    (member,) = [each for each in routing.members if each.address == here.proxy.address]
    await here.proxy.down()
    routing.serve_here(member, cast(grpc.aio.Channel, here.caller.server._rpcs[0].local_channel))
    own = next(id_ for id_ in map(str, range(100)) if first_for(world, id_) is here)
    answers = await asyncio.gather(*(world.fleet.StartRollout(start()) for _ in range(16)))
    answers += [await world.fleet.StartRollout(start(own)), await world.fleet.StartRollout(start(own))]
    assert [answer.attached for answer in answers] == [False] * 17 + [True]
    assert {answer.rollout.uid for answer in answers} == {rollout.uid for rollout in await here.rollouts()}
    listed = await world.fleet.ListRollouts(pb.ListRolloutsRequest(page_size=100))
    assert {rollout.uid for rollout in listed.rollouts} == {rollout.uid for _, rollout in await world.all()}


async def test_a_server_less_moves_only_its_own_starts(world: Fleets) -> None:
    members = [Member(open_channel(place.proxy.address)) for place in world.places]
    for number in range(50):
        key = ("http://trainer", str(number))
        order = ranked(members, key)
        assert ranked(members[::-1], key) == order
        left = [member for member in members if member is not order[0]]
        assert ranked(left, key) == order[1:]


async def test_a_server_that_is_away_is_passed_over_and_the_duplicate_follows(world: Fleets) -> None:
    first = first_for(world, "id")
    await first.proxy.down()
    taken = await world.fleet.StartRollout(start("id"))
    await first.proxy.mend()
    await connected(world.fleet, first)
    again = await world.fleet.StartRollout(start("id"))
    assert (again.rollout.uid, again.attached) == (taken.rollout.uid, True)
    assert not await first.rollouts()


async def connected(fleet: Fleet, place: FleetMember) -> None:
    """Wait until the fleet reaches a server again."""
    (member,) = [each for each in fleet.routing.members if each.address == place.proxy.address]

    async def is_reached() -> bool:
        return await member.reached(1)

    await until(is_reached)


async def test_all_servers_away_is_unavailable_and_says_so(world: Fleets) -> None:
    for place in world.places:
        await place.proxy.down()
    refused = await refusal(world.fleet.StartRollout(start("id")))
    assert (refused.code, refused.reason) == (Code.UNAVAILABLE, "SERVER_UNREACHABLE")
    assert refused.text.startswith("3 of 3 rollout servers cannot be reached")
    assert refused.retry_after == 1.0
    assert "127.0.0.1" not in refused.text


async def test_a_server_that_drains_keeps_its_own_and_takes_nothing_else(world: Fleets) -> None:
    first = first_for(world, "runs")
    running = await world.fleet.StartRollout(start("runs"))
    ids = [f"late-{number}" for number in range(40)]
    late = next(id_ for id_ in ids if first_for(world, id_) is first)
    draining = asyncio.create_task(first.caller.server.drain())

    async def drains() -> bool:
        return bool((await first.caller.stub.GetServerInfo(pb.GetServerInfoRequest())).draining)

    await until(drains)
    assert (await world.fleet.StartRollout(start("runs"))).rollout.uid == running.rollout.uid
    elsewhere = await world.fleet.StartRollout(start(late))
    assert elsewhere.rollout.uid not in {rollout.uid for rollout in await first.rollouts()}
    first.gated.gate.set()
    await draining
    assert (await world.fleet.StartRollout(start("runs"))).rollout.uid == running.rollout.uid


async def test_all_servers_draining_is_what_one_of_them_says(world: Fleets) -> None:
    await asyncio.gather(*(place.caller.server.drain() for place in world.places))
    refused = await refusal(world.fleet.StartRollout(start("id")))
    assert (refused.code, refused.reason) == (Code.UNAVAILABLE, "DRAINING")
    assert refused.retry_after is not None


async def test_a_lost_answer_starts_nothing_twice(world: Fleets) -> None:
    first = first_for(world, "id")
    await connected(world.fleet, first)
    first.proxy.lose_an_answer()
    answer = await world.fleet.StartRollout(start("id"))
    assert first.proxy.connections == 2
    assert [rollout.uid for _, rollout in await world.all()] == [answer.rollout.uid]
    assert [rollout.uid for rollout in await first.rollouts()] == [answer.rollout.uid]


async def test_answers_lost_one_after_the_other_start_nothing_twice(world: Fleets) -> None:
    ids = [f"id-{number}" for number in range(40)]
    for id_ in ids:
        first = first_for(world, id_)
        await connected(world.fleet, first)
        first.proxy.lose_an_answer()
        await world.fleet.StartRollout(start(id_))
    assert len({rollout.uid for _, rollout in await world.all()}) == len(ids)


async def test_a_lost_answer_without_an_id_is_not_asked_for_again(world: Fleets) -> None:
    for place in world.places:
        await connected(world.fleet, place)
        place.proxy.lose_an_answer()
    refused = await refusal(world.fleet.StartRollout(start()))
    assert refused.code is Code.UNAVAILABLE
    assert len(await world.all()) <= 1


async def test_a_run_is_streamed_from_the_server_that_took_it(world: Fleets) -> None:
    first = first_for(world, "id")
    await first.proxy.down()
    call = world.fleet.RunRollout(pb.RunRolloutRequest(start=start("id"), detail=event_pb2.EVENT_DETAIL_BASIC))
    items = aiter(call)
    started = (await anext(items)).started
    for place in world.places:
        place.gated.gate.set()
    rest = [item async for item in items]
    assert rest[-1].event.HasField("finished")
    assert [rollout.uid for _, rollout in await world.all()] == [started.rollout.uid]
    assert call.cancel() is False


async def test_a_run_that_is_cancelled_detaches(world: Fleets) -> None:
    asked = start("id")
    asked.spec.cancel_after_detach.SetInParent()
    call = world.fleet.RunRollout(pb.RunRolloutRequest(start=asked))
    uid = (await anext(aiter(call))).started.rollout.uid
    assert call.cancel() is True
    rollout = await first_for(world, "id").caller.ended(uid)
    assert rollout.outcome.cancellation.reason == "detached"


async def test_a_run_that_is_refused_is_refused_as_by_one_server(world: Fleets) -> None:
    call = world.fleet.RunRollout(pb.RunRolloutRequest(start=start("id", rollout_id="")))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await anext(aiter(call))
    assert caught.value.code() is Code.INVALID_ARGUMENT
    assert not await world.all()


async def test_an_agent_that_nobody_has_is_not_found(world: Fleets) -> None:
    refused = await refusal(world.fleet.StartRollout(start("id", agent="nobody")))
    assert refused.code is Code.NOT_FOUND


async def test_a_deadline_holds_for_all_attempts(world: Fleets) -> None:
    call = world.fleet.RunRollout(pb.RunRolloutRequest(start=start("id")), timeout=0.3)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        _ = [item async for item in call]
    assert caught.value.code() is Code.DEADLINE_EXCEEDED
    refused = await refusal(world.fleet.StartRollout(start("other"), timeout=-1.0))
    assert refused.code is Code.DEADLINE_EXCEEDED
    ((_, rollout),) = await world.all()
    assert rollout.state == pb.ROLLOUT_STATE_RUNNING


async def test_a_call_without_answer_hears_of_its_deadline(world: Fleets) -> None:
    for place in world.places:
        await place.proxy.down()
    refused = await refusal(world.fleet.GetServerInfo(pb.GetServerInfoRequest(), timeout=-1.0))
    assert refused.code is Code.DEADLINE_EXCEEDED


async def test_one_server_needs_no_fleet() -> None:
    async with open_channel("127.0.0.1:1") as channel, open_channel("127.0.0.1:2") as other:
        assert isinstance(stub_of([channel]), RolloutServiceStub)
        assert isinstance(stub_of([channel, other]), Fleet)
        for wrong in ([], [channel, channel]):
            with pytest.raises(ValueError, match="different addresses"):
                stub_of(wrong)
