"""Policies that a trainer announces, and pauses of sampling while it loads weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from osmosis.rollout.v1 import rollout_service_pb2 as rs
from osmosis.rollout.v1 import trainer_service_pb2 as pb
from rollout_client import AsyncClient, Client, InvalidRequest, Retry
from rollout_client.trainer import (
    Finished,
    Generated,
    Group,
    SamplingParams,
    Serving,
    SyncTrainer,
    Trainer,
    TryAgainLater,
    Turn,
    parsers,
)
from rollout_client.trainer.batches import Batches
from rollout_client.trainer.generation import validate_generated
from rollout_client.trainer.policy import AnnouncedPolicy, Policy
from rollout_server import Agent
from rollout_server.app import Server
from rollout_server.calculator import Calculator
from rollout_server.local_stack.loop_thread import LoopThread

from tests.client.trainer.asker import Limits, retry_info, standing
from tests.client.trainer.host import Host, Hosted, hosting
from tests.client.trainer.test_stream import two_turns
from tests.support.start_requests import settings
from tests.support.tcp_proxy import TcpProxy
from tests.support.toy_model import ADDS, END, decode, encode, until

QUESTION = "Please calculate 5 plus 3."


class Weights:
    """A model whose weights have a step. Each logprob is minus the step that sampled the token."""

    def __init__(self) -> None:
        self.step = 1
        self.loading = False
        self.turns: list[Turn] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self, turn: Turn) -> Generated:
        generated = self.complete(turn)
        await self.gate.wait()
        await asyncio.sleep(0)
        return generated

    async def batch(self, turns: Sequence[Turn]) -> list[Generated | Exception]:
        found: list[Generated | Exception] = [self.complete(turn) for turn in turns]
        await self.gate.wait()
        return found

    def complete(self, turn: Turn) -> Generated:
        assert not self.loading, "a call began during a pause"
        self.turns.append(turn)
        ids = [*encode(ADDS(decode(turn.ids))), END]
        return Generated(ids, [-float(self.step)] * len(ids))


def trainer_of(server: Any, model: Any, **fields: Any) -> Trainer:
    given = {"generate": model, "decode": decode, "parse": parsers.hermes, "end_ids": {END}, **fields}
    return Trainer(server, **given)


@asynccontextmanager
async def joined(model: Any, agents: Sequence[Agent] = (), **fields: Any) -> AsyncIterator[Trainer]:
    """A trainer of a real server with these agents; by default the calculator."""
    async with (
        Server([*(agents or (Calculator(),))], settings(max_running=1000)) as server,
        trainer_of(f"127.0.0.1:{server.grpc_port}", model, **fields) as trainer,
    ):
        yield trainer


async def groups_of(trainer: Trainer, count: int, **fields: Any) -> list[Group]:
    """Groups of one prompt each."""
    prompts = [QUESTION] * count
    return [each async for each in trainer.rollouts(prompts, at_once=1000, tokenizer="toy", **fields)]


def is_labelled(rollout: Finished) -> bool:
    """Whether a rollout ended well, and each sampled token names the step that sampled it, with its version."""
    assert (rollout.end, rollout.mismatch, rollout.checked) == ("stop", None, True), rollout.error
    (sample,) = rollout.samples
    assert sample.spans is not None
    assert sample.logprobs is not None
    return all(
        -sample.logprobs[at - len(sample.prompt_ids)] == span.policy_step == int(span.policy_version.removeprefix("v"))
        for span in sample.spans
        if span.trains
        for at in range(span.start, span.stop)
    )


async def update(trainer: Trainer, model: Weights) -> None:
    """Load new weights."""
    await trainer.pause()
    model.loading = True
    for _ in range(20):
        await asyncio.sleep(0)
    model.step, model.loading = model.step + 1, False
    await trainer.resume(version=f"v{model.step}", step=model.step)


@pytest.mark.parametrize("serving", [None, Serving()])
async def test_no_call_begins_while_weights_are_loaded_under_load(serving: Serving | None) -> None:
    model = Weights()
    async with joined(model, serving=serving) as trainer:
        await trainer.announce(version="v1", step=1)
        running = asyncio.create_task(groups_of(trainer, 25, n=4))
        for count in range(20, 181, 40):
            await until(lambda count=count: len(model.turns) >= count or running.done())
            await update(trainer, model)
        groups = await running
    rollouts = [each for group in groups for each in group.rollouts]
    assert (len(rollouts), [each for each in rollouts if not is_labelled(each)]) == (100, [])
    steps = {sample.policy_steps for rollout in rollouts for sample in rollout.samples}
    assert len(steps) > 1
    assert {turn.policy_step for turn in model.turns} >= {1, 2}


async def test_turns_that_have_not_begun_wait_at_the_server_during_a_pause() -> None:
    """The server limits the time for a response, but not the length of a pause."""
    model = Weights()
    model.gate.clear()
    async with standing(model, Limits(generating=1)) as stand:
        turns = stand.listener._turns
        began, queued, came = (stand.asker(uid=uid).request(encode("Hi")) for uid in ("u1", "u2", "u3"))
        calls = [asyncio.ensure_future(stand.completions.Complete(began))]
        await until(lambda: model.turns)
        calls.append(asyncio.ensure_future(stand.completions.Complete(queued)))
        await until(lambda: len(turns._running) == 2)
        turns._announced.change("", None, paused=True)
        model.loading = True
        postponed = [await retry_info(stand.completions.Complete(came))]
        model.gate.set()
        assert (await calls[0]).token_ids
        postponed.append(await retry_info(calls[1]))
        assert all(each is not None and each.retry_delay.ToMilliseconds() == 100 for each in postponed)
        model.loading = False
        turns._announced.change("", None, paused=False)
        for each in (queued, came):
            await stand.completions.Complete(each)
    assert [turn.uid for turn in model.turns] == ["u1", "u2", "u3"]


async def test_turns_that_wait_for_a_batch_are_postponed_by_a_pause() -> None:
    model = Weights()
    model.gate.clear()
    turn = Turn("u1", "r1", "", 0, "0", 1, encode("Hi"), SamplingParams())
    batches = Batches(model.batch, 1, 80_000.0, AnnouncedPolicy())
    began, waits = (asyncio.ensure_future(batches.generate(each)) for each in (turn, replace(turn, uid="u2")))
    await until(lambda: model.turns)
    batches.postpone()
    with pytest.raises(TryAgainLater):
        await waits
    model.gate.set()
    await began
    again = replace(turn, uid="u3")
    await batches.generate(again)
    assert [each.uid for each in model.turns] == ["u1", "u3"]


async def test_a_running_batch_goes_on_during_a_pause_and_the_next_one_waits() -> None:
    model = Weights()
    model.gate.clear()
    async with joined(None, generate_batch=model.batch, batch_seconds=80_000.0) as trainer:
        await trainer.announce(version="v1", step=1)
        running = asyncio.create_task(groups_of(trainer, 2, n=4))
        await until(lambda: len(model.turns) == 8)
        await trainer.pause()
        model.loading = True
        model.gate.set()
        for _ in range(50):
            await asyncio.sleep(0.001)
        model.step, model.loading = 2, False
        await trainer.resume(version="v2", step=2)
        groups = await running
    assert all(is_labelled(each) for group in groups for each in group.rollouts)
    assert [turn.policy_step for turn in model.turns] == [1] * 8 + [2] * 8
    assert {sample.policy_steps for group in groups for each in group.rollouts for sample in each.samples} == {(1, 2)}


def test_without_asyncio_a_completion_names_the_policy_of_its_call() -> None:
    step, seen = 0, set()

    def generate(turn: Turn) -> Generated:
        seen.add((turn.policy_step, step))
        ids = [*encode(ADDS(decode(turn.ids[: len(turn.ids) - turn.resumed]))), END]
        rest = ids[turn.resumed :] if turn.resumed or turn.turn == 1 else ids[:2]
        return Generated(rest, [-float(step)] * len(rest), "stop" if rest[-1] == END else "abort")

    with LoopThread() as loop:
        server = Server([Calculator()], settings())
        loop.run(server.__aenter__())
        try:
            with SyncTrainer(
                f"127.0.0.1:{server.grpc_port}", generate=generate, decode=decode, parse=parsers.hermes, end_ids={END}
            ) as trainer:
                trainer.announce(version="v0", step=0)
                for group in trainer.rollouts([QUESTION] * 6, n=2, at_once=4, tokenizer="toy"):
                    trainer.pause()
                    step += 1
                    trainer.resume(version=f"v{step}", step=step)
                    assert all(is_labelled(each) for each in group.rollouts)
        finally:
            loop.run(server.__aexit__(None, None, None))
    assert len(seen) > 1
    assert all(announced == now for announced, now in seen)


async def test_a_new_stream_begins_with_what_was_announced() -> None:
    """The server knows the announcements of a stream only as long as the stream."""

    async def play(stream: Hosted, rollout: rs.Rollout) -> None:
        # As the server does: during a pause it asks for nothing, and the trainer would refuse.
        await until(lambda: not [each.policy for each in stream.came if each.HasField("policy")][-1].paused)
        await two_turns(stream, rollout)

    model, host = Weights(), Host(play)
    async with hosting(host) as port, TcpProxy(port) as line:
        client = AsyncClient(line.address, retry=Retry(first=0.005, longest=0.02))
        async with client, trainer_of(client, model, on_mismatch="flag") as trainer:
            stream = host.stream
            await trainer.announce(version="v7", step=7)
            await trainer.pause()
            host.forget()
            line.cut()
            assert trainer._transport is not None
            await until(trainer._transport._stream.connection.over.done)  # type: ignore[union-attr]
            running = asyncio.create_task(groups_of(trainer, 1, n=1))
            await until(lambda: host.streams and len(host.stream.came) == 2)
            assert not model.turns
            await trainer.resume()
            (group,) = await running
    assert len(group.rollouts) == 1
    assert {turn.policy_step for turn in model.turns} == {7}
    items = [[each for each in came if not each.HasField("answer")] for came in (stream.came, host.stream.came)]
    assert [[(each.policy.version, each.policy.step, each.policy.paused) for each in came] for came in items] == [
        [("v7", 7, False), ("v7", 7, True)],
        [("v7", 7, True), ("", 0, False), ("v7", 7, False)],
    ]
    assert items[1][1].HasField("start")


async def test_a_pause_of_an_earlier_trainer_does_not_hold_the_next_one() -> None:
    """The server keeps what was announced for an address."""
    model, fields = Weights(), {"tokenizer": "toy", "n": 1}
    async with Server([Calculator()], settings()) as server:
        address = f"127.0.0.1:{server.grpc_port}"
        async with trainer_of(address, model, serving=Serving()) as left:
            await left.pause()
            listener = left._transport._listener  # type: ignore[union-attr]
            own = Serving(listen=listener.url.removeprefix("grpc://"))
        async with AsyncClient(address) as client:
            (policies,) = server._registry.policies._policies.values()
            assert [each.paused for each in policies.values()] == [False], "a trainer that closes ends its pause"
            await client.set_policy(paused=True, completions_url=listener.url)  # as one that was killed leaves it
        async with trainer_of(address, model, serving=own) as trainer:
            (group,) = [each async for each in trainer.rollouts([QUESTION], **fields)]
    assert group.rollouts[0].end == "stop"


async def test_announcements_at_once_arrive_in_order() -> None:
    """One that waits for another one sends what holds when its turn comes: a step never decreases."""
    host = Host(two_turns)
    async with hosting(host) as port, trainer_of(f"127.0.0.1:{port}", Weights()) as trainer:
        async with trainer._transport._opening:  # type: ignore[union-attr]
            first = asyncio.create_task(trainer.announce(step=1))
            await until(lambda: trainer._announced.policy.step == 1)
            second = asyncio.create_task(trainer.announce(step=2))
            await until(lambda: trainer._announced.policy.step == 2)
        await asyncio.gather(first, second)
        assert [each.policy.step for each in host.stream.came] == [2, 2]


async def test_an_announcement_that_is_refused_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    host = Host(two_turns)
    async with hosting(host) as port, trainer_of(f"127.0.0.1:{port}", Weights()) as trainer:
        host.stream.send(refused=pb.TrainRefusal(start_sequence=1, code=3, message="policy.step: is 7"))
        await trainer.announce(step=7)
        await until(lambda: "policy.step: is 7" in caplog.text)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"step": -1}, ValueError, "step must be from 0"),
        ({"step": 2**63}, ValueError, "step must be from 0"),
        ({"step": 4}, ValueError, "step must not decrease: 4 is below 5"),
        ({"step": 6.0}, TypeError, "step must be an int or None, not float"),
        ({"step": True}, TypeError, "step must be an int or None, not bool"),
        ({"version": 6}, TypeError, "version must be a str, not int"),
        ({"version": "v" * 257}, ValueError, "version must have at most 256 characters"),
        ({"version": "a\nb"}, ValueError, "all of them printable"),
    ],
)
async def test_a_wrong_announcement_changes_nothing(change: dict[str, Any], error: type[Exception], text: str) -> None:
    announced = AnnouncedPolicy()
    announced.change("v5", 5, paused=True)
    with pytest.raises(error, match=text):
        announced.change(**{"version": "", "step": None, **change}, paused=False)
    assert (announced.policy, announced.paused) == (Policy("v5", 5), True)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("", None), ("v5", 5)),
        (("v5", None), ("v5", 5)),
        (("", 5), ("v5", 5)),
        (("v4", None), ("v4", None)),
        (("", 4), ("", 4)),
        (("v4", 4), ("v4", 4)),
    ],
)
def test_a_completion_that_names_another_policy_is_not_relabelled(given: Any, expected: Any) -> None:
    found = Policy("v5", 5).label(Generated([1], policy_version=given[0], policy_step=given[1]))
    assert (found.policy_version, found.policy_step) == expected


@pytest.mark.parametrize("step", [-1, 2**63, 1.0, True, "1"])
def test_a_wrong_step_of_a_completion_is_refused(step: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"Generated\.policy_step must be"):
        validate_generated(Generated([1], policy_step=step))


async def test_a_client_announces_for_its_callers_rollouts() -> None:
    async with Server([Calculator()], settings()) as server:
        async with AsyncClient(f"127.0.0.1:{server.grpc_port}") as client:
            assert await client.set_policy(version="v3", step=3) == ()
            assert await client.set_policy(step=2) == ()  # no rollout is unfinished
            with pytest.raises(InvalidRequest, match="printable"):
                await client.set_policy(version="v\n4")
            assert await client.set_policy(step=2, completions_url="http://trainer:1") == ()
        with Client(f"127.0.0.1:{server.grpc_port}") as sync:
            assert await asyncio.to_thread(sync.set_policy, step=3, paused=True) == ()
