"""Messages in their two forms: the JSON form verbatim; the typed form without loss, or as JSON."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from osmosis.rollout.v1 import message_pb2
from rollout_server.core.message import MalformedMessage, Message
from rollout_server.edge.wire.message import message_from_proto, message_to_proto, messages_from_proto

from tests.edge.rpc.json_texts import message_texts, plain_message_texts, valid
from tests.support.start_requests import chat, json_message

EXAMPLES = settings(max_examples=40, deadline=None)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


def through(message: message_pb2.Message, *, typed: bool = True) -> message_pb2.Message:
    """A message after conversion to a core value and back over the wire."""
    written = message_to_proto(message_from_proto(message), typed=typed).SerializeToString()
    return message_pb2.Message.FromString(written)


@st.composite
def parts(draw: st.DrawFn) -> list[message_pb2.ContentPart]:
    """Content with a typed form: one text, or several parts of text and JSON."""
    if draw(st.booleans()):
        return [message_pb2.ContentPart(text=draw(TEXTS))]
    written = draw(st.dictionaries(TEXTS, TEXTS | st.integers() | st.none() | st.lists(TEXTS), max_size=3))
    part = message_pb2.ContentPart(json=json.dumps(written, ensure_ascii=False))
    more = draw(st.lists(TEXTS.map(lambda text: message_pb2.ContentPart(text=text)), max_size=3))
    return draw(st.permutations([part, *more]))


@st.composite
def chats(draw: st.DrawFn) -> message_pb2.Message:
    """A typed message with any of its fields."""
    call = st.builds(message_pb2.ToolCall, id=TEXTS, name=TEXTS, arguments_json=TEXTS)
    fields = {name: draw(TEXTS) for name in ("tool_call_id", "name", "reasoning") if draw(st.booleans())}
    return message_pb2.Message(
        chat=message_pb2.ChatMessage(
            role=draw(TEXTS.filter(str.strip)),
            parts=draw(st.just([]) | parts()),
            tool_calls=draw(st.lists(call, max_size=3)),
            **fields,
        )
    )


@EXAMPLES
@given(message_texts())
@example('{"role":"user","content":null}')
@example('{"content" : "" ,\n"role":"user","content":[ ]}')
@example(f'{{"role":"user","n":[{2**64 + 1},{10**300},-0,1e400,1.10]}}')
@example('{"role":"tool","tool_call_id":"\\ud800","\\u0072ole":"user"}')
@example(' \r\n{"role":"assistant","tool_calls":[{"function":{"arguments":{"b":1,"a":2}}}]}\t')
def test_the_json_form_comes_out_byte_for_byte(text: str) -> None:
    assert through(json_message(text), typed=False).json == text


@EXAMPLES
@given(message_texts() | plain_message_texts())
def test_what_the_typed_form_says_of_json_is_json_and_its_own(text: str) -> None:
    """However a trainer writes JSON, the result is either a typed message that converts back equally, or the JSON verbatim."""
    message = Message.parse(text)
    shown = message_to_proto(message, typed=True)
    if shown.WhichOneof("form") == "json":
        assert shown.json == text
    else:
        assert message_from_proto(shown).fields() == message.fields()


@EXAMPLES
@given(chats())
@example(chat("user"))
@example(chat("user", ""))
@example(chat("assistant", tool_calls=[message_pb2.ToolCall(id="", name="", arguments_json="")]))
@example(chat("tool", "8", tool_call_id="", name="", reasoning=""))
def test_the_typed_form_comes_back_as_it_went(message: message_pb2.Message) -> None:
    assert through(message) == message


@EXAMPLES
@given(chats())
def test_the_typed_form_becomes_a_message_that_http_trainers_know(message: message_pb2.Message) -> None:
    fields = valid(message_from_proto(message).text)
    typed = message.chat
    assert fields["role"] == typed.role
    assert ("content" in fields) == bool(typed.parts)
    if len(typed.parts) == 1 and typed.parts[0].HasField("text"):
        assert fields["content"] == typed.parts[0].text
    elif typed.parts:
        said = [
            {"type": "text", "text": part.text} if part.HasField("text") else valid(part.json) for part in typed.parts
        ]
        assert fields["content"] == said
    assert [call["function"]["arguments"] for call in fields.get("tool_calls", [])] == [
        call.arguments_json for call in typed.tool_calls
    ]
    assert fields.keys() <= {"role", "content", "name", "reasoning_content", "tool_calls", "tool_call_id"}
    for name in ("tool_call_id", "name", "reasoning"):
        key = "reasoning_content" if name == "reasoning" else name
        assert (key in fields) == typed.HasField(name)


@pytest.mark.parametrize(
    "text",
    [
        '{"role":"assistant","content":"x","vendor_score":0.5}',
        '{"role":"assistant","content":null}',
        '{"role":"assistant","content":"x","tool_calls":null}',
        '{"role":"assistant","content":[]}',
        '{"role":"assistant","content":"x","tool_calls":[]}',
        '{"role":"assistant","content":"\\ud800"}',
        '{"role":"assistant","tool_calls":[{"id":"\\ud800","type":"function","function":{"name":"n","arguments":""}}]}',
        '{"role":"assistant","tool_calls":[{"id":"c","type":"function","function":{"name":"n","arguments":{"a":1}}}]}',
        '{"role":"assistant","tool_calls":[{"id":"c","type":"function","function":{"name":"n","arguments":7}}]}',
        '{"role":"assistant","content":{}}',
        '{"role":"assistant","content":7}',
        '{"role":"assistant","content":["x"]}',
        '{"role":"assistant","content":"x","name":7}',
        '{"role":"assistant","content":"x","reasoning_content":["x"]}',
        '{"role":"assistant","tool_calls":{}}',
        '{"role":"assistant","tool_calls":["x"]}',
        '{"role":"assistant","tool_calls":[{"id":"c","type":"custom","function":{"name":"n","arguments":""}}]}',
        '{"role":"assistant","tool_calls":[{"id":"c","index":0,"function":{"name":"n","arguments":""}}]}',
        '{"role":"assistant","tool_calls":[{"function":{"name":"n","arguments":""}}]}',
        '{"role":"assistant","tool_calls":[{"id":"c","function":{"name":"n","arguments":"","vendor":1}}]}',
        '{"role":"assistant","tool_calls":[{"id":"c","function":{"name":"n","arguments":null}}]}',
    ],
)
def test_what_the_typed_form_cannot_carry_stays_json(text: str) -> None:
    assert message_to_proto(Message.parse(text), typed=True) == json_message(text)


@pytest.mark.parametrize(
    "part",
    [
        '{"n":1}',
        '{ "n": 1 }',
        '{"n": 1.10}',
        '{"n": 1e400}',
        '{"n": 1, "n": 2}',
        '{"n": "\\u00e9"}',
        '{"type":"text","text":"x"}',
        '{"type": "image_url", "image_url": "https://x"}',
        '{"type": "input_audio", "input_audio": {"data": "A=", "format": "wav"}}',
    ],
)
@pytest.mark.parametrize("beside", [(), ("x",)])
def test_a_part_in_json_is_carried_verbatim(part: str, beside: tuple[str, ...]) -> None:
    message = chat("user", *beside, message_pb2.ContentPart(json=part))
    assert through(message) == message


@pytest.mark.parametrize("part", ['{"n": "\\ud800"}', '{"type": "image_url", "image_url": {"url": "\\udc00"}}'])
def test_a_part_with_half_a_surrogate_pair_comes_back_in_one_form_or_the_other(part: str) -> None:
    message = message_from_proto(chat("user", "x", message_pb2.ContentPart(json=part)))
    shown = message_to_proto(message, typed=True)
    assert part in (shown.json or shown.chat.parts[1].json)
    assert message_from_proto(shown) == message


@EXAMPLES
@given(
    st.sampled_from(["image/png", "audio/wav", "video/mp4", "a", ""]) | TEXTS,
    st.binary(max_size=5) | TEXTS,
    st.just(b"") | st.binary(min_size=32, max_size=32),
)
def test_a_blob_comes_back_as_a_blob(media_type: str, source: bytes | str, digest: bytes) -> None:
    blob = message_pb2.Blob(media_type=media_type, sha256=digest)
    if isinstance(source, bytes):
        blob.inline = source
    else:
        blob.uri = source
    message = chat("user", message_pb2.ContentPart(blob=blob))
    assert through(message) == message


@pytest.mark.parametrize(
    ("media_type", "source", "content"),
    [
        (
            "image/png",
            {"uri": "https://x/y.png"},
            {"type": "image_url", "image_url": {"url": "https://x/y.png"}, "media_type": "image/png"},
        ),
        (
            "image/png",
            {"inline": b"\x00\xff"},
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AP8="}},
        ),
        ("audio/wav", {"inline": b"ab"}, {"type": "input_audio", "input_audio": {"data": "YWI=", "format": "wav"}}),
        ("application/pdf", {"inline": b""}, {"type": "file", "file": {"file_data": "data:application/pdf;base64,"}}),
        ("video/mp4", {"uri": "data:,"}, {"type": "file", "file": {"file_data": "data:,"}, "media_type": "video/mp4"}),
    ],
)
def test_a_blob_becomes_a_part_that_holds_it(media_type: str, source: dict[str, str | bytes], content: object) -> None:
    blob = message_pb2.Blob(media_type=media_type, **source)  # type: ignore[arg-type]
    sent = chat("user", "See:", message_pb2.ContentPart(blob=blob))
    message = message_from_proto(sent)
    assert message_to_proto(message, typed=True) == sent
    assert message.fields()["content"] == [{"type": "text", "text": "See:"}, content]


def test_messages_of_both_forms_are_refused_together() -> None:
    messages, typed, wrong = messages_from_proto([json_message('{"role":"user"}'), chat("user")], "spec.messages")
    assert (len(messages), typed, [violation.field for violation in wrong]) == (2, True, ["spec.messages"])


def test_a_message_of_eight_mebibytes_is_taken_and_one_byte_more_is_not() -> None:
    frame = '{"role":"user","content":""}'
    fitting = frame.replace('""', '"' + "x" * (8 * 1024 * 1024 - len(frame)) + '"')
    assert message_from_proto(json_message(fitting)).text == fitting
    for larger in (fitting + " ", fitting.replace("x", "€", 1)):
        with pytest.raises(MalformedMessage, match="bytes"):
            message_from_proto(json_message(larger))
