"""Groups against a real server: both clients, a strict trainer, broken connections, and an agent that ranks its rollouts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence

import pytest
from rollout_client import (
    AsyncClient,
    Client,
    Conflict,
    GroupOutcome,
    GroupResult,
    InvalidRequest,
    NotFound,
    StartFields,
    samples,
)
from rollout_server import RewardResult, Run
from rollout_server.app import Server
from rollout_server.calculator import Calculator
from rollout_server.testing.trainer import StrictTrainer

from tests.client.conftest import QUICK, ServerAndTrainer
from tests.support.agents import Gated, Measured
from tests.support.calculator_tools import calculator_tools
from tests.support.server_client import until
from tests.support.start_requests import settings
from tests.support.tcp_proxy import TcpProxy


class Competing(Calculator):
    """A calculator whose rollouts compete: the reward is the rank of the index."""

    name = "competing"

    async def reward_group(self, runs: Sequence[Run]) -> list[RewardResult]:
        size = len(runs)
        return [RewardResult(reward=place / size, scores={"size": size}) for place, _ in enumerate(runs)]


class Threaded(Calculator):
    """The same with a plain function, which runs in a thread."""

    name = "threaded"

    def reward_group(self, runs: Sequence[Run]) -> list[float]:
        assert threading.current_thread() is not threading.main_thread()
        return [float(place) for place, _ in enumerate(runs)]


@pytest.fixture
async def world() -> AsyncIterator[ServerAndTrainer]:
    """A server with four slots whose agents include one with a group reward."""
    gated, measured = Gated(), Measured()
    async with (
        Server([Calculator(), gated, measured, Competing(), Threaded()], settings(max_running=4)) as server,
        StrictTrainer(tools=calculator_tools()) as trainer,
    ):
        yield ServerAndTrainer(server, trainer, gated, measured)


def competing(world: ServerAndTrainer, **changes: object) -> StartFields:
    return world.asked(agent="competing", rollout_id="step-7", **changes)


async def test_a_group_in_few_slots_gets_its_ranks(world: ServerAndTrainer, client: AsyncClient) -> None:
    started = await client.start_group(24, **competing(world, metadata={"ground_truth": "16"}))
    stream = client.watch_group(started.group_id, view="samples")
    found = {outcome.index: outcome.rollout.outcome async for outcome in stream}
    assert {index: outcome.reward for index, outcome in found.items()} == {at: at / 24 for at in range(24)}
    assert all(outcome.scores["size"] == 24 for outcome in found.values())
    assert all(set(samples(outcome)[0].response_mask) == {0, 1} for outcome in found.values())
    assert stream.result == GroupResult(asked=24, usable=24, completed=24)
    assert all(world.trainer.verdict(f"step-7/{index}").accepted for index in range(24))
    group = await client.get_group(started.group_id)
    assert [member.uid for member in group.members] == [member.uid for member in started.group.members]
    assert (group.result, group.last_sequence, stream.last_sequence) == (stream.result, 25, 25)
    listed = [rollout async for rollout in client.list(group_id=started.group_id)]
    assert sorted(rollout.spec.group_index for rollout in listed) == list(range(24))


async def test_a_plain_function_rewards_a_group(world: ServerAndTrainer, client: AsyncClient) -> None:
    started = await client.start_group(5, **world.asked(agent="threaded"))
    found = {each.index: each.rollout.outcome.reward async for each in client.watch_group(started.group_id)}
    assert found == {index: float(index) for index in range(5)}


async def test_a_repeated_start_attaches_and_another_payload_conflicts(
    world: ServerAndTrainer, client: AsyncClient
) -> None:
    fields = competing(world, request_id="key", group_id="step-7/prompt-3")
    started = await client.start_group(3, min_usable=2, **fields)
    again = await client.start_group(3, min_usable=2, **fields)
    assert (started.attached, again.attached, again.group_id) == (False, True, "step-7/prompt-3")
    for count, least in ((4, 2), (3, 1)):
        with pytest.raises(Conflict):
            await client.start_group(count, min_usable=least, **fields)
    with pytest.raises(Conflict, match="another group"):
        await client.start_group(3, **competing(world, group_id="step-7/prompt-3"))


async def test_wrong_arguments_are_named(world: ServerAndTrainer, client: AsyncClient) -> None:
    for count, fields, wrong in ((0, {}, ["count"]), (2, {"group_index": 1}, ["spec.group_index"])):
        with pytest.raises(InvalidRequest) as raised:
            await client.start_group(count, **competing(world, **fields))
        assert [field.field for field in raised.value.fields] == wrong
    with pytest.raises(TypeError, match="request_memory"):
        await client.start_group(2, **competing(world, request_memory="until_received"))
    with pytest.raises(NotFound):
        await client.get_group("nothing")
    with pytest.raises(NotFound):
        await anext(client.watch_group("nothing"))


async def test_a_stream_that_is_cut_after_every_outcome(
    world: ServerAndTrainer, line: TcpProxy, far: AsyncClient
) -> None:
    started = await far.start_group(6, **competing(world))
    stream = far.watch_group(started.group_id)
    seen: list[GroupOutcome] = []
    async for outcome in stream:
        seen.append(outcome)
        line.cut()
    assert sorted(outcome.index for outcome in seen) == list(range(6))
    assert stream.result is not None
    assert stream.result.completed == 6
    rest = far.watch_group(started.group_id, after_sequence=4)
    assert [outcome.index async for outcome in rest] == [outcome.index for outcome in seen[4:]]
    over = far.watch_group(started.group_id, after_sequence=7)
    assert ([each async for each in over], over.result) == ([], None)


async def test_a_thread_starts_watches_and_cancels_a_group(world: ServerAndTrainer) -> None:
    def play() -> tuple[int, GroupResult | None]:
        with Client(world.address, retry=QUICK) as client:
            started = client.start_group(6, **world.asked(agent="gated"))
            with client.watch_group(started.group_id) as stream:
                cancelled = client.cancel(group_id=started.group_id, reason="enough")
                reasons = {each.rollout.outcome.cancellation.reason for each in stream}
            assert reasons == {"enough"}
            assert client.get_group(started.group_id).result == stream.result
            return len(cancelled), stream.result

    assert await asyncio.to_thread(play) == (6, GroupResult(asked=6, cancelled=6))


async def test_leaving_the_stream_detaches_from_all_rollouts(world: ServerAndTrainer, client: AsyncClient) -> None:
    started = await client.start_group(3, **world.asked(agent="gated", cancel_after_detach=0.5))
    stream = client.watch_group(started.group_id)
    reading = asyncio.create_task(anext(stream))
    await asyncio.sleep(1.0)
    group = await client.get_group(started.group_id)
    assert not any(member.finished for member in group.members)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await stream.aclose()

    async def has_ended() -> bool:  # polls: a client that waits is attached
        return (await client.get_group(started.group_id)).HasField("result")

    await until(has_ended)
    rollouts = [rollout async for rollout in client.list(group_id=started.group_id)]
    assert [rollout.outcome.cancellation.reason for rollout in rollouts] == ["detached"] * 3


async def test_a_trainer_that_fails_is_refilled(world: ServerAndTrainer, client: AsyncClient) -> None:
    nowhere = world.asked(agent="calculator", rollout_id="g", completions="http://127.0.0.1:9", limits={"time": 30})
    started = await client.start_group(2, refill=3, **nowhere)
    stream = client.watch_group(started.group_id)
    found = [(outcome.replaced, outcome.usable) async for outcome in stream]
    assert found == [(True, False)] * 3 + [(False, False)] * 2
    assert stream.result == GroupResult(asked=2, refilled=3, failed=2)
    members = (await client.get_group(started.group_id)).members
    assert sum("/r" in member.rollout_id for member in members) in (1, 2)
