"""Rollouts of several servers, called like those of one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from osmosis.rollout.v1.rollout_service_pb2_grpc import add_RolloutServiceServicer_to_server
from rollout_gateway.channel import open_channel
from rollout_gateway.fleet.fleet import Fleet
from rollout_server.runtime.registry import pages as scans

from tests.gateway.fleet.fleets import Fleets, fleets
from tests.support.agents import Idle
from tests.support.scripted_server import ScriptedServer
from tests.support.server_client import refusal, until
from tests.support.start_requests import start

Code = grpc.StatusCode


@pytest.fixture
async def world() -> AsyncIterator[Fleets]:
    async with fleets() as made:
        yield made


async def started(fleet: Fleet, count: int, **changes: str) -> list[str]:
    """Start this many rollouts on arbitrary servers and return their uids."""
    answers = await asyncio.gather(*(fleet.StartRollout(start(**changes)) for _ in range(count)))
    return [answer.rollout.uid for answer in answers]


async def one_on_each(world: Fleets) -> list[str]:
    """Start a rollout on each server, unknown to the fleet, and return their uids."""
    return [(await place.caller.start(start())).rollout.uid for place in world.places]


async def test_each_rollout_is_found_wherever_it_is(world: Fleets) -> None:
    uids = await one_on_each(world)
    for uid in uids:
        assert (await world.fleet.GetRollout(pb.GetRolloutRequest(uid=uid))).rollout.uid == uid
    another = await world.another()
    waiting = [asyncio.create_task(another.WaitRollout(pb.WaitRolloutRequest(uid=uid))) for uid in uids]
    for place in world.places:
        place.gated.gate.set()
    for ended in await asyncio.gather(*waiting):
        assert ended.rollout.state == pb.ROLLOUT_STATE_FINISHED
    third = await world.another()
    for uid in uids:
        await third.AcknowledgeOutcome(pb.AcknowledgeOutcomeRequest(uid=uid))


async def test_a_watch_is_that_of_the_server(world: Fleets) -> None:
    uids = await one_on_each(world)
    for place in world.places:
        place.gated.gate.set()
    for place, uid in zip(world.places, uids, strict=True):
        watched = [item.event async for item in world.fleet.WatchRollout(pb.WatchRolloutRequest(uid=uid))]
        assert watched == await place.caller.events(uid)
        last = pb.WatchRolloutRequest(uid=uid, after_sequence=watched[-1].sequence)
        assert [item async for item in world.fleet.WatchRollout(last)] == []


async def test_a_watch_that_is_cancelled_ends(world: Fleets) -> None:
    (uid,) = await started(world.fleet, 1)
    call = world.fleet.WatchRollout(pb.WatchRolloutRequest(uid=uid))
    items = aiter(call)
    await anext(items)

    async def read() -> None:
        async for _ in items:
            pass

    reading = asyncio.create_task(read())
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.wait([reading])
    assert reading.cancelled()


async def test_a_rollout_that_is_nowhere_is_not_found(world: Fleets) -> None:
    for call in (
        world.fleet.GetRollout(pb.GetRolloutRequest(uid="nowhere")),
        world.fleet.WaitRollout(pb.WaitRolloutRequest(uid="nowhere")),
        world.fleet.AcknowledgeOutcome(pb.AcknowledgeOutcomeRequest(uid="nowhere")),
        world.fleet.CancelRollouts(pb.CancelRolloutsRequest(selection=pb.Selection(uids=["nowhere"]))),
        anext(aiter(world.fleet.WatchRollout(pb.WatchRolloutRequest(uid="nowhere")))),
    ):
        refused = await refusal(call)
        assert (refused.code, refused.reason) == (Code.NOT_FOUND, "ROLLOUT_NOT_FOUND")


async def test_while_a_server_is_away_nothing_is_said_not_to_exist(world: Fleets) -> None:
    uids = await one_on_each(world)
    await world.places[1].proxy.down()
    for uid in (uids[0], uids[2]):
        assert (await world.fleet.GetRollout(pb.GetRolloutRequest(uid=uid))).rollout.uid == uid
    for uid in (uids[1], "nowhere"):
        refused = await refusal(world.fleet.GetRollout(pb.GetRolloutRequest(uid=uid)))
        assert (refused.code, refused.reason) == (Code.UNAVAILABLE, "SERVER_UNREACHABLE")
        assert refused.text == "1 of 3 rollout servers cannot be reached: one of them may have the rollout"


async def test_what_the_owner_refuses_is_refused(world: Fleets) -> None:
    (uid,) = await started(world.fleet, 1)
    another = await world.another()
    refused = await refusal(another.AcknowledgeOutcome(pb.AcknowledgeOutcomeRequest(uid=uid)))
    assert (refused.code, refused.reason) == (Code.FAILED_PRECONDITION, "ROLLOUT_NOT_FINISHED")
    refused = await refusal(anext(aiter(another.WatchRollout(pb.WatchRolloutRequest(uid=uid, after_sequence=999)))))
    assert refused.code is Code.OUT_OF_RANGE


async def states(world: Fleets) -> dict[str, int]:
    return {rollout.uid: rollout.state for _, rollout in await world.all()}


async def test_rollouts_are_cancelled_wherever_they_are(world: Fleets) -> None:
    uids = await one_on_each(world)
    spared = await started(world.fleet, 3)
    asked = pb.CancelRolloutsRequest(selection=pb.Selection(uids=[*uids, uids[0]]), reason="enough")
    assert sorted((await world.fleet.CancelRollouts(asked)).uids) == sorted(uids)
    for place, uid in zip(world.places, uids, strict=True):
        assert (await place.caller.ended(uid)).outcome.cancellation.reason == "enough"
    assert {(await states(world))[uid] for uid in spared} == {pb.ROLLOUT_STATE_RUNNING}
    assert list((await world.fleet.CancelRollouts(asked)).uids) == []


async def test_other_conditions_hold_beside_uids(world: Fleets) -> None:
    uids = await one_on_each(world)
    selection = pb.Selection(uids=uids, agent=Idle.name)
    assert list((await world.fleet.CancelRollouts(pb.CancelRolloutsRequest(selection=selection))).uids) == []
    assert set((await states(world)).values()) == {pb.ROLLOUT_STATE_RUNNING}


async def test_one_uid_that_is_nowhere_cancels_nothing(world: Fleets) -> None:
    uids = await one_on_each(world)
    asked = pb.CancelRolloutsRequest(selection=pb.Selection(uids=[*uids, "nowhere"]))
    refused = await refusal(world.fleet.CancelRollouts(asked))
    assert (refused.code, refused.reason) == (Code.NOT_FOUND, "ROLLOUT_NOT_FOUND")
    assert "'nowhere'" in refused.text
    assert set((await states(world)).values()) == {pb.ROLLOUT_STATE_RUNNING}


async def test_one_uid_that_a_known_server_has_forgotten_cancels_nothing(world: Fleets) -> None:
    uids = await one_on_each(world)
    for uid in uids:
        await world.fleet.GetRollout(pb.GetRolloutRequest(uid=uid))
    asked = pb.CancelRolloutsRequest(selection=pb.Selection(uids=[*uids, uids[0][:-1] + "x"]))
    refused = await refusal(world.fleet.CancelRollouts(asked))
    assert (refused.code, refused.reason) == (Code.NOT_FOUND, "ROLLOUT_NOT_FOUND")
    assert set((await states(world)).values()) == {pb.ROLLOUT_STATE_RUNNING}


async def test_a_servers_other_rollouts_are_found_by_its_id(world: Fleets) -> None:
    uids = await one_on_each(world)
    others = [(await place.caller.start(start())).rollout.uid for place in world.places]
    assert len({uid.rpartition("-")[0] for uid in uids + others}) == len(uids)
    for uid in uids:
        await world.fleet.GetRollout(pb.GetRolloutRequest(uid=uid))
    await world.places[1].proxy.down()
    for uid in (others[0], others[2]):
        assert (await world.fleet.GetRollout(pb.GetRolloutRequest(uid=uid))).rollout.uid == uid
        forgotten = pb.GetRolloutRequest(uid=uid[:-1] + "x")
        # The server named in the uid decides alone, even if others are unreachable.
        assert (await refusal(world.fleet.GetRollout(forgotten))).code is Code.NOT_FOUND
    assert (await refusal(world.fleet.GetRollout(pb.GetRolloutRequest(uid=others[1])))).code is Code.UNAVAILABLE


async def test_all_are_cancelled_everywhere(world: Fleets) -> None:
    uids = await started(world.fleet, 9)
    everything = pb.CancelRolloutsRequest(selection=pb.Selection(all=True))
    assert sorted((await world.fleet.CancelRollouts(everything)).uids) == sorted(uids)

    async def are_over() -> bool:
        return set((await states(world)).values()) == {pb.ROLLOUT_STATE_FINISHED}

    await until(are_over)


async def test_an_empty_selection_cancels_nothing(world: Fleets) -> None:
    await one_on_each(world)
    for asked in (pb.CancelRolloutsRequest(), pb.CancelRolloutsRequest(selection=pb.Selection())):
        assert (await refusal(world.fleet.CancelRollouts(asked))).code is Code.INVALID_ARGUMENT
    assert set((await states(world)).values()) == {pb.ROLLOUT_STATE_RUNNING}


async def test_a_cancel_that_did_not_reach_everybody_says_so(world: Fleets) -> None:
    uids = await one_on_each(world)
    await world.places[2].proxy.down()
    everything = pb.CancelRolloutsRequest(selection=pb.Selection(all=True))
    refused = await refusal(world.fleet.CancelRollouts(everything))
    assert (refused.code, refused.reason) == (Code.UNAVAILABLE, "SERVER_UNREACHABLE")
    named = pb.CancelRolloutsRequest(selection=pb.Selection(uids=uids))
    assert (await refusal(world.fleet.CancelRollouts(named))).code is Code.UNAVAILABLE
    reached = pb.CancelRolloutsRequest(selection=pb.Selection(uids=uids[:2]))
    assert list((await world.fleet.CancelRollouts(reached)).uids) == []


async def pages(fleet: Fleet, size: int, selection: pb.Selection | None = None) -> list[Sequence[pb.Rollout]]:
    """All pages, in order."""
    found: list[Sequence[pb.Rollout]] = []
    token = ""
    while token or not found:
        page = await fleet.ListRollouts(
            pb.ListRolloutsRequest(page_size=size, page_token=token, selection=selection), timeout=30
        )
        found.append(page.rollouts)
        token = page.next_page_token
    return found


def key(rollout: pb.Rollout) -> tuple[int, int, str]:
    return rollout.create_time.seconds, rollout.create_time.nanos, rollout.uid


@pytest.mark.parametrize("size", [1, 2, 7, 40, 1000])
async def test_pages_tell_everything_once_and_newest_first(world: Fleets, size: int) -> None:
    await started(world.fleet, 40)
    read = await pages(world.fleet, size)
    told = [rollout for page in read for rollout in page]
    assert told == sorted((rollout for _, rollout in await world.all()), key=key, reverse=True)
    assert [len(page) for page in read[:-1]] == [size] * (len(read) - 1)


async def test_a_page_of_one_busy_server_is_full(world: Fleets) -> None:
    busy = world.places[0].caller
    uids = [(await busy.start(start())).rollout.uid for _ in range(30)]
    (only,) = await pages(world.fleet, 30)
    assert [rollout.uid for rollout in only] == uids[::-1]


async def test_rollouts_that_start_and_go_do_not_disturb_the_pages() -> None:
    async with fleets(max_records=0) as world:
        uids = await started(world.fleet, 30)
        before = [rollout.uid for _, rollout in await world.all()]
        asked = pb.ListRolloutsRequest(page_size=4)
        told: list[str] = []
        while not told or asked.page_token:
            page = await world.fleet.ListRollouts(asked)
            told += [rollout.uid for rollout in page.rollouts]
            asked.page_token = page.next_page_token
            asked.page_size = asked.page_size % 7 + 1
            # New rollouts arrive and the last listed one is forgotten, so no server can use it as a page position.
            await started(world.fleet, 6)
            last = [rollout.uid for rollout in page.rollouts][-2:]
            await world.fleet.CancelRollouts(pb.CancelRolloutsRequest(selection=pb.Selection(uids=last)))
            await gone(world, last)
        assert len(told) == len(set(told))
        assert set(told) == set(before) == set(uids)


async def gone(world: Fleets, uids: Sequence[str]) -> None:
    """Wait until no server has these rollouts."""

    async def are_forgotten() -> bool:
        for place in world.places:
            place.caller.server._registry.forget()
        return not set(uids) & {rollout.uid for _, rollout in await world.all()}

    await until(are_forgotten)


class Stepping(ScriptedServer):
    """A server whose rollouts are not ordered by time, because its clock was set back."""

    times: Sequence[int] = ()

    async def ListRollouts(self, request: Any, context: Any) -> pb.ListRolloutsResponse:
        first = int(request.page_token or 0)
        after = first + request.page_size
        rollouts = [pb.Rollout(uid=f"{time}", create_time=Timestamp(seconds=time)) for time in self.times]
        token = str(after) if after < len(rollouts) else ""
        tokens = [str(number) for number in range(first, min(after, len(rollouts)))]
        return pb.ListRolloutsResponse(rollouts=rollouts[first:after], next_page_token=token, page_tokens=tokens)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
async def test_a_clock_that_was_set_back_loses_nothing(size: int) -> None:
    orders = ((15, 12, 29, 26, 21, 7), (30, 14, 13, 25, 5))
    async with AsyncExitStack() as stack:
        channels = []
        for times in orders:
            scripted, server = Stepping(), grpc.aio.server()  # type: ignore[abstract]  # rpcs that nobody calls
            scripted.times = times
            add_RolloutServiceServicer_to_server(scripted, server)
            port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            stack.push_async_callback(server.stop, None)
            channels.append(await stack.enter_async_context(open_channel(f"127.0.0.1:{port}")))
        told = [int(rollout.uid) for page in await pages(Fleet(channels), size) for rollout in page]
    for times in orders:
        assert [time for time in told if time in times] == list(times)


async def test_a_selection_is_kept_over_the_pages(world: Fleets) -> None:
    wanted = await started(world.fleet, 10, rollout_id="wanted")
    await started(world.fleet, 10, rollout_id="other")
    read = await pages(world.fleet, 3, pb.Selection(rollout_ids=["wanted"]))
    assert sorted(rollout.uid for page in read for rollout in page) == sorted(wanted)


async def test_page_tokens_are_checked(world: Fleets) -> None:
    await started(world.fleet, 10)
    own = (await world.fleet.ListRollouts(pb.ListRolloutsRequest(page_size=3))).next_page_token
    await asyncio.gather(*(world.places[0].caller.start(start()) for _ in range(2)))
    server = await world.places[0].caller.stub.ListRollouts(pb.ListRolloutsRequest(page_size=1))
    another = pb.Selection(rollout_ids=["r"])
    for asked in (
        pb.ListRolloutsRequest(page_token="?"),
        pb.ListRolloutsRequest(page_token="bnVsbA=="),
        pb.ListRolloutsRequest(page_token=own[:-4]),
        pb.ListRolloutsRequest(page_token=server.next_page_token),
        pb.ListRolloutsRequest(page_token=own, selection=another),
        pb.ListRolloutsRequest(page_token=own, page_size=1001),
    ):
        refused = await refusal(world.fleet.ListRollouts(asked))
        assert refused.code is Code.INVALID_ARGUMENT
        assert refused.fields.keys() == {"page_size" if asked.page_size else "page_token"}
    another_fleet = await world.another()
    assert (await another_fleet.ListRollouts(pb.ListRolloutsRequest(page_token=own))).rollouts


async def test_a_list_is_whole_or_none(world: Fleets) -> None:
    for _ in range(4):
        await one_on_each(world)
    page = await world.fleet.ListRollouts(pb.ListRolloutsRequest(page_size=3))
    await world.places[0].proxy.down()
    for token in ("", page.next_page_token):
        refused = await refusal(world.fleet.ListRollouts(pb.ListRolloutsRequest(page_size=3, page_token=token)))
        assert (refused.code, refused.reason) == (Code.UNAVAILABLE, "SERVER_UNREACHABLE")


async def test_servers_are_one_server_to_whoever_asks_what_they_are(world: Fleets) -> None:
    await started(world.fleet, 7)
    each = [await place.caller.stub.GetServerInfo(pb.GetServerInfoRequest()) for place in world.places]
    told = await world.fleet.GetServerInfo(pb.GetServerInfoRequest())
    assert told.running == sum(info.running for info in each) == 7
    assert (told.max_running, told.max_queued) == (3 * each[0].max_running, 3 * each[0].max_queued)
    assert (told.max_request_bytes, told.max_rollout_time) == (each[0].max_request_bytes, each[0].max_rollout_time)
    assert (told.version, told.features) == (each[0].version, each[0].features)
    assert told.start_time.seconds == min(info.start_time.seconds for info in each)
    assert not told.draining
    agents = (await world.fleet.ListAgents(pb.ListAgentsRequest())).agents
    assert [(agent.name, agent.default) for agent in agents] == [("gated", True), ("idle", False)]
    assert not (await world.fleet.ListTools(pb.ListToolsRequest(agent="idle"))).tools
    assert (await refusal(world.fleet.ListTools(pb.ListToolsRequest(agent="none")))).code is Code.NOT_FOUND


async def test_they_drain_if_all_of_them_do(world: Fleets) -> None:
    for place in world.places:
        assert not (await world.fleet.GetServerInfo(pb.GetServerInfoRequest())).draining
        await place.caller.server.drain()
    assert (await world.fleet.GetServerInfo(pb.GetServerInfoRequest())).draining


async def test_who_is_left_speaks_for_all(world: Fleets) -> None:
    for place in world.places[:2]:
        await place.proxy.down()
    info = await world.fleet.GetServerInfo(pb.GetServerInfoRequest())
    assert info.max_running == world.places[2].caller.server.settings.max_running
    assert len((await world.fleet.ListAgents(pb.ListAgentsRequest())).agents) == 2
    await world.fleet.ListTools(pb.ListToolsRequest())
    assert (await refusal(world.fleet.ListTools(pb.ListToolsRequest(agent="none")))).code is Code.UNAVAILABLE
    await world.places[2].proxy.down()
    for call in (
        world.fleet.GetServerInfo(pb.GetServerInfoRequest()),
        world.fleet.ListAgents(pb.ListAgentsRequest()),
        world.fleet.ListTools(pb.ListToolsRequest()),
    ):
        refused = await refusal(call)
        assert (refused.code, refused.reason) == (Code.UNAVAILABLE, "SERVER_UNREACHABLE")


async def test_the_texts_of_tokens_come_from_the_owner(world: Fleets) -> None:
    for uid in await one_on_each(world):
        refused = await refusal(world.fleet.DecodeTokens(pb.DecodeTokensRequest(uid=uid, segment_id="0")))
        assert (refused.code, refused.reason) == (Code.NOT_FOUND, "SEGMENT_NOT_FOUND")


async def test_pages_that_end_early_stay_in_order(world: Fleets, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(6):
        await one_on_each(world)
    chosen = [(await place.caller.start(start(labels={"a": "needle"}))).rollout.uid for place in world.places]
    for _ in range(4):
        await one_on_each(world)
    chosen += [(await place.caller.start(start(labels={"a": "Needle"}))).rollout.uid for place in world.places]
    monkeypatch.setattr(scans, "SLICE", -1.0)
    monkeypatch.setattr(scans, "_SLICES", 2)
    for selection, expected in ((pb.Selection(text="needle"), chosen), (pb.Selection(group_id="none"), [])):
        request, found = pb.ListRolloutsRequest(selection=selection, page_size=2), list[str]()
        for _ in range(100):
            page = await world.fleet.ListRollouts(request)
            found += [rollout.uid for rollout in page.rollouts]
            request.page_token = page.next_page_token
            if not page.next_page_token:
                break
        assert found == expected[::-1]
