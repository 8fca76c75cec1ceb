"""Outcomes in the trainer library: accepted once, compared token by token, fetched if no delivery arrives."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import pytest
from osmosis.rollout.v1 import outcome_pb2, spec_pb2, token_pb2
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from osmosis.rollout.v1.completion_service_pb2_grpc import CompletionServiceStub
from osmosis.rollout.v1.outcome_service_pb2 import DeliverOutcomeRequest
from osmosis.rollout.v1.outcome_service_pb2_grpc import OutcomeServiceStub
from rollout_client import NotFound
from rollout_client.trainer import Finished, RecordMismatch, Serving, Trainer, parsers
from rollout_client.trainer.results import verify_rollout
from rollout_client.trainer.rollout_records import Record

from tests.client.scripted import Refusal, Stage, scripted
from tests.client.trainer.asker import MODEL, OTHER, Asker, _Bearer, refusal, standing
from tests.client.trainer.test_turns import PROMPT, RESULT
from tests.support.toy_model import END, ToyModel, decode, until

STOP: dict[str, Any] = {"stop": outcome_pb2.Stop(reason="stop")}
FAILED: dict[str, Any] = {"failure": outcome_pb2.Failure(category=outcome_pb2.FAILURE_CATEGORY_NETWORK, message="gone")}


def delivered(asker: Asker, answers: list[Any], end: dict[str, Any] = STOP, rollout_id: str = "r1") -> pb.Rollout:
    """The finished rollout that a server would send for its ledger."""
    spans, at = [], 0
    while at < len(asker.tokens):
        by_model, turn = asker.tokens[at][1], asker.turns[at]
        stop = at
        while stop < len(asker.tokens) and (asker.tokens[stop][1], asker.turns[stop]) == (by_model, turn):
            stop += 1
        span = token_pb2.SampleSpan(turn=turn, start=at, stop=stop, author=MODEL if by_model else OTHER)
        if by_model:
            span.policy_version = "policy-1"
        else:
            span.mask_reason = token_pb2.MASK_REASON_ENVIRONMENT if at else token_pb2.MASK_REASON_PROMPT
        spans.append(span)
        at = stop
    opening = spans[0].stop
    logprobs = iter([value for answer in answers for value in answer.logprobs.values])
    sample = token_pb2.Sample(
        segment_id=asker.segment,
        prompt_ids=[token for token, _ in asker.tokens[:opening]],
        response_ids=[token for token, _ in asker.tokens[opening:]],
        response_mask=bytes(by_model for _, by_model in asker.tokens[opening:]),
        logprobs=token_pb2.Logprobs(values=[next(logprobs) if m else 0.0 for _, m in asker.tokens[opening:]]),
        spans=spans,
    )
    outcome = outcome_pb2.Outcome(samples=[sample], metrics=outcome_pb2.Metrics(turns=len(answers)), **end)
    spec = spec_pb2.RolloutSpec(rollout_id=rollout_id, group_id="g")
    return pb.Rollout(uid=asker.uid, spec=spec, state=pb.ROLLOUT_STATE_FINISHED, outcome=outcome)


@dataclass
class Played:
    """A rollout of two turns: the trainer's record, and the server's version."""

    record: Record
    rollout: pb.Rollout
    cut: pb.Rollout

    @property
    def sample(self) -> token_pb2.Sample:
        """The server's sample, which a test may change."""
        return self.rollout.outcome.samples[0]

    @property
    def opening(self) -> int:
        """The length of the prompt."""
        return len(self.sample.prompt_ids)

    def finished(self) -> Finished:
        """Compare both records."""
        return verify_rollout(self.rollout, self.record)


@pytest.fixture
async def played() -> Played:
    """A consistent rollout, and the same without its last turn."""
    async with standing() as stand:
        asker = stand.asker()
        first = await asker.ask(PROMPT)
        cut = delivered(asker, [first], FAILED)
        second = await asker.ask(RESULT)
        return Played(stand.records.open("u1"), delivered(asker, [first, second]), cut)


def test_what_is_the_same_is_checked(played: Played) -> None:
    finished = played.finished()
    assert (finished.mismatch, finished.checked, finished.end, len(finished.samples)) == (None, True, "stop", 1)


@pytest.mark.parametrize("end", [STOP, FAILED], ids=["stop", "failure"])
def test_an_answer_that_the_server_did_not_take_is_not_missed(played: Played, end: dict[str, Any]) -> None:
    """The server had stopped waiting, or had failed."""
    played.cut.outcome.MergeFrom(outcome_pb2.Outcome(**end))
    finished = verify_rollout(played.cut, played.record)
    assert (finished.mismatch, finished.end) == (None, next(iter(end)))
    played.cut.outcome.metrics.turns = 2  # the server did accept it
    mismatch = verify_rollout(played.cut, played.record).mismatch
    assert mismatch is not None
    assert mismatch.field == "length"


def test_a_whole_segment_is_not_missed_where_the_server_took_no_answer_in_it(played: Played) -> None:
    del played.cut.outcome.samples[:]
    played.cut.outcome.metrics.turns = 0
    assert verify_rollout(played.cut, played.record).mismatch is None
    played.cut.outcome.metrics.turns = 1
    mismatch = verify_rollout(played.cut, played.record).mismatch
    assert mismatch is not None
    assert (mismatch.field, mismatch.theirs) == ("segment", "no sample of it")


def change(values: Any, at: int, value: Any) -> None:
    values[at] = value


def shortened(played: Played) -> None:
    played.sample.response_ids.pop()
    played.sample.response_mask = played.sample.response_mask[:-1]
    played.sample.logprobs.values.pop()
    played.sample.spans[-1].stop -= 1


def all_masked(played: Played) -> None:
    span = played.sample.spans[1]
    span.author, span.mask_reason, span.policy_version = token_pb2.AUTHOR_OTHER, token_pb2.MASK_REASON_ENVIRONMENT, ""
    count = span.stop - span.start
    played.sample.response_mask = bytes(count) + played.sample.response_mask[count:]
    played.sample.logprobs.values[:count] = [0.0] * count


def trains_on_tools(played: Played) -> None:
    span = played.sample.spans[2]
    span.author, span.policy_version = token_pb2.AUTHOR_MODEL, "policy-1"
    span.ClearField("mask_reason")
    start, stop = span.start - played.opening, span.stop - played.opening
    mask = bytearray(played.sample.response_mask)
    mask[start:stop] = b"\x01" * (stop - start)
    played.sample.response_mask = bytes(mask)


def another_segment(played: Played) -> None:
    played.rollout.outcome.samples.append(played.sample)
    played.rollout.outcome.samples[1].segment_id = "9"


LIES: dict[str, tuple[Callable[[Played], None], str, Callable[[Played], int | None]]] = {
    "prompt id": (lambda p: change(p.sample.prompt_ids, 2, 1), "ids", lambda p: 2),
    "response id": (lambda p: change(p.sample.response_ids, 3, 1), "ids", lambda p: p.opening + 3),
    "shortened": (shortened, "length", lambda p: None),
    "logprob": (lambda p: change(p.sample.logprobs.values, 1, -9.0), "logprobs", lambda p: p.opening + 1),
    "no logprobs": (lambda p: p.sample.ClearField("logprobs"), "logprobs", lambda p: None),
    "all masked": (all_masked, "mask", lambda p: p.opening),
    "trains on tools": (trains_on_tools, "mask", lambda p: p.sample.spans[2].start),
    "policy": (lambda p: setattr(p.sample.spans[1], "policy_version", "old"), "policy_version", lambda p: p.opening),
    "segment": (another_segment, "segment", lambda p: None),
    "no sample": (lambda p: p.rollout.outcome.ClearField("samples"), "segment", lambda p: None),
}


@pytest.mark.parametrize("name", LIES)
def test_every_lie_is_found_and_named(played: Played, name: str) -> None:
    tell, field, index = LIES[name]
    at = index(played)
    tell(played)
    finished = played.finished()
    assert finished.mismatch is not None
    assert (finished.mismatch.field, finished.mismatch.index, finished.samples) == (field, at, ())
    assert field in str(finished.mismatch)


def test_a_sample_that_contradicts_itself_is_a_mismatch(played: Played) -> None:
    played.sample.response_mask = b"\x01"
    finished = played.finished()
    assert finished.mismatch is not None
    assert not finished.samples


def test_an_agents_author_may_mask_tokens_of_the_model(played: Played) -> None:
    span = played.sample.spans[1]
    span.mask_reason = token_pb2.MASK_REASON_AUTHOR
    count = span.stop - span.start
    played.sample.response_mask = bytes(count) + played.sample.response_mask[count:]
    played.sample.logprobs.values[:count] = [0.0] * count
    assert played.finished().mismatch is None


async def test_an_outcome_is_taken_once_and_acknowledged_as_often_as_it_comes(played: Played) -> None:
    async with standing() as stand:
        request = DeliverOutcomeRequest(delivery_key="k", rollout=played.rollout)
        error = await refusal(stand.deliveries.DeliverOutcome(request))
        assert (error.code, error.reason) == (grpc.StatusCode.NOT_FOUND, "ROLLOUT_UNKNOWN")
        future = stand.outcomes.expect("r1")
        await stand.deliveries.DeliverOutcome(request)
        await stand.deliveries.DeliverOutcome(request)
        assert (await future) == played.rollout
        stand.outcomes.close("r1")
        await stand.deliveries.DeliverOutcome(request)
        error = await refusal(stand.deliveries.DeliverOutcome(DeliverOutcomeRequest(delivery_key="k")))
        assert error.code is grpc.StatusCode.INVALID_ARGUMENT


@asynccontextmanager
async def staged() -> AsyncIterator[Stage]:
    """A scripted server that accepts any rollout."""
    async with scripted() as stage:
        stage.script.says("StartRollout", pb.StartRolloutResponse(rollout=pb.Rollout(uid="u1")))
        stage.script.says("CancelRollouts", pb.CancelRolloutsResponse())
        stage.script.says("AcknowledgeOutcome", pb.AcknowledgeOutcomeResponse())
        stage.script.says("SetPolicy", pb.SetPolicyResponse())
        yield stage


def trainer_of(stage: Stage, **fields: Any) -> Trainer:
    """A trainer of the scripted server that fetches outcomes at once."""
    return Trainer(
        stage.address,
        generate=ToyModel(),
        decode=decode,
        parse=parsers.hermes,
        end_ids={END},
        serving=Serving(look=fields.pop("look", 0.01)),
        **fields,
    )


async def play(stage: Stage, lie: bool) -> None:
    """Act as the server of one rollout: two turns, and an outcome with one id changed."""
    await until(lambda: stage.script.asked("StartRollout"))
    start = stage.script.asked("StartRollout")[0]
    bearer = _Bearer(f"Bearer {start.credentials.completions_bearer}")
    target = start.spec.completions
    assert target.replays_turn_keys
    async with grpc.aio.insecure_channel(target.url.removeprefix("grpc://"), interceptors=[bearer]) as channel:
        asker = Asker(CompletionServiceStub(channel))
        answers = [await asker.ask(PROMPT), await asker.ask(RESULT)]
        rollout = delivered(asker, answers, rollout_id=start.spec.rollout_id)
        rollout.outcome.samples[0].response_ids[3] += lie
        stub: Any = OutcomeServiceStub(channel)
        await stub.DeliverOutcome(DeliverOutcomeRequest(delivery_key="k", rollout=rollout))


@pytest.mark.parametrize("lie", [False, True])
async def test_nobody_trains_on_what_was_not_generated(lie: bool) -> None:
    async with staged() as stage:
        async with trainer_of(stage, look=60, on_mismatch="flag") as trainer:
            playing = asyncio.create_task(play(stage, lie))
            (group,) = [each async for each in trainer.rollouts(["Add."], n=1, tokenizer="toy")]
            await playing
        (finished,) = group.rollouts
        assert ((finished.mismatch is not None), len(finished.samples), finished.checked) == (lie, 1 - lie, True)
        assert len(trainer._records) == 0


async def test_a_mismatch_is_raised_unless_it_is_to_be_flagged() -> None:
    async with staged() as stage, trainer_of(stage, look=60) as trainer:
        playing = asyncio.create_task(play(stage, lie=True))
        with pytest.raises(RecordMismatch, match="ids at token") as caught:
            _ = [each async for each in trainer.rollouts(["Add."], n=1, tokenizer="toy")]
        await playing
        again = pickle.loads(pickle.dumps(caught.value))  # a worker process raises it in its parent
        assert (str(again), again.finished.uid) == (str(caught.value), "u1")


@pytest.mark.parametrize("forgotten", [False, True])
async def test_an_outcome_that_is_not_delivered_is_found(played: Played, forgotten: bool) -> None:
    async with staged() as stage:
        if forgotten:
            stage.script.says("AcknowledgeOutcome", Refusal(grpc.StatusCode.NOT_FOUND, "there is no such rollout"))
        running, done = pb.Rollout(uid="u1", state=pb.ROLLOUT_STATE_RUNNING), played.rollout
        said = [pb.GetRolloutResponse(rollout=each) for each in (running, running, done, done)]
        stage.script.says("GetRollout", *said)
        async with trainer_of(stage) as trainer:
            (group,) = [each async for each in trainer.rollouts(["Add."], n=1, tokenizer="toy")]
        (finished,) = group.rollouts
        assert (finished.uid, finished.checked, len(finished.samples)) == ("u1", False, 1)
        assert [each.uid for each in stage.script.asked("AcknowledgeOutcome")] == ["u1"]


async def test_a_rollout_that_the_server_lost_is_told() -> None:
    async with staged() as stage:
        stage.script.says("GetRollout", Refusal(grpc.StatusCode.NOT_FOUND, "there is no such rollout"))
        async with trainer_of(stage) as trainer:
            with pytest.raises(NotFound):
                _ = [each async for each in trainer.rollouts(["Add."], n=2, tokenizer="toy")]
        started = {each.spec.rollout_id for each in stage.script.asked("StartRollout")}
        cancelled = {name for each in stage.script.asked("CancelRollouts") for name in each.selection.rollout_ids}
        assert started == cancelled
