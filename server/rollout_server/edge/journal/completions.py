"""The journal's encoding of completions, without loss. Unknown tokens differ from no tokens."""

from __future__ import annotations

from osmosis.journal.v1 import journal_pb2 as pb

from rollout_server.core.ledger import PolicyRun, Prediction, Tokens
from rollout_server.core.record import Answered
from rollout_server.core.segment import Plane
from rollout_server.edge.journal.values import (
    decode_logprobs,
    decode_text,
    decode_tokens,
    encode_logprobs,
    encode_text,
    encode_tokens,
    read_excerpt,
    read_message,
    read_usage,
    write_excerpt,
    write_message,
    write_usage,
)


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
