"""The journal's encoding of fields of records that are not equal in the record and in its proto."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from osmosis.journal.v1 import journal_pb2 as pb

from rollout_server.core.ledger import Drift
from rollout_server.core.outcome import Cancellation, End, Failure, RewardResult, Stop
from rollout_server.edge.journal import values
from rollout_server.edge.journal.values import decode_text, encode_text
from rollout_server.edge.wire import enums
from rollout_server.edge.wire.outcome import capture_from_proto, capture_to_proto, origin_from_proto, origin_to_proto
from rollout_server.edge.wire.spec import sampling_from_proto, sampling_to_proto

_CATEGORIES = {value: category for category, value in enums.CATEGORIES.items()}
_DRIFT_KINDS = {value: kind for kind, value in enums.DRIFT_KINDS.items()}
_REWARD_RULES = {value: rule for rule, value in enums.REWARD_RULES.items()}


@dataclass(frozen=True, slots=True)
class FieldCodec:
    """How a field of a record is encoded.

    Args:
        write: gets the value, the proto of the record, and the name of the field, which it sets.
        read: gets the proto of the record and the name of the field, and returns the value.
    """

    write: Callable[[Any, Any, str], None]
    read: Callable[[Any, str], Any]


def _filled(write: Callable[[Any, Any], None], read: Callable[[Any], Any]) -> FieldCodec:
    """Return the codec of a message or a list, which `write` fills in place."""
    return FieldCodec(
        lambda value, proto, name: write(value, getattr(proto, name)), lambda proto, name: read(getattr(proto, name))
    )


def _copied(to_proto: Callable[[Any], Any], from_proto: Callable[[Any], Any]) -> FieldCodec:
    """Return the codec of a message that other messages of the contract have, too."""
    return _filled(lambda value, proto: proto.CopyFrom(to_proto(value)), from_proto)


def _optional(codec: FieldCodec) -> FieldCodec:
    """Return a codec that leaves the field unset for None."""

    def write(value: Any, proto: Any, name: str) -> None:
        if value is not None:
            codec.write(value, proto, name)

    return FieldCodec(write, lambda proto, name: codec.read(proto, name) if proto.HasField(name) else None)


def _write_drift(drift: Drift, proto: Any, _: str) -> None:
    proto.kind = enums.DRIFT_KINDS[drift.kind]
    proto.index = drift.index
    proto.expected = drift.expected
    proto.reported = drift.reported


def _read_drift(proto: Any, _: str) -> Drift:
    return Drift(_DRIFT_KINDS[proto.kind], proto.index, proto.expected, proto.reported)


def _write_end(end: End, proto: pb.Ended, _: str) -> None:
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


def _read_end(proto: pb.Ended, _: str) -> End:
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


def _write_reward(result: RewardResult, proto: pb.RewardResult) -> None:
    if result.reward is not None:
        proto.reward = result.reward
    if result.scores is not None:
        values.write_numbers(result.scores, proto.scores)
    proto.extra_json = encode_text(result.extra_json)
    if result.roles is not None:
        values.write_numbers(result.roles, proto.roles)


def _read_reward(proto: pb.RewardResult) -> RewardResult:
    return RewardResult(
        reward=proto.reward if proto.HasField("reward") else None,
        scores=values.read_numbers(proto.scores) if proto.HasField("scores") else None,
        extra_json=decode_text(proto.extra_json),
        roles=values.read_numbers(proto.roles) if proto.HasField("roles") else None,
    )


TEXT: Final = FieldCodec(
    lambda value, proto, name: setattr(proto, name, encode_text(value)),
    lambda proto, name: decode_text(getattr(proto, name)),
)
TEXTS: Final = _filled(
    lambda texts, proto: proto.extend(map(encode_text, texts)), lambda proto: tuple(map(decode_text, proto))
)
OPTIONAL_NUMBER: Final = _optional(FieldCodec(lambda value, proto, name: setattr(proto, name, value), getattr))
MESSAGE: Final = _filled(values.write_message, values.read_message)
MESSAGES: Final = _filled(values.write_messages, values.read_messages)
CALL: Final = _filled(values.write_call, values.read_call)
ROLE: Final = _filled(values.write_role, values.read_role)
EXCERPT: Final = _filled(values.write_excerpt, values.read_excerpt)
USAGE: Final = _optional(_filled(values.write_usage, values.read_usage))
WARNINGS: Final = _filled(
    lambda warnings, proto: proto.extend(map(values.warning_to_proto, warnings)), values.read_warnings
)
REWARD: Final = _filled(_write_reward, _read_reward)
REWARD_RULE: Final = FieldCodec(
    lambda rule, proto, name: setattr(proto, name, enums.REWARD_RULES[rule]),
    lambda proto, name: _REWARD_RULES[getattr(proto, name)],
)
SAMPLING: Final = _optional(_copied(sampling_to_proto, sampling_from_proto))
ORIGIN: Final = _copied(origin_to_proto, origin_from_proto)
CAPTURE: Final = _copied(lambda report: capture_to_proto(report, ()), capture_from_proto)
"""`longest_share` is left out, because it follows from the segments."""

# Those that have another name, or several fields.
PARENT: Final = FieldCodec(
    lambda segment_id, proto, _: setattr(proto, "of_segment_id", segment_id), lambda proto, _: proto.of_segment_id
)
END: Final = FieldCodec(_write_end, _read_end)
DRIFT: Final = FieldCodec(_write_drift, _read_drift)
