"""The journal's encoding of the other records: acceptance, what agents do beside turns, notes, and the end.

The encoding is without loss, as that of `turn_records`: a `write_...` function fills the empty proto of a record, and its
`read_...` function returns an equal record. JSON texts stay verbatim. A value that is not set differs from 0 and from an empty one.
"""

from __future__ import annotations

from osmosis.journal.v1 import journal_pb2 as pb

from rollout_server.core.outcome import Cancellation, End, Failure, RewardResult, Stop
from rollout_server.core.record import Accepted, CaptureSettled, Ended, Forked, ModelCalled, Note, Observed, Resumed
from rollout_server.edge.journal.values import (
    decode_text,
    encode_text,
    read_message,
    read_messages,
    read_numbers,
    read_role,
    read_usage,
    read_warnings,
    warning_to_proto,
    write_message,
    write_messages,
    write_numbers,
    write_role,
    write_usage,
)
from rollout_server.edge.wire import enums
from rollout_server.edge.wire.outcome import (
    capture_from_proto,
    capture_to_proto,
    origin_from_proto,
    origin_to_proto,
)

_CATEGORIES = {value: category for category, value in enums.CATEGORIES.items()}
_REWARD_RULES = {value: rule for rule, value in enums.REWARD_RULES.items()}


def write_accepted(record: Accepted, proto: pb.Accepted) -> None:
    """Write the number of initial messages, and the agent with its version."""
    proto.messages = record.messages
    proto.agent = record.agent
    proto.agent_version = record.agent_version


def read_accepted(proto: pb.Accepted) -> Accepted:
    """Return the record of `write_accepted`."""
    return Accepted(proto.messages, proto.agent, proto.agent_version)


def write_fork(record: Forked, proto: pb.Forked) -> None:
    """Write the origin of a conversation, the messages that the agent gave, the names of its tools, and its role."""
    proto.segment_id = record.segment_id
    proto.of_segment_id = record.of
    proto.origin.CopyFrom(origin_to_proto(record.origin))
    proto.count = record.count
    write_messages(record.messages, proto.messages)
    proto.tools.extend(map(encode_text, record.tools))
    write_role(record.role, proto.role)
    proto.after_turn = record.after_turn
    proto.by_tool = record.by_tool


def read_fork(proto: pb.Forked) -> Forked:
    """Return the record of `write_fork`."""
    return Forked(
        segment_id=proto.segment_id,
        of=proto.of_segment_id,
        origin=origin_from_proto(proto.origin),
        count=proto.count,
        messages=read_messages(proto.messages),
        tools=tuple(map(decode_text, proto.tools)),
        role=read_role(proto.role),
        after_turn=proto.after_turn,
        by_tool=proto.by_tool,
    )


def write_capture(record: CaptureSettled, proto: pb.CaptureSettled) -> None:
    """Write the counts of the calls. `longest_share` is left out, because it follows from the segments."""
    proto.segment_id = record.segment_id
    proto.report.CopyFrom(capture_to_proto(record.report, ()))


def read_capture(proto: pb.CaptureSettled) -> CaptureSettled:
    """Return the record of `write_capture`."""
    return CaptureSettled(proto.segment_id, capture_from_proto(proto.report))


def write_observed(record: Observed, proto: pb.Observed) -> None:
    """Write the value of a side effect as JSON, and where it happened."""
    proto.what = record.what
    proto.value_json = encode_text(record.value_json)
    proto.segment_id = record.segment_id
    proto.number = record.number
    proto.after = record.after
    proto.concurrent = record.concurrent
    proto.by_tool = record.by_tool


def read_observed(proto: pb.Observed) -> Observed:
    """Return the record of `write_observed`."""
    return Observed(
        what=proto.what,
        value_json=decode_text(proto.value_json),
        segment_id=proto.segment_id,
        number=proto.number,
        after=proto.after,
        concurrent=proto.concurrent,
        by_tool=proto.by_tool,
    )


def write_model_call(record: ModelCalled, proto: pb.ModelCalled) -> None:
    """Write a further model's completion. Without `usage` the model reported none."""
    proto.model = encode_text(record.model)
    write_message(record.message, proto.message)
    proto.finish_reason = encode_text(record.finish_reason)
    if record.usage is not None:
        write_usage(record.usage, proto.usage)
    proto.attempts = record.attempts
    proto.elapsed_ms = record.elapsed_ms
    proto.segment_id = record.segment_id
    proto.number = record.number
    proto.digest = record.digest
    proto.by_tool = record.by_tool


def read_model_call(proto: pb.ModelCalled) -> ModelCalled:
    """Return the record of `write_model_call`."""
    return ModelCalled(
        model=decode_text(proto.model),
        message=read_message(proto.message),
        finish_reason=decode_text(proto.finish_reason),
        usage=read_usage(proto.usage) if proto.HasField("usage") else None,
        attempts=proto.attempts,
        elapsed_ms=proto.elapsed_ms,
        segment_id=proto.segment_id,
        number=proto.number,
        digest=proto.digest,
        by_tool=proto.by_tool,
    )


def write_note(record: Note, proto: pb.Note) -> None:
    """Write the code and the text of a note, and its turn."""
    proto.turn = record.turn
    proto.code = encode_text(record.code)
    proto.text = encode_text(record.text)


def read_note(proto: pb.Note) -> Note:
    """Return the record of `write_note`."""
    return Note(proto.turn, decode_text(proto.code), decode_text(proto.text))


def write_resumed(record: Resumed, proto: pb.Resumed) -> None:
    """Write how often the rollout has been resumed."""
    proto.times = record.times


def read_resumed(proto: pb.Resumed) -> Resumed:
    """Return the record of `write_resumed`."""
    return Resumed(proto.times)


def write_end(record: Ended, proto: pb.Ended) -> None:
    """Write the stop, failure or cancellation, the rewards, the times in milliseconds, and the warnings."""
    _write_how(record.end, proto)
    _write_result(record.reward_result, proto.reward_result)
    proto.total_ms = record.total_ms
    proto.queued_ms = record.queued_ms
    proto.warnings.extend(map(warning_to_proto, record.warnings))
    proto.reward_rule = enums.REWARD_RULES[record.reward_rule]
    if record.policy_step is not None:
        proto.policy_step = record.policy_step


def read_end(proto: pb.Ended) -> Ended:
    """Return the record of `write_end`."""
    return Ended(
        end=_read_how(proto),
        reward_result=_read_result(proto.reward_result),
        total_ms=proto.total_ms,
        queued_ms=proto.queued_ms,
        warnings=read_warnings(proto.warnings),
        reward_rule=_REWARD_RULES[proto.reward_rule],
        policy_step=proto.policy_step if proto.HasField("policy_step") else None,
    )


def _write_how(end: End, proto: pb.Ended) -> None:
    match end:
        case Stop():
            proto.stop.reason = encode_text(end.reason)
            proto.stop.truncated = end.truncated
        case Failure():
            failure = proto.failure
            failure.category = enums.CATEGORIES[end.category]
            failure.message = encode_text(end.message)
            failure.turn = end.turn
            if end.http_status is not None:
                failure.http_status = end.http_status
            if end.source is not None:
                failure.source = enums.FAILURE_CLASSES[end.source]
        case Cancellation():
            proto.cancellation.reason = encode_text(end.reason)


def _read_how(proto: pb.Ended) -> End:
    match proto.WhichOneof("end"):
        case "stop":
            return Stop(decode_text(proto.stop.reason), proto.stop.truncated)
        case "failure":
            return _read_failure(proto.failure)
        case "cancellation":
            return Cancellation(decode_text(proto.cancellation.reason))
        case _:
            raise ValueError("the record of an end has no end")


def _read_failure(proto: pb.Failure) -> Failure:
    return Failure(
        category=_CATEGORIES[proto.category],
        message=decode_text(proto.message),
        turn=proto.turn,
        http_status=proto.http_status if proto.HasField("http_status") else None,
        source=enums.FAILURE_CLASSES_BY_NUMBER[proto.source] if proto.source else None,
    )


def _write_result(result: RewardResult, proto: pb.RewardResult) -> None:
    if result.reward is not None:
        proto.reward = result.reward
    if result.scores is not None:
        write_numbers(result.scores, proto.scores)
    proto.extra_json = encode_text(result.extra_json)
    if result.roles is not None:
        write_numbers(result.roles, proto.roles)


def _read_result(proto: pb.RewardResult) -> RewardResult:
    return RewardResult(
        reward=proto.reward if proto.HasField("reward") else None,
        scores=read_numbers(proto.scores) if proto.HasField("scores") else None,
        extra_json=decode_text(proto.extra_json),
        roles=read_numbers(proto.roles) if proto.HasField("roles") else None,
    )
