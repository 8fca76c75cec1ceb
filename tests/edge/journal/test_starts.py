"""The journal's encoding of accepted starts and credentials: nothing is lost, and a start contains no secret."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from osmosis.journal.v1 import journal_pb2 as pb
from rollout_server.core.limits import Limits
from rollout_server.core.message import Message
from rollout_server.core.spec import Dialect, Target
from rollout_server.edge.journal.starts import decode_credentials, decode_start, encode_credentials, encode_start
from rollout_server.runtime.journal import AcceptedStart
from rollout_server.runtime.ports import Credentials
from rollout_server.runtime.start_request import StartRequest

from tests.edge.journal.strategies import credentials, starts
from tests.support.runtime_harness import a_spec

SECRETS = Credentials("sEcret-1", "sEcret-2", "sEcret-3", {"judge": "sEcret-4"})


def started(**fields: object) -> AcceptedStart:
    """An accepted start whose spec has these fields."""
    return AcceptedStart("u1", StartRequest(a_spec(**fields), "me", "once", True, SECRETS), "f00d", "1", 1.7e9)


def without_credentials(start: AcceptedStart) -> AcceptedStart:
    return replace(start, request=replace(start.request, credentials=Credentials()))


@given(start=starts)
def test_what_is_read_equals_what_was_written(start: AcceptedStart) -> None:
    read = decode_start(encode_start(start))
    assert read == without_credentials(start)
    spec, before = read.request.spec, start.request.spec
    assert (list(spec.labels), list(spec.models)) == (list(before.labels), list(before.models))
    assert repr(replace(spec, train_on=None)) == repr(replace(before, train_on=None))


@given(before=credentials)
def test_credentials_are_read_as_they_were(before: Credentials) -> None:
    assert decode_credentials(encode_credentials(before)) == before


def test_a_start_contains_no_secret() -> None:
    data = encode_start(started())
    assert b"sEcret" not in data
    assert decode_start(data).request.credentials == Credentials()
    assert encode_credentials(SECRETS).count(b"sEcret") == 4


def test_no_credentials_are_empty() -> None:
    assert decode_credentials(encode_credentials(Credentials())) == Credentials()


@pytest.mark.parametrize("typed", [False, True])
def test_messages_are_verbatim_in_both_forms(typed: bool) -> None:
    text = '{ "content": "ü", "role":"user", "name": "n", "half": "\\ud83d" }'
    start = started(messages=(Message.parse(text),), typed=typed)
    spec = decode_start(encode_start(start)).request.spec
    assert (spec.messages[0].text, spec.typed) == (text, typed)


@pytest.mark.parametrize("seconds", [0.0, 1 / 3, 1e-12, 1e9 + 0.1, 5e-324])
def test_times_are_not_rounded(seconds: float) -> None:
    start = started(limits=Limits(seconds=seconds), cancel_after_detach=seconds)
    spec = decode_start(encode_start(start)).request.spec
    assert (spec.limits.seconds, spec.cancel_after_detach) == (seconds, seconds)


@pytest.mark.parametrize("dialect", Dialect)
def test_targets_keep_their_protocol(dialect: Dialect) -> None:
    target = Target("" if dialect is Dialect.STREAM else "http://t:1/v1", dialect, True, "m")
    start = started(completions=target, outcome=target, tools=target, models={"judge": target})
    assert decode_start(encode_start(start)).request.spec == start.request.spec


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\xff", "DecodeError"),
        (encode_start(started())[:-1], "DecodeError"),
        (b"", "it has no spec"),
        (pb.AcceptedStart(spec={}, messages=[{"text": b"\xff"}]).SerializeToString(), "UnicodeDecodeError"),
        (pb.AcceptedStart(spec={}, label_names=["a"]).SerializeToString(), "KeyError('a')"),
    ],
)
def test_other_bytes_are_no_start(data: bytes, text: str) -> None:
    with pytest.raises(ValueError, match="these bytes are not an accepted start that this version can read") as refused:
        decode_start(data)
    assert text in str(refused.value)


def test_other_bytes_are_no_credentials() -> None:
    with pytest.raises(ValueError, match="these bytes are not credentials") as refused:
        decode_credentials(encode_credentials(SECRETS)[:-1])
    assert "sEcret" not in str(refused.value)
