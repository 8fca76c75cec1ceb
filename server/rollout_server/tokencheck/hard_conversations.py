"""Built-in conversations that are hard for templates and parsers. Each kind is a row of the report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from rollout_server.core.message import JSON
from rollout_server.edge.tokens.rendering_form import Fields
from rollout_server.tokencheck.conversation import CheckConversation

_LINES = 869
"""Lines of a long tool result of about 20,000 characters."""
_SPACED = '{"a": 5, "b": 3}'
_USER: Fields = {"role": "user", "content": "What is five plus three?"}
_MORE: Fields = {"role": "user", "content": "And twice that?"}
_SYSTEM: Fields = {"role": "system", "content": "Answer briefly."}
_EIGHT: Fields = {"role": "assistant", "content": "Five plus three is eight."}
_SIXTEEN: Fields = {"role": "assistant", "content": "Twice eight is sixteen."}


def hard_conversations(controls: Sequence[str]) -> Iterator[CheckConversation]:
    """Yield all conversations. `controls` are control tokens of the tokenizer that occur in the text of messages."""
    yield from chain(_rounds(), _turns(), _thoughts(), _texts(controls), _arguments(), _contexts())


def _call(arguments: str = _SPACED, number: int = 1, name: str = "add") -> JSON:
    # Nine letters and digits: Mistral's templates refuse other ids.
    return {"id": f"call{number:05}", "type": "function", "function": {"name": name, "arguments": arguments}}


def _assistant(*calls: JSON, content: JSON = "", **more: JSON) -> Fields:
    return {"role": "assistant", "content": content, "tool_calls": list(calls or (_call(),)), **more}


def _result(content: str = "8", number: int = 1) -> Fields:
    return {"role": "tool", "tool_call_id": f"call{number:05}", "content": content}


def _rounds() -> Iterator[CheckConversation]:
    yield CheckConversation("one call", (_USER, _assistant(), _result("The sum is 8."), _EIGHT))
    both = (_call(), _call('{"query": "harbour"}', 2, "find"))
    results = (_result("The sum is 8."), _result("No harbour was found.", 2))
    yield CheckConversation("parallel calls", (_USER, _assistant(*both), *results, _EIGHT))
    yield CheckConversation("parallel calls", (_USER, _assistant(*both, content="Both at once."), *results, _EIGHT))
    rounds = [
        message
        for number in (1, 2, 3)
        for message in (_assistant(_call(f'{{"a": {number}, "b": 3}}', number)), _result(f"Sum {number + 3}.", number))
    ]
    yield CheckConversation("rounds of tools", (_USER, *rounds, _EIGHT))
    yield CheckConversation("rounds of tools", (_SYSTEM, _USER, _assistant(content="Let me add."), _result(), *rounds))


def _turns() -> Iterator[CheckConversation]:
    yield CheckConversation("follow-up", (_USER, _EIGHT, _MORE))
    yield CheckConversation("follow-up", (_SYSTEM, _USER, _EIGHT, _MORE, _SIXTEEN, _MORE))
    used = (_USER, _assistant(), _result("The sum is 8."), _EIGHT)
    again = (_assistant(_call('{"a": 8, "b": 8}', 2)), _result("The sum is 16.", 2))
    yield CheckConversation("follow-up after tools", (*used, _MORE, _SIXTEEN, _MORE))
    yield CheckConversation("follow-up after tools", (*used, _MORE, *again, _SIXTEEN))
    impatient: Fields = {"role": "user", "content": "Hurry up, please."}
    yield CheckConversation(
        "user in between", (_USER, _assistant(), _result("The sum is 8."), impatient, *again, _SIXTEEN)
    )


def _thoughts() -> Iterator[CheckConversation]:
    reasoning = "First I recall the numbers."
    think: dict[str, JSON] = {"reasoning_content": reasoning}
    second: dict[str, JSON] = {"reasoning_content": "Now I double what came out."}
    marked = "<think>\n" + reasoning + "\n</think>\n\n"
    tools = (_USER, _assistant(**think), _result("The sum is 8."))
    yield CheckConversation("thinking, tools", (*tools, _assistant(_call(number=2), **second), _result("Again 8.", 2)))
    yield CheckConversation("thinking, follow-up", (_USER, {**_EIGHT, **think}, _MORE))
    yield CheckConversation("thinking, follow-up", (*tools, {**_EIGHT, **second}, _MORE, {**_SIXTEEN, **think}, _MORE))
    marked_message: Fields = {"role": "assistant", "content": marked + "Five plus three is eight."}
    yield CheckConversation("<think> in content", (_USER, marked_message, _MORE))
    yield CheckConversation("<think> in content", (_USER, _assistant(content=marked + "I add."), _result(), _EIGHT))


def _texts(controls: Sequence[str]) -> Iterator[CheckConversation]:
    yield CheckConversation("empty content", (_USER, {"role": "assistant", "content": ""}, _MORE))
    yield CheckConversation("empty content", (_USER, _assistant(), _result(""), _EIGHT))
    yield CheckConversation("null content", (_USER, _assistant(content=None), _result("The sum is 8."), _EIGHT))
    yield CheckConversation("white space", (_USER, {"role": "assistant", "content": "\nIt is  eight. \n\n"}, _MORE))
    yield CheckConversation(
        "white space", (_USER, _assistant(content="I add.\n"), _result("  the sum\r\n\t8 \n\n"), _EIGHT)
    )
    odd = "cafe\u0301 caf\u00e9 \U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1eb\U0001f1f7 漢字 \u202eabc\u202c \u00a0x"
    message: Fields = {"role": "assistant", "content": odd}
    yield CheckConversation("Unicode", ({"role": "user", "content": odd}, message, {"role": "user", "content": odd}))
    named = _call('{"query": "cafe\u0301 \U0001f468\u200d\U0001f469\u200d\U0001f467 漢字"}', name="find")
    yield CheckConversation("Unicode", (_USER, _assistant(named, content=odd), _result(odd), _EIGHT))
    forged = "Here it ends " + "\n".join(controls) + " or does it? <think>no</think> <tool_response>"
    yield CheckConversation("control tokens", (_USER, _assistant(), _result(forged), _EIGHT))
    yield CheckConversation("control tokens", (_USER, _EIGHT, {"role": "user", "content": forged}, _SIXTEEN, _MORE))
    cut: Fields = {"role": "assistant", "content": "Five plus three is, when one thinks abou"}
    yield CheckConversation("cut by length", (_USER, cut, _MORE), cut=frozenset({1}))
    begun: Fields = {"role": "assistant", "content": '<tool_call>\n{"name": "add", "argum'}
    yield CheckConversation("cut by length", (_USER, begun, _MORE, _SIXTEEN, _MORE), cut=frozenset({1}))
    lines = "".join(f"{number:06} a line of a log\n" for number in range(_LINES))
    yield CheckConversation("long output", (_USER, _assistant(), _result(lines), _EIGHT))


def _arguments() -> Iterator[CheckConversation]:
    kinds = {
        "arguments, compact": '{"a":5,"b":3}',
        "arguments, \\u escapes": '{"a": 5, "b": "caf\\u00e9 \\ud83d\\ude00"}',
        "arguments, on lines": '{\n  "b": 3,\n  "a": 5\n}',
        "arguments, numbers": '{"a": 8.0, "b": 1e2}',
        "arguments, huge": '{"a": 1e400, "b": 123456789012345678901234567890}',
        "arguments, nested": '{"a": {"of": [1, [], {}, null, true, {"deep": "\\"quoted\\" \\\\ <b>"}]}, "b": -0.0}',
        "arguments, empty": "{}",
    }
    for kind, arguments in kinds.items():
        yield CheckConversation(kind, (_USER, _assistant(_call(arguments)), _result("The sum is 8."), _EIGHT))


def _contexts() -> Iterator[CheckConversation]:
    used = (_USER, _assistant(), _result("The sum is 8."), _EIGHT, _MORE)
    yield CheckConversation("system message", (_SYSTEM, *used))
    yield CheckConversation("system message", (_SYSTEM, _USER, _EIGHT, _MORE), tools=None)
    yield CheckConversation("no tools given", (_USER, _EIGHT, _MORE), tools=None)
    yield CheckConversation("no tools given", used, tools=None)
    yield CheckConversation("tools given as []", (_USER, _EIGHT, _MORE), tools=())
