"""Randomly changed responses of trainers: parsed, or refused with a reason, and never another exception."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_server.core.ledger import MAX_TOKEN_ID
from rollout_server.edge.trainer.chat_completion import ChatCompletion

from tests.edge.trainer.http.answers import GOOD, MESSAGE, check, with_text

FIELD = re.compile(r"choices|token_ids|prompt_token_ids|logprobs|usage|message|finish_reason")


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values in a JSON value."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield from paths(item, (*path, key))


def without(path: tuple[Any, ...]) -> bytes:
    """The valid response without a field or an item."""
    body = copy.deepcopy(dict(GOOD))
    holder: Any = body
    for key in path[:-1]:
        holder = holder[key]
    del holder[path[-1]]
    return json.dumps(body).encode()


PLACES = st.sampled_from([path for path in paths(GOOD) if path])
NUMBERS = [
    "-1",
    "2147483648",
    "4294967296",
    "18446744073709551616",
    "1" + "0" * 5000,
    "-0",
    "1.0",
    "1e2",
    "1e999",
    "0.5",
]
ODDITIES = [
    "NaN",
    "Infinity",
    "-Infinity",
    "[" * 5000 + "]" * 5000,
    '{"a":' * 5000 + "1" + "}" * 5000,
    '"\\ud800"',
    '"\ud800"',
]
REPEATED = [
    '{"role": "user", "role": "assistant"}',
    '{"role": "assistant", "role": 1}',
    '{"role": "assistant", "": {}}',
]
TEXTS = st.one_of(
    st.sampled_from([*NUMBERS, *ODDITIES, *REPEATED, "null", "true", "[]", "{}", '""', "[null]", "", "'x'", "[1,]"]),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    ).map(json.dumps),
)


@settings(max_examples=300, deadline=None)
@given(PLACES, TEXTS)
def test_anything_anywhere(path: tuple[Any, ...], text: str) -> None:
    """One value of a valid response is replaced: it is parsed, or refused with a reason that names the field."""
    said = check(with_text(path, text))
    if isinstance(said, str) and not re.search("JSON|recursion", said):
        assert FIELD.search(said)


@settings(max_examples=50, deadline=None)
@given(PLACES)
def test_anything_missing(path: tuple[Any, ...]) -> None:
    said = check(without(path))
    assert isinstance(said, ChatCompletion) or FIELD.search(said) or "not JSON" in said


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_bytes_changed(data: st.DataObject) -> None:
    body = bytearray(json.dumps(GOOD).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(body) - 1))
        body[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    check(bytes(body))


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=40))
def test_no_answer_at_all(body: bytes) -> None:
    assert isinstance(check(body), str)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, MAX_TOKEN_ID)), st.data())
def test_what_is_right_is_read_as_it_is(ids: list[int], data: st.DataObject) -> None:
    logprobs = data.draw(st.lists(st.floats(-100, 0, width=32), min_size=len(ids), max_size=len(ids)))
    body = json.dumps({**GOOD, "token_ids": ids, "prompt_token_ids": ids[::-1], "logprobs": logprobs}).encode()
    read = check(body)
    assert isinstance(read, ChatCompletion)
    assert (list(read.token_ids), list(read.reported or ())) == (ids, ids[::-1])
    assert list(read.logprobs or ()) == logprobs
    assert json.loads(read.message.text) == MESSAGE
