"""Rollouts over streams of a real server: cut at every message, with several trainers at once, in both token modes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import pytest
from rollout_client import AsyncClient, Retry, samples
from rollout_client.trainer import Finished, Group, Serving, Trainer, parsers
from rollout_server import Agent, Run
from rollout_server.app import Server
from rollout_server.calculator import Calculator

from tests.support.severed_connection import Cut, SeveredLine
from tests.support.start_requests import settings
from tests.support.tcp_proxy import TcpProxy
from tests.support.toy_model import CALL, END, ToyModel, by_turns, decode, encode, until

SOON = Retry(first=0.005, longest=0.02)
QUESTION = "Please calculate 5 plus 3."
SAYS = by_turns("Let me add.\n" + CALL, "It is 8.\n#### 8")


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with Server([Calculator()], settings()) as server:
        yield server


def trainer_of(client: AsyncClient, model: Any, **fields: Any) -> Trainer:
    return Trainer(client, generate=model, decode=decode, parse=parsers.hermes, end_ids={END}, **fields)


async def groups_of(trainer: Trainer, prompts: Sequence[str] = (QUESTION,), **fields: Any) -> list[Group]:
    return [each async for each in trainer.rollouts(prompts, **{"n": 1, "tokenizer": "toy", **fields})]


def render(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[int]:
    """A template that renders calls as the model writes them, so that each prompt extends the previous one."""
    text = ""
    for each in messages:
        calls = [call["function"] for call in each.get("tool_calls") or ()]
        said = [f'<tool_call>\n{{"name": "{c["name"]}", "arguments": {c["arguments"]}}}\n</tool_call>' for c in calls]
        text += f"<|im_start|>{each['role']}\n" + "\n".join([each["content"], *said]) + "<|im_end|>"
    return encode(text + "<|im_start|>assistant\n")


async def same_as_the_servers(client: AsyncClient, finished: Finished) -> bool:
    """Whether the samples from the stream equal the server's record, element by element."""
    kept = samples(await client.get(finished.uid, view="full"))
    return (finished.mismatch, finished.checked, finished.error) == (None, True, "") and list(finished.samples) == kept


@pytest.mark.parametrize("serving", [None, Serving()])
@pytest.mark.parametrize("fields", [{}, {"render": render}])
async def test_what_comes_is_what_the_server_has(server: Server, serving: Any, fields: dict[str, Any]) -> None:
    async with AsyncClient(f"127.0.0.1:{server.grpc_port}") as client:
        async with trainer_of(client, ToyModel(SAYS), serving=serving, **fields) as trainer:
            mode = "messages" if fields else "tokens"
            (group,) = await groups_of(trainer, n=3, token_mode=mode, tokenizer=None if fields else "toy")
        assert [await same_as_the_servers(client, each) for each in group.rollouts] == [True] * 3
        for each in group.rollouts:
            (sample,) = each.samples
            written = [token for token, trains in zip(sample.response_ids, sample.response_mask, strict=True) if trains]
            assert written == [*encode("Let me add.\n" + CALL), END, *encode("It is 8.\n#### 8"), END]


class Delegating(Agent):
    """Call a sub-agent, then continue twice in parallel: as the main conversation and as a branch of it."""

    name = "delegating"

    async def play(self, run: Run) -> None:
        await run.sample()
        helper = await run.fork([{"role": "user", "content": "What is 7 plus 3?"}])
        await helper.sample()
        await run.append({"role": "user", "content": "Go on."})
        branch = await run.fork()
        await asyncio.gather(run.sample(), branch.sample())


@pytest.mark.parametrize("serving", [None, Serving()])
async def test_conversations_of_one_rollout_are_samples_of_their_own(serving: Any) -> None:
    async with (
        Server([Delegating()], settings()) as server,
        AsyncClient(f"127.0.0.1:{server.grpc_port}") as client,
        trainer_of(client, ToyModel(by_turns("It is 8.", "Indeed.")), serving=serving) as trainer,
    ):
        (group,) = await groups_of(trainer, n=2)
        for each in group.rollouts:
            assert await same_as_the_servers(client, each)
            assert sorted(sample.kind for sample in each.samples) == ["branch", "main", "subagent"]
            assert (
                sum(sum(sample.response_mask) for sample in each.samples)
                == each.rollout.outcome.metrics.generated_tokens
            )


async def test_several_trainers_have_their_own(server: Server) -> None:
    async with AsyncClient(f"127.0.0.1:{server.grpc_port}") as client:
        models = [ToyModel(SAYS, version=f"policy-{index}") for index in range(3)]
        trainers = [trainer_of(client, model, generating=2) for model in models]
        async with trainers[0], trainers[1], trainers[2]:
            played = await asyncio.gather(*(groups_of(each, [QUESTION] * 4, n=2, at_once=4) for each in trainers))
    for model, groups in zip(models, played, strict=True):
        assert (len(groups), len(model.prompts), model.most_at_once <= 2) == (4, 16, True)
        spans = [
            span
            for group in groups
            for each in group.rollouts
            for sample in each.samples
            for span in sample.spans or ()
        ]
        assert {span.policy_version for span in spans if span.trains} == {model.version}


async def cut_at(server: Server, cut: Cut) -> bool:
    """Run a group over a connection that is cut there; return whether it was cut.

    A turn generated twice would have two prompts.
    """
    model = ToyModel(SAYS)
    async with (
        SeveredLine(server.grpc_port, cut) as line,
        AsyncClient(line.address, retry=SOON) as client,
        AsyncClient(f"127.0.0.1:{server.grpc_port}") as near,
        trainer_of(client, model) as trainer,
    ):
        (group,) = await groups_of(trainer, n=2, limits={"turns": 4})
        assert [await same_as_the_servers(near, each) for each in group.rollouts] == [True] * 2
        assert (len(model.prompts), model.cancelled) == (4, 0)
        known = [each async for each in near.list(group_id=group.id)]
        assert sorted(each.uid for each in known) == sorted(each.uid for each in group.rollouts)
        assert {each.outcome.WhichOneof("end") for each in known} == {"stop"}
    return line.was_cut


@pytest.mark.parametrize("passes", [False, True])
@pytest.mark.parametrize("to_server", [False, True])
async def test_a_cut_at_any_message_gives_one_outcome_and_no_turn_twice(
    server: Server, to_server: bool, passes: bool
) -> None:
    cuts = [Cut(to_server, number, passes) for number in range(1, 25)]
    was_cut = await asyncio.gather(*(cut_at(server, cut) for cut in cuts))
    # All messages; the other cuts are after the last one. How many acknowledgements there are depends on the time.
    assert all(was_cut[:8])
    assert not was_cut[-1]


async def test_a_stream_that_stayed_away_is_lost_alone() -> None:
    """One of two trainers is disconnected for longer than the grace time. The other one is not affected."""
    held, free = ToyModel(SAYS, gate=asyncio.Event()), ToyModel(SAYS)
    async with (
        Server([Calculator()], settings(stream_grace_seconds=0.05)) as server,
        TcpProxy(server.grpc_port) as line,
        AsyncClient(line.address, retry=SOON) as far,
        AsyncClient(f"127.0.0.1:{server.grpc_port}") as near,
        trainer_of(far, held) as away,
        trainer_of(near, free) as other,
    ):
        going = asyncio.create_task(groups_of(away, n=2))
        await until(lambda: held.at_once == 2)
        await line.down()
        (group,) = await groups_of(other, n=2)
        assert [each.error for each in group.rollouts] == ["", ""]
        await asyncio.gather(*[near.wait(each.uid) async for each in near.list()])
        await line.mend()
        ((one, two),) = [each.rollouts for each in await going]
        assert [each.end for each in (one, two)] == ["failure", "failure"]
        assert "trainer" in one.error
        assert held.cancelled == 2
        held.gate = None
        (group,) = await groups_of(away)
        assert await same_as_the_servers(near, group.rollouts[0])
