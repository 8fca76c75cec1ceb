"""Special rules of the asynchronous HTTP API (docs/design.md, "Asynchronous HTTP API")."""

from __future__ import annotations

import pytest
from rollout_server import Limits
from rollout_server.core.outcome import Stop
from rollout_server.core.spec import Dialect, Target

from tests.support.runtime_harness import RuntimeHarness, Say, a_wish, outcome_of

PLAIN = Target("http://trainer:8081", Dialect.HTTP_PLAIN)


@pytest.mark.parametrize(
    ("finish_reason", "reason", "truncated"),
    [
        ("stop", "stop", False),
        ("length", "length", True),
        ("content_filter", "content_filter", False),
        ("", "stop", False),
    ],
)
async def test_the_trainers_last_word_is_the_rollouts(
    new_world: type[RuntimeHarness], finish_reason: str, reason: str, truncated: bool
) -> None:
    outcome = await outcome_of(new_world().start(Say("8", finish_reason=finish_reason), completions=PLAIN))
    assert outcome.end == Stop(reason, truncated)


async def test_in_other_dialects_it_is_not(new_world: type[RuntimeHarness]) -> None:
    outcome = await outcome_of(new_world().start(Say("8", finish_reason="content_filter")))
    assert outcome.end == Stop("stop")


async def test_a_limit_that_is_met_goes_before_the_trainers_word(new_world: type[RuntimeHarness]) -> None:
    rollout = new_world().start(Say("8", finish_reason="length"), completions=PLAIN, limits=Limits(generated_tokens=1))
    assert (await outcome_of(rollout)).end == Stop("max_tokens", True)


@pytest.mark.parametrize(
    ("limits", "reason"), [(Limits(turns=0), "max_turns"), (Limits(generated_tokens=0), "max_tokens")]
)
async def test_a_limit_of_0_ends_it_before_anybody_is_asked(
    new_world: type[RuntimeHarness], limits: Limits, reason: str
) -> None:
    world = new_world()
    rollout = world.start(completions=PLAIN, limits=limits)
    outcome = await outcome_of(rollout)
    assert outcome.end == Stop(reason)
    assert world.script(rollout).asks == []


async def test_a_conversation_may_begin_with_nothing(new_world: type[RuntimeHarness]) -> None:
    world = new_world()
    rollout = world.start(Say("hello"), completions=PLAIN, messages=())
    outcome = await outcome_of(rollout)
    assert outcome.end == Stop("stop")
    assert [message.fields()["content"] for message in outcome.messages] == ["hello"]
    assert [ask.asked.messages for ask in world.script(rollout).asks] == [0]


async def test_a_known_key_finds_its_rollout_under_another_rollout_id(new_world: type[RuntimeHarness]) -> None:
    world = new_world()
    rollout, _ = world.wish(a_wish("key", rollout_id="first", completions=PLAIN))
    assert world.wish(a_wish("key", rollout_id="second", completions=PLAIN)) == (rollout, True)
    assert rollout.spec.rollout_id == "first"
