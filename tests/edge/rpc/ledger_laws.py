"""The laws of the ledger (docs/design.md), checked on outcomes received over the wire."""

from __future__ import annotations

from array import array

from osmosis.rollout.v1 import outcome_pb2, token_pb2
from rollout_server.testing.checks.verdict import TrainerSample

MODEL, OTHER = token_pb2.AUTHOR_MODEL, token_pb2.AUTHOR_OTHER


def lawful(outcome: outcome_pb2.Outcome) -> None:
    """Assert that segments and samples obey the laws and hold the same tokens."""
    assert [sample.segment_id for sample in outcome.samples] == [segment.id for segment in outcome.segments]
    assert len({segment.id for segment in outcome.segments}) == len(outcome.segments)
    for segment, sample in zip(outcome.segments, outcome.samples, strict=True):
        _lawful_spans(segment)
        _same_tokens(segment, sample)
    assert sum(len(span.token_ids) for span in _spans(outcome) if span.author == MODEL) == (
        outcome.metrics.generated_tokens
    )


def _spans(outcome: outcome_pb2.Outcome) -> list[token_pb2.Span]:
    return [span for segment in outcome.segments for span in segment.spans]


def _lawful_spans(segment: token_pb2.Segment) -> None:
    spans = segment.spans
    assert (spans[0].author, spans[0].mask_reason) == (OTHER, token_pb2.MASK_REASON_PROMPT)
    assert spans[-1].author == MODEL
    assert [span.turn for span in spans] == sorted(span.turn for span in spans)
    for span in spans[1:]:
        assert span.mask_reason != token_pb2.MASK_REASON_PROMPT
        assert len(span.token_ids) > 0
    for span in spans:
        assert span.author in (MODEL, OTHER)
        assert span.author == MODEL or span.mask_reason != token_pb2.MASK_REASON_UNSPECIFIED
        assert all(token < 2**31 for token in span.token_ids)
        if span.author == OTHER:
            assert not span.HasField("logprobs")
        elif span.HasField("logprobs"):
            assert len(span.logprobs.values) == len(span.token_ids)


def _same_tokens(segment: token_pb2.Segment, sample: token_pb2.Sample) -> None:
    prompt, *response = segment.spans
    assert list(sample.prompt_ids) == list(prompt.token_ids)
    assert list(sample.response_ids) == [token for span in response for token in span.token_ids]
    trains = [span.author == MODEL and not span.mask_reason for span in response for _ in span.token_ids]
    assert list(sample.response_mask) == [int(train) for train in trains]
    known = all(span.HasField("logprobs") for span in response if span.author == MODEL)
    assert sample.HasField("logprobs") == known
    if known:
        expected: list[float] = []
        for span in response:
            expected += span.logprobs.values if span.author == MODEL else [0.0] * len(span.token_ids)
        assert list(sample.logprobs.values) == expected


def same_sample(sample: token_pb2.Sample, judged: TrainerSample) -> None:
    """Assert that a sample equals, element by element, the one that the trainer accumulated."""
    assert tuple(sample.prompt_ids) == judged.prompt_ids
    assert tuple(sample.response_ids) == judged.response_ids
    assert tuple(sample.response_mask) == judged.response_mask
    assert array("f", sample.logprobs.values) == array("f", judged.logprobs)
