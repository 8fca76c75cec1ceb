"""Accepted and refused items of a stream: statuses, groups, credit, callers, and bounds of stored data."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from osmosis.rollout.v1 import completion_service_pb2 as cpb
from osmosis.rollout.v1 import outcome_pb2, spec_pb2
from osmosis.rollout.v1 import rollout_service_pb2 as rpb
from osmosis.rollout.v1 import trainer_service_pb2 as pb
from rollout_server.edge.api_keys import entry_of, new_key

from tests.edge.stream.conftest import TURNS, OpenPlace, StreamServer
from tests.edge.stream.trainer import FULL, Line, Trainer, kind, start
from tests.support.server_client import Refusal

pytestmark = pytest.mark.asyncio(loop_scope="module")


def asked(count: int) -> Callable[[Trainer], bool]:
    return lambda trainer: len(trainer.asks) == count


HELLO = {"hello": pb.TrainHello(credit=1)}
WRONG: Sequence[tuple[str, Sequence[dict[str, Any]], str]] = (
    ("another first", [{"sequence": 1, "start": start("r")}], "start"),
    ("nothing first", [{}], "item"),
    ("no credit", [{"hello": pb.TrainHello()}], "hello.credit"),
    ("too much credit", [{"hello": pb.TrainHello(credit=2**31)}], "hello.credit"),
    ("an unknown detail", [{"hello": pb.TrainHello(credit=1, detail=99)}], "hello.detail"),  # type: ignore[arg-type]
    ("seen on none", [{"hello": pb.TrainHello(credit=1, last_seen=1)}], "hello.last_seen"),
    ("a numbered hello", [{"sequence": 1, **HELLO}], "sequence"),
    ("hello twice", [HELLO, HELLO], "hello"),
    ("no number", [HELLO, {"start": start("r")}], "sequence"),
    ("a gap", [HELLO, {"sequence": 2, "start": start("r")}], "sequence"),
    ("a number too many", [HELLO, {"sequence": 1, "credit": pb.TrainCredit(asks=1)}], "sequence"),
    ("acknowledged too much", [HELLO, {"acknowledge": pb.TrainAcknowledge(sequence=1)}], "acknowledge.sequence"),
    ("no item", [HELLO, {}], "item"),
)


@pytest.mark.parametrize(("items", "field"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
async def test_items_out_of_order_are_invalid(place: StreamServer, items: Sequence[dict[str, Any]], field: str) -> None:
    line = Line(place.channel)
    for item in items:
        await line.send(**item)
    refusal = Refusal.of(await line.refused())
    assert refusal.code == grpc.StatusCode.INVALID_ARGUMENT
    assert list(refusal.fields) == [field]


async def test_no_message_at_all_is_invalid(place: StreamServer) -> None:
    call: Any = place.channel.stream_stream("/osmosis.rollout.v1.TrainerService/Train")()
    await call.write(b"\xff\xff\xff")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert Refusal.of(caught.value).fields.keys() == {"request"}


async def test_after_a_wrong_item_the_stream_goes_on(place: StreamServer) -> None:
    trainer = place.trainer()
    await trainer.put(start=start("r", agent="held"))
    await trainer.until(lambda t: len(t.started) == 1)
    assert trainer.line is not None
    await trainer.line.send(sequence=7, start=start("gap"))
    assert (await trainer.line.refused()).code() == grpc.StatusCode.INVALID_ARGUMENT
    trainer.line = None
    place.held.gate.set()
    await trainer.until(lambda t: bool(t.outcomes))
    assert trainer.outcomes[0].outcome.stop.reason == "stop"


async def test_what_was_taken_before_is_skipped(place: StreamServer) -> None:
    trainer = place.trainer()
    await trainer.put(start=start("r"))
    await trainer.until(lambda t: len(t.started) == 1)
    assert trainer.line is not None
    await trainer.line.send(sequence=1, start=start("again"))
    await trainer.until(lambda t: bool(t.outcomes))
    await trainer.put(start=start("other"))
    await trainer.until(lambda t: len(t.started) == 2)
    assert [rollout.spec.rollout_id for rollout in trainer.started] == ["r", "other"]


@pytest.mark.parametrize("last_seen", [0, 99])
async def test_a_last_item_that_cannot_be_is_invalid(place: StreamServer, last_seen: int) -> None:
    """The number of another trainer's item, or one from before the last acknowledgement."""
    trainer = place.trainer()
    await trainer.put(start=start("r"))
    await trainer.until(lambda t: bool(t.outcomes))
    await trainer.put(start=start("other"))  # so that the earlier acknowledgements were processed
    await trainer.until(lambda t: len(t.started) == 2)
    trainer.cut()
    trainer.seen = last_seen
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await trainer.connect()
    assert list(Refusal.of(caught.value).fields) == ["hello.last_seen"]


@pytest.mark.parametrize(
    ("wrong", "code", "text"),
    [
        (
            start("r", completions=spec_pb2.Target(url="grpc://a:1")),
            "INVALID_ARGUMENT",
            "spec.completions: must be unset",
        ),
        (start(" "), "INVALID_ARGUMENT", "spec.rollout_id"),
        (pb.TrainStart(), "INVALID_ARGUMENT", "start.rollout: is missing"),
        (pb.TrainStart(rollout=rpb.StartRolloutRequest(request_id="r")), "INVALID_ARGUMENT", "spec: is missing"),
        (start("r", count=1025), "INVALID_ARGUMENT", "start.count"),
        (start("r" * 255, count=3), "INVALID_ARGUMENT", "spec.rollout_id"),
        (start("r", count=3, request_id="r" * 255), "INVALID_ARGUMENT", "request_id: has 257 characters, at most 256"),
        (start("r", agent="nobody"), "NOT_FOUND", "nobody"),
        (start("r", on_interrupt=spec_pb2.INTERRUPT_POLICY_RESUME), "FAILED_PRECONDITION", "on_interrupt"),
    ],
)
async def test_a_start_is_refused_as_start_rollout_would(
    place: StreamServer, wrong: pb.TrainStart, code: str, text: str
) -> None:
    trainer = place.trainer()
    await trainer.put(start=start("good", agent="held"))
    number = await trainer.put(start=wrong)
    await trainer.until(lambda t: bool(t.refused))
    (refused,) = trainer.refused
    assert refused.start_sequence == number
    assert refused.code == grpc.StatusCode[code].value[0]
    assert text in refused.message
    assert len(trainer.started) == 1


async def test_a_group_that_does_not_fit_is_not_begun(open_place: OpenPlace) -> None:
    place = await open_place(max_running=2, max_queued=2)
    trainer = place.trainer()
    await trainer.put(start=start("five", count=5, agent="held"))
    await trainer.put(start=start("four", count=4, agent="held"))
    await trainer.until(lambda t: len(t.started) == 4)
    assert [refused.code for refused in trainer.refused] == [grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]]
    listed: rpb.ListRolloutsResponse = await place.stub.ListRollouts(rpb.ListRolloutsRequest())
    assert {rollout.spec.rollout_id for rollout in listed.rollouts} == {f"four/{k}" for k in range(4)}


async def test_a_group_of_which_one_is_taken_otherwise_is_not_begun(place: StreamServer) -> None:
    trainer = place.trainer()
    await trainer.put(start=start("there", request_id="k/2", agent="held"))
    number = await trainer.put(start=start("gone", count=4, request_id="k", agent="held"))
    await trainer.until(lambda t: bool(t.refused))
    assert trainer.refused[0].start_sequence == number
    assert trainer.refused[0].code == grpc.StatusCode.ALREADY_EXISTS.value[0]
    selection = rpb.Selection(rollout_ids=["there", *(f"gone/{k}" for k in range(4))])
    listed: rpb.ListRolloutsResponse = await place.stub.ListRollouts(rpb.ListRolloutsRequest(selection=selection))
    assert [rollout.spec.rollout_id for rollout in listed.rollouts] == ["there"]
    place.held.gate.set()
    await trainer.until(lambda t: len(t.outcomes) == 1)
    assert {ask.uid for ask in trainer.asks} == {trainer.started[0].uid}


async def test_a_group_that_is_started_again_on_a_full_server_is_found(open_place: OpenPlace) -> None:
    place = await open_place(max_running=2, max_queued=2, stream_rollouts=4)
    trainer = place.trainer()
    for _ in range(2):
        await trainer.put(start=start("g", count=4, request_id="k", agent="held"))
    await trainer.until(lambda t: len(t.started) == 8)
    assert [rollout.uid for rollout in trainer.started[4:]] == [rollout.uid for rollout in trainer.started[:4]]
    place.held.gate.set()
    await trainer.until(lambda t: len(t.outcomes) == 4)
    assert not trainer.refused


async def test_starts_that_nobody_reads_are_refused_before_they_fill_the_memory(open_place: OpenPlace) -> None:
    """Each start finds the same rollouts, so no other limit applies."""
    place = await open_place(stream_rollouts=8, stream_unacknowledged=4)
    trainer = place.trainer()
    trainer.automatic = False
    await trainer.connect()
    for _ in range(6):
        await trainer.put(start=start("g", count=4, request_id="k", agent="held"))
    trainer.automatic = True
    await trainer.until(lambda t: len(t.started) + 4 * len(t.refused) == 24)
    assert len(trainer.started) <= 4 + 8 + 4
    assert {refused.code for refused in trainer.refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]}
    assert "are not sent yet" in trainer.refused[0].message


async def test_no_more_asks_are_under_way_than_there_is_credit(place: StreamServer) -> None:
    trainer = place.trainer(credit=2)
    trainer.automatic = False
    # In message mode nothing is rendered first, so all five wait when the first completion arrives.
    await trainer.put(start=start("r", count=5, token_mode=spec_pb2.TOKEN_MODE_MESSAGES))
    open_: list[cpb.CompleteRequest] = []
    most = answered = 0
    order: list[str] = []
    while len(trainer.outcomes) < 5:
        before = len(trainer.asks)
        item = await trainer.one() if trainer.line is not None else await _first(trainer)
        open_ += trainer.asks[before:]
        order += [ask.uid for ask in trainer.asks[before:]]
        most = max(most, len(open_))
        assert len(open_) <= 2
        if len(open_) == 2 or (answered >= 5 * TURNS - 2 and open_):
            await trainer.complete(open_.pop(0))
            answered += 1
        if item.sequence:
            await trainer.acknowledge()
    assert most == 2
    assert len(set(order[:5])) == 5, "the rollouts' requests alternate"


async def _first(trainer: Any) -> pb.TrainResponse:
    await trainer.connect()
    item: pb.TrainResponse = await trainer.one()
    return item


async def test_more_credit_lets_more_asks_out_and_an_ended_rollout_gives_its_own_back(place: StreamServer) -> None:
    trainer = place.trainer(credit=1)
    trainer.automatic = False
    await trainer.put(start=start("r", count=3))
    await trainer.until(lambda t: len(t.asks) == 1)
    assert trainer.line is not None
    await trainer.line.send(credit=pb.TrainCredit(asks=1))
    await trainer.until(lambda t: len(t.asks) == 2)
    selection = rpb.Selection(uids=[trainer.asks[0].uid, "unknown"])
    await trainer.put(cancel=rpb.CancelRolloutsRequest(selection=selection, reason="enough"))
    await trainer.until(lambda t: len(t.asks) == 3)
    await trainer.until(lambda t: bool(t.outcomes))
    assert trainer.outcomes[0].outcome.cancellation.reason == "enough"
    assert len({ask.uid for ask in trainer.asks}) == 3


async def test_a_cancel_that_is_wrong_is_refused(place: StreamServer) -> None:
    trainer = place.trainer()
    empty = await trainer.put(cancel=rpb.CancelRolloutsRequest())
    strange = await trainer.put(cancel=rpb.CancelRolloutsRequest(selection=rpb.Selection(callers=["somebody"])))
    await trainer.until(lambda t: len(t.refused) == 2)
    codes = {refused.start_sequence: refused.code for refused in trainer.refused}
    assert codes[empty] == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert codes[strange] == grpc.StatusCode.PERMISSION_DENIED.value[0]


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED])
async def test_an_ask_that_is_put_off_comes_again(place: StreamServer, code: grpc.StatusCode) -> None:
    trainer = place.trainer(credit=1)
    trainer.automatic = False
    await trainer.put(start=start("r"))
    for number in range(3):
        await trainer.until(asked(number + 1))
        await trainer.reject(trainer.asks[-1], code, retry_after=Duration(nanos=1000))
    trainer.automatic = True
    await trainer.until(lambda t: bool(t.outcomes))
    assert trainer.outcomes[0].outcome.stop.reason == "stop"
    assert trainer.outcomes[0].outcome.metrics.completion_attempts == TURNS + 3


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INVALID_ARGUMENT])
async def test_any_other_rejection_ends_the_rollout(place: StreamServer, code: grpc.StatusCode) -> None:
    trainer = place.trainer()
    trainer.automatic = False
    spec = start("r")
    spec.rollout.credentials.completions_bearer = "s3cr3t-s3cr3t"
    await trainer.put(start=spec)
    await trainer.until(lambda t: len(t.asks) == 1)
    await trainer.reject(trainer.asks[0], code, message="no s3cr3t-s3cr3t")
    await trainer.until(lambda t: bool(t.outcomes))
    assert f"the trainer answered {code.name}: no [redacted]" in trainer.outcomes[0].outcome.failure.message


async def test_an_ask_that_nobody_answers_ends_its_rollout(open_place: OpenPlace) -> None:
    place = await open_place(trainer_timeout_seconds=0.05)
    trainer = place.trainer()
    trainer.automatic = False
    await trainer.put(start=start("r"))
    await trainer.until(lambda t: bool(t.outcomes))
    failure = trainer.outcomes[0].outcome.failure
    assert failure.category == outcome_pb2.FAILURE_CATEGORY_TIMEOUT
    assert "turn 1: timeout" in failure.message


async def test_no_stranger_takes_or_sees_a_stream(open_place: OpenPlace) -> None:
    keys = {name: new_key() for name in ("ann", "bob", "root")}
    entries = [entry_of(name, key, admin=name == "root") for name, key in keys.items()]
    place = await open_place(api_keys=entries)
    ann = place.trainer()
    ann.key = keys["ann"]
    ann.automatic = False
    await ann.put(start=start("r", request_id="k"))
    await ann.until(lambda t: len(t.asks) == 1)
    for name in ("bob", "root"):
        line = Line(place.channel, keys[name])
        await line.send(hello=pb.TrainHello(stream_id=ann.stream_id, credit=1, last_seen=ann.seen))
        assert Refusal.of(await line.refused()).reason == "STREAM_EXPIRED"
    nobody = Line(place.channel)
    await nobody.send(**HELLO)
    assert (await nobody.refused()).code() == grpc.StatusCode.UNAUTHENTICATED
    bob = place.trainer()
    bob.key = keys["bob"]
    await bob.put(cancel=rpb.CancelRolloutsRequest(selection=rpb.Selection(all=True)))
    await bob.put(start=start("r", request_id="k"))
    await bob.until(lambda t: bool(t.outcomes))
    assert bob.outcomes[0].uid != ann.started[0].uid
    ann.automatic = True
    await ann.complete(ann.asks[0])
    await ann.until(lambda t: bool(t.outcomes))
    assert ann.outcomes[0].outcome.stop.reason == "stop"
    assert {ask.uid for ask in bob.asks} == {bob.outcomes[0].uid}


async def test_streams_are_counted(open_place: OpenPlace) -> None:
    place = await open_place(max_streams=3, max_streams_of_caller=2)
    for _ in range(2):
        await place.trainer().connect()
    line = Line(place.channel)
    await line.send(**HELLO)
    refusal = Refusal.of(await line.refused())
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_STREAMS")
    assert refusal.retry_after is not None


async def test_nothing_more_is_sent_than_may_be_unacknowledged(open_place: OpenPlace) -> None:
    place = await open_place(stream_unacknowledged=4)
    trainer = place.trainer(credit=100)
    trainer.automatic = False
    await trainer.put(start=start("r", count=10))
    await trainer.until(lambda t: t.seen == 4)
    await trainer.put(answer=pb.TrainAnswer(turn_key="none"))
    await trainer.until(lambda t: kind(t.items[-1]) == "acknowledge")  # the server continues, but sends nothing else
    assert trainer.seen == 4
    trainer.automatic = True
    await trainer.acknowledge()
    await trainer.until(lambda t: len(t.outcomes) == 10)
    assert {r.outcome.stop.reason for r in trainer.outcomes} == {"stop"}


async def _refused_for_ever(trainer: Trainer) -> None:
    while True:
        await trainer.put(start=start(" "))
        await trainer.until(lambda t: not t.kept)  # gRPC loses the status of a call that ends during a write


async def test_refusals_that_nobody_takes_end_the_connection_and_nothing_is_lost(open_place: OpenPlace) -> None:
    place = await open_place(stream_unacknowledged=2)
    trainer = place.trainer()
    trainer.automatic = False
    await trainer.connect()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await _refused_for_ever(trainer)
    refusal = Refusal.of(caught.value)
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_REFUSALS")
    assert trainer.sent > 2
    trainer.line, trainer.automatic = None, True
    while len(trainer.refused) < trainer.sent:
        try:
            await trainer.until(lambda t: len(t.refused) == t.sent)
        except grpc.aio.AioRpcError:  # again too many at once; a few were accepted
            trainer.line = None
    assert [refused.start_sequence for refused in trainer.refused] == list(range(1, trainer.sent + 1))


async def test_rollouts_that_are_not_acknowledged_are_counted(open_place: OpenPlace) -> None:
    place = await open_place(stream_rollouts=2)
    trainer = place.trainer()
    await trainer.put(start=start("two", count=2))
    await trainer.put(start=start("one more"))
    await trainer.until(lambda t: len(t.outcomes) == 2)
    assert [refused.code for refused in trainer.refused] == [grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]]
    await trainer.put(start=start("now"))
    await trainer.until(lambda t: len(t.started) == 3)


async def test_a_slow_reader_costs_no_memory_and_holds_up_no_other(place: StreamServer) -> None:
    slow = place.trainer(detail=FULL)
    await slow.put(start=start("noisy", agent="held", metadata_json='{"notes": 5000}'))
    await slow.connect()
    for _ in range(3):
        await slow.one()
    quick = place.trainer()
    await quick.put(start=start("r", count=4))
    await quick.until(lambda t: len(t.outcomes) == 4)
    place.held.gate.set()
    await slow.until(lambda t: bool(t.outcomes))
    told = [event.event.sequence for event in slow.events]
    assert told == list(range(1, slow.outcomes[0].last_sequence + 1))


async def test_it_ends_with_its_server(open_place: OpenPlace) -> None:
    place = await open_place()
    trainer = place.trainer()
    trainer.automatic = False
    await trainer.put(start=start("r"))
    await trainer.until(lambda t: len(t.asks) == 1)
    assert trainer.line is not None
    draining = asyncio.create_task(place.server.__aexit__(None, None, None))
    await trainer.until(lambda t: bool(t.outcomes))
    assert trainer.outcomes[0].outcome.failure.category == outcome_pb2.FAILURE_CATEGORY_INTERRUPTED
    await trainer.acknowledge()
    assert (await trainer.line.refused()).code() == grpc.StatusCode.UNAVAILABLE
    await draining


async def test_an_outcome_that_a_stream_owes_is_not_forgotten(open_place: OpenPlace) -> None:
    place = await open_place(max_records=0)
    trainer = place.trainer()
    trainer.automatic = False
    wanted = start("r", request_id="k", agent="held", token_mode=spec_pb2.TOKEN_MODE_MESSAGES)
    await trainer.put(start=wanted)
    await trainer.until(lambda t: len(t.started) == 1)
    uid = trainer.started[0].uid
    await trainer.put(cancel=rpb.CancelRolloutsRequest(selection=rpb.Selection(uids=[uid])))
    await trainer.until(lambda t: bool(t.outcomes))
    assert (await place.get(uid)).state == rpb.ROLLOUT_STATE_FINISHED
    await trainer.put(start=wanted)
    await trainer.until(lambda t: len(t.started) == 2)
    assert trainer.started[1].uid == uid
    await trainer.acknowledge()
    await trainer.put(start=wanted)
    await trainer.until(lambda t: len(t.started) == 3)
    assert trainer.started[2].uid != uid
