"""Conversion of log records to event protos."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from operator import attrgetter
from typing import Protocol

from google.protobuf.timestamp_pb2 import Timestamp
from osmosis.rollout.v1 import event_pb2, token_pb2

from rollout_server.core.ledger import Author, Segment, Span
from rollout_server.core.machine import Machine
from rollout_server.core.outcome import Outcome
from rollout_server.core.record import (
    Accepted,
    Answered,
    Appended,
    Asked,
    CaptureSettled,
    Deed,
    DriftFound,
    Ended,
    Forked,
    GivenUp,
    Masked,
    ModelCalled,
    Note,
    Observed,
    Resumed,
    Rewarded,
    SegmentOpened,
    ToolReturned,
    ToolStarted,
)
from rollout_server.core.spec import Spec
from rollout_server.edge.wire import enums
from rollout_server.edge.wire.message import message_to_proto, messages_to_proto, utf8
from rollout_server.edge.wire.outcome import (
    capture_to_proto,
    origin_to_proto,
    outcome_to_proto,
    span_to_proto,
)
from rollout_server.edge.wire.spec import sampling_to_proto
from rollout_server.runtime.log import Entry

_WITH_MESSAGES = (event_pb2.EVENT_DETAIL_MESSAGES, event_pb2.EVENT_DETAIL_FULL, event_pb2.EVENT_DETAIL_OUTCOME)


class RecordedRollout(Protocol):
    """What events show of a rollout. A `Rollout` has it, and so has one that is read from a journal."""

    @property
    def spec(self) -> Spec:
        """Its request."""

    @property
    def machine(self) -> Machine:
        """Its state machine."""

    @property
    def outcome(self) -> Outcome | None:
        """Its outcome; None until it has finished."""


def timestamp(seconds: float) -> Timestamp:
    """Return seconds since the Unix epoch as a Timestamp, rounded to the nearest nanosecond."""
    whole, rest = divmod(round(seconds * 1e9), 1_000_000_000)
    return Timestamp(seconds=whole, nanos=rest)


def event(rollout: RecordedRollout, entry: Entry, detail: int) -> event_pb2.RolloutEvent:
    """Return the event proto of a log entry. `detail` is an EventDetail."""
    proto = event_pb2.RolloutEvent(sequence=entry.sequence, time=timestamp(entry.time))
    _View(rollout, detail).fill(proto, entry)
    return proto


class _View:
    """Fills event protos with the requested detail."""

    def __init__(self, rollout: RecordedRollout, detail: int) -> None:
        self._rollout = rollout
        self._typed = rollout.spec.typed
        self._messages = detail in _WITH_MESSAGES
        self._full = detail == event_pb2.EVENT_DETAIL_FULL

    def fill(self, proto: event_pb2.RolloutEvent, entry: Entry) -> None:
        record = entry.record
        proto.turn = entry.turn
        proto.segment_id = getattr(record, "segment_id", entry.segment_id)
        match record:
            case Accepted(messages, agent, version):
                proto.accepted.CopyFrom(
                    event_pb2.Accepted(messages=messages, agent=agent, agent_version=version),
                )
            case Asked():
                proto.asked.CopyFrom(_request_to_proto(record))
            case Answered():
                proto.answered.CopyFrom(self._completion_to_proto(record))
            case Appended(messages):
                shown = messages_to_proto(messages, typed=self._typed) if self._messages else ()
                proto.appended.CopyFrom(event_pb2.Appended(messages=shown, count=len(messages)))
            case ToolStarted(_, index, call):
                proto.tool_started.CopyFrom(
                    event_pb2.ToolStarted(call_id=utf8(call.id), name=utf8(call.name), index=index)
                )
            case ToolReturned():
                proto.tool_returned.CopyFrom(self._tool_result_to_proto(record))
            case SegmentOpened():
                opened = event_pb2.SegmentOpened(
                    origin=origin_to_proto(record.origin), prompt_tokens=record.prompt_tokens
                )
                proto.segment_opened.CopyFrom(opened)
            case DriftFound():
                proto.drift_found.CopyFrom(_drift_to_proto(record))
            case Forked() | GivenUp() | Masked() | Observed() | Rewarded() | ModelCalled() | CaptureSettled():
                self._fill_agent_record(proto, record)
            case Note(_, code, text):
                proto.note.CopyFrom(event_pb2.Note(code=utf8(code), text=utf8(text)))
            case Resumed(times):
                proto.resumed.CopyFrom(event_pb2.Resumed(times=times))
            case Ended():
                self._fill_outcome(proto)

    def _completion_to_proto(self, record: Answered) -> event_pb2.Answered:
        usage = record.usage or (0, 0)
        return event_pb2.Answered(
            message=message_to_proto(record.message, typed=self._typed) if self._messages else None,
            finish_reason=utf8(record.finish_reason),
            generated_tokens=len(record.token_ids) if record.token_ids is not None else usage[1],
            prompt_tokens=self._prompt_tokens(record),
            tool_calls=record.tool_calls,
            spans=self._spans(record.turn) if self._full else (),
            attempts=record.attempts,
            elapsed_ms=record.elapsed_ms,
            verified=record.reported is not None,
            policy_version=record.policy_version,
            policy_step=record.policy_step,
            mask_length=record.mask_length,
            extra_json=utf8(record.extra_json) if self._messages else "",
        )

    def _prompt_tokens(self, record: Answered) -> int:
        if record.reported is not None:
            return record.shared + len(record.reported)
        segment, spans = self._spans_of(record.turn)
        if segment is None:
            return record.usage[0] if record.usage else 0
        return next((span.start for span in spans if span.author is Author.MODEL), len(segment))

    def _spans(self, turn: int) -> list[token_pb2.Span]:
        segment, spans = self._spans_of(turn)
        return [span_to_proto(segment, span) for span in spans] if segment is not None else []

    def _spans_of(self, turn: int) -> tuple[Segment | None, list[Span]]:
        for segment in reversed(self._rollout.machine.ledger.segments):  # recent turns are in the last segment
            spans = segment.spans  # sorted by turn
            start = bisect_left(spans, turn, key=attrgetter("turn"))
            stop = bisect_right(spans, turn, key=attrgetter("turn"))
            if start < stop:
                return segment, list(spans[start:stop])
        return None, []

    def _tool_result_to_proto(self, record: ToolReturned) -> event_pb2.ToolReturned:
        return event_pb2.ToolReturned(
            call_id=utf8(record.call.id),
            name=utf8(record.call.name),
            index=record.index,
            failed=record.failed,
            elapsed_ms=record.elapsed_ms,
            message=message_to_proto(record.message, typed=self._typed) if self._messages else None,
        )

    def _fill_agent_record(self, proto: event_pb2.RolloutEvent, record: Deed) -> None:
        match record:
            case Forked():
                proto.forked.CopyFrom(self._fork_to_proto(record))
            case GivenUp():
                proto.given_up.SetInParent()
            case Masked(_, reason):
                proto.masked.CopyFrom(event_pb2.Masked(reason=utf8(reason)))
            case Rewarded(_, value):
                proto.rewarded.CopyFrom(event_pb2.Rewarded(value=value))
            case Observed(what, value):
                shown = utf8(value) if self._messages else ""
                proto.observed.CopyFrom(event_pb2.Observed(what=what, value_json=shown))
            case ModelCalled():
                proto.model_called.CopyFrom(self._model_call_to_proto(record))
            case CaptureSettled():
                report = capture_to_proto(record.report, self._rollout.machine.ledger.segments)
                proto.capture_settled.CopyFrom(event_pb2.CaptureSettled(report=report))

    def _model_call_to_proto(self, record: ModelCalled) -> event_pb2.ModelCalled:
        prompt, generated = record.usage or (0, 0)
        return event_pb2.ModelCalled(
            model=utf8(record.model),
            message=message_to_proto(record.message, typed=self._typed) if self._messages else None,
            finish_reason=utf8(record.finish_reason),
            prompt_tokens=prompt,
            generated_tokens=generated,
            attempts=record.attempts,
            elapsed_ms=record.elapsed_ms,
        )

    def _fork_to_proto(self, record: Forked) -> event_pb2.Forked:
        shown = messages_to_proto(record.messages, typed=self._typed) if self._messages else ()
        return event_pb2.Forked(
            of_segment_id=record.of,
            origin=origin_to_proto(record.origin),
            count=record.count,
            messages=shown,
            tools=[utf8(name) for name in record.tools],
            role=utf8(record.role.name),
            trainable=record.role.trainable,
            model=record.role.model,
            after_turn=record.after_turn,
        )

    def _fill_outcome(self, proto: event_pb2.RolloutEvent) -> None:
        outcome: Outcome | None = self._rollout.outcome
        if outcome is not None:
            shown = outcome_to_proto(
                outcome, self._rollout.spec, messages=self._messages, samples=self._full, segments=self._full
            )
            proto.finished.CopyFrom(event_pb2.Finished(outcome=shown))


def _request_to_proto(record: Asked) -> event_pb2.Asked:
    sampling = sampling_to_proto(record.sampling) if record.sampling is not None else None
    return event_pb2.Asked(turn_key=record.turn_key, messages=record.messages, sampling=sampling)


def _drift_to_proto(record: DriftFound) -> event_pb2.DriftFound:
    drift = record.drift
    return event_pb2.DriftFound(
        kind=enums.DRIFT_KINDS[drift.kind],
        index=drift.index,
        expected_tokens=drift.expected,
        reported_tokens=drift.reported,
        expected_text=utf8(record.around[0]),
        reported_text=utf8(record.around[1]),
    )
