"""The journal's encoding of log entries: nothing is lost, no class of records is missing, and other bytes are refused."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from osmosis.journal.v1 import journal_pb2 as pb
from rollout_server.core import record as records
from rollout_server.core.ledger import Prediction, pack_tokens
from rollout_server.core.message import Message, ToolCall
from rollout_server.core.outcome import Stop
from rollout_server.core.record import Answered, Asked, Ended, Note, Record, Rewarded, ToolStarted
from rollout_server.edge.journal import values
from rollout_server.edge.journal.records import CODECS, decode_entries, encode_entries
from rollout_server.runtime.log import Entry

from tests.edge.journal.strategies import RECORDS, entries

MESSAGE = Message.write({"role": "assistant", "content": "8"})
ANSWERED = Answered(1, MESSAGE, "stop", array("I", [1, 2]), array("f", [-0.1, -0.0]))


def members(union: str) -> set[type]:
    """The classes of a union that is written as text, such as `Record`."""
    found: set[type] = set()
    for name in union.split(" | "):
        member = vars(records)[name]
        found |= members(member) if isinstance(member, str) else {member}
    return found


def stored(*entries: Entry) -> list[Entry]:
    """The entries after encoding and decoding."""
    return decode_entries(encode_entries(entries))


def stored_record(record: Record) -> Record:
    (entry,) = stored(Entry(1, 0.0, record))
    return entry.record


def test_every_class_of_records_is_encoded() -> None:
    classes = members(Record)
    assert len(classes) == 18
    assert CODECS.keys() == RECORDS.keys() == classes
    fields = [codec.field for codec in CODECS.values()]
    assert sorted(fields) == sorted(each.name for each in pb.Entry.DESCRIPTOR.oneofs_by_name["record"].fields)


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_what_is_read_equals_what_was_written(kind: type, data: st.DataObject) -> None:
    written = data.draw(st.lists(entries(RECORDS[kind]), min_size=1, max_size=2))
    read = stored(*written)
    assert read == written
    # Unlike ==, this also compares types, the order of mappings and the sign of zero.
    assert repr(read) == repr(written)


@given(written=st.lists(entries(st.one_of(*RECORDS.values())), max_size=5))
def test_a_batch_keeps_its_order(written: list[Entry]) -> None:
    assert stored(*written) == written


def test_no_entries_are_a_batch() -> None:
    assert encode_entries([]) == b""
    assert stored() == []


def test_arrays_keep_every_bit() -> None:
    read = stored_record(ANSWERED)
    assert isinstance(read, Answered)
    assert read.token_ids is not None
    assert read.logprobs is not None
    assert (read.token_ids.typecode, read.logprobs.typecode) == ("I", "f")
    assert read.logprobs.tobytes() == array("f", [-0.1, -0.0]).tobytes()
    (entry,) = pb.Entries.FromString(encode_entries([Entry(1, 0.0, ANSWERED)])).entries
    assert entry.answered.token_ids == bytes([1, 0, 0, 0, 2, 0, 0, 0])


@pytest.mark.parametrize(
    ("predicted", "reported", "once"),
    [
        (([], [1, 2, 3]), [1, 2, 3], True),
        (([1], [2, 3]), [1, 2, 3], True),
        (([], []), [], True),
        (([1], [2, 3]), [1, 2, 4], False),
        (([1], [2, 3]), [1, 2], False),
        (([1], [2, 3]), [2, 3], False),
        (([1], [2, 3]), [1, 2, 3, 4], False),
        (([], []), [1], False),
        (([1], [2, 3]), [], False),
        (([1], [2, 3]), None, False),
        (None, [1, 2, 3], False),
    ],
)
def test_a_reported_prompt_is_stored_once_if_it_is_the_predicted_one(
    predicted: tuple[list[int], list[int]] | None, reported: list[int] | None, once: bool
) -> None:
    prediction = None if predicted is None else Prediction(*map(pack_tokens, predicted))
    prompt = None if reported is None else pack_tokens(reported)
    record = replace(ANSWERED, predicted=prediction, reported=prompt, shared=7)
    assert stored_record(record) == record
    (entry,) = pb.Entries.FromString(encode_entries([Entry(1, 0.0, record)])).entries
    assert entry.answered.reported_as_predicted is once
    assert entry.answered.HasField("reported") is (reported is not None and not once)


def test_a_big_endian_machine_swaps_the_bytes_of_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "_SWAPS", True)
    tokens = array("I", [1, 2])
    swapped = values.encode_tokens(tokens)
    assert swapped == bytes([0, 0, 0, 1, 0, 0, 0, 2])
    assert tokens == array("I", [1, 2])
    assert values.decode_tokens(swapped) == tokens


@pytest.mark.parametrize("name", ["token_ids", "logprobs", "reported"])
def test_unknown_and_no_tokens_are_different(name: str) -> None:
    empty = array("f" if name == "logprobs" else "I")
    for value in (None, empty):
        read = stored_record(replace(ANSWERED, **{name: value}))
        assert getattr(read, name) == value
        assert (getattr(read, name) is None) is (value is None)


@pytest.mark.parametrize(
    "arguments",
    ["", "{}", '{"a": 1', {}, {"b": 1, "a": [10**400, -(2.0**0.5), float("inf")]}, {"half": "\ud83d"}],
    ids=["empty", "object", "not JSON", "parsed", "large numbers", "half of a pair"],
)
def test_arguments_stay_what_the_model_wrote(arguments: str | dict[str, object]) -> None:
    call = ToolCall("c", "add", arguments)  # type: ignore[arg-type]
    read = stored_record(ToolStarted(1, 0, call))
    assert read == ToolStarted(1, 0, call)
    assert repr(read) == repr(ToolStarted(1, 0, call))


def test_a_message_stays_verbatim() -> None:
    text = '{ "role":"user",\t"content" : null, "n": 123456789012345678901234567890.10, "half": "\\ud83d" }'
    read = stored_record(replace(ANSWERED, message=Message.parse(text)))
    assert isinstance(read, Answered)
    assert read.message == Message(text, "user")


def test_what_is_not_set_takes_no_space() -> None:
    size = len(encode_entries([Entry(1, 1.7e9, Rewarded(0, 0.0))]))
    assert size < 20
    assert len(encode_entries([Entry(1, 1.7e9, Asked(1, "0", "u/0/1", 2))])) < 40


def damaged(**fields: object) -> bytes:
    """A batch with one entry with these fields."""
    return pb.Entries(entries=[pb.Entry(sequence=7, **fields)]).SerializeToString()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\xff", "DecodeError"),
        (encode_entries([Entry(1, 0.0, ANSWERED)])[:-1], "DecodeError"),
        (damaged(), "entry 7 has no record, or one of a newer version"),
        (b"\x0a\x05\x08\x07\xa2\x06\x00", "entry 7 has no record, or one of a newer version"),
        (damaged(answered=pb.Answered(token_ids=b"abc")), "bytes length not a multiple of item size"),
        (
            damaged(answered=pb.Answered(turn=3, reported_as_predicted=True)),
            "turn 3 is the predicted one, and there is none",
        ),
        (damaged(note=pb.Note(text=b"\xff")), "UnicodeDecodeError"),
        (damaged(tool_started=pb.ToolStarted()), "a tool call has no arguments"),
        (damaged(tool_started=pb.ToolStarted(call=pb.ToolCall(object_json=b"[]"))), "not a JSON object"),
        (damaged(tool_started=pb.ToolStarted(call=pb.ToolCall(object_json=b"{"))), "JSONDecodeError"),
        (damaged(ended=pb.Ended(reward_rule=1)), "the record of an end has no end"),
        (damaged(ended=pb.Ended(reward_rule=99, stop=pb.Stop())), "KeyError(99)"),
        (damaged(segment_opened=pb.SegmentOpened()), "KeyError(0)"),
    ],
)
def test_other_bytes_are_refused(data: bytes, text: str) -> None:
    with pytest.raises(ValueError, match="these bytes are not log entries that this version can read") as refused:
        decode_entries(data)
    assert text in str(refused.value)


@given(
    written=st.lists(entries(st.one_of(*RECORDS.values())), min_size=1, max_size=2),
    place=st.integers(0),
    value=st.integers(0, 255),
)
def test_a_changed_byte_raises_nothing_else(written: list[Entry], place: int, value: int) -> None:
    data = bytearray(encode_entries(written))
    data[place % len(data)] = value
    try:
        decode_entries(bytes(data))
    except ValueError as error:
        assert "these bytes are not log entries" in str(error)  # noqa: PT017 - most changes are valid entries


def test_a_number_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="out of range"):
        encode_entries([Entry(1, 0.0, Note(-1, "code", "text"))])
    with pytest.raises(ValueError, match="out of range"):
        encode_entries([Entry(1, 0.0, Ended(Stop("stop"), policy_step=2**63))])
