"""The laws of training samples, for random ledgers and for contradictory input."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
from hypothesis import given, settings
from osmosis.rollout.v1 import outcome_pb2, token_pb2
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from rollout_client import SampleSpan, TrainingSample, samples
from rollout_client.export.json_lines import read_jsonl, write_jsonl
from rollout_client.export.parquet import read_parquet, write_parquet
from rollout_client.samples import Parting

from tests.support.random_rollouts import outcome_of, rollouts, span


def written(rollout: pb.Rollout) -> list[token_pb2.Segment]:
    """The segments with at least one generated token."""
    return [each for each in rollout.outcome.segments if len(each.spans) > 1]


@settings(max_examples=50)
@given(rollouts())
def test_a_sample_holds_what_its_segment_holds(rollout: pb.Rollout) -> None:
    found = samples(rollout)
    assert [each.segment_id for each in found] == [segment.id for segment in written(rollout)]
    for sample, segment in zip(found, written(rollout), strict=True):
        tokens = [token for each in segment.spans for token in each.token_ids]
        assert sample.prompt_ids + sample.response_ids == tokens
        assert sample.spans is not None
        assert [tokens[each.start : each.stop] for each in sample.spans] == [list(s.token_ids) for s in segment.spans]
        for ours, theirs in zip(sample.spans, segment.spans, strict=True):
            assert (ours.turn, ours.policy_version) == (theirs.turn, theirs.policy_version)
            assert ours.author == ("model" if theirs.author == token_pb2.AUTHOR_MODEL else "other")
            reason = token_pb2.MaskReason.Name(theirs.mask_reason).removeprefix("MASK_REASON_").lower()
            assert ours.reason == (None if reason == "unspecified" else reason)
        kind = token_pb2.SegmentKind.Name(segment.origin.kind).removeprefix("SEGMENT_KIND_").lower()
        assert (sample.kind, sample.parent_id) == (kind, segment.origin.parent_id)
        assert (sample.parent_tokens, sample.verified) == (segment.origin.parent_tokens, segment.verified)


@settings(max_examples=50)
@given(rollouts(split=True))
def test_each_sampled_token_is_in_the_response_of_one_sample(rollout: pb.Rollout) -> None:
    found = samples(rollout)
    for segment in written(rollout):
        parts = [each for each in found if each.segment_id == segment.id]
        tokens = [token for each in segment.spans for token in each.token_ids]
        assert [each.part for each in parts] == list(range(len(parts)))
        assert parts[-1].prompt_ids + parts[-1].response_ids == tokens
        sampled, start = list[tuple[int, int | None]](), 0
        for span_ in segment.spans:
            step = span_.policy_step if span_.HasField("policy_step") else None
            if span_.author == token_pb2.AUTHOR_MODEL:
                sampled += [(at, step) for at in range(start, start + len(span_.token_ids))]
            start += len(span_.token_ids)
        assert sampled == [
            (at, each.policy_step)
            for sample in parts
            for each in sample.spans or ()
            if each.author == "model"
            for at in range(each.start, each.stop)
        ]
        for sample in parts:
            assert sample.prompt_ids + sample.response_ids == tokens[: len(sample.prompt_ids + sample.response_ids)]
            steps = [s.policy_step for s in sample.spans or () if s.trains and s.policy_step is not None]
            assert sample.policy_steps == ((min(steps), max(steps)) if steps else None)
    turns = [(each.turn, each.value) for sample in found for each in sample.turn_rewards]
    ids = {sample.segment_id for sample in found}
    assert sorted(turns) == sorted((r.turn, r.value) for r in rollout.outcome.turn_rewards if r.segment_id in ids)


@settings(max_examples=50)
@given(rollouts(split=True))
def test_the_laws_of_a_sample(rollout: pb.Rollout) -> None:
    for sample in samples(rollout):
        assert len(sample.response_ids) == len(sample.response_mask) > 0
        assert set(sample.response_mask) <= {0, 1}
        assert sample.spans is not None
        cut = len(sample.prompt_ids)
        authors = [each for each in sample.spans for _ in range(each.start, each.stop)]
        assert len(authors) == cut + len(sample.response_ids)
        assert sample.response_mask == [int(each.author == "model" and each.reason is None) for each in authors[cut:]]
        assert authors[-1].author == "model"
        assert all(each.reason == "prompt" for each in authors[:cut])
        if sample.logprobs is not None:
            assert len(sample.logprobs) == len(sample.response_ids)
            masked = [value for value, trains in zip(sample.logprobs, sample.response_mask, strict=True) if not trains]
            assert masked == [0.0] * len(masked)


@settings(max_examples=50)
@given(rollouts())
def test_logprobs_are_those_of_the_answers_or_none_at_all(rollout: pb.Rollout) -> None:
    for sample, segment in zip(samples(rollout), written(rollout), strict=True):
        answers = [each for each in segment.spans if each.author == token_pb2.AUTHOR_MODEL]
        if all(each.HasField("logprobs") for each in answers):
            trained = [v for v, mask in zip(sample.logprobs or (), sample.response_mask, strict=True) if mask]
            assert trained == [value for each in answers if not each.mask_reason for value in each.logprobs.values]
        else:
            assert sample.logprobs is None


@settings(max_examples=50)
@given(rollouts())
def test_the_rollout_stands_on_each_sample(rollout: pb.Rollout) -> None:
    outcome = rollout.outcome
    end = outcome.WhichOneof("end")
    for sample in samples(rollout):
        assert (sample.uid, sample.rollout_id, sample.group_id) == ("u1", "r/1", "g")
        assert (sample.end, sample.reason) == (end, "network" if end == "failure" else outcome.stop.reason)
        assert sample.scores == dict(outcome.scores)
        declared = "role_not_trainable" if sample.role == "user" else ""
        reason = declared or ("" if any(sample.response_mask) else "no_trained_tokens")
        failed = ("server", False, "failure_server")  # ENDS names no source of its failure
        verdict = sample.failure_class, sample.trainable, sample.untrainable_reason
        assert verdict == (failed if end == "failure" else ("", not reason, reason))
        assert sample.spans is not None
        assert sample.truncated == (outcome.stop.truncated and sample.spans[-1].turn == outcome.metrics.turns)


@settings(max_examples=50)
@given(rollouts())
def test_the_view_without_segments_tells_the_same(rollout: pb.Rollout) -> None:
    less = copy.deepcopy(rollout)
    del less.outcome.segments[:]
    assert samples(less) == samples(rollout)


@settings(max_examples=20)
@given(rollouts())
def test_what_a_server_leaves_out_is_not_known(rollout: pb.Rollout) -> None:
    for sample in rollout.outcome.samples:
        sample.ClearField("spans")
        sample.ClearField("origin")
    for bare in samples(rollout):
        assert (bare.spans, bare.kind, bare.parent_id, bare.verified) == (None, "", "", None)


def test_an_outcome_alone_has_no_names() -> None:
    (sample,) = samples(outcome_of(span("prompt", 2), span("model", 3, policy_version="p7")))
    assert (sample.uid, sample.rollout_id, sample.group_id) == ("", "", "")
    assert sample.spans == (
        SampleSpan("other", "prompt", 1, 0, 2),
        SampleSpan("model", None, 1, 2, 5, "p7"),
    )


def test_what_an_author_masked_out_does_not_train_and_may_end_a_sample() -> None:
    (sample,) = samples(outcome_of(span("prompt", 1), span("model", 1), span("environment", 2), span("author", 2)))
    assert sample.response_mask == [1, 0, 0, 0, 0]
    assert sample.spans is not None
    assert (sample.spans[-1].author, sample.spans[-1].reason) == ("model", "author")


def test_a_failure_of_an_unknown_kind_is_internal_and_a_cancellation_has_its_words() -> None:
    outcome = outcome_of(span("prompt", 1), span("model", 1))
    outcome.failure.category = 99  # type: ignore[assignment]
    assert (samples(outcome)[0].end, samples(outcome)[0].reason) == ("failure", "internal")
    assert (samples(outcome)[0].failure_class, samples(outcome)[0].trainable) == ("unspecified", False)
    assert samples(outcome)[0].untrainable_reason == "failure_unspecified"
    outcome.cancellation.reason = "diverged"
    assert (samples(outcome)[0].end, samples(outcome)[0].reason) == ("cancellation", "diverged")
    assert (samples(outcome)[0].failure_class, samples(outcome)[0].trainable) == ("cancelled", False)
    assert samples(outcome)[0].untrainable_reason == "cancelled"


def test_a_sample_says_where_a_call_of_the_agent_parted(tmp_path: Path) -> None:
    origin = token_pb2.SegmentOrigin(kind=token_pb2.SEGMENT_KIND_DRIFT, parent_id="0")
    origin.parting.CopyFrom(token_pb2.Parting(message=1, field="content", expected="8.", found="8", api="chat"))
    outcome = outcome_of(span("prompt", 1), span("model", 1), origin=origin)
    (sample,) = samples(outcome)
    assert sample.parting == Parting(1, "content", "8.", "8", "chat")
    write_jsonl([sample], tmp_path / "samples.jsonl")
    write_parquet([sample], tmp_path / "samples.parquet")
    assert list(read_jsonl(tmp_path / "samples.jsonl")) == [sample]
    assert read_parquet(tmp_path / "samples.parquet") == [sample]


def test_nothing_known_is_no_sample_and_an_unfinished_rollout_an_error() -> None:
    assert samples(outcome_pb2.Outcome()) == []
    assert samples(pb.Rollout(outcome=outcome_pb2.Outcome())) == []
    with pytest.raises(ValueError, match="'u9' has not finished"):
        samples(pb.Rollout(uid="u9"))


RIGHT = (span("prompt", 2), span("model", 2), span("environment", 2), span("model", 1))
WRONG = {
    "other_tokens": (outcome_of(*RIGHT, prompt_ids=[1, 2]), "tokens of its spans differ"),
    "no_tokens": (outcome_of(*RIGHT, response_ids=[]), "tokens of its spans differ"),
    "other_mask": (outcome_of(*RIGHT, response_mask=b"\1\1\1\0\1", logprobs=None), "mask differs from"),
    "no_bit": (outcome_of(*RIGHT, response_mask=b"\1\2\0\0\1"), "values other than 0 and 1"),
    "masked_logprob": (outcome_of(*RIGHT, logprobs=token_pb2.Logprobs(values=[-1] * 5)), "logprob other than"),
    "trailing_environment": (outcome_of(*RIGHT[:3]), "last token was not generated"),
    "two_prompts": (outcome_of(RIGHT[0], RIGHT[1], prompt_ids=[10], response_ids=[11, 10, 11], response_mask=b"\0\1\1",
                               logprobs=None), "first span is not the prompt"),
    "short_mask": (outcome_of(*RIGHT, response_mask=b"\1"), "differ in length"),
}  # fmt: skip


@pytest.mark.parametrize(("outcome", "named"), WRONG.values(), ids=WRONG.keys())
def test_what_contradicts_itself_is_refused(outcome: outcome_pb2.Outcome, named: str) -> None:
    with pytest.raises(ValueError, match=f"segment '0': .*{named}"):
        samples(outcome)


def test_a_sample_cannot_be_made_wrong() -> None:
    spans = (SampleSpan("other", "prompt", 1, 0, 1), SampleSpan("model", None, 1, 2, 3))
    with pytest.raises(ValueError, match="without gaps"):
        TrainingSample("0", [1], [2], [1], None, spans)
    with pytest.raises(ValueError, match="nothing to train on"):
        TrainingSample("0", [1], [], [], None)
    with pytest.raises(ValueError, match="without gaps"):
        TrainingSample("0", [], [2], [1], None, ())
