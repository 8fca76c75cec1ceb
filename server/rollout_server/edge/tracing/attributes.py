"""Attributes of spans, made of specs, records and outcomes.

Never among them: bearer tokens, keys, URLs beyond host and port, and texts of messages, tools, trainers or receivers. Short words
that trainers and models choose, such as a finish reason, are cut to `LONGEST` characters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Final, TypeAlias

from rollout_server.core.outcome import Cancellation, Failure, Outcome, Stop, failure_class_of
from rollout_server.core.record import Answered, DriftFound, Ended, ModelCalled, Record, SegmentOpened, ToolStarted
from rollout_server.core.spec import ENGINES, Target
from rollout_server.core.usage import lengths
from rollout_server.edge.metrics.observer import end_labels
from rollout_server.edge.targets.host_port import MalformedTarget, read_url
from rollout_server.edge.tracing import conventions as names
from rollout_server.runtime.outcome_delivery import DeliveryAcknowledged, DeliveryRefused, Receipt
from rollout_server.runtime.ports import CompletionRequest
from rollout_server.runtime.rollout import Rollout

Attribute: TypeAlias = "str | bool | int | float | Sequence[str]"
Attributes: TypeAlias = dict[str, Attribute]
LONGEST: Final = 128
OTHER: Final = "_OTHER"
_TOOL: Final = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_TRAINER: Final = "trainer"
"""`gen_ai.provider.name` of a trainer, whose model nobody else serves."""


@lru_cache(1024)
def target_attributes(target: Target) -> MappingProxyType[str, str | int]:
    """Return provider, model and address of a target."""
    provider = target.dialect.value if target.dialect in ENGINES else _TRAINER
    found: dict[str, str | int] = {names.PROVIDER: provider, **server_attributes(target.url)}
    if target.model:
        found[names.MODEL] = target.model
    return MappingProxyType(found)


@lru_cache(1024)
def server_attributes(url: str) -> Mapping[str, str | int]:
    """Return host and port of a URL; nothing for a trainer on a stream, which has none."""
    try:
        address = read_url(url)
    except MalformedTarget:
        return {}
    return MappingProxyType({names.SERVER_ADDRESS: address.host_text, names.SERVER_PORT: address.port})


def rollout_attributes(rollout: Rollout) -> Attributes:
    """Return the attributes with which a rollout's span begins."""
    spec, target = rollout.spec, target_attributes(rollout.spec.completions)
    found: Attributes = {
        names.OPERATION: names.INVOKE_AGENT,
        names.PROVIDER: str(target[names.PROVIDER]),
        names.AGENT_NAME: rollout.agent.name,
        names.AGENT_VERSION: rollout.agent.version,
        names.CONVERSATION: rollout.uid,
        names.UID: rollout.uid,
        names.ROLLOUT_ID: spec.rollout_id,
    }
    if spec.completions.model:
        found[names.MODEL] = spec.completions.model
    if spec.group_id:
        found[names.GROUP_ID] = spec.group_id
    return found


def completion_attributes(rollout: Rollout, request: CompletionRequest, target: Target, model: str) -> Attributes:
    """Return the attributes with which the span of a completion begins."""
    asked, sampling = request.asked, request.sampling
    found: Attributes = {
        **target_attributes(target).copy(),
        names.OPERATION: names.CHAT,
        names.CONVERSATION: rollout.uid,
    }
    found[names.SEGMENT] = asked.segment_id
    if model:
        found[names.FURTHER_MODEL] = model
    else:
        found[names.TURN] = asked.turn
    if sampling.temperature is not None:
        found[names.TEMPERATURE] = sampling.temperature
    if sampling.top_p is not None:
        found[names.TOP_P] = sampling.top_p
    if sampling.max_tokens is not None:
        found[names.MAX_TOKENS] = sampling.max_tokens
    return found


def usage_of(rollout: Rollout, records: Iterable[Record]) -> tuple[int, int] | None:
    """Return the lengths of prompt and completion in tokens by the records of a completion; None if nobody knows them."""
    for record in records:
        if isinstance(record, Answered):
            generated, prompt = lengths(record, rollout.machine.of_turn(record.turn).line)
            return prompt, generated
        if isinstance(record, ModelCalled):
            return record.usage
    return None


def completed_attributes(records: Iterable[Record], usage: tuple[int, int] | None) -> Attributes:
    """Return what records and usage of a completion add to the attributes of its span."""
    found: Attributes = {} if usage is None else {names.INPUT_TOKENS: usage[0], names.OUTPUT_TOKENS: usage[1]}
    for record in records:
        match record:
            case Answered() | ModelCalled():
                found[names.ATTEMPTS] = record.attempts
                if record.finish_reason:
                    found[names.FINISH_REASONS] = (record.finish_reason[:LONGEST],)
                if isinstance(record, Answered) and record.policy_version:
                    found[names.POLICY_VERSION] = record.policy_version[:LONGEST]
            case DriftFound(drift=drift):
                found |= {names.DRIFT_INDEX: drift.index, names.DRIFT_KIND: drift.kind.value}
            case SegmentOpened(segment_id=segment):
                found[names.SEGMENT] = segment
    return found


def tool_attributes(rollout: Rollout, started: ToolStarted) -> Attributes:
    """Return the attributes with which the span of a tool call begins. A model may call tools that do not exist."""
    name, call = started.call.name, started.call.id
    return {
        names.OPERATION: names.EXECUTE_TOOL,
        names.TOOL_NAME: name if _TOOL.fullmatch(name) else OTHER,
        names.TOOL_CALL: call[:LONGEST],
        names.TOOL_TYPE: "function",
        names.CONVERSATION: rollout.uid,
        names.SEGMENT: started.segment_id,
        names.TURN: started.turn,
    }


def delivery_attributes(rollout: Rollout, target: Target, attempt: int) -> Attributes:
    """Return the attributes with which the span of an attempt to deliver an outcome begins."""
    return {**server_attributes(target.url), names.UID: rollout.uid, names.ATTEMPT: attempt}


def delivery_error(receipt: Receipt) -> str:
    """Return the `error.type` of an attempt to deliver an outcome; empty if it was acknowledged."""
    if isinstance(receipt, DeliveryAcknowledged):
        return ""
    return "refused" if isinstance(receipt, DeliveryRefused) else "not_acknowledged"


def failure_attributes(failure: Failure) -> Attributes:
    """Return the kind of a failure, without its message."""
    return {names.ERROR: failure.category.value, names.FAILURE_CLASS: failure.failure_class.value}


def outcome_attributes(outcome: Outcome, ended: Ended) -> Attributes:
    """Return what the outcome of a rollout adds to the attributes of its span."""
    metrics, (end, reason) = outcome.metrics, end_labels(outcome.end)
    spans = [span for segment in outcome.segments for span in segment.spans]
    trained = sum(span.stop - span.start for span in spans if span.trains)
    found: Attributes = {
        names.INPUT_TOKENS: metrics.prompt_tokens,
        names.OUTPUT_TOKENS: metrics.generated_tokens,
        names.TURNS: metrics.turns,
        names.TRAINED_TOKENS: trained,
        names.MASKED_TOKENS: sum(span.stop - span.start for span in spans) - trained,
        names.QUEUE_MS: round(ended.queued_ms, 3),
        names.END: end,
        names.END_REASON: reason,
    }
    match outcome.end:
        case Failure() as failure:
            found |= failure_attributes(failure)
        case Cancellation() as end_:
            found[names.FAILURE_CLASS] = str(getattr(failure_class_of(end_), "value", ""))
        case Stop():
            pass
    return found


def evaluations(outcome: Outcome, most: int) -> Iterable[Attributes]:
    """Yield reward and scores of a rollout that completed, at most so many, as attributes of events."""
    result = outcome.reward_result
    scores = {} if result.reward is None else {"reward": result.reward}
    for name, score in list((scores | dict(result.scores or {})).items())[:most]:
        yield {names.EVALUATION_NAME: name[:LONGEST], names.EVALUATION_SCORE: float(score)}
