"""The journal's encoding of log entries, without loss: the records that are read are equal to those that were written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, Final

from google.protobuf.message import DecodeError
from osmosis.journal.v1 import journal_pb2 as pb

from rollout_server.core.record import (
    Accepted,
    Answered,
    Appended,
    Asked,
    CaptureSettled,
    DriftFound,
    Ended,
    Forked,
    GivenUp,
    Masked,
    ModelCalled,
    Note,
    Observed,
    Record,
    Resumed,
    Rewarded,
    SegmentOpened,
    ToolReturned,
    ToolStarted,
)
from rollout_server.edge.journal.completions import read_completion, write_completion
from rollout_server.edge.journal.record_fields import (
    CALL,
    CAPTURE,
    DRIFT,
    END,
    EXCERPT,
    MESSAGE,
    MESSAGES,
    OPTIONAL_NUMBER,
    ORIGIN,
    PARENT,
    REWARD,
    REWARD_RULE,
    ROLE,
    SAMPLING,
    TEXT,
    TEXTS,
    USAGE,
    WARNINGS,
    FieldCodec,
)
from rollout_server.runtime.log import Entry


@dataclass(frozen=True, slots=True)
class RecordCodec:
    """How a class of records is encoded.

    Args:
        field: the field of `Entry.record`.
        write: fills the empty proto of this field from a record.
        read: returns the record of the proto.
    """

    field: str
    write: Callable[[Any, Any], None]
    read: Callable[[Any], Record]


def _by_fields(kind: type[Any], field: str, **codecs: FieldCodec) -> RecordCodec:
    """Return the codec of a dataclass. Its proto has fields of the same names, which are equal except those of `codecs`."""
    equal = [each.name for each in fields(kind) if each.name not in codecs]

    def write(record: Record, proto: Any) -> None:
        for name in equal:
            setattr(proto, name, getattr(record, name))
        for name, codec in codecs.items():
            codec.write(getattr(record, name), proto, name)

    def read(proto: Any) -> Any:
        values = {name: getattr(proto, name) for name in equal}
        return kind(**values, **{name: codec.read(proto, name) for name, codec in codecs.items()})

    return RecordCodec(field, write, read)


CODECS: Final[Mapping[type, RecordCodec]] = MappingProxyType(
    {
        Accepted: _by_fields(Accepted, "accepted"),
        Asked: _by_fields(Asked, "asked", sampling=SAMPLING),
        Answered: RecordCodec("answered", write_completion, read_completion),
        Appended: _by_fields(Appended, "appended", messages=MESSAGES),
        ToolStarted: _by_fields(ToolStarted, "tool_started", call=CALL),
        ToolReturned: _by_fields(ToolReturned, "tool_returned", call=CALL, message=MESSAGE),
        Forked: _by_fields(Forked, "forked", of=PARENT, origin=ORIGIN, messages=MESSAGES, tools=TEXTS, role=ROLE),
        GivenUp: _by_fields(GivenUp, "given_up"),
        CaptureSettled: _by_fields(CaptureSettled, "capture_settled", report=CAPTURE),
        Observed: _by_fields(Observed, "observed", value_json=TEXT),
        ModelCalled: _by_fields(
            ModelCalled, "model_called", model=TEXT, message=MESSAGE, finish_reason=TEXT, usage=USAGE
        ),
        Masked: _by_fields(Masked, "masked", reason=TEXT),
        Rewarded: _by_fields(Rewarded, "rewarded"),
        SegmentOpened: _by_fields(SegmentOpened, "segment_opened", origin=ORIGIN),
        DriftFound: _by_fields(DriftFound, "drift_found", drift=DRIFT, around=EXCERPT),
        Note: _by_fields(Note, "note", code=TEXT, text=TEXT),
        Resumed: _by_fields(Resumed, "resumed"),
        Ended: _by_fields(
            Ended,
            "ended",
            end=END,
            reward_result=REWARD,
            warnings=WARNINGS,
            reward_rule=REWARD_RULE,
            policy_step=OPTIONAL_NUMBER,
        ),
    }
)
"""Each class of records."""

_BY_FIELD = {codec.field: codec for codec in CODECS.values()}


def encode_entries(entries: Sequence[Entry]) -> bytes:
    """Return log entries as bytes. Raises ValueError for a number that is negative or has more than 64 bits."""
    batch = pb.Entries()
    for entry in entries:
        codec = CODECS[type(entry.record)]
        proto = batch.entries.add()
        proto.sequence = entry.sequence
        proto.time = entry.time
        proto.turn = entry.turn
        proto.segment_id = entry.segment_id
        record = getattr(proto, codec.field)
        record.SetInParent()
        codec.write(entry.record, record)
    return batch.SerializeToString()


def decode_entries(data: bytes) -> list[Entry]:
    """Return the log entries of `encode_entries`. Raises ValueError for other bytes, and for records of a newer server."""
    try:
        return [_read_entry(proto) for proto in pb.Entries.FromString(data).entries]
    except (DecodeError, KeyError, ValueError) as error:
        raise ValueError(f"these bytes are not log entries that this version can read: {error!r}") from error


def _read_entry(proto: pb.Entry) -> Entry:
    field = proto.WhichOneof("record")
    if field is None:
        raise ValueError(f"entry {proto.sequence} has no record, or one of a newer version")
    record = _BY_FIELD[field].read(getattr(proto, field))
    return Entry(proto.sequence, proto.time, record, proto.turn, proto.segment_id)
