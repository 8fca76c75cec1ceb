"""A trainer as a client only: the items it sends on its stream, and its reaction to cuts, refusals and lost streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import pytest
from osmosis.rollout.v1 import completion_service_pb2 as cs
from osmosis.rollout.v1 import message_pb2
from osmosis.rollout.v1 import rollout_service_pb2 as rs
from rollout_client import AsyncClient, Retry, RolloutError, TooLarge, Unavailable
from rollout_client.trainer import Finished, Generated, Group, RecordMismatch, Trainer, TryAgainLater, parsers

from tests.client.trainer.asker import Asker
from tests.client.trainer.host import Host, Hosted, Rejected, hosting
from tests.client.trainer.test_outcomes import delivered
from tests.client.trainer.test_turns import PROMPT, RESULT
from tests.support.severed_connection import Cut, SeveredLine
from tests.support.tcp_proxy import TcpProxy
from tests.support.toy_model import END, ToyModel, decode, until

SOON = Retry(first=0.005, longest=0.02)


def client_of(address: str, **fields: Any) -> AsyncClient:
    return AsyncClient(address, **{"retry": SOON, **fields})


def trainer_of(client: AsyncClient, model: Any, **fields: Any) -> Trainer:
    return Trainer(client, generate=model, decode=decode, parse=parsers.hermes, end_ids={END}, **fields)


@asynccontextmanager
async def joined(host: Host, model: Any, **fields: Any) -> AsyncIterator[Trainer]:
    """A trainer on a stream to the host."""
    async with (
        hosting(host) as port,
        client_of(f"127.0.0.1:{port}") as client,
        trainer_of(client, model, **fields) as trainer,
    ):
        yield trainer


async def groups_of(trainer: Trainer, *prompts: str, n: int = 1, **fields: Any) -> list[Group]:
    return [each async for each in trainer.rollouts(prompts or ["Add."], n=n, tokenizer="toy", **fields)]


async def finish(stream: Hosted, rollout: rs.Rollout, asker: Asker, answers: list[cs.CompleteResponse]) -> None:
    done = delivered(asker, answers, rollout_id=rollout.spec.rollout_id)
    stream.send(outcome={"rollout": done})


async def two_turns(stream: Hosted, rollout: rs.Rollout) -> None:
    """A completion, a tool result, a completion."""
    asker = Asker(stream, uid=rollout.uid)
    await finish(stream, rollout, asker, [await asker.ask(PROMPT), await asker.ask(RESULT)])


def well(finished: Finished) -> bool:
    return (finished.mismatch, finished.checked, finished.error, len(finished.samples)) == (None, True, "", 1)


async def test_a_group_is_one_start_and_nothing_is_sent_twice() -> None:
    host, model = Host(two_turns), ToyModel()
    async with hosting(host) as port, client_of(f"127.0.0.1:{port}", api_key="k3y") as client:
        async with trainer_of(client, model, generating=5) as trainer:
            (group,) = await groups_of(trainer, n=3, limits={"turns": 4})
        stream = host.stream
        await stream.done.wait()
    assert [well(each) for each in group.rollouts] == [True] * 3
    assert [each.uid for each in group.rollouts] == ["u1-0", "u1-1", "u1-2"]
    assert len({each.rollout.spec.rollout_id for each in group.rollouts}) == 3
    (hello,) = stream.hellos
    assert (hello.stream_id, hello.last_seen, hello.credit, hello.detail) == ("", 0, 5, 0)
    assert [item.sequence for item in stream.came] == list(range(1, 8))
    start = stream.came[0].start
    assert (start.count, start.rollout.spec.limits.turns, start.rollout.spec.group_id) == (3, 4, group.id)
    assert not start.rollout.spec.HasField("completions")
    assert [item.WhichOneof("item") for item in stream.came[1:]] == ["answer"] * 6
    assert (stream.acknowledged, host.keys, len(model.prompts)) == (3 + 6 + 3, ["Bearer k3y"], 6)


async def test_asks_are_answered_in_any_order_and_no_more_at_once_than_may_be() -> None:
    model, seen = ToyModel(gate=asyncio.Event()), []

    async def play(stream: Hosted, rollout: rs.Rollout) -> None:
        askers = [Asker(stream, uid=rollout.uid, segment=str(segment)) for segment in range(4)]
        answers = await asyncio.gather(*(asker.ask(PROMPT) for asker in askers))
        seen.extend(answers)
        await finish(stream, rollout, askers[0], answers[:1])

    async with joined(Host(play), model, generating=3, on_mismatch="flag") as trainer:
        going = asyncio.create_task(groups_of(trainer))
        await until(lambda: model.at_once == 3)
        model.gate.set()
        await going
    assert (len(seen), model.most_at_once) == (4, 3)


async def cut_at(cut: Cut) -> bool:
    """Run a group over a connection that is cut there; return whether it was cut."""
    host, model = Host(two_turns), ToyModel()
    async with (
        hosting(host) as port,
        SeveredLine(port, cut) as line,
        client_of(line.address) as client,
        trainer_of(client, model) as trainer,
    ):
        (group,) = await groups_of(trainer, n=2)
        assert [well(each) for each in group.rollouts] == [True] * 2
        assert len(model.prompts) == 4  # no turn was generated twice
        stream = list(host.streams.values())[-1]
        answered = [item.answer.turn_key for item in stream.came if item.HasField("answer")]
        assert (len(answered), len(set(answered))) == (4, 4)
        await until(lambda: stream.acknowledged == 2 + 4 + 2)
    return line.was_cut


@pytest.mark.parametrize("passes", [False, True])
@pytest.mark.parametrize("to_server", [False, True])
async def test_a_cut_at_any_message_loses_and_repeats_nothing(to_server: bool, passes: bool) -> None:
    number = 1
    while await cut_at(Cut(to_server, number, passes)):
        number += 1
    assert number > 8


async def test_a_generation_outlives_the_connection_it_was_asked_over() -> None:
    model, host = ToyModel(gate=asyncio.Event()), Host(two_turns)
    async with (
        hosting(host) as port,
        TcpProxy(port) as line,
        client_of(line.address) as client,
        trainer_of(client, model) as trainer,
    ):
        going = asyncio.create_task(groups_of(trainer))
        await model.begun.wait()
        for connections in (2, 3):
            line.cut()
            await until(lambda n=connections: len(host.stream.hellos) == n)  # type: ignore[misc]
        model.gate.set()
        ((rollout,),) = [each.rollouts for each in await going]
    assert well(rollout)
    assert (len(model.prompts), model.cancelled) == (2, 0)
    assert [(hello.stream_id, hello.last_seen) for hello in host.stream.hellos] == [("", 0), ("s0", 2), ("s0", 2)]


async def test_a_server_that_is_gone_for_too_long_is_told() -> None:
    model = ToyModel(gate=asyncio.Event())
    hasty = Retry(patience=0.05, first=0.005, longest=0.01)
    async with (
        hosting(Host(two_turns, grace=0.05)) as port,
        TcpProxy(port) as line,
        client_of(line.address, retry=hasty) as client,
        trainer_of(client, model) as trainer,
    ):
        going = asyncio.create_task(groups_of(trainer))
        await model.begun.wait()
        await line.down()
        with pytest.raises(Unavailable, match="was running when its stream"):
            await going
        assert model.cancelled == 1


async def test_no_room_is_waited_for_and_other_refusals_are_raised() -> None:
    full, bad = grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT
    host = Host(two_turns, refusals=[full, grpc.StatusCode.UNAVAILABLE, bad])
    async with hosting(host) as port, client_of(f"127.0.0.1:{port}") as client:
        async with trainer_of(client, ToyModel()) as trainer:
            with pytest.raises(RolloutError, match="no room") as caught:
                await groups_of(trainer)
            assert caught.value.code is bad
            (group,) = await groups_of(trainer)
        assert well(group.rollouts[0])
        starts = [item.start.rollout for item in host.stream.came if item.HasField("start")]
    assert len({start.request_id for start in starts[:3]}) == 1
    assert len({start.request_id for start in starts}) == 2


async def test_what_cannot_be_answered_is_rejected_with_what_the_contract_wants() -> None:
    seen: list[Any] = []

    async def asked(stream: Hosted, request: cs.CompleteRequest) -> None:
        with suppress(Rejected):
            try:
                await stream.Complete(request)
            except Rejected as rejected:
                seen.append(rejected.reject)
                raise

    async def play(stream: Hosted, rollout: rs.Rollout) -> None:
        asker = Asker(stream, uid=rollout.uid)
        await asked(stream, asker.request(PROMPT))  # refused: the model raises TryAgainLater
        first = await asker.ask(PROMPT)
        lost = Asker(stream, uid=rollout.uid, segment="1", base=asker.checkpoint([(7, False)], 1))
        await asked(stream, lost.request(RESULT))
        changed = asker.request(RESULT)
        changed.new_tokens.spans[0].token_ids[2] += 1
        await asked(stream, changed)
        stream.mention(read_ledger=cs.ReadLedgerRequest(uid=asker.uid, segment_id="0", offset=2))
        stream.mention(read_ledger=cs.ReadLedgerRequest(uid=asker.uid, segment_id="9"))
        seen.extend([await stream.ledgers.get(), await stream.ledgers.get()])
        await asked(stream, asker.request(RESULT, new_tokens=None))
        await finish(stream, rollout, asker, [first])

    model, busy = ToyModel(), [True]

    async def generate(prompt_ids: Any, sampling: Any) -> Generated:
        if busy.pop() if busy else False:
            raise TryAgainLater(1.5)
        return await model(prompt_ids, sampling)

    async with joined(Host(play), generate) as trainer:
        (group,) = await groups_of(trainer)
    assert well(group.rollouts[0])
    later, unknown, parted, ledger, none, messages = seen
    assert (later.code, later.retry_after.ToMilliseconds(), later.reason) == (8, 1500, "TRY_AGAIN_LATER")
    assert (unknown.code, unknown.reason) == (9, "BASE_UNKNOWN")
    assert not unknown.HasField("retry_after")
    assert (parted.code, [mark.tokens for mark in parted.mismatch.checkpoints]) == (
        10,
        [ledger.ledger.checkpoints[0].tokens],
    )
    assert list(ledger.ledger.spans[0].token_ids) == PROMPT[2:]
    assert (none.segment_id, none.HasField("ledger")) == ("9", False)
    assert (messages.code, messages.reason) == (12, "MESSAGE_MODE")


async def test_the_typed_form_travels_in_message_mode() -> None:
    seen: list[cs.CompleteResponse] = []

    async def play(stream: Hosted, rollout: rs.Rollout) -> None:
        asker = Asker(stream, uid=rollout.uid)
        chat = message_pb2.ChatMessage(role="user", parts=[message_pb2.ContentPart(text="Add.")])
        request = asker.request([], new_tokens=None, new_messages=[message_pb2.Message(chat=chat)])
        answer = await stream.Complete(request)
        seen.append(answer)
        asker.tokens = [(token, False) for token in answer.prompt_ids.values]
        asker.tokens += [(token, True) for token in answer.token_ids]
        asker.turns = [1] * len(asker.tokens)
        await finish(stream, rollout, asker, [answer])

    def render(messages: Any, tools: Any) -> list[int]:
        assert messages == [{"role": "user", "content": "Add."}]
        return PROMPT

    async with joined(Host(play), ToyModel(), render=render) as trainer:
        (group,) = await groups_of(trainer)
    assert well(group.rollouts[0])
    assert seen[0].message.chat.tool_calls[0].name == "add"


async def test_an_outcome_ends_what_is_still_generated_for_its_rollout() -> None:
    model = ToyModel(gate=asyncio.Event())

    async def play(stream: Hosted, rollout: rs.Rollout) -> None:
        asker = Asker(stream, uid=rollout.uid)
        stream.send(ask=asker.request(PROMPT))
        await model.begun.wait()
        cancelled = rs.Rollout(uid=rollout.uid, spec=rollout.spec, state="ROLLOUT_STATE_FINISHED")
        cancelled.outcome.cancellation.reason = "time"
        stream.send(outcome={"rollout": cancelled})

    async with joined(Host(play), model) as trainer:
        (group,) = await groups_of(trainer)
        assert group.rollouts[0].end == "cancellation"
        await until(lambda: model.cancelled == 1)


async def test_leaving_cancels_over_the_stream_and_says_goodbye() -> None:
    model = ToyModel(gate=asyncio.Event())
    host = Host(two_turns)
    async with hosting(host) as port, client_of(f"127.0.0.1:{port}") as client:
        async with trainer_of(client, model) as trainer:
            going = asyncio.create_task(groups_of(trainer, n=2))
            await until(lambda: model.at_once == 2)
            going.cancel()
            await asyncio.gather(going, return_exceptions=True)
        await host.stream.done.wait()
        assert model.cancelled == 2
        assert len(trainer._records) == 0
    named = {name for each in host.cancelled for name in each.selection.rollout_ids}
    started = host.stream.came[0].start.rollout.spec.rollout_id
    assert named == {f"{started}/0", f"{started}/1"}


async def test_items_that_the_server_cannot_take_break_nothing() -> None:
    async def play(stream: Hosted, rollout: rs.Rollout) -> None:
        asker = Asker(stream, uid=rollout.uid)
        try:
            await finish(stream, rollout, asker, [await asker.ask(PROMPT)])
        except Rejected as rejected:
            failed = rs.Rollout(uid=rollout.uid, spec=rollout.spec, state="ROLLOUT_STATE_FINISHED")
            failed.outcome.failure.message = f"{rejected.reject.code}: {rejected}"
            stream.send(outcome={"rollout": failed})

    talks = ToyModel(lambda prompt: "la " * 3000)
    async with joined(Host(play, largest=2000), talks) as trainer:
        with pytest.raises(TooLarge, match="start has"):
            await groups_of(trainer, "x" * 3000)
        (group,) = await groups_of(trainer)
        assert "13: answer has" in group.rollouts[0].error
        talks.says = lambda prompt: "la"
        (group,) = await groups_of(trainer)
        assert well(group.rollouts[0])


async def test_a_lie_of_the_server_is_found() -> None:
    async def play(stream: Hosted, rollout: rs.Rollout) -> None:
        asker = Asker(stream, uid=rollout.uid)
        done = delivered(asker, [await asker.ask(PROMPT)], rollout_id=rollout.spec.rollout_id)
        done.outcome.samples[0].response_ids[1] += 1
        stream.send(outcome={"rollout": done})

    async with joined(Host(play), ToyModel()) as trainer:
        with pytest.raises(RecordMismatch, match="ids at token"):
            await groups_of(trainer)


async def test_a_server_that_cannot_be_reached_or_has_no_streams_is_told_at_once() -> None:
    async with hosting(Host(two_turns), trains=False) as port, client_of(f"127.0.0.1:{port}") as client:
        with pytest.raises(RolloutError, match="serving=Serving"):
            async with trainer_of(client, ToyModel()):
                pass
    async with client_of(f"127.0.0.1:{port}", retry=Retry(patience=0)) as client:
        with pytest.raises(Unavailable):
            async with trainer_of(client, ToyModel()):
                pass
