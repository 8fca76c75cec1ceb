"""A server that does not know the trainer's stream any more, as after a restart: what the trainer sends on the next stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from osmosis.rollout.v1 import completion_service_pb2 as cs
from osmosis.rollout.v1 import rollout_service_pb2 as rs
from rollout_client import InvalidRequest, Retry, Unavailable
from rollout_client.trainer import Generated, Group, Trainer, Turn, parsers

from tests.client.trainer.asker import Asker
from tests.client.trainer.host import Host, Hosted, hosting
from tests.client.trainer.test_outcomes import delivered
from tests.client.trainer.test_stream import SOON, client_of, finish, groups_of, trainer_of, two_turns, well
from tests.client.trainer.test_turns import PROMPT, RESULT
from tests.support.tcp_proxy import TcpProxy
from tests.support.toy_model import END, ToyModel, decode, until


@dataclass
class Lossy:
    """A host whose streams can be lost."""

    host: Host
    line: TcpProxy
    trainer: Trainer

    def lose(self) -> None:
        """Forget all streams and cut the connection."""
        self.host.forget()
        self.line.cut()

    def started(self, **fields: Any) -> asyncio.Task[list[Group]]:
        return asyncio.create_task(groups_of(self.trainer, **fields))


@asynccontextmanager
async def lossy(host: Host, model: Any, retry: Retry = SOON) -> AsyncIterator[Lossy]:
    async with (
        hosting(host) as port,
        TcpProxy(port) as line,
        client_of(line.address, retry=retry) as client,
        trainer_of(client, model) as trainer,
    ):
        yield Lossy(host, line, trainer)


def kinds(stream: Hosted) -> list[str | None]:
    return [item.WhichOneof("item") for item in stream.came]


async def test_the_same_starts_are_sent_again_and_no_turn_is_generated_twice() -> None:
    model = ToyModel(gate=asyncio.Event())
    async with lossy(Host(two_turns), model) as lost:
        going = lost.started(n=2)
        await until(lambda: model.at_once == 2)
        (first,) = lost.host.stream.came
        lost.lose()
        await until(lambda: lost.host.streams and len(lost.host.stream._asks) == 2)
        assert lost.host.stream.came == [first]
        await until(lambda: lost.host.stream.acknowledged == 4)  # both requests have arrived
        model.gate.set()
        (group,) = await going
        assert [well(each) for each in group.rollouts] == [True] * 2
        assert (len(model.prompts), model.cancelled) == (4, 0)
        assert kinds(lost.host.stream) == ["start", *["answer"] * 4]
        (again,) = await groups_of(lost.trainer)
        assert well(again.rollouts[0])


async def test_a_completed_turn_is_answered_again_from_the_record() -> None:
    """The answers of two turns are lost with the server. It requests the turns again, under their keys."""
    model, answers = ToyModel(), list[cs.CompleteResponse]()

    async def play(stream: Hosted, rollout: rs.Rollout) -> None:
        asker = Asker(stream, uid=rollout.uid)
        answers.extend([await asker.ask(PROMPT), await asker.ask(RESULT)])
        if len(answers) == 2:
            lost.lose()
        else:
            await finish(stream, rollout, asker, answers[2:])

    async with lossy(Host(play), model) as lost:
        (group,) = await lost.started()
    assert well(group.rollouts[0])
    assert answers[:2] == answers[2:]
    assert len(model.prompts) == 2


async def test_outcomes_count_once() -> None:
    """One rollout of a group has finished before the stream is lost, and its outcome arrives again."""
    model, gates = ToyModel(), {"0": asyncio.Event(), "1": asyncio.Event()}

    async def play(stream: Hosted, rollout: rs.Rollout) -> None:
        asker = Asker(stream, uid=rollout.uid)
        await gates[rollout.uid[-1]].wait()
        if rollout.uid in outcomes:
            stream.send(outcome={"rollout": outcomes[rollout.uid]})
            return
        answers = [await asker.ask(PROMPT)]
        outcomes[rollout.uid] = delivered(asker, answers, rollout_id=rollout.spec.rollout_id)
        stream.send(outcome={"rollout": outcomes[rollout.uid]})

    outcomes: dict[str, rs.Rollout] = {}
    async with lossy(Host(play), model) as lost:
        going = lost.started(n=2)
        gates["0"].set()
        await until(lambda: lost.host.streams and lost.host.stream.acknowledged == 4)
        lost.lose()
        await until(lambda: lost.host.streams and lost.host.stream.acknowledged == 3)
        gates["1"].set()
        (group,) = await going
    assert [well(each) for each in group.rollouts] == [True] * 2
    assert len(model.prompts) == 2


async def test_a_server_that_has_lost_the_rollouts_runs_them_anew() -> None:
    """Its rollouts have other uids. What was generated for the former ones is given up."""
    model = ToyModel(gate=asyncio.Event())
    async with lossy(Host(two_turns), model) as lost:
        going = lost.started(n=2)
        await until(lambda: model.at_once == 2)
        await lost.trainer.announce(version="second", step=2)
        gate, model.gate = model.gate, None
        lost.lose()
        (group,) = await going
        assert kinds(lost.host.stream)[:2] == ["policy", "start"]
        assert lost.host.stream.came[0].policy.step == 2
        await until(lambda: model.cancelled == 2)
        assert [each.uid for each in group.rollouts] == ["u2-0", "u2-1"]
        assert [well(each) for each in group.rollouts] == [True] * 2
        assert len(lost.trainer._records) == 0
        gate.set()


async def test_finished_rollouts_that_were_started_anew_with_their_group_are_cancelled() -> None:
    model, last = ToyModel(), asyncio.Event()

    async def play(stream: Hosted, rollout: rs.Rollout) -> None:
        if rollout.uid.endswith("1"):
            await last.wait()
        await two_turns(stream, rollout)

    async with lossy(Host(play), model) as lost:
        going = lost.started(n=2)
        await until(lambda: lost.host.streams and lost.host.stream.acknowledged == 5)
        await lost.trainer.announce(step=2)  # so that the number of the start differs, and with it the uids
        lost.lose()
        await until(lambda: lost.host.cancelled)
        last.set()
        (group,) = await going
    (cancel,) = lost.host.cancelled
    assert list(cancel.selection.rollout_ids) == [group.rollouts[0].rollout.spec.rollout_id]
    assert [each.uid for each in group.rollouts] == ["u1-0", "u2-1"]


async def test_a_cancellation_that_was_not_acknowledged_is_sent_again() -> None:
    model = ToyModel(gate=asyncio.Event())
    async with lossy(Host(two_turns), model) as lost:
        going = lost.started(n=2)
        await until(lambda: model.at_once == 2)
        name = lost.host.stream.came[0].start.rollout.request_id
        lost.host.forget()
        await lost.line.down()
        going.cancel()
        await asyncio.gather(going, return_exceptions=True)  # gives up waiting for the outcomes
        await lost.line.mend()
        await until(lambda: lost.host.cancelled)
        (cancel,) = lost.host.cancelled
        assert sorted(cancel.selection.rollout_ids) == [f"{name}/0", f"{name}/1"]
        assert kinds(lost.host.stream) == ["cancel"]
        await until(lambda: model.cancelled == 2)


async def test_a_cancellation_without_an_outcome_is_sent_again_although_it_was_acknowledged() -> None:
    model = ToyModel(gate=asyncio.Event())
    async with lossy(Host(two_turns), model) as lost:
        going = lost.started(n=2)
        await until(lambda: model.at_once == 2)
        name = lost.host.stream.came[0].start.rollout.request_id
        going.cancel()
        await until(lambda: len(lost.host.cancelled) == 2)
        await lost.trainer.announce(step=2)  # once it is processed, so are the cancellations
        lost.lose()
        await until(lambda: len(lost.host.cancelled) == 3)
        assert sorted(lost.host.cancelled[2].selection.rollout_ids) == [f"{name}/0", f"{name}/1"]
        await asyncio.gather(going, return_exceptions=True)


async def test_starts_without_a_response_are_repeated() -> None:
    async with lossy(Host(two_turns), ToyModel()) as lost:
        await lost.line.down()
        lost.host.forget()
        going = lost.started(n=2)
        await asyncio.sleep(0.02)
        await lost.line.mend()
        (group,) = await going
    assert [well(each) for each in group.rollouts] == [True] * 2


@pytest.mark.parametrize("code", [grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT])
async def test_a_refused_repetition_is_tried_again_or_fails_its_rollouts(code: grpc.StatusCode) -> None:
    model = ToyModel(gate=asyncio.Event())
    async with lossy(Host(two_turns), model) as lost:
        going = lost.started(n=2)
        await until(lambda: model.at_once == 2)
        lost.host.refusals.append(code)
        lost.lose()
        if code is grpc.StatusCode.INVALID_ARGUMENT:
            with pytest.raises(InvalidRequest, match="start it again: no room"):
                await going
            assert model.cancelled == 2
        else:
            await until(lambda: lost.host.streams and lost.host.stream.acknowledged == 5)
            assert kinds(lost.host.stream) == ["start", "start"]
            model.gate.set()
            (group,) = await going
            assert [well(each) for each in group.rollouts] == [True] * 2


async def test_all_fail_if_the_next_stream_cannot_be_opened() -> None:
    model = ToyModel(gate=asyncio.Event())
    async with lossy(Host(two_turns, grace=0.05), model, Retry(patience=0.05, first=0.005, longest=0.01)) as lost:
        going = [lost.started() for _ in range(3)]
        await until(lambda: model.at_once == 3)
        lost.host.draining = True
        lost.lose()
        for each in going:
            with pytest.raises(Unavailable, match="was running when its stream"):
                await each
        await until(lambda: model.cancelled == 3)


async def test_it_survives_the_loss_of_several_streams() -> None:
    model = ToyModel(gate=asyncio.Event())
    async with lossy(Host(two_turns), model) as lost:
        going = lost.started()
        await until(lambda: model.at_once == 1)
        for _ in range(3):
            lost.lose()
            await until(lambda: lost.host.streams and lost.host.stream._asks)
        await until(lambda: lost.host.stream.acknowledged == 2)
        model.gate.set()
        (group,) = await going
    assert well(group.rollouts[0])
    assert (len(model.prompts), model.cancelled) == (2, 0)


async def test_batches_count_a_turn_once_that_two_streams_have_requested() -> None:
    """The batch does not wait for the turns that a server requests again: they are in it."""
    batches, gate = list[int](), asyncio.Event()

    async def play(stream: Hosted, rollout: rs.Rollout) -> None:
        asker = Asker(stream, uid=rollout.uid)
        await finish(stream, rollout, asker, [await asker.ask(PROMPT)])

    async def generate_batch(turns: list[Turn]) -> list[Generated]:
        batches.append(len(turns))
        await gate.wait()
        return [Generated([END], [-0.5], "stop", "policy-1") for _ in turns]

    host = Host(play)
    fields: Any = {"generate_batch": generate_batch, "batch_seconds": 600, "decode": decode, "parse": parsers.hermes}
    async with (
        hosting(host) as port,
        TcpProxy(port) as line,
        client_of(line.address) as client,
        Trainer(client, end_ids={END}, **fields) as trainer,
    ):
        going = asyncio.create_task(groups_of(trainer, n=2))
        await until(lambda: host.streams and host.stream.acknowledged == 4)
        host.forget()
        line.cut()
        await until(lambda: host.streams and host.stream.acknowledged == 4)
        host.stream.mention(idle={"last_ask": 4})
        gate.set()
        (group,) = await going
    assert batches == [2]
    assert [each.error for each in group.rollouts] == ["", ""]
