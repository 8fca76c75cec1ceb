"""Parsers of tool calls: valid, sloppy and malicious completions."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rollout_client.trainer import Parse, ParsedCompletion, ToolCall
from rollout_client.trainer.completion import to_message
from rollout_client.trainer.parsers import hermes, llama, mistral, parser_by_name, plain, thinking

ADD = ToolCall("add", '{"a": 1}')
SUB = ToolCall("sub", "{}")


def said(content: str, *calls: ToolCall, reasoning: str | None = None) -> ParsedCompletion:
    """A parsed completion."""
    return ParsedCompletion(content, calls, reasoning)


HERMES = {
    '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>': said("", ADD),
    'I add.\n<tool_call>{"name":"add","arguments":{"a": 1}}</tool_call>': said("I add.", ADD),
    '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>\n<tool_call>{"name": "sub"}</tool_call>': said(
        "", ADD, SUB
    ),
    '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n': said("", ADD),
    '<tool_call>{"name": "add", "parameters": {"a": 1}}</tool_call>': said("", ADD),
    '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call> Done.': said("Done.", ADD),
    '<tool_call>{"name":"f","arguments":{"x":"</tool_call><tool_call>"}}</tool_call>': said(
        "", ToolCall("f", '{"x":"</tool_call><tool_call>"}')
    ),
    '<tool_call>{"name":"f","arguments":{ "n" : 12345678901234567890123,\n"x": 1.50, "e": "\\u00e9" }}</tool_call>': said(
        "", ToolCall("f", '{ "n" : 12345678901234567890123,\n"x": 1.50, "e": "\\u00e9" }')
    ),
    '<tool_call>{"name":"f","arguments":{"x":"two\nlines"}}</tool_call>': said("", ToolCall("f", '{"x":"two\nlines"}')),
    '<tool_call>{"name":"f","arguments":"{\\"x\\": 1}"}</tool_call>': said("", ToolCall("f", '"{\\"x\\": 1}"')),
    '<tool_call>oops</tool_call> <tool_call>{"name":"sub"}</tool_call>': said("<tool_call>oops</tool_call>", SUB),
}
HERMES_CONTENT = (
    "",
    "  Nothing to call. ",
    "<tool_call>",
    "<tool_call></tool_call>",
    '<tool_call>{"name": "add", "arguments": {"a": ',
    '<tool_call>{"name": "add"} and more</tool_call>',
    '<tool_call>{"name": "add", "args": {"a": 1}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"a": 1}, "parameters": {"a": 2}}</tool_call>',
    '<tool_call>{"name": 7, "arguments": {}}</tool_call>',
    '<tool_call>{"name": " ", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "\\ud800"}</tool_call>',
    '<tool_call>{"name": "add", "name": "sub"}</tool_call>',
    "<tool_call>{'name': 'add'}</tool_call>",
    '<tool_call>[{"name": "add"}]</tool_call>',
    '{"name": "add", "arguments": {"a": 1}}',
    '</tool_call>{"name": "add"}<tool_call>',
)
LLAMA = {
    '{"name": "add", "parameters": {"a": 1}}': said("", ADD),
    '<|python_tag|>{"name": "add", "parameters": {"a": 1}}': said("", ADD),
    '{"type": "function", "name": "add", "parameters": {"a": 1}}\n': said("", ADD),
    '{"name": "add", "arguments": {"a": 1}}; {"name": "sub", "parameters": {}}': said("", ADD, SUB),
    'Let me see. <|python_tag|>{"name": "add", "parameters": {"a": 1}};{"name": "sub", "parameters": {}}': said(
        "Let me see.", ADD, SUB
    ),
    '<|python_tag|>brave_search.call(query="who; {is}", n=3)': said(
        "", ToolCall("brave_search", '{"query": "who; {is}", "n": 3}')
    ),
    "<|python_tag|>clock.call()": said("", ToolCall("clock", "{}")),
    '{"name": "f", "parameters": {"q": "a; {\\"name\\": 1}"}}': said("", ToolCall("f", '{"q": "a; {\\"name\\": 1}"}')),
}
LLAMA_CONTENT = (
    '{"name": "Ada", "age": 36}',
    '{"parameters": {"a": 1}}',
    '{"name": "f", "parameters": {}, "arguments": {}}',
    'Call {"name": "add", "parameters": {"a": 1}}',
    '{"name": "add", "parameters": {"a": 1}} is what I would call.',
    '{"name": "add", "parameters": {"a": 1}} {"name": "sub", "parameters": {}}',
    '{"name": "add", "parameters": {"a": ',
    "<|python_tag|>print(1 + 1)",
    "<|python_tag|>search.call(query=who)",
    '<|python_tag|>search.call(query="a", query="b")',
    '<|python_tag|>search.call(query="a") + 1',
    '<|python_tag|>search.call(query="a" n=1)',
    '<|python_tag|>search.call("a")',
    "<|python_tag|>",
    "{}",
    ";",
)
MISTRAL = {
    '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]': said("", ADD),
    '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, {"name": "sub", "arguments": {}}]': said("", ADD, SUB),
    '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "abc123xyz"}]': said(
        "", ToolCall("add", '{"a": 1}', "abc123xyz")
    ),
    '[TOOL_CALLS]{"name": "add", "arguments": {"a": 1}}': said("", ADD),
    'Adding.[TOOL_CALLS]add{"a": 1}': said("Adding.", ADD),
    '[TOOL_CALLS]add{"a": 1}[TOOL_CALLS]sub{}': said("", ADD, SUB),
    '[TOOL_CALLS]add[ARGS]{"a": 1}': said("", ADD),
    '[TOOL_CALLS]add[CALL_ID]abc123xyz[ARGS]{"a": 1}': said("", ToolCall("add", '{"a": 1}', "abc123xyz")),
    '[TOOL_CALLS]f[ARGS]{"x": "[TOOL_CALLS]g{}"}': said("", ToolCall("f", '{"x": "[TOOL_CALLS]g{}"}')),
    "[TOOL_CALLS]oops [TOOL_CALLS]sub{}": said("[TOOL_CALLS]oops", SUB),
}
MISTRAL_CONTENT = (
    "[TOOL_CALLS]",
    "[TOOL_CALLS][]",
    "[TOOL_CALLS]add",
    '[TOOL_CALLS]add{"a": ',
    "[TOOL_CALLS]add[ARGS]",
    "[TOOL_CALLS]add[ARGS][1]",
    '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}, oops]',
    '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}',
    '[TOOL_CALLS][{"name": "add"}]',
    'add{"a": 1}',
    '[{"name": "add", "arguments": {"a": 1}}]',
)
EVERY = (hermes, llama, mistral, thinking(hermes), thinking(llama), thinking(mistral), plain)


@pytest.mark.parametrize(
    ("parse", "text", "answer"),
    [
        (parse, text, answer)
        for parse, cases in ((hermes, HERMES), (llama, LLAMA), (mistral, MISTRAL))
        for text, answer in cases.items()
    ],
)
def test_calls_are_read(parse: Parse, text: str, answer: ParsedCompletion) -> None:
    assert parse(text) == answer


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (parse, text)
        for parse, texts in ((hermes, HERMES_CONTENT), (llama, LLAMA_CONTENT), (mistral, MISTRAL_CONTENT))
        for text in texts
    ],
)
def test_what_is_no_call_stays_content_to_the_letter(parse: Parse, text: str) -> None:
    assert parse(text) == ParsedCompletion(text)


def test_a_call_that_is_only_thought_of_is_none() -> None:
    call = '<tool_call>{"name": "sub"}</tool_call>'
    parse = thinking(hermes)
    assert parse(f"<think>\nMaybe {call}?\n</think>\n\nNo.") == said("No.", reasoning=f"Maybe {call}?")
    assert parse(f"Opened in the prompt.</think>{call}") == said("", SUB, reasoning="Opened in the prompt.")
    assert parse(f"<think>cut off {call}") == said("", reasoning=f"cut off {call}")
    assert parse(f"No thought. {call}") == said("No thought.", SUB)


@pytest.mark.timeout(20)  # an implementation that rescans the text takes minutes
@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>" * 20_000,
        '<tool_call>{"a":' * 20_000,
        "[TOOL_CALLS]" * 20_000,
        '[TOOL_CALLS][{"name": "f", "arguments": {}},' * 10_000,
        '{"name": "f", "parameters": ' + "[" * 200_000,
        '<tool_call>{"name": "f", "arguments": ' + '{"a":' * 100_000,
        '[TOOL_CALLS]f{"a": ' + "9" * 200_000,
        '<tool_call>{",":["' * 20_000,
        "<|python_tag|>" * 20_000,
    ],
    ids=lambda text: text[:24],
)
def test_hostile_texts_are_content_at_once(text: str) -> None:
    for parse in EVERY:
        assert parse(text).content == text


MARKS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<think>", "</think>")
JSON = (
    '{"name": "f"',
    ', "arguments": ',
    ', "parameters": ',
    "{}",
    "}",
    "[",
    "]",
    ";",
    '"',
    "\\",
    "\ud800",
    "\n",
    " é f",
)
PIECES = st.sampled_from((*MARKS, *JSON))


@given(st.lists(PIECES, max_size=12).map("".join))
@example('<tool_call>{"name": "f", "arguments": {}}</tool_call>' * 2)
def test_anything_can_be_read_and_sent(text: str) -> None:
    for parse in EVERY:
        answer = parse(text)
        for call in answer.tool_calls:
            assert call.arguments == "{}" or call.arguments in text
        for typed in (False, True):
            message = to_message(answer, 3, typed=typed)
            message.SerializeToString()
        calls = json.loads(to_message(answer, 3, typed=False).json).get("tool_calls", [])
        assert len({call["id"] for call in calls}) == len(answer.tool_calls)


def test_ids_are_kept_where_they_can_be_and_made_up_otherwise() -> None:
    calls = [
        ToolCall("f", "{}", "mine"),
        ToolCall("f", "{}"),
        ToolCall("f", "{}", "mine"),
        ToolCall("f", "{}", "t00002001"),
    ]
    ids = [
        call["id"] for call in json.loads(to_message(ParsedCompletion("", calls), 2, typed=False).json)["tool_calls"]
    ]
    assert ids[0] == "mine"
    assert len(set(ids)) == 4
    assert all(each.isalnum() and len(each) == 9 for each in ids[1:])


def test_the_typed_form_says_the_same() -> None:
    answer = said("text", ADD, reasoning="why")
    chat = to_message(answer, 1, typed=True).chat
    assert (chat.role, chat.parts[0].text, chat.reasoning) == ("assistant", "text", "why")
    assert (chat.tool_calls[0].name, chat.tool_calls[0].arguments_json) == ("add", '{"a": 1}')


def test_a_parser_by_its_name_is_applied_after_the_reasoning() -> None:
    parse = parser_by_name("hermes")
    assert parse('<think>why</think><tool_call>{"name": "sub"}</tool_call>') == said("", SUB, reasoning="why")


def test_a_parser_may_be_any_function() -> None:
    assert parser_by_name("rollout_client.trainer.completion:plain") is plain


@pytest.mark.parametrize("name", ["xml", "thinking", ""])
def test_a_name_that_no_parser_has_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"no parser '{name}'; use one of hermes, llama, mistral, plain, or"):
        parser_by_name(name)
