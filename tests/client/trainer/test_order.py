"""Groups in the order of their prompts, and the one sample that stands for a rollout."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import settings as limit
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from rollout_client import samples
from rollout_client.export import to_trl
from rollout_client.trainer import Finished, Generated, Prompt, Trainer, Turn, parsers
from rollout_client.trainer.results import verify_rollout
from rollout_server import Agent, Run
from rollout_server.app import Server
from rollout_server.calculator import Calculator

from tests.support.random_rollouts import outcome_of, rollouts, span
from tests.support.start_requests import settings
from tests.support.toy_model import END, ToyModel, decode, until

QUESTION = "Please calculate 5 plus 3."


@pytest.fixture
async def address() -> AsyncIterator[str]:
    async with Server([Calculator(), Failing()], settings()) as server:
        yield f"127.0.0.1:{server.grpc_port}"


class Delayed:
    """A model whose group "slow" waits for `gate`."""

    def __init__(self) -> None:
        self.model = ToyModel()
        self.gate = asyncio.Event()
        self.begun: set[str] = set()

    async def __call__(self, turn: Turn) -> Generated:
        self.begun.add(turn.group_id)
        if turn.group_id == "slow":
            await self.gate.wait()
        return await self.model(turn.ids, turn.sampling)

    def trainer(self, address: str) -> Trainer:
        return Trainer(address, generate=self, decode=decode, parse=parsers.hermes, end_ids={END})


def prompts(*names: str) -> list[Prompt]:
    return [Prompt([{"role": "user", "content": QUESTION}], group_id=name) for name in names]


async def test_groups_come_in_order_and_not_before_the_one_that_is_waited_for(address: str) -> None:
    names = ["a", "slow", *map(str, range(20))]
    model, taken = Delayed(), list[str]()

    def given() -> Iterator[Prompt]:
        for prompt in prompts(*names):
            taken.append(prompt.group_id)
            yield prompt

    async with model.trainer(address) as trainer:
        order = []
        stream = trainer.rollouts(given(), n=2, at_once=8, in_order=True, tokenizer="toy", agent="calculator")
        async with aclosing(stream) as groups:
            order.append((await anext(groups)).id)
            late = asyncio.ensure_future(anext(groups))
            await until(lambda: model.begun >= {"slow", "0", "1", "2"})
            await asyncio.sleep(0.05)  # nothing else may be taken now: the others wait for the slow one
            assert (taken, late.done()) == (["a", "slow", "0", "1", "2"], False)
            model.gate.set()
            order.append((await late).id)
            order += [group.id async for group in groups]
    assert order == names


async def test_without_order_a_slow_group_delays_no_other(address: str) -> None:
    model = Delayed()
    async with model.trainer(address) as trainer:
        order = []
        async with aclosing(
            trainer.rollouts(prompts("slow", *"abcdef"), n=2, at_once=4, tokenizer="toy", agent="calculator")
        ) as groups:
            async for group in groups:
                order.append(group.id)
                if len(order) == 6:
                    model.gate.set()
    assert (sorted(order[:6]), order[6]) == (list("abcdef"), "slow")


async def test_an_error_comes_at_the_place_of_its_group(address: str) -> None:
    """Groups before a group that fails are yielded, though it fails first; none after it."""
    a, b, c = prompts(*"abc")
    wrong = replace(b, metadata={"value": float("nan")})
    async with Delayed().trainer(address) as trainer:
        stream = trainer.rollouts([a, wrong, c], n=2, in_order=True, tokenizer="toy", agent="calculator")
        assert (await anext(stream)).id == "a"
        with pytest.raises(ValueError, match="metadata"):
            await anext(stream)
        assert [group async for group in stream] == []


@limit(max_examples=40)
@given(rollouts())
def test_the_primary_sample_has_most_trained_tokens(rollout: pb.Rollout) -> None:
    finished = verify_rollout(rollout, None)
    trained = [each for each in samples(rollout) if each.trainable]
    if not trained:
        assert finished.primary is None
        return
    most = max(sum(each.response_mask) for each in trained)
    assert finished.primary == next(each for each in trained if sum(each.response_mask) == most)


@limit(max_examples=40)
@given(rollouts())
def test_a_rollout_has_one_row_in_trl(rollout: pb.Rollout) -> None:
    finished = verify_rollout(rollout, None)
    row = to_trl([finished], end_id=7)
    (ids,), (mask,) = row["completion_ids"], row["env_mask"]
    assert len(ids) == len(mask) > 0
    if finished.primary is not None:
        assert (ids, mask) == (finished.primary.response_ids, finished.primary.response_mask)
    elif finished.untrainable:
        assert (row["prompt_ids"][0], set(mask)) == (finished.untrainable[0].prompt_ids, {0})
    else:
        assert (row["prompt_ids"], ids, mask, row["logprobs"]) == ([[7]], [7], [0], [[0.0]])
        assert row["rollout_reward"] == [None]
    assert bool(row["rollout_untrainable"][0]) == (finished.primary is None)


def test_a_sample_of_a_further_model_is_no_row_of_the_trainer() -> None:
    """Its tokens are those of another tokenizer, and another policy sampled them. It has more trained tokens than the others."""
    (own,) = samples(outcome_of(span("prompt", 2), span("model", 2)))
    (critic,) = samples(outcome_of(span("prompt", 2), span("model", 9)))
    critic = replace(critic, segment_id="1", role="critic", model="critic")
    both = Finished(pb.Rollout(uid="u"), [critic, own], None, False)
    assert (both.own, both.primary) == ([own], own)
    assert to_trl([both])["rollout_model"] == [""]
    assert to_trl([critic])["rollout_model"] == ["critic"]  # asked for by name
    untrained = replace(own, trainable=False, untrainable_reason="untrained_role")
    others = replace(critic, trainable=False), untrained
    assert to_trl([replace(both, samples=[critic], untrainable=others)])["completion_ids"] == [own.response_ids]
    alone = replace(both, samples=[critic], untrainable=others[:1])
    assert alone.primary is None
    assert (to_trl([alone], end_id=7)["completion_ids"], to_trl([alone], end_id=7)["env_mask"]) == ([[7]], [[0]])


class Failing(Agent):
    """Fails before its first turn in every second rollout of a group."""

    name = "failing"

    async def play(self, run: Run) -> None:
        if (run.request.group_index or 0) % 2:
            raise ValueError("no luck")
        await run.sample()


async def test_rollouts_without_samples_keep_their_row(address: str) -> None:
    async with Delayed().trainer(address) as trainer:
        stream = trainer.rollouts(prompts("a", "b"), n=4, in_order=True, tokenizer="toy", agent="failing")
        finished = [rollout async for group in stream for rollout in group.rollouts]
    failed = [not each.samples for each in finished]
    assert failed == [False, True] * 4
    made = to_trl(finished, end_id=END)
    assert made["rollout_uid"] == [each.uid for each in finished]
    assert [sum(mask) > 0 for mask in made["env_mask"]] == [not each for each in failed]
    assert made["logprobs"] is not None
    assert [len(values) for values in made["logprobs"]] == [len(ids) for ids in made["completion_ids"]]
    for index, lacks in enumerate(failed):
        row = made["prompt_ids"][index], made["completion_ids"][index], made["env_mask"][index]
        assert (row == ([END], [END], [0])) == lacks
        assert made["rollout_untrainable"][index] == (f"failure_{finished[index].failure_class}" if lacks else "")
    with pytest.raises(ValueError, match=f"{finished[1].uid}.*end_id"):
        to_trl(finished)


def test_a_refused_rollout_keeps_its_row() -> None:
    refused = verify_rollout(pb.Rollout(uid="u"), None)
    assert refused.mismatch is not None
    row = to_trl([refused], end_id=7)
    assert (row["rollout_untrainable"], row["completion_ids"]) == (["mismatch"], [[7]])
