"""The order of stop reasons in the protocol: tokens, no calls, the calls run, turns."""

from __future__ import annotations

import pytest
from rollout_server import Agent, Limits, Run, tool
from rollout_server.core.ledger import DriftKind
from rollout_server.core.outcome import Category, Failure, Stop
from rollout_server.core.record import DriftFound
from rollout_server.core.spec import DriftPolicy

from tests.support.runtime_harness import FOREVER, USER, Looping, RuntimeHarness, Say, call, contents, outcome_of, wait

CALLS = (call("echo", text="hello"),)
AGAIN = Say("again", CALLS)
DONE = Say("done")


@tool
async def echo(text: str) -> str:
    """Says it again."""
    return text


class Echoing(Agent):
    """An agent with the default loop and a tool."""

    name = "echoing"
    tools = (echo,)


@pytest.mark.parametrize(
    ("limits", "says", "reason", "turns", "ran"),
    [
        pytest.param(Limits(), [DONE], "stop", 1, 0, id="no calls"),
        pytest.param(Limits(), [AGAIN, AGAIN, DONE], "stop", 3, 2, id="no calls any more"),
        pytest.param(Limits(turns=1), [DONE], "stop", 1, 0, id="no calls in the last turn"),
        pytest.param(Limits(turns=2), [AGAIN], "max_turns", 2, 2, id="the last turn's calls have run"),
        pytest.param(Limits(generated_tokens=2), [AGAIN], "max_tokens", 2, 1, id="tokens go before calls"),
        pytest.param(Limits(generated_tokens=1), [DONE], "max_tokens", 1, 0, id="tokens go before no calls"),
        pytest.param(Limits(generated_tokens=2, turns=2), [AGAIN], "max_tokens", 2, 1, id="tokens go before turns"),
        pytest.param(Limits(generated_tokens=3, turns=2), [AGAIN], "max_turns", 2, 2, id="one token short"),
        pytest.param(Limits(tool_turns=1), [AGAIN], "max_turns", 2, 1, id="turns with calls"),
        pytest.param(Limits(tool_turns=1), [AGAIN, DONE], "stop", 2, 1, id="as many turns with calls as allowed"),
        pytest.param(Limits(bytes=1), [DONE], "max_bytes", 0, 0, id="a prompt of too many bytes is not sent"),
        pytest.param(Limits(bytes=len(USER.text) + 1), [AGAIN], "max_bytes", 1, 1, id="bytes"),
    ],
)
async def test_the_first_limit_that_is_met_stops(
    new_world: type[RuntimeHarness], limits: Limits, says: list[Say], reason: str, turns: int, ran: int
) -> None:
    outcome = await outcome_of(new_world(Echoing()).start(*says, limits=limits))
    assert outcome.end == Stop(reason)
    assert (outcome.metrics.turns, outcome.metrics.tool_calls) == (turns, ran)
    assert len(contents(outcome, "assistant")) == turns
    assert contents(outcome, "tool") == ["hello"] * ran


async def test_an_answer_that_crosses_the_token_limit_is_kept_whole(new_world: type[RuntimeHarness]) -> None:
    outcome = await outcome_of(
        new_world(Echoing()).start(Say("long", CALLS, tokens=100), limits=Limits(generated_tokens=7))
    )
    assert contents(outcome, "assistant") == ["long"]
    assert outcome.metrics.generated_tokens == 100
    (segment,) = outcome.segments
    assert len(segment.sample().response_ids) == 100


async def test_of_two_limits_the_lower_holds(new_world: type[RuntimeHarness]) -> None:
    class Short(Echoing):
        limits = Limits(turns=2, generated_tokens=50)

    for asked, turns in ((Limits(turns=1), 1), (Limits(turns=3), 2), (Limits(), 2)):
        outcome = await outcome_of(new_world(Short()).start(AGAIN, limits=asked))
        assert outcome.metrics.turns == turns


@pytest.mark.parametrize(
    ("says", "end"), [([Say("cut", finish_reason="length")], Stop("stop", truncated=True)), ([DONE], Stop("stop"))]
)
async def test_a_last_answer_that_was_cut_says_so(new_world: type[RuntimeHarness], says: list[Say], end: Stop) -> None:
    assert (await outcome_of(new_world().start(*says))).end == end


async def test_only_the_last_answer_counts_as_cut(new_world: type[RuntimeHarness]) -> None:
    outcome = await outcome_of(new_world(Echoing()).start(Say("cut", CALLS, finish_reason="length"), DONE))
    assert outcome.end == Stop("stop")


async def test_an_agent_ends_with_its_own_word(new_world: type[RuntimeHarness]) -> None:
    class Curt(Agent):
        name = "curt"

        async def play(self, run: Run) -> None:
            await run.sample()
            await run.finish("enough")

        async def reward(self, run: Run) -> float:
            return 0.5

    outcome = await outcome_of(new_world(Curt()).start(Say("cut", finish_reason="length")))
    assert outcome.end == Stop("enough", truncated=True)
    assert outcome.reward_result.reward == 0.5


async def test_messages_that_the_agent_adds_are_asked_with_and_counted(new_world: type[RuntimeHarness]) -> None:
    class Insisting(Agent):
        name = "insisting"

        async def play(self, run: Run) -> None:
            await run.sample()
            await run.append({"role": "user", "content": "sure?"})
            await run.sample()

    world = new_world(Insisting())
    rollout = world.start(Say("8"), Say("yes"))
    outcome = await outcome_of(rollout)
    assert [ask.asked.messages for ask in world.script(rollout).asks] == [1, 3]
    assert [ask.last_messages for ask in world.script(rollout).asks] == [0, 1]
    assert contents(outcome, "user") == ["5 + 3?", "sure?"]


async def test_a_trainer_that_fails_ends_the_rollout_with_what_there_was(new_world: type[RuntimeHarness]) -> None:
    failure = Failure(Category.TRAINER_SERVER, "turn 2: the trainer answered 500", http_status=500)
    outcome = await outcome_of(new_world(Echoing()).start(AGAIN, Say(failure=failure)))
    assert outcome.end == Failure(failure.category, failure.message, 2, 500)
    assert contents(outcome, "tool") == ["hello"]
    assert outcome.metrics.generated_tokens == 1


@pytest.mark.parametrize(
    "message",
    [
        '{"role": "assistant", "tool_calls": {}}',
        '{"role": "assistant", "tool_calls": [{"id": "a"}]}',
        '{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": 1}}]}',
        '{"role": "assistant", "tool_calls": [{"function": {"name": "echo"}}]}',
        '{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "echo", "arguments": 7}}]}',
    ],
)
async def test_a_malformed_answer_is_an_error_that_names_turn_and_field(
    new_world: type[RuntimeHarness], message: str
) -> None:
    outcome = await outcome_of(new_world(Echoing()).start(AGAIN, Say(message=message)))
    assert isinstance(outcome.end, Failure)
    assert outcome.end.category is Category.VALIDATION
    assert "turn 2" in outcome.end.message
    assert "tool_calls" in outcome.end.message
    assert outcome.messages[-1].text == message


@pytest.mark.parametrize("policy", [None, DriftPolicy.WARN, DriftPolicy.FAIL])
async def test_drift_ends_the_rollout_only_where_it_was_asked_to(
    new_world: type[RuntimeHarness], policy: DriftPolicy | None
) -> None:
    rollout = new_world(Echoing()).start(AGAIN, Say("done", reported=(1, 99, 2)), on_drift=policy)
    outcome = await outcome_of(rollout)
    assert [entry.record.drift.kind for entry in rollout.log.entries if isinstance(entry.record, DriftFound)] == [
        DriftKind.RETOKENISED
    ]
    assert len(outcome.segments) == 2
    if policy is DriftPolicy.FAIL:
        assert isinstance(outcome.end, Failure)
        assert outcome.end.category is Category.TOKEN_DRIFT
        assert "token 1" in outcome.end.message
    else:
        assert outcome.end == Stop("stop")
    assert [warned.code for warned in outcome.warnings] == ["token_drift"]


@tool
async def stall() -> str:
    """Never returns."""
    await wait(FOREVER)
    return ""


class Stalling(Agent):
    """Wait forever in the given place."""

    name = "stalling"
    tools = (stall,)

    async def play(self, run: Run) -> None:
        if run.metadata["where"] == "play":
            await wait(FOREVER)
        await super().play(run)

    async def reward(self, run: Run) -> float:
        await wait(FOREVER)
        return 1.0


STALLS = {
    "sample": Say(seconds=FOREVER),
    "tools": Say("wait", (call("stall"),)),
    "play": DONE,
    "reward": DONE,
}


@pytest.mark.parametrize("where", STALLS)
async def test_the_time_limit_holds_wherever_the_rollout_is(new_world: type[RuntimeHarness], where: str) -> None:
    world = new_world(Stalling())
    rollout = world.start(STALLS[where], limits=Limits(seconds=30), metadata_json=f'{{"where": "{where}"}}')
    outcome = await outcome_of(rollout)
    assert isinstance(outcome.end, Failure)
    assert outcome.end.category is Category.TIMEOUT
    assert "timeout" in outcome.end.message
    assert "30 s" in outcome.end.message
    assert ("The agent's reward had not returned" in outcome.end.message) == (where == "reward")
    assert outcome.metrics.total_ms == pytest.approx(30_000)
    assert outcome.reward_result.reward is None
    assert len(contents(outcome, "assistant")) == (where in ("tools", "reward"))


async def test_time_is_counted_from_the_first_turn_not_in_the_queue(new_world: type[RuntimeHarness]) -> None:
    world = new_world(Stalling(), Looping())
    rollouts = [
        world.start(STALLS["sample"], limits=Limits(seconds=30), metadata_json='{"where": "sample"}')
        for _ in range(101)
    ]
    last = await outcome_of(rollouts[-1])
    assert last.metrics.queued_ms == pytest.approx(30_000)
    assert last.metrics.total_ms == pytest.approx(30_000)
