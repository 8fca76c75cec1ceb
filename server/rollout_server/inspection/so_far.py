"""The outcome so far of a rollout that still runs, from its events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from osmosis.rollout.v1 import event_pb2, outcome_pb2, rollout_service_pb2, token_pb2


def add_outcome_so_far(rollout: rollout_service_pb2.Rollout, events: Iterable[event_pb2.RolloutEvent]) -> None:
    """Add an outcome without an end to a rollout that has not finished: messages, segments and drift so far.

    Reads events up to `rollout.last_sequence` and then stops, because a running rollout's stream of events does not end.

    Args:
        rollout: a rollout in view "full".
        events: its events with the detail "full", from the first one on.
    """
    rollout.outcome.metrics.CopyFrom(rollout.metrics)
    rollout.outcome.messages.extend(rollout.spec.messages)
    segments: dict[str, token_pb2.Segment] = {}
    forks: dict[str, event_pb2.Forked] = {}  # by segment; a segment that a fork opened, or that continues one
    opened: dict[int, event_pb2.RolloutEvent] = {}  # the event that opened a segment, by turn; `answered` follows it
    for event in _up_to(rollout.last_sequence, events):
        match event.WhichOneof("event"):
            case "forked":
                forks[event.segment_id] = event.forked
            case "segment_opened":
                opened[event.turn] = event
            case "answered":
                rollout.outcome.messages.append(event.answered.message)
                _add_spans(segments, event, opened.get(event.turn), forks)
            case "tool_returned":
                rollout.outcome.messages.append(event.tool_returned.message)
            case "appended":
                rollout.outcome.messages.extend(event.appended.messages)
            case "drift_found":
                rollout.outcome.warnings.append(_warning(event))
    rollout.outcome.segments.extend(segments.values())


def _up_to(last: int, events: Iterable[event_pb2.RolloutEvent]) -> Iterator[event_pb2.RolloutEvent]:
    for event in events if last else ():
        yield event
        if event.sequence >= last:
            return


def _add_spans(
    segments: dict[str, token_pb2.Segment],
    event: event_pb2.RolloutEvent,
    opened: event_pb2.RolloutEvent | None,
    forks: dict[str, event_pb2.Forked],
) -> None:
    """Add the tokens of a turn to its segment. A turn without token ids adds nothing."""
    if not event.answered.spans:
        return
    name = event.segment_id if opened is None else opened.segment_id
    segment = segments.setdefault(name, token_pb2.Segment(id=name, verified=True, role="agent", trainable=True))
    if opened is not None:
        segment.origin.CopyFrom(opened.segment_opened.origin)
        fork = forks.get(name) or forks.get(segment.origin.parent_id)
        if fork is not None:
            forks[name], segment.role, segment.trainable = fork, fork.role, fork.trainable
            segment.model = fork.model
    segment.spans.extend(event.answered.spans)
    segment.verified = segment.verified and event.answered.verified


def _warning(event: event_pb2.RolloutEvent) -> outcome_pb2.Warning:
    index = event.drift_found.index
    text = f"the reported prompt differs from the prediction at token {index}"
    return outcome_pb2.Warning(code="token_drift", message=text, turn=event.turn, index=index)
