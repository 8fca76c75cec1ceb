"""Messages are carried verbatim; any malformed message is refused."""

from __future__ import annotations

import json
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_server.core.message import (
    MalformedMessage,
    Message,
    ToolCall,
    parse_json,
    parse_object,
    tool_calls,
    utf8_length,
)

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
roles = st.text(min_size=1).filter(str.strip)
objects = st.dictionaries(st.text(max_size=5), values, max_size=4)


def calls_in(**fields: object) -> tuple[ToolCall, ...]:
    return tool_calls(Message.parse(json.dumps({"role": "assistant", **fields})).fields())


@given(objects, roles, st.booleans(), st.sampled_from((None, 2)), st.sampled_from(("", " ", "\n\t")))
def test_the_text_stays_as_it_came(
    fields: dict[str, object], role: str, ascii_only: bool, indent: int | None, around: str
) -> None:
    text = around + json.dumps({**fields, "role": role}, ensure_ascii=ascii_only, indent=indent) + around
    parsed = Message.parse(text)
    assert (parsed.text, parsed.role) == (text, role)
    assert parsed.fields() == {**fields, "role": role}


@pytest.mark.parametrize(
    "text",
    [
        '{"role": "user", "n": 18446744073709551616}',
        '{"role": "user", "n": %s.5}' % ("9" * 5000),
        '{"role": "user", "n": 1e400}',
        '{"role": "user", "n": 0.1000000000000000055511151231257827}',
        '{"role": "user", "content": null}',
        '{"content": "", "role": "user"}',
        '{"role": "user", "content": "\\ud800"}',
        '{"role": "user", "content": "\\u0000"}',
        '{"role": "user", "a": 1, "a": 2}',
        '{"role": "system", "role": "user"}',
        '{"role": "user"\r\n}\n',
    ],
)
def test_what_parsing_would_lose_is_kept(text: str) -> None:
    assert Message.parse(text) == Message(text, "user")


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "nonsense",
        "{",
        '{"role": "user"',
        '{"role": "user"} {}',
        "{'role': 'user'}",
        '{"role": "user",}',
        '\ufeff{"role": "user"}',
        '{"role": "user", "c": "\n"}',
        '{"role": "user", "c": "\\x"}',
        '{"role": "user", "n": NaN}',
        '{"role": "user", "n": [Infinity]}',
        '{"role": "user", "n": {"deep": -Infinity}}',
        '{"role": "user", "n": 01}',
        "NaN",
        "null",
        "true",
        "1",
        '"user"',
        "[]",
        '[{"role": "user"}]',
        "{}",
        '{"Role": "user"}',
        '{"role": null}',
        '{"role": 1}',
        '{"role": ["user"]}',
        '{"role": {"name": "user"}}',
        '{"role": ""}',
        '{"role": " \\t\\n"}',
        '{"role": "\\u00a0\\u3000"}',
        '{"role": "user", "role": ""}',
    ],
)
def test_what_is_no_message_is_malformed(text: str) -> None:
    with pytest.raises(MalformedMessage):
        Message.parse(text)


@given(st.text(alphabet='{}[]",:\\ \n\tulnaefrstoxIN0123456789.eE+-\ud800\ufeff', max_size=40))
def test_any_text_is_a_message_or_malformed(text: str) -> None:
    for candidate in (text, '{"role": "user", "content": ' + text + "}"):
        try:
            parsed = Message.parse(candidate)
        except MalformedMessage:
            pass
        else:
            assert parsed.text is candidate
            assert parsed.role.strip()


def test_a_malformed_message_is_a_value_error() -> None:
    assert issubclass(MalformedMessage, ValueError)


@given(values)
def test_parse_json_takes_any_json(value: object) -> None:
    assert parse_json(json.dumps(value)) == value


def test_a_message_whose_fields_are_known_is_not_parsed_again() -> None:
    assert Message.parsed("text", {"role": "user"}) == Message("text", "user")
    with pytest.raises(MalformedMessage, match="role"):
        Message.parsed('{"role": "user"}', {"role": " "})


@given(objects)
def test_parse_object_takes_any_object(fields: dict[str, object]) -> None:
    assert parse_object(json.dumps(fields)) == fields


class TestWriting:
    @given(st.dictionaries(st.text(string.ascii_letters, max_size=3), values, max_size=4))
    def test_what_is_written_says_what_it_was_told(self, fields: dict[str, object]) -> None:
        told = {"role": "tool", **fields, "content": "ü\u0000\n"}
        written = Message.write(told)  # type: ignore[arg-type]
        assert (written.role, written.fields()) == (told["role"], told) if told["role"] == "tool" else True

    def test_keys_keep_their_order_and_letters_stay_letters(self) -> None:
        assert Message.write({"b": "ü", "role": "tool", "a": 1}).text == '{"b": "ü", "role": "tool", "a": 1}'

    @given(st.text(st.characters()))
    def test_what_is_written_can_be_sent(self, content: str) -> None:
        text = Message.write({"role": "tool", "content": content}).text
        assert text.encode("utf-8").decode("utf-8") == text

    @pytest.mark.parametrize("content", ["\ud800", "a\udfffb", "\udcff\udcfe"])
    def test_half_a_surrogate_pair_can_be_sent_too(self, content: str) -> None:
        Message.write({"role": "tool", "content": content}).text.encode("utf-8")

    @pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
    def test_numbers_that_are_not_json_are_refused(self, number: float) -> None:
        with pytest.raises(ValueError, match="JSON"):
            Message.write({"role": "tool", "content": number})

    def test_a_role_is_needed(self) -> None:
        with pytest.raises(MalformedMessage):
            Message.write({"content": "8"})


class TestToolCalls:
    @pytest.mark.parametrize("fields", [{}, {"tool_calls": None}, {"tool_calls": []}])
    def test_there_may_be_none(self, fields: dict[str, object]) -> None:
        assert calls_in(**fields) == ()

    @pytest.mark.parametrize(
        ("written", "read"),
        [
            ({"arguments": '{"a": 1}'}, '{"a": 1}'),
            ({"arguments": "not json"}, "not json"),
            ({"arguments": {"a": 1}}, {"a": 1}),
            ({"arguments": {}}, {}),
            ({"arguments": ""}, ""),
            ({"arguments": None}, ""),
            ({}, ""),
        ],
    )
    def test_arguments_are_text_or_an_object(self, written: dict[str, object], read: object) -> None:
        calls = calls_in(tool_calls=[{"id": "a", "type": "function", "function": {"name": "add", **written}}])
        assert calls == (ToolCall("a", "add", read),)  # type: ignore[arg-type]

    def test_they_keep_their_order(self) -> None:
        calls = [{"id": name, "function": {"name": name, "arguments": ""}} for name in "bca"]
        assert [(c.id, c.name) for c in calls_in(tool_calls=calls)] == [("b", "b"), ("c", "c"), ("a", "a")]

    @pytest.mark.parametrize(
        ("calls", "where"),
        [
            ({}, "tool_calls"),
            ("", "tool_calls"),
            (0, "tool_calls"),
            ([None], "tool_calls[0]"),
            ([[]], "tool_calls[0]"),
            ([{"id": "a"}], "tool_calls[0].function"),
            ([{"id": "a", "function": "add"}], "tool_calls[0].function"),
            ([{"id": "a", "function": {}}], "tool_calls[0].function.name"),
            ([{"id": "a", "function": {"name": 1}}], "tool_calls[0].function.name"),
            ([{"function": {"name": "add"}}], "tool_calls[0].id"),
            ([{"id": 1, "function": {"name": "add"}}], "tool_calls[0].id"),
            ([{"id": "a", "function": {"name": "add", "arguments": 1}}], "tool_calls[0].function.arguments"),
            ([{"id": "a", "function": {"name": "add", "arguments": []}}], "tool_calls[0].function.arguments"),
            ([{"id": "a", "function": {"name": "add"}}, None], "tool_calls[1]"),
        ],
    )
    def test_a_malformed_one_is_named(self, calls: object, where: str) -> None:
        with pytest.raises(MalformedMessage) as caught:
            calls_in(tool_calls=calls)
        assert str(caught.value).split(" ")[0] == where


@given(st.lists(st.text("aé€😀\ud83d\ude00")))
def test_the_length_of_texts_is_the_sum_of_their_lengths(texts: list[str]) -> None:
    assert utf8_length(*texts) == sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
