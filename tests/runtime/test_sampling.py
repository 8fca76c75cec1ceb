"""Turns with other sampling parameters than the request's: what is requested, recorded and refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from rollout_server.agent import Agent
from rollout_server.core.outcome import Failure, Metrics, Stop
from rollout_server.core.record import Asked
from rollout_server.core.spec import Dialect, Sampling, Target, TokenizerName
from rollout_server.runtime.errors import AgentMistake
from rollout_server.runtime.rollout import Rollout
from rollout_server.runtime.run.arguments import turn_sampling
from rollout_server.runtime.run.messages import Reply
from rollout_server.runtime.run.run import Run

from tests.support.runtime_harness import RuntimeHarness, Say, outcome_of

NewWorld = Callable[..., RuntimeHarness]
WHOLE = Sampling(0.7, 0.9, 512, ("END",), True, '{"seed": 18446744073709551617, "penalty": 1e999}')


class Changing(Agent):
    """Override the parameters of one turn between two others, and of one turn in another conversation."""

    name = "changing"

    def __init__(self, **options: Any) -> None:
        self.options = options

    async def play(self, run: Run) -> None:
        await run.sample()
        await run.append({"role": "user", "content": "Again."})
        await run.sample(**self.options)
        aside = await run.fork([{"role": "user", "content": "Aside."}])
        await aside.sample(**self.options)
        await run.append({"role": "user", "content": "Again."})
        await run.sample()


def asked(rollout: Rollout) -> list[Asked]:
    return [entry.record for entry in rollout.log.entries if isinstance(entry.record, Asked)]


async def test_an_override_holds_for_its_turn_and_is_recorded(new_world: NewWorld) -> None:
    """`outcome_of` replays the log; the machine accepts its records unchanged or refuses them."""
    world = new_world(Changing(temperature=0, stop="\n", extra={"min_p": 0.1}))
    rollout = world.start(sampling=WHOLE)
    assert (await outcome_of(rollout)).end == Stop("stop")
    own = replace(WHOLE, temperature=0.0, stop=("\n",), extra_json=f'{WHOLE.extra_json[:-1]}, "min_p": 0.1}}')
    assert [ask.sampling for ask in world.script(rollout).asks] == [WHOLE, own, own, WHOLE]
    assert [record.sampling for record in asked(rollout)] == [None, own, own, None]


async def test_what_the_request_says_anyway_is_no_override(new_world: NewWorld) -> None:
    world = new_world(Changing(temperature=0.7, top_p=None, max_tokens=512, stop=["END"], extra={}))
    rollout = world.start(sampling=WHOLE)
    await outcome_of(rollout)
    assert [ask.sampling for ask in world.script(rollout).asks] == [WHOLE] * 4
    assert [record.sampling for record in asked(rollout)] == [None] * 4


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"temperature": Fraction(1, 2)}, {"temperature": 0.5}),
        ({"temperature": Decimal("0.5")}, {"temperature": 0.5}),
        ({"temperature": 2, "top_p": 0}, {"temperature": 2.0, "top_p": 0.0}),
        ({"max_tokens": 2**31 - 1}, {"max_tokens": 2**31 - 1}),
        ({"stop": []}, {"stop": ()}),
        ({"stop": ("a", "ü")}, {"stop": ("a", "ü")}),
        ({"logprobs": False}, {"logprobs": False}),
        ({"extra": {"seed": 3}}, None),
        ({}, {}),
    ],
)
def test_what_is_set_replaces_and_the_rest_stays(given: dict[str, Any], found: dict[str, Any] | None) -> None:
    request = replace(WHOLE, extra_json='{ "seed": 1, "top_k": 1.10 } ')
    made = turn_sampling(request, given, Dialect.GRPC)
    if found is None:
        assert (json.loads(made.extra_json), replace(made, extra_json="")) == (
            {"seed": 3, "top_k": 1.1},
            replace(request, extra_json=""),
        )
    else:
        assert made == replace(request, **found)


@pytest.mark.parametrize("known", ["", "{}", " { } ", '{"top_k": 1.10}'])
def test_further_parameters_are_added_to_any_that_there_are(known: str) -> None:
    made = turn_sampling(Sampling(extra_json=known), {"extra": {"min_p": 0.1, "ü": [None]}}, Dialect.GRPC)
    assert json.loads(made.extra_json) == {**json.loads(known or "{}"), "min_p": 0.1, "ü": [None]}
    assert known != '{"top_k": 1.10}' or '"top_k": 1.10,' in made.extra_json


WRONG: tuple[tuple[dict[str, Any], str], ...] = (
    ({"temperature": "hot"}, "sample: temperature='hot' is invalid; pass a number"),
    ({"temperature": True}, "sample: temperature=True is invalid; pass a number"),
    ({"temperature": [1]}, r"sample: temperature=\[1\] is invalid; pass a number"),
    ({"temperature": -0.1}, "sample: temperature=-0.1: must be from 0 to 2"),
    ({"temperature": float("nan")}, "sample: temperature=nan: must be from 0 to 2"),
    ({"top_p": 1.5}, "sample: top_p=1.5: must be from 0 to 1"),
    ({"top_p": 10**400}, "sample: top_p=1000.*: must be from 0 to 1"),
    ({"max_tokens": 0}, "sample: max_tokens=0: must be from 1 to 2147483647"),
    ({"max_tokens": 1.0}, "sample: max_tokens=1.0 is invalid; pass an integer"),
    ({"stop": ["a", 1]}, r"sample: stop=\['a', 1\] is invalid; pass a string or a list of strings"),
    ({"stop": b"ab"}, "sample: stop=b'ab' is invalid; pass a string or a list of strings"),
    ({"stop": "\ud800"}, "sample: stop=.* is invalid; pass a string or a list of strings"),
    ({"stop": ["a"] * 65}, "sample: stop=.*: has 65 entries, at most 64 are allowed"),
    ({"logprobs": 1}, "sample: logprobs=1 is invalid; pass True or False"),
    ({"extra": "min_p"}, "sample: extra='min_p' is invalid; pass a dict that can be serialized as JSON"),
    ({"extra": {"min_p": float("inf")}}, "sample: extra=.* is invalid; pass a dict that can be serialized as JSON"),
    ({"extra": {"min_p": {1}}}, "sample: extra=.* is invalid; pass a dict that can be serialized as JSON"),
    ({"extra": {"bias": [0] * 100_000}}, "sample: extra=.*: holds more than 100000 JSON values"),
    ({"extra": {1: 2}}, "sample: extra={1: 2} is invalid; pass a dict that can be serialized as JSON"),
    ({"extra": {"stop": "a"}}, r"sample: extra contains stop, which is an option: use sample\(stop=...\)"),
    ({"extra": {"penalty": 1}}, "the request's extra parameters contain a number that JSON cannot"),
    ({"min_p": 0.1}, r"sample: min_p is not an option; .* as extra=\{'min_p': ...\}"),
)


@pytest.mark.parametrize(("given", "said"), WRONG)
def test_what_is_wrong_is_named(given: dict[str, Any], said: str) -> None:
    request = replace(WHOLE, extra_json='{"penalty": 1, "other": 1e999}')
    with pytest.raises(AgentMistake, match=said):
        turn_sampling(request, given, Dialect.GRPC)


def test_the_synchronous_dialect_has_its_own_most_tokens() -> None:
    with pytest.raises(AgentMistake, match="max_tokens=32769: must be from 1 to 32768"):
        turn_sampling(Sampling(), {"max_tokens": 32_769}, Dialect.HTTP_MASKED)


async def test_a_mistake_asks_nobody_and_the_run_goes_on(new_world: NewWorld) -> None:
    class Clumsy(Agent):
        name = "clumsy"

        async def play(self, run: Run) -> None:
            with pytest.raises(AgentMistake, match="temperature"):
                await run.sample(temperature=3)
            await run.sample(temperature=2)

    world = new_world(Clumsy())
    rollout = world.start()
    assert (await outcome_of(rollout)).end == Stop("stop")
    assert [record.turn for record in asked(rollout)] == [1]


async def test_a_run_tells_its_request_what_was_used_and_what_was_sampled(new_world: NewWorld) -> None:
    seen: list[object] = []

    class Looking(Agent):
        name = "looking"

        async def play(self, run: Run) -> None:
            request = run.request
            seen.extend(
                (request.rollout_id, request.group_id, request.labels, request.sampling, request.limits.seconds)
            )
            seen.extend((run.metadata, run.used, run.tools))
            reply = await run.sample()
            assert reply.token_ids is not None
            seen.extend((run.used.turns, run.used.generated_tokens, reply.token_ids, reply.logprobs))

    more: dict[str, Any] = {"group_id": "g", "labels": {"a": "b"}, "metadata_json": '{"x": 1}', "sampling": WHOLE}
    rollout = new_world(Looking()).start(Say("done", tokens=3), **more)
    assert not isinstance((await outcome_of(rollout)).end, Failure)
    assert seen[:5] == ["r1", "g", {"a": "b"}, WHOLE, rollout.spec.limits.seconds]
    assert seen[5:8] == [{"x": 1}, Metrics(), ()]
    assert seen[8:] == [1, 3, [10, 11, 12], None]


def test_a_reply_of_ones_own_has_no_tokens() -> None:
    assert (Reply({"content": "x"}, (), "stop").token_ids, Reply({}, (), "").logprobs) == (None, None)


async def test_the_masked_dialect_bounds_an_override_in_a_rollout(new_world: NewWorld) -> None:
    said: list[str] = []

    class Long(Agent):
        name = "long"

        async def play(self, run: Run) -> None:
            try:
                await run.sample(max_tokens=40_000)
            except AgentMistake as mistake:
                said.append(str(mistake))
            await run.sample()

    target = Target("http://trainer:1", Dialect.HTTP_MASKED)
    rollout = new_world(Long()).start(completions=target, tokenizer=TokenizerName("t"))
    assert (await outcome_of(rollout)).end == Stop("stop")
    assert said == ["sample: max_tokens=40000: must be from 1 to 32768"]
