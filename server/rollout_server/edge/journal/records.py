"""The journal's encoding of log entries, without loss: the records that are read are equal to those that were written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
from rollout_server.edge.journal import agent_records, turn_records
from rollout_server.runtime.log import Entry


@dataclass(frozen=True, slots=True)
class RecordCodec:
    """How a class of records is encoded.

    Args:
        field: the field of `Entry.record`.
        write: fills the proto of this field from a record.
        read: returns the record of the proto.
    """

    field: str
    write: Callable[[Any, Any], None]
    read: Callable[[Any], Record]


CODECS: Final[Mapping[type, RecordCodec]] = MappingProxyType(
    {
        Accepted: RecordCodec("accepted", agent_records.write_accepted, agent_records.read_accepted),
        Asked: RecordCodec("asked", turn_records.write_request, turn_records.read_request),
        Answered: RecordCodec("answered", turn_records.write_completion, turn_records.read_completion),
        Appended: RecordCodec("appended", turn_records.write_appended, turn_records.read_appended),
        ToolStarted: RecordCodec("tool_started", turn_records.write_tool_started, turn_records.read_tool_started),
        ToolReturned: RecordCodec("tool_returned", turn_records.write_tool_returned, turn_records.read_tool_returned),
        Forked: RecordCodec("forked", agent_records.write_fork, agent_records.read_fork),
        GivenUp: RecordCodec("given_up", turn_records.write_given_up, turn_records.read_given_up),
        CaptureSettled: RecordCodec("capture_settled", agent_records.write_capture, agent_records.read_capture),
        Observed: RecordCodec("observed", agent_records.write_observed, agent_records.read_observed),
        ModelCalled: RecordCodec("model_called", agent_records.write_model_call, agent_records.read_model_call),
        Masked: RecordCodec("masked", turn_records.write_masked, turn_records.read_masked),
        Rewarded: RecordCodec("rewarded", turn_records.write_rewarded, turn_records.read_rewarded),
        SegmentOpened: RecordCodec("segment_opened", turn_records.write_segment, turn_records.read_segment),
        DriftFound: RecordCodec("drift_found", turn_records.write_drift, turn_records.read_drift),
        Note: RecordCodec("note", agent_records.write_note, agent_records.read_note),
        Resumed: RecordCodec("resumed", agent_records.write_resumed, agent_records.read_resumed),
        Ended: RecordCodec("ended", agent_records.write_end, agent_records.read_end),
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
