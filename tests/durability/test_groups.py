"""Groups over `kill -9`: their watchers go on, failed rollouts are started anew, and the reward is that of an undisturbed run."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from osmosis.rollout.v1 import group_pb2, outcome_pb2
from osmosis.rollout.v1 import rollout_service_pb2 as pb

from tests.durability import checks
from tests.durability.aims import Aim, Moment
from tests.durability.stage import Stage
from tests.durability.trials import trial


def request_of(here: Stage, run: str, number: int, **fields: int) -> group_pb2.StartGroupRequest:
    """The request for a group whose agent ranks its rollouts."""
    chosen = trial("replaying", number, run, "ranked", ("look", "note", "look"))
    single = here.clients.start_request(chosen)
    single.spec.ClearField("outcome")
    single.spec.group_id = run
    return group_pb2.StartGroupRequest(request_id=run, spec=single.spec, **fields)


async def watched(here: Stage, group_id: str, after: int = 0) -> list[pb.WatchGroupResponse]:
    """The items of a group until the stream ends or breaks."""
    found: list[pb.WatchGroupResponse] = []
    request = pb.WatchGroupRequest(group_id=group_id, after_sequence=after, view=pb.ROLLOUT_VIEW_SAMPLES)
    try:
        async for item in here.server.stub.WatchGroup(request):
            found.append(item)  # noqa: PERF401 - what came before an error counts
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.UNAVAILABLE:
            raise
    return found


def results(items: list[pb.WatchGroupResponse]) -> dict[int, tuple[float, list[checks.Tokens]]]:
    """Reward and samples by index of the rollouts that completed."""
    found = [
        item.outcome for item in items if item.HasField("outcome") and item.outcome.rollout.outcome.HasField("stop")
    ]
    return {
        each.index: (each.rollout.outcome.reward, [checks.tokens(one) for one in each.rollout.outcome.samples])
        for each in found
    }


@pytest.mark.parametrize(
    "aim",
    [
        Aim(Moment.ASKED, 500, 3),
        Aim(Moment.TOOL_MIDDLE, 500, tool="note"),
        Aim(Moment.TOOL_AFTER, 500, tool="reward"),
    ],
    ids=lambda aim: f"{aim.moment.name}-{aim.turn or aim.tool}",
)
async def test_a_group_goes_on_after_a_crash(here: Stage, aim: Aim) -> None:
    """A crash inside of a tool that must not run twice fails one rollout, which is started anew."""
    undisturbed = await here.server.stub.StartGroup(request_of(here, "undisturbed", 500, count=4, refill=4))
    wanted = await watched(here, undisturbed.group.group_id)
    assert wanted[-1].result.completed == 4
    assert sorted(reward for reward, _ in results(wanted).values()) == [0.0, 1.0, 2.0, 3.0]

    request = request_of(here, "crashed", 500, count=4, refill=4)
    here.load(aim)
    (started,) = await asyncio.gather(here.server.stub.StartGroup(request), return_exceptions=True)
    before = [] if isinstance(started, Exception) else await watched(here, started.group.group_id)
    await here.server.restart()
    again = await here.server.stub.StartGroup(request)
    assert again.group.group_id == "crashed"
    assert again.attached or isinstance(started, Exception)
    after = await watched(here, again.group.group_id, len(before))
    assert await watched(here, again.group.group_id) == [*before, *after]
    assert [item.sequence for item in (*before, *after)] == list(range(1, len(before) + len(after) + 1))
    assert after[-1].result.completed == 4
    assert results([*before, *after]) == results(wanted)
    replaced = [item.outcome for item in (*before, *after) if item.outcome.replaced]
    for each in replaced:
        assert each.rollout.outcome.failure.category == outcome_pb2.FAILURE_CATEGORY_INTERRUPTED
        assert "tool note was running" in each.rollout.outcome.failure.message
    assert replaced or aim.tool != "note"
    assert after[-1].result.refilled == len(replaced)
    effects = [line.split() for line in here.effects()]
    uids = {member.uid for member in again.group.members}
    begun = sum(line[0] == "begun" and line[3] == "reward" and line[1] in uids for line in effects)
    assert begun == 1 + (aim.tool == "reward")  # it was called, and its result was not stored


async def test_an_early_stop_holds_after_a_crash(here: Stage) -> None:
    request = request_of(here, "early", 501, count=6, min_usable=3)
    started = await here.server.stub.StartGroup(request)
    items = await watched(here, started.group.group_id)
    here.server.kill()
    await here.server.restart()
    group = (await here.server.stub.GetGroup(group_pb2.GetGroupRequest(group_id=started.group.group_id))).group
    assert group.result == items[-1].result
    assert group.result.usable >= 3
    assert await watched(here, started.group.group_id) == items
    request.min_usable = 4
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await here.server.stub.StartGroup(request)
    assert refused.value.code() is grpc.StatusCode.ALREADY_EXISTS
