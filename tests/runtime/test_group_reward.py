"""The reward over a group: rollouts wait for it without a slot, and no end of a member, and no fault of it, blocks the others."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

import pytest
from rollout_server import Agent, RewardResult, Run
from rollout_server.core.error import Busy
from rollout_server.core.message import Message
from rollout_server.core.outcome import Cancellation, Category, Failure, FailureClass, Outcome, Stop, segment_rewards
from rollout_server.core.spec import Dialect, Target
from rollout_server.runtime.errors import RolloutEnded, RolloutFailed
from rollout_server.runtime.groups.group import RolloutGroup
from rollout_server.runtime.groups.state import GroupPlan, GroupResult
from rollout_server.runtime.models import ModelCompletion, ModelEndpoint, ModelLimits
from rollout_server.runtime.ports import CompletionRequest, Credentials
from rollout_server.runtime.registry.selection import Selection
from rollout_server.runtime.rollout import RolloutState
from rollout_server.runtime.start_request import Capacity, StartRequest

from tests.runtime.outcome_receivers import RECEIVER, Receiver
from tests.support.group_harness import SLOW, GroupHarness, Ranked, finished, items
from tests.support.runtime_harness import (
    FOREVER,
    ME,
    SECRET,
    Looping,
    Say,
    Script,
    a_spec,
    assert_internal,
    limits,
    wait,
)

BROKEN = Say(failure=Failure(Category.NETWORK, "nobody there"))


def outcomes(group: RolloutGroup) -> list[Outcome]:
    """The outcomes of the current rollouts, by index."""
    assert all(each.outcome is not None for each in group.members)
    return [each.outcome for each in group.members if each.outcome is not None]


def rewards(group: RolloutGroup) -> list[float | None]:
    """The rewards of the current rollouts, by index."""
    return [outcome.reward_result.reward for outcome in outcomes(group)]


async def test_64_rollouts_in_4_slots_wait_for_their_group(harness: Callable[..., GroupHarness]) -> None:
    agent, receiver = Ranked(), Receiver()
    world = harness(agent, capacity=Capacity(running=4), reporter=receiver)
    lengths = [(7 * index) % 64 + 1 for index in range(64)]
    world.scripts |= {f"g/{index}": Script(Say("x" * lengths[index], seconds=20)) for index in range(64)}
    # All together take 16 times 20 s, longer than the time limit of one: waiting for the group does not count.
    group = world.start_group(64, outcome=RECEIVER, **limits(seconds=30.0))
    most, waited = 0, 0
    while group.result is None:
        await asyncio.sleep(5)
        most = max(most, world.roster.running)
        states = [each.state for each in group.members]
        assert states.count(RolloutState.QUEUED) == world.roster.queued
        if group.result is None:
            waited = max(waited, states.count(RolloutState.RUNNING) - world.roster.running)
            assert receiver.parcels == []
    assert (most, waited) == (4, 60)
    assert agent.groups == [list(range(64))]
    assert rewards(group) == [length - 1.0 for length in lengths]
    assert {tuple(outcome.reward_result.scores or ()) for outcome in outcomes(group)} == {("length", "ranked")}
    assert all(outcome.metrics.total_ms == pytest.approx(20_000) for outcome in outcomes(group))
    assert receiver.packed == 64
    assert await finished(group) == GroupResult(64, 64, 0, 64, 0, 0, early_stop=False)


async def test_several_groups_share_few_slots(harness: Callable[..., GroupHarness]) -> None:
    world = harness(Ranked(), capacity=Capacity(running=2))
    groups = [world.start_group(9, rollout_id=f"group{number}", priority=number % 3) for number in range(20)]
    for group in groups:
        assert (await finished(group)).completed == 9
    assert rewards(groups[0]) == [0.0] * 9


async def test_failed_cancelled_and_replaced_rollouts_do_not_block_the_others(
    harness: Callable[..., GroupHarness],
) -> None:
    agent = Ranked()
    world = harness(agent)
    world.says(_0=Say("xx"), _1=BROKEN, _1_r1=Say("x", seconds=9), _2=BROKEN, _3=Say(seconds=FOREVER), _4=Say("xxx"))
    group = world.start_group(5, refill=1)
    await asyncio.sleep(5)
    assert group.members[2].state is RolloutState.FINISHED
    assert group.members[0].state is RolloutState.RUNNING
    world.roster.cancel(Selection(ME, uids=(group.members[3].uid,)), "not needed")
    assert await finished(group) == GroupResult(5, 3, 1, 3, 1, 1, early_stop=False)
    assert agent.groups == [[0, 1, 4]]
    assert rewards(group) == [1.0, 0.0, None, None, 2.0]


async def test_a_rollout_cancelled_while_it_waits_ends_at_once(harness: Callable[..., GroupHarness]) -> None:
    agent = Ranked()
    world = harness(agent)
    world.says(_0=Say("x"), _1=Say("xx"), _2=Say("xxx", seconds=50))
    group = world.start_group(3)
    await asyncio.sleep(5)
    waiting = group.members[1]
    assert (waiting.state, waiting.outcome) == (RolloutState.RUNNING, None)
    assert world.roster.cancel(Selection(ME, uids=(waiting.uid,)), "not needed") == [waiting.uid]
    await asyncio.sleep(1)
    assert waiting.outcome is not None
    assert waiting.outcome.end == Cancellation("not needed")
    assert waiting.outcome.reward_result == RewardResult()
    assert world.roster.cancel(Selection(ME, uids=(waiting.uid,)), "again") == []
    assert await finished(group) == GroupResult(3, 2, 0, 2, 0, 1, early_stop=False)
    assert (agent.groups, rewards(group)) == ([[0, 2]], [0.0, None, 1.0])


async def test_all_waiting_rollouts_cancelled_before_the_last_one_completes(
    harness: Callable[..., GroupHarness],
) -> None:
    agent = Ranked()
    world = harness(agent)
    world.says(_0=Say("xx"), _1=Say("x", seconds=50))
    group = world.start_group(2)
    await asyncio.sleep(5)
    world.roster.cancel(Selection(ME, uids=(group.members[0].uid,)), "not needed")
    await finished(group)
    assert (agent.groups, rewards(group)) == ([[1]], [None, 0.0])


async def test_a_group_cancelled_during_its_reward_ends_at_once(harness: Callable[..., GroupHarness]) -> None:
    agent = Ranked()
    agent.gate.clear()
    world = harness(agent)
    group = world.start_group(3)
    await asyncio.sleep(5)
    world.roster.cancel(Selection(ME, uids=(group.members[1].uid,)), "one")
    await asyncio.sleep(5)
    assert [each.state for each in group.members] == [
        RolloutState.RUNNING,
        RolloutState.FINISHED,
        RolloutState.RUNNING,
    ]
    world.roster.cancel(Selection(ME, group_id=group.id), "all")
    before = asyncio.get_running_loop().time()
    assert await finished(group) == GroupResult(3, 0, 0, 0, 0, 3, early_stop=False)
    assert asyncio.get_running_loop().time() == before
    ends = [outcome.end for outcome in outcomes(group)]
    assert ends == [Cancellation("all"), Cancellation("one"), Cancellation("all")]
    assert agent.groups == [[0, 1, 2]]


async def test_a_drain_interrupts_rollouts_that_wait(harness: Callable[..., GroupHarness]) -> None:
    receiver = Receiver()
    world = harness(Ranked(), reporter=receiver)
    world.says(_1=Say(seconds=FOREVER))
    group = world.start_group(2, outcome=RECEIVER)
    await asyncio.sleep(5)
    await world.roster.drain(1)
    ends = [outcome.end for outcome in outcomes(group)]
    assert [end.category for end in ends if isinstance(end, Failure)] == [Category.INTERRUPTED] * 2
    assert receiver.packed == 2
    assert (await finished(group)).usable == 0


async def test_a_drain_waits_for_the_reward_of_a_group(harness: Callable[..., GroupHarness]) -> None:
    agent = Ranked()
    agent.gate.clear()
    world = harness(agent)
    group = world.start_group(2)
    asyncio.get_running_loop().call_later(20, agent.gate.set)
    await world.roster.drain(60)
    assert [outcome.end for outcome in outcomes(group)] == [Stop("stop"), Stop("stop")]


async def test_a_detached_rollout_that_waits_is_cancelled(harness: Callable[..., GroupHarness]) -> None:
    world = harness(Ranked())
    world.says(_1=Say(seconds=SLOW))
    group = world.start_group(2, cancel_after_detach=10.0)
    await finished(group)
    assert [outcome.end for outcome in outcomes(group)] == [Cancellation("detached")] * 2


class Short(Ranked):
    reward_group_seconds = 30.0


@pytest.mark.parametrize("error", [LookupError(SECRET), SystemExit(SECRET), RolloutEnded(Stop(SECRET))])
async def test_a_group_reward_that_raises_fails_all_its_rollouts(
    harness: Callable[..., GroupHarness], error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    agent = Ranked()
    agent.failing = error
    world = harness(agent)
    world.says(_1=BROKEN)
    group = world.start_group(3, refill=1)
    assert await finished(group) == GroupResult(3, 0, 1, 0, 3, 0, early_stop=False)
    for outcome in outcomes(group):
        assert_internal(outcome)
        assert "group reward failed" in str(outcome.end)
        assert outcome.reward_result == RewardResult()
    assert "reward_group() failed" in caplog.text


async def test_a_group_reward_has_a_time_limit(
    harness: Callable[..., GroupHarness], caplog: pytest.LogCaptureFixture
) -> None:
    agent = Short()
    agent.gate.clear()
    group = harness(agent).start_group(2)
    before = asyncio.get_running_loop().time()
    assert (await finished(group)).failed == 2
    assert asyncio.get_running_loop().time() - before == pytest.approx(30)
    assert "did not return within 30 s" in str(outcomes(group)[0].end)
    assert "reward_group()" in caplog.text


class Stuck:
    """Further models that never reply."""

    limits = ModelLimits()

    def __init__(self) -> None:
        self.endpoints = {"judge": ModelEndpoint(Target("http://j", Dialect.OPENAI, model="m"))}
        self.ended = 0

    async def complete(self, target: Target, request: CompletionRequest) -> ModelCompletion:
        try:
            await wait(FOREVER)
            raise AssertionError("it was not cancelled")
        finally:
            self.ended += 1


class Threaded(Short):
    """Asks a further model from a thread."""

    reward_group_seconds = 0.2

    def reward_group(self, runs: Sequence[Run]) -> list[RewardResult]:  # type: ignore[override]
        reply = runs[-1].wait(runs[-1].model("judge").sample([{"role": "user", "content": "?"}]))
        return [RewardResult(reward=float(reply.content)) for _ in runs]


async def test_a_call_that_a_thread_of_the_group_reward_waits_for_is_cancelled(
    harness: Callable[..., GroupHarness],
) -> None:
    models = Stuck()
    group = harness(Threaded(), models=models).start_group(2)
    assert (await finished(group)).failed == 2
    assert models.ended == 1


class Unreachable(Stuck):
    """Further models that cannot be reached."""

    async def complete(self, target: Target, request: CompletionRequest) -> ModelCompletion:
        raise RolloutFailed(Failure(Category.NETWORK, "turn 1: the engine at j:80 could not be reached", 1))


class InTasks(Short):
    """Asks a further model in tasks of a group, or the model of the rollouts, which is not possible."""

    def __init__(self, *, further: bool) -> None:
        self.further = further

    async def reward_group(self, runs: Sequence[Run]) -> list[RewardResult]:
        async with asyncio.TaskGroup() as group:
            for run in runs:
                question = [{"role": "user", "content": "?"}]
                group.create_task(run.model("judge").sample(question) if self.further else run.append(*question))
        return []


@pytest.mark.parametrize(("further", "failed_by"), [(True, FailureClass.ENGINE), (False, FailureClass.ENVIRONMENT)])
async def test_what_a_task_of_the_group_reward_raises_is_the_failure(
    harness: Callable[..., GroupHarness], further: bool, failed_by: FailureClass
) -> None:
    group = harness(InTasks(further=further), models=Unreachable()).start_group(2)
    assert (await finished(group)).failed == 2
    for outcome in outcomes(group):
        assert isinstance(outcome.end, Failure)
        assert outcome.end.failure_class is failed_by
        assert "interrupted" not in outcome.end.message


class Returning(Agent):
    name = "returning"

    def __init__(self, value: object) -> None:
        self.value = value

    async def reward(self, run: Run) -> RewardResult:
        return RewardResult(reward=0.5, scores={"own": 1.0, "both": 1.0}, extra_json='{"own": 1}')

    async def reward_group(self, runs: Sequence[Run]) -> list[float]:
        return self.value  # type: ignore[return-value]


@pytest.mark.parametrize(
    "value", [[1.0], [1.0, 2.0, 3.0], None, "ab", [1.0, "x"], [1.0, float("nan")], {0: 1.0, 1: 2.0}]
)
async def test_a_group_reward_that_is_none_fails_its_rollouts(
    harness: Callable[..., GroupHarness], value: object, caplog: pytest.LogCaptureFixture
) -> None:
    group = harness(Returning(value)).start_group(2)
    assert (await finished(group)).failed == 2
    assert "agent 'returning': reward_group" in caplog.text


async def test_a_group_reward_gives_rewards_of_roles_only_with_the_rule_own(
    harness: Callable[..., GroupHarness], caplog: pytest.LogCaptureFixture
) -> None:
    agent = Returning([RewardResult(1.0, roles={"agent": 0.25})] * 2)
    assert (await finished(harness(agent).start_group(2))).failed == 2
    assert 'rewards of roles reach samples only with reward_rule = "own", it is "copy"' in caplog.text
    agent.reward_rule = "own"
    group = harness(agent).start_group(2)
    await finished(group)
    assert [segment_rewards(outcome) for outcome in outcomes(group)] == [{"0": 0.25}] * 2


async def test_a_group_reward_replaces_and_extends_the_rollouts_own(harness: Callable[..., GroupHarness]) -> None:
    both = RewardResult(scores={"both": 2.0, "new": 3.0})
    group = harness(Returning([None, 2, both, RewardResult(reward=0.0, extra_json="{}")])).start_group(4)
    await finished(group)
    own = {"own": 1.0, "both": 1.0}
    assert [outcome.reward_result for outcome in outcomes(group)] == [
        RewardResult(0.5, own, '{"own": 1}'),
        RewardResult(2.0, own, '{"own": 1}'),
        RewardResult(0.5, {"own": 1.0, "both": 2.0, "new": 3.0}, '{"own": 1}'),
        RewardResult(0.0, own, "{}"),
    ]


async def test_an_early_stop_keeps_the_rollouts_that_wait(harness: Callable[..., GroupHarness]) -> None:
    agent = Ranked()
    world = harness(agent)
    world.says(_0=Say("xx"), _1=Say("x", seconds=5), _2=Say(seconds=FOREVER), _3=Say("xxx", seconds=3))
    group = world.start_group(4, min_usable=2)
    found = await items(group)
    assert found[-1] == GroupResult(4, 2, 0, 2, 0, 2, early_stop=True)
    assert (agent.groups, rewards(group)) == ([[0, 3]], [0.0, None, None, 1.0])


class Cleaning(Ranked):
    """Takes 20 s to clean up the rollout of index 1."""

    async def cleanup(self, run: Run) -> None:
        if run.request.group_index == 1:
            await asyncio.sleep(20)


async def test_a_rollout_cancelled_during_its_cleanup_stops_no_group_early(
    harness: Callable[..., GroupHarness],
) -> None:
    agent = Cleaning()
    world = harness(agent)
    world.says(_0=Say("xx"), _1=Say("x"), _2=Say("xxx", seconds=50))
    group = world.start_group(3, min_usable=2)
    await asyncio.sleep(10)
    world.roster.cancel(Selection(ME, uids=(group.members[1].uid,)), "not needed")
    assert await finished(group) == GroupResult(3, 2, 0, 2, 0, 1, early_stop=False)
    assert (agent.groups, rewards(group)) == ([[0, 2]], [0.0, None, 1.0])


class Models:
    """A judge that replies after 10 s, only with the key of the request."""

    endpoints: Mapping[str, ModelEndpoint] = {}
    limits = ModelLimits()

    def __init__(self) -> None:
        self.deadlines: list[float | None] = []

    async def complete(self, target: Target, request: CompletionRequest) -> ModelCompletion:
        assert request.credentials.completions == "key"
        self.deadlines.append(request.deadline)
        await asyncio.sleep(10)
        return ModelCompletion(Message.write({"role": "assistant", "content": "4"}), "stop", (7, 2), 1)


class Asking(Ranked):
    """Asks a judge twice for each rollout of a group."""

    async def reward_group(self, runs: Sequence[Run]) -> list[float]:  # type: ignore[override]
        replies = [
            (await run.model("judge").sample([{"role": "user", "content": "?"}])).content for _ in "12" for run in runs
        ]
        return [float(reply) for reply in replies[: len(runs)]]


def start_judged(world: GroupHarness, **fields: object) -> RolloutGroup:
    """Start a group of two whose rollouts ask the judge of the request."""
    judge = {"judge": Target("http://j", Dialect.OPENAI, model="m")}
    spec = a_spec(rollout_id="g", agent="ranked", models=judge, **fields)
    return world.start_request(
        StartRequest(spec, "me", credentials=Credentials(models={"judge": "key"})), GroupPlan(2)
    )[0]


async def test_a_rollout_cancelled_while_its_group_is_judged_does_not_fail_the_others(
    harness: Callable[..., GroupHarness],
) -> None:
    group = start_judged(world := harness(Asking(), models=Models()))
    await asyncio.sleep(5)
    world.roster.cancel(Selection(ME, uids=(group.members[0].uid,)), "not needed")
    assert await finished(group) == GroupResult(2, 1, 0, 1, 0, 1, early_stop=False)
    assert rewards(group) == [None, 4.0]
    await asyncio.sleep(1)
    assert [each.credentials for each in group.members] == [Credentials()] * 2


async def test_the_time_limit_of_a_rollout_does_not_bound_the_models_of_its_group(
    harness: Callable[..., GroupHarness],
) -> None:
    models = Models()
    group = start_judged(harness(Asking(), models=models), **limits(seconds=1.0))
    assert (await finished(group)).completed == 2
    assert models.deadlines == [None] * 4


async def test_rollouts_that_wait_count_towards_the_capacity(harness: Callable[..., GroupHarness]) -> None:
    world = harness(Ranked(), Looping(), capacity=Capacity(running=2, queued=2))
    world.says(_0=Say(), _1=Say(), _2=Say(), _3=Say(seconds=50))
    group = world.start_group(4)
    await asyncio.sleep(5)
    assert (world.roster.running, world.roster.queued) == (1, 0)
    with pytest.raises(Busy, match="1 rollouts run and 3 wait"):
        world.start(agent="looping")
    await finished(group)
    await asyncio.sleep(1)
    assert len(world.start_group(4, agent="looping").members) == 4


async def test_rollouts_that_were_started_one_by_one_do_not_wait(harness: Callable[..., GroupHarness]) -> None:
    agent = Ranked()
    world = harness(agent)
    rollouts = [world.start(Say("xx"), group_id="g", group_index=index) for index in range(2)]
    await asyncio.sleep(1)
    found = [each.outcome for each in rollouts if each.outcome is not None]
    assert [each.reward_result.reward for each in found] == [2.0, 2.0]
    assert [[warned.code for warned in each.warnings] for each in found] == [["group_reward_missing"]] * 2
    alone = world.start()
    await asyncio.sleep(1)
    assert alone.outcome is not None
    assert alone.outcome.warnings == ()
    assert agent.groups == []


class Reading(Agent):
    """Compares states, and tries what a group's reward may not do."""

    name = "reading"
    told: list[object]

    async def play(self, run: Run) -> None:
        run.state["number"] = run.request.group_index
        await run.sample()

    async def cleanup(self, run: Run) -> None:
        run.state["cleaned"] = True

    async def reward_group(self, runs: Sequence[Run]) -> list[float]:
        self.told = [(run.state, run.reward, run.turn, run.cancelled) for run in runs]
        for act in (runs[0].sample(), runs[0].append({"role": "user", "content": "?"})):
            with pytest.raises(RolloutEnded):
                await act
        return [float(run.state["number"]) for run in runs]


async def test_the_runs_of_a_group_can_only_be_read(harness: Callable[..., GroupHarness]) -> None:
    agent = Reading()
    group = harness(agent).start_group(2)
    await finished(group)
    assert agent.told == [({"number": at, "cleaned": True}, RewardResult(), 1, True) for at in range(2)]
    assert rewards(group) == [0.0, 1.0]


def test_a_group_reward_is_checked_when_its_class_is_defined() -> None:
    with pytest.raises(TypeError, match="reward_group is called with"):

        class Wrong(Agent):
            name = "wrong"

            async def reward_group(self) -> list[float]:  # type: ignore[override]
                return []

    with pytest.raises(ValueError, match="reward_group_seconds is 0"):

        class Never(Agent):
            name = "never"
            reward_group_seconds = 0


async def test_the_log_names_the_group(harness: Callable[..., GroupHarness], caplog: pytest.LogCaptureFixture) -> None:
    agent = Ranked()
    agent.failing = LookupError("no ranks")
    with caplog.at_level(logging.ERROR):
        group = harness(agent).start_group(1, group_id="mine")
        await finished(group)
    assert "test_group_reward" not in caplog.records[0].getMessage()
    assert "group_harness.py" in caplog.records[0].getMessage()
    assert "group mine" in caplog.records[0].getMessage()
