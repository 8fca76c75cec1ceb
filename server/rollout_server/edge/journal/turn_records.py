"""The journal's encoding of the records of turns: requests, completions, messages, tool calls and drift.

The encoding is without loss: a `write_...` function fills the empty proto of a record, and its `read_...` function returns an
equal record. Unknown tokens differ from no tokens.
"""

from __future__ import annotations

from osmosis.journal.v1 import journal_pb2 as pb

from rollout_server.core.ledger import Drift, PolicyRun, Prediction, Tokens
from rollout_server.core.record import (
    Answered,
    Appended,
    Asked,
    DriftFound,
    GivenUp,
    Masked,
    Rewarded,
    SegmentOpened,
    ToolReturned,
    ToolStarted,
)
from rollout_server.core.segment import Plane
from rollout_server.edge.journal.values import (
    decode_logprobs,
    decode_text,
    decode_tokens,
    encode_logprobs,
    encode_text,
    encode_tokens,
    read_call,
    read_excerpt,
    read_message,
    read_messages,
    read_usage,
    write_call,
    write_excerpt,
    write_message,
    write_messages,
    write_usage,
)
from rollout_server.edge.wire import enums
from rollout_server.edge.wire.outcome import origin_from_proto, origin_to_proto
from rollout_server.edge.wire.spec import sampling_from_proto, sampling_to_proto

_DRIFT_KINDS = {value: kind for kind, value in enums.DRIFT_KINDS.items()}


def write_request(record: Asked, proto: pb.Asked) -> None:
    """Write the request of a completion. Without `sampling` it has the rollout's own parameters."""
    proto.turn = record.turn
    proto.segment_id = record.segment_id
    proto.turn_key = record.turn_key
    proto.messages = record.messages
    proto.by_tool = record.by_tool
    if record.sampling is not None:
        proto.sampling.CopyFrom(sampling_to_proto(record.sampling))


def read_request(proto: pb.Asked) -> Asked:
    """Return the record of `write_request`."""
    sampling = sampling_from_proto(proto.sampling) if proto.HasField("sampling") else None
    return Asked(proto.turn, proto.segment_id, proto.turn_key, proto.messages, sampling, proto.by_tool)


def write_completion(record: Answered, proto: pb.Answered) -> None:
    """Write a completion: only fields that are set, and ids, logprobs and planes as little-endian arrays."""
    proto.turn = record.turn
    write_message(record.message, proto.message)
    proto.attempts = record.attempts
    proto.elapsed_ms = record.elapsed_ms
    proto.tool_calls = record.tool_calls
    proto.shared = record.shared
    proto.rendered_by = record.rendered_by
    for name in ("finish_reason", "policy_version", "extra_json"):
        if text := getattr(record, name):
            setattr(proto, name, encode_text(text))
    for name in ("mask_length", "policy_step"):
        if (number := getattr(record, name)) is not None:
            setattr(proto, name, number)
    if record.usage is not None:
        write_usage(record.usage, proto.usage)
    if record.around != ("", ""):
        write_excerpt(record.around, proto.around)
    _write_tokens(record, proto)
    for code, text in record.notes:
        proto.notes.add(code=encode_text(code), text=encode_text(text))


def _write_tokens(record: Answered, proto: pb.Answered) -> None:
    if record.token_ids is not None:
        proto.token_ids = encode_tokens(record.token_ids)
    if record.logprobs is not None:
        proto.logprobs = encode_logprobs(record.logprobs)
    if (predicted := record.predicted) is not None:
        proto.predicted.closing = encode_tokens(predicted.closing)
        proto.predicted.environment = encode_tokens(predicted.environment)
    if record.reported is not None:
        # Usually equal, and as long as all messages since the last turn: the first prompt may have 32,000 tokens.
        if predicted is not None and record.reported == _prompt(predicted):
            proto.reported_as_predicted = True
        else:
            proto.reported = encode_tokens(record.reported)
    for plane in record.planes:
        proto.planes.add(name=encode_text(plane.name), dtype=encode_text(plane.dtype), values=plane.values)
    for run in record.runs:
        proto.runs.add(tokens=run.tokens, version=encode_text(run.version), step=run.step)


def _prompt(predicted: Prediction) -> Tokens:
    """Return the predicted tokens, without a copy if there is no closing token."""
    return predicted.closing + predicted.environment if predicted.closing else predicted.environment


def read_completion(proto: pb.Answered) -> Answered:
    """Return the record of `write_completion`."""
    has, predicted = proto.HasField, _read_prediction(proto)
    return Answered(
        turn=proto.turn,
        message=read_message(proto.message),
        finish_reason=decode_text(proto.finish_reason),
        token_ids=decode_tokens(proto.token_ids) if has("token_ids") else None,
        logprobs=decode_logprobs(proto.logprobs) if has("logprobs") else None,
        predicted=predicted,
        reported=_read_reported(proto, predicted),
        shared=proto.shared,
        mask_length=proto.mask_length if has("mask_length") else None,
        attempts=proto.attempts,
        elapsed_ms=proto.elapsed_ms,
        usage=read_usage(proto.usage) if has("usage") else None,
        policy_version=decode_text(proto.policy_version),
        notes=tuple((decode_text(note.code), decode_text(note.text)) for note in proto.notes),
        tool_calls=proto.tool_calls,
        around=read_excerpt(proto.around),
        planes=tuple(Plane(decode_text(each.name), decode_text(each.dtype), each.values) for each in proto.planes),
        extra_json=decode_text(proto.extra_json),
        policy_step=proto.policy_step if has("policy_step") else None,
        runs=tuple(map(_read_run, proto.runs)),
        rendered_by=proto.rendered_by,
    )


def _read_prediction(proto: pb.Answered) -> Prediction | None:
    if not proto.HasField("predicted"):
        return None
    return Prediction(decode_tokens(proto.predicted.closing), decode_tokens(proto.predicted.environment))


def _read_reported(proto: pb.Answered, predicted: Prediction | None) -> Tokens | None:
    if not proto.reported_as_predicted:
        return decode_tokens(proto.reported) if proto.HasField("reported") else None
    if predicted is None:
        raise ValueError(f"the reported prompt of turn {proto.turn} is the predicted one, and there is none")
    return _prompt(predicted)


def _read_run(proto: pb.PolicyRun) -> PolicyRun:
    return PolicyRun(proto.tokens, decode_text(proto.version), proto.step if proto.HasField("step") else None)


def write_appended(record: Appended, proto: pb.Appended) -> None:
    """Write the messages that the agent added, verbatim."""
    write_messages(record.messages, proto.messages)
    proto.segment_id = record.segment_id
    proto.by_tool = record.by_tool


def read_appended(proto: pb.Appended) -> Appended:
    """Return the record of `write_appended`."""
    return Appended(read_messages(proto.messages), proto.segment_id, proto.by_tool)


def write_tool_started(record: ToolStarted, proto: pb.ToolStarted) -> None:
    """Write a tool call that begins, and whether it may run again."""
    proto.turn = record.turn
    proto.index = record.index
    write_call(record.call, proto.call)
    proto.segment_id = record.segment_id
    proto.by_tool = record.by_tool
    proto.repeatable = record.repeatable


def read_tool_started(proto: pb.ToolStarted) -> ToolStarted:
    """Return the record of `write_tool_started`."""
    return ToolStarted(
        turn=proto.turn,
        index=proto.index,
        call=read_call(proto.call),
        segment_id=proto.segment_id,
        by_tool=proto.by_tool,
        repeatable=proto.repeatable,
    )


def write_tool_returned(record: ToolReturned, proto: pb.ToolReturned) -> None:
    """Write a tool call with its result."""
    proto.turn = record.turn
    proto.index = record.index
    write_call(record.call, proto.call)
    write_message(record.message, proto.message)
    proto.failed = record.failed
    proto.elapsed_ms = record.elapsed_ms
    proto.segment_id = record.segment_id
    proto.cancelled = record.cancelled
    proto.used_state = record.used_state


def read_tool_returned(proto: pb.ToolReturned) -> ToolReturned:
    """Return the record of `write_tool_returned`."""
    return ToolReturned(
        turn=proto.turn,
        index=proto.index,
        call=read_call(proto.call),
        message=read_message(proto.message),
        failed=proto.failed,
        elapsed_ms=proto.elapsed_ms,
        segment_id=proto.segment_id,
        cancelled=proto.cancelled,
        used_state=proto.used_state,
    )


def write_given_up(record: GivenUp, proto: pb.GivenUp) -> None:
    """Write the turn that ended without a completion."""
    proto.turn = record.turn
    proto.segment_id = record.segment_id
    proto.by_tool = record.by_tool


def read_given_up(proto: pb.GivenUp) -> GivenUp:
    """Return the record of `write_given_up`."""
    return GivenUp(proto.turn, proto.segment_id, proto.by_tool)


def write_masked(record: Masked, proto: pb.Masked) -> None:
    """Write the turn that the author masked out, with the reason."""
    proto.turn = record.turn
    proto.reason = encode_text(record.reason)
    proto.by_tool = record.by_tool


def read_masked(proto: pb.Masked) -> Masked:
    """Return the record of `write_masked`."""
    return Masked(proto.turn, decode_text(proto.reason), proto.by_tool)


def write_rewarded(record: Rewarded, proto: pb.Rewarded) -> None:
    """Write the reward of a turn as a 64-bit float."""
    proto.turn = record.turn
    proto.value = record.value
    proto.by_tool = record.by_tool


def read_rewarded(proto: pb.Rewarded) -> Rewarded:
    """Return the record of `write_rewarded`."""
    return Rewarded(proto.turn, proto.value, proto.by_tool)


def write_segment(record: SegmentOpened, proto: pb.SegmentOpened) -> None:
    """Write the origin of a segment, and its prompt length in tokens."""
    proto.turn = record.turn
    proto.segment_id = record.segment_id
    proto.origin.CopyFrom(origin_to_proto(record.origin))
    proto.prompt_tokens = record.prompt_tokens


def read_segment(proto: pb.SegmentOpened) -> SegmentOpened:
    """Return the record of `write_segment`."""
    return SegmentOpened(proto.turn, proto.segment_id, origin_from_proto(proto.origin), proto.prompt_tokens)


def write_drift(record: DriftFound, proto: pb.DriftFound) -> None:
    """Write the kind and token index of a drift, the lengths of both prompts in tokens, and the text around it."""
    drift = record.drift
    proto.turn = record.turn
    proto.segment_id = record.segment_id
    proto.kind = enums.DRIFT_KINDS[drift.kind]
    proto.index = drift.index
    proto.expected = drift.expected
    proto.reported = drift.reported
    if record.around != ("", ""):
        write_excerpt(record.around, proto.around)


def read_drift(proto: pb.DriftFound) -> DriftFound:
    """Return the record of `write_drift`."""
    drift = Drift(_DRIFT_KINDS[proto.kind], proto.index, proto.expected, proto.reported)
    return DriftFound(proto.turn, proto.segment_id, drift, read_excerpt(proto.around))
