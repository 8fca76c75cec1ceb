"""Training samples of an outcome: one per segment of its ledger.

The prompt of a sample is masked. In the response, exactly the tokens with mask 1 train. Inconsistent samples raise ValueError, so
none of them can reach the optimizer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from google.protobuf.descriptor import EnumDescriptor
from osmosis.rollout.v1.outcome_pb2 import Failure, FailureCategory, FailureClass, Outcome, RewardRule
from osmosis.rollout.v1.rollout_service_pb2 import Rollout
from osmosis.rollout.v1.token_pb2 import Author, MaskReason, Sample, Segment, SegmentKind
from osmosis.rollout.v1.token_pb2 import Parting as PartingProto
from osmosis.rollout.v1.token_pb2 import SampleSpan as SpanProto

from rollout_client.errors import RolloutFailed
from rollout_client.proto_fields import enum_values

MODEL: Final = "model"
PROMPT: Final = "prompt"
ENVIRONMENT: Final = "environment"
#: Name of an enum value that a newer server added.
_OTHER: Final = "unspecified"


def _enum_names(kind: EnumDescriptor) -> Mapping[int, str]:
    return MappingProxyType({number: word for word, number in enum_values(kind).items()})


AUTHORS: Final = _enum_names(Author.DESCRIPTOR)
MASK_REASONS: Final = _enum_names(MaskReason.DESCRIPTOR)
SEGMENT_KINDS: Final = _enum_names(SegmentKind.DESCRIPTOR)
_CATEGORIES: Final = _enum_names(FailureCategory.DESCRIPTOR)
_CLASSES: Final = _enum_names(FailureClass.DESCRIPTOR)
_CANCELLED: Final = _CLASSES[FailureClass.FAILURE_CLASS_CANCELLED]


@dataclass(frozen=True, slots=True)
class SampleSpan:
    """Consecutive tokens of one author from one turn.

    Args:
        author: "model", or "other" for prompt, chat template, tool results and user messages.
        reason: why the tokens are masked: "prompt", "environment" (tokens between two completions), "closing" (the stop token
            that a truncated completion lacks) or "author" (masked out by the agent's author). None: they train.
        turn: turn whose prompt or completion the tokens belong to, from 1.
        start: index of the first token, counted from the first prompt token.
        stop: index after the last token.
        policy_version: policy version reported by the trainer; empty: unknown.
    """

    author: str
    reason: str | None
    turn: int
    start: int
    stop: int
    policy_version: str = ""

    @property
    def trains(self) -> bool:
        """Whether the tokens have mask 1: the model generated them and no author masked them out."""
        return self.author == MODEL and self.reason is None


@dataclass(frozen=True, slots=True)
class TurnReward:
    """The reward that the agent gave to a turn: its number, from 1, and the sum of what was given."""

    turn: int
    value: float


@dataclass(frozen=True, slots=True)
class Parting:
    """Where a call of an agent that owns its loop left its other conversations, so that a segment was opened.

    Args:
        message: index of the first message that differs from the closest conversation, from 0.
        field: what differs there, such as "content", "tools" or "history".
        expected: the text there so far, at most 200 characters.
        found: the text that the agent sent, at most 200 characters.
        api: the API of the call: "chat", "responses", "messages" or "grpc".
        client_agent: the client's id of the agent that called; empty: none.
    """

    message: int
    field: str
    expected: str = ""
    found: str = ""
    api: str = ""
    client_agent: str = ""


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """One training sample: a masked prompt and the response after it, which ends with a generated token.

    Below, T is the number of response tokens.

    Args:
        segment_id: id of the segment within its rollout: "0", "1", ...
        prompt_ids: token ids (int) of the first prompt; none of them trains.
        response_ids: T token ids (int), T >= 1: completions and environment tokens.
        response_mask: T values (int): 1 for a generated token that trains, otherwise 0.
        logprobs: T natural logarithms (float) at the time of sampling, 0.0 where the mask is 0. None: the trainer sent none for
            at least one completion.
        spans: author and mask reason of every token of prompt and response, without gaps. None: the server did not send them.
        kind: why the segment was opened: "main", "drift", "gap", "compaction", "subagent" or "branch"; empty: not sent.
        parent_id: id of the segment that it continues; empty for the first.
        parent_tokens: number of leading tokens shared with the parent segment.
        verified: True if the trainer reported every prompt. False: prompt and environment tokens are the server's rendering.
            None: not sent.
        uid: the server's id of the rollout.
        rollout_id: the caller's id of the rollout.
        group_id: id of the rollouts of one prompt, such as a GRPO group.
        end: how the rollout ended: "stop", "failure" or "cancellation"; empty: unknown.
        reason: details of `end`: the stop reason, the category of the failure, or the reason of the cancellation.
        truncated: the sample ends with the last completion of the rollout, and that completion was cut by length.
        reward: reward of the sample, by the rule that the agent declares (docs/samples.md). By default, that of the whole rollout.
            None: it has none.
        scores: named components of the reward.
        completion_ms: time the rollout waited for completions, in milliseconds.
        tool_ms: time the rollout waited for tools, in milliseconds.
        failure_class: who has to act if the rollout failed, such as "engine"; "cancelled" if it was cancelled, empty if it
            completed. docs/failures.md lists them.
        role: the part that the conversation plays, as the agent names it, such as "critic"; "agent" by default.
        model: name of the further model that generated the completions; empty: the request's completion target did.
        trainable: whether to train on the sample. The mask does not depend on it: it says who wrote the tokens.
        untrainable_reason: why not, as a stable word such as "failure_engine" or "cancelled"; empty if it is trainable.
        turn_rewards: rewards that the agent gave to turns of the sample, by turn. A turn without a reward is missing.
        parting: where the agent's call parted from its other conversations. None: the sample began otherwise.

    Raises ValueError if lengths, mask, logprobs and spans contradict each other.
    """

    segment_id: str
    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    logprobs: list[float] | None
    spans: tuple[SampleSpan, ...] | None = None
    kind: str = ""
    parent_id: str = ""
    parent_tokens: int = 0
    verified: bool | None = None
    uid: str = ""
    rollout_id: str = ""
    group_id: str = ""
    end: str = ""
    reason: str = ""
    truncated: bool = False
    reward: float | None = None
    scores: Mapping[str, float] = field(default_factory=dict)
    completion_ms: float = 0.0
    tool_ms: float = 0.0
    failure_class: str = ""
    role: str = "agent"
    trainable: bool = True
    untrainable_reason: str = ""
    turn_rewards: tuple[TurnReward, ...] = ()
    model: str = ""
    parting: Parting | None = None

    @property
    def turn_scores(self) -> list[float]:
        """One reward per completion of the sample, in order, 0.0 for one without a reward; empty if no completion has one."""
        given = {each.turn: each.value for each in self.turn_rewards}
        if not given or self.spans is None:
            return list(given.values())
        turns = {span.turn for span in self.spans if span.author == MODEL}
        # A completion without tokens has no span.
        return [given.get(turn, 0.0) for turn in sorted(turns | given.keys())]

    def __post_init__(self) -> None:
        for fault in (_fault_of_lists(self), _fault_of_spans(self)):
            if fault:
                raise ValueError(f"segment {self.segment_id!r}: {fault}")


def samples(source: Outcome | Rollout) -> list[TrainingSample]:
    """Return the training samples of an outcome or of a finished rollout, usually one.

        for sample in samples(client.wait(uid, view="samples")):
            assert len(sample.response_ids) == len(sample.response_mask)

    A rollout that failed or was cancelled has samples of everything before that point. Whether one may be trained on is in its
    `trainable`; `only_trainable` drops the others. A segment without generated tokens has no sample.

    Args:
        source: an outcome or rollout in view "samples" or "full"; other views contain no samples.

    Raises:
        ValueError: the rollout has not finished, or a sample is inconsistent: ids, mask, logprobs and spans contradict each
            other, so it would train on wrong tokens.
    """
    if isinstance(source, Outcome):
        return _samples(source, Rollout())
    if not source.HasField("outcome"):
        raise ValueError(f"rollout {source.uid!r} has not finished, so it has no samples; wait for it first")
    return _samples(source.outcome, source)


def only_trainable(samples: Iterable[TrainingSample]) -> tuple[list[TrainingSample], Mapping[str, int]]:
    """Return the samples that may be trained on, and the number of the others by `untrainable_reason`.

        kept, dropped = only_trainable(samples(rollout))  # dropped: {"failure_engine": 2}

    Samples are dropped one by one: the other rollouts of a group keep theirs.
    """
    found = list(samples)
    dropped = Counter(each.untrainable_reason for each in found if not each.trainable)
    return [each for each in found if each.trainable], dict(dropped)


def _samples(outcome: Outcome, rollout: Rollout) -> list[TrainingSample]:
    segments = {segment.id: segment for segment in outcome.segments}
    written = [each for each in outcome.samples if each.response_ids or each.response_mask]
    return [_sample(each, segments.get(each.segment_id), outcome, rollout) for each in written]


def _sample(sample: Sample, segment: Segment | None, outcome: Outcome, rollout: Rollout) -> TrainingSample:
    (end, reason), (trainable, untrainable_reason) = _end(outcome), _verdict(sample, outcome)
    spans = _spans(sample.spans) if sample.spans else None
    if segment is not None:
        _compare(sample, segment)
    return TrainingSample(
        segment_id=sample.segment_id,
        prompt_ids=list(sample.prompt_ids),
        response_ids=list(sample.response_ids),
        response_mask=list(sample.response_mask),
        logprobs=list(sample.logprobs.values) if sample.HasField("logprobs") else None,
        spans=spans,
        kind=SEGMENT_KINDS.get(sample.origin.kind, _OTHER) if sample.HasField("origin") else "",
        parent_id=sample.origin.parent_id,
        parent_tokens=sample.origin.parent_tokens,
        verified=sample.verified if sample.spans else None,
        uid=rollout.uid,
        rollout_id=rollout.spec.rollout_id,
        group_id=rollout.spec.group_id,
        end=end,
        reason=reason,
        truncated=outcome.stop.truncated and _is_last(sample, spans, outcome),
        reward=_reward(sample, outcome),
        scores=dict(outcome.scores),
        completion_ms=outcome.metrics.completion_ms,
        tool_ms=outcome.metrics.tool_ms,
        failure_class=failure_class_of(outcome),
        role=sample.role or "agent",
        trainable=trainable,
        untrainable_reason=untrainable_reason,
        turn_rewards=tuple(
            TurnReward(each.turn, each.value) for each in outcome.turn_rewards if each.segment_id == sample.segment_id
        ),
        model=sample.model,
        parting=_parting(sample.origin.parting) if sample.origin.HasField("parting") else None,
    )


def _parting(proto: PartingProto) -> Parting:
    return Parting(proto.message, proto.field, proto.expected, proto.found, proto.api, proto.client_agent)


def _reward(sample: Sample, outcome: Outcome) -> float | None:
    """Return the reward of a sample. Servers without a reward rule send only that of the rollout."""
    source = outcome if outcome.reward_rule == RewardRule.REWARD_RULE_UNSPECIFIED else sample
    return source.reward if source.HasField("reward") else None


def raise_for_failure(source: Rollout | Outcome, *, uid: str = "") -> None:
    """Raise `RolloutFailed` if a rollout failed or was cancelled; do nothing if it completed.

        rollout = client.wait(uid, timeout=600)
        raise_for_failure(rollout)

    Args:
        source: a finished rollout, or an outcome, for example of `run`.
        uid: the server's id of the rollout, for the exception. A rollout has its own.

    Raises:
        RolloutFailed: with class, category, turn and uid.
        ValueError: the rollout has not finished.
    """
    if isinstance(source, Rollout) and not source.HasField("outcome"):
        raise ValueError(f"rollout {source.uid!r} has not finished; wait for it first")
    outcome, uid = (source, uid) if isinstance(source, Outcome) else (source.outcome, source.uid)
    found, failure = failure_class_of(outcome), outcome.failure
    if outcome.HasField("failure"):
        raise RolloutFailed(failure.message, found, category_of(failure), failure.turn, uid)
    if found:
        raise RolloutFailed(f"the rollout was cancelled: {outcome.cancellation.reason}", found, uid=uid)


def category_of(failure: Failure) -> str:
    """Return the name of a failure's category, such as "tool". A category of a newer server is "internal"."""
    return _CATEGORIES.get(failure.category, _CATEGORIES[FailureCategory.FAILURE_CATEGORY_INTERNAL])


def failure_class_of(outcome: Outcome) -> str:
    """Return who has to act on a failed rollout, such as "engine"; "cancelled" for a cancelled one, empty if it completed.

    A failure of a server that sends no classes, or a class of a newer server, is "unspecified".
    """
    if outcome.HasField("failure"):
        return _CLASSES.get(outcome.failure.failure_class, _OTHER)
    return _CANCELLED if outcome.HasField("cancellation") else ""


def _verdict(sample: Sample, outcome: Outcome) -> tuple[bool, str]:
    """Return whether the server says that the sample trains, and why not.

    A server that says nothing is an old one: then a failed or cancelled rollout does not train.
    """
    if sample.HasField("trainable"):
        return sample.trainable, sample.untrainable_reason
    found = failure_class_of(outcome)
    return not found, f"failure_{found}" if outcome.HasField("failure") else found


def _end(outcome: Outcome) -> tuple[str, str]:
    end = outcome.WhichOneof("end")
    if end == "failure":
        return end, category_of(outcome.failure)
    if end == "cancellation":
        return end, outcome.cancellation.reason
    return end or "", outcome.stop.reason


def _is_last(sample: Sample, spans: Sequence[SampleSpan] | None, outcome: Outcome) -> bool:
    """Whether a sample ends with the rollout's last completion. Without spans, the last sample is assumed to."""
    if spans:
        return spans[-1].turn == outcome.metrics.turns
    return sample.segment_id == outcome.samples[-1].segment_id


def _spans(protos: Sequence[SpanProto]) -> tuple[SampleSpan, ...]:
    return tuple(
        SampleSpan(
            AUTHORS.get(proto.author, _OTHER),
            MASK_REASONS.get(proto.mask_reason, _OTHER) if proto.mask_reason else None,
            proto.turn,
            proto.start,
            proto.stop,
            proto.policy_version,
        )
        for proto in protos
    )


def _compare(sample: Sample, segment: Segment) -> None:
    written = [token for span in segment.spans for token in span.token_ids]
    if written != [*sample.prompt_ids, *sample.response_ids]:
        raise ValueError(f"segment {segment.id!r}: the tokens of its spans differ from those of its sample")


def _fault_of_lists(sample: TrainingSample) -> str:
    """Return what is wrong with ids, mask and logprobs, or an empty text."""
    count, values = len(sample.response_ids), sample.logprobs
    if len(sample.response_mask) != count or (values is not None and len(values) != count):
        return "ids, mask and logprobs differ in length"
    if not count:
        return "the response is empty, so there is nothing to train on"
    if not {0, 1}.issuperset(sample.response_mask):
        return "the mask contains values other than 0 and 1"
    if values is not None and any(
        value and not trains for value, trains in zip(values, sample.response_mask, strict=True)
    ):
        return "a token with mask 0 has a logprob other than 0.0"
    return ""


def _fault_of_spans(sample: TrainingSample) -> str:
    """Return what is wrong with the spans, if they are known, or an empty text."""
    spans = sample.spans
    if spans is None:
        return ""
    starts = [0, *(span.stop for span in spans)]
    total = len(sample.prompt_ids) + len(sample.response_ids)
    if [span.start for span in spans] != starts[:-1] or starts != sorted(starts) or starts[-1] != total:
        return "its spans do not cover prompt and response without gaps"
    if not spans or spans[0].stop != len(sample.prompt_ids) or spans[0].reason != PROMPT:
        return "its first span is not the prompt"
    if spans[-1].author != MODEL:
        return "its last token was not generated by the model"
    mask = [int(span.trains) for span in spans[1:] for _ in range(span.start, span.stop)]
    return "" if mask == sample.response_mask else "its mask differs from the one that its spans imply"
