"""The journal's encoding of fields of records that are not equal in the record and in its proto."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from rollout_server.core.ledger import Drift
from rollout_server.edge.journal import ends, values
from rollout_server.edge.journal.values import decode_text, encode_text
from rollout_server.edge.wire import enums
from rollout_server.edge.wire.outcome import capture_from_proto, capture_to_proto, origin_from_proto, origin_to_proto
from rollout_server.edge.wire.spec import sampling_from_proto, sampling_to_proto

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
REWARD: Final = _filled(ends.write_reward, ends.read_reward)
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
END: Final = FieldCodec(lambda end, proto, _: ends.write_end(end, proto), lambda proto, _: ends.read_end(proto))
DRIFT: Final = FieldCodec(_write_drift, _read_drift)
