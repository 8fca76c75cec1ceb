"""Files with random content give a transcript or one ValueError, never another exception."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from rollout_gateway.rest.proto_json import message_to_json
from rollout_server.inspection.load import parse_rollout
from rollout_server.inspection.terminal import ViewOptions, lines
from rollout_server.inspection.text import as_json
from rollout_server.inspection.transcript import transcript_of

from tests.support.random_rollouts import rollouts

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def looked_at(content: bytes) -> None:
    """Load and print a file like the command does. Errors in a file raise ValueError before anything is printed."""
    transcript = None
    with contextlib.suppress(ValueError):
        transcript = transcript_of(parse_rollout(content))
    if transcript is not None:
        assert json.dumps(as_json(transcript, str))
        assert [str(line) for line in lines(transcript, ViewOptions(None, logprobs=True))]
        assert [str(line) for line in lines(transcript, ViewOptions(str))]


def changed(data: st.DataObject, value: Any) -> Any:
    """The value with one part of it, at any depth, replaced or removed."""
    places = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    if not places or data.draw(st.integers(0, 5)) == 0:
        return data.draw(values)
    place = data.draw(st.sampled_from(places))
    if data.draw(st.integers(0, 9)) == 0:
        del value[place]
    else:
        value[place] = changed(data, value[place])
    return value


@settings(max_examples=60, deadline=None)
@given(st.data(), rollouts())
def test_json_with_something_else_in_it(data: st.DataObject, rollout: pb.Rollout) -> None:
    rollout.state = pb.ROLLOUT_STATE_FINISHED
    whole = json.loads(msgspec.json.encode(message_to_json(rollout, pb.ROLLOUT_VIEW_FULL)))
    looked_at(json.dumps(whole).encode())
    looked_at(json.dumps(changed(data, whole)).encode())


@settings(max_examples=50, deadline=None)
@given(st.data(), rollouts())
def test_binary_with_something_else_in_it(data: st.DataObject, rollout: pb.Rollout) -> None:
    rollout.state = pb.ROLLOUT_STATE_FINISHED
    content = bytearray(rollout.SerializeToString())
    looked_at(bytes(content))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    looked_at(bytes(content[: data.draw(st.integers(0, len(content)))]))
    looked_at(bytes(content))


@settings(max_examples=50)
@given(st.binary() | st.binary().map(lambda rest: b"{" + rest) | values.map(lambda value: json.dumps(value).encode()))
def test_anything(content: bytes) -> None:
    looked_at(content)
