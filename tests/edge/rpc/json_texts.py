"""JSON as people and programs write it: texts whose spelling carries more than their value."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

SPACE = st.sampled_from(["", "", "", " ", "\n", "\t", " \r\n  "])
ROLES = ("system", "user", "assistant", "tool", "function")
LARGE = (str(2**53 + 1), str(2**64 + 1), str(-(2**63) - 1), str(10**300), "7" * 5000, "-0", "0")
REALS = ("1.10", "1e5", "1E-7", "-0.0", "1e400", "0.1000000000000000055511151231257827", "1.0")
# Surrogates cannot be encoded as characters, only as escapes.
CHARACTERS = st.characters(exclude_categories=["Cs"])


@st.composite
def strings(draw: st.DrawFn) -> str:
    """A JSON string: plain, or with redundant escapes, unpaired surrogates included."""
    text = draw(st.text(CHARACTERS, max_size=6))
    escaped = json.dumps(text, ensure_ascii=draw(st.booleans()))
    extra = draw(st.sampled_from(["", "", "\\/", "\\u0041", "\\ud83d\\ude00", "\\ud800", "\\u0000"]))
    return f'{escaped[:-1]}{extra}"'


def numbers() -> st.SearchStrategy[str]:
    """Integers of any size, and decimals that floats cannot represent."""
    return st.integers(-(10**40), 10**40).map(str) | st.sampled_from(LARGE + REALS)


def scalars() -> st.SearchStrategy[str]:
    """Values without members."""
    return st.sampled_from(["null", "true", "false", "{}", "[]", '""']) | numbers() | strings()


@st.composite
def joined(draw: st.DrawFn, items: list[str], brackets: str) -> str:
    """Items between brackets, with white space where JSON allows it."""
    spaced = [f"{draw(SPACE)}{item}{draw(SPACE)}" for item in items]
    return f"{brackets[0]}{','.join(spaced) or draw(SPACE)}{brackets[1]}"


@st.composite
def pairs(draw: st.DrawFn, values: st.SearchStrategy[str]) -> str:
    """A member of an object."""
    return f"{draw(strings())}{draw(SPACE)}:{draw(SPACE)}{draw(values)}"


@st.composite
def objects(draw: st.DrawFn, values: st.SearchStrategy[str]) -> str:
    """An object whose keys may be duplicated."""
    members: list[str] = draw(st.lists(pairs(values), max_size=4))
    twice = draw(st.booleans())
    if members and twice:
        members.append(members[0])
    return draw(joined(members, "{}"))


@st.composite
def arrays(draw: st.DrawFn, values: st.SearchStrategy[str]) -> str:
    """An array."""
    return draw(joined(draw(st.lists(values, max_size=3)), "[]"))


def values() -> st.SearchStrategy[str]:
    """Any JSON value."""
    return st.recursive(scalars(), lambda inner: objects(inner) | arrays(inner), max_leaves=8)


@st.composite
def message_texts(draw: st.DrawFn) -> str:
    """A message that HTTP trainers accept: a known role, any content, any further keys, in any order."""
    role = f'"role"{draw(SPACE)}:{draw(SPACE)}"{draw(st.sampled_from(ROLES))}"'
    contents = st.sampled_from(["null", '""', '"x"', "[]"]) | strings() | values()
    members = draw(st.lists(pairs(values()), max_size=3))
    members += draw(st.lists(contents.map(lambda content: f'"content":{content}'), max_size=2))
    members.insert(draw(st.integers(0, len(members))), role)
    if draw(st.booleans()):
        members.insert(0, '"role": "an earlier one"')
    return f"{draw(SPACE)}{draw(joined(members, '{}'))}{draw(SPACE)}"


@st.composite
def plain_message_texts(draw: st.DrawFn) -> str:
    """An assistant message with few or no fields that the typed form cannot express."""
    parts = objects(scalars()) | st.builds('{{"type": "text", "text": {}}}'.format, strings())
    urls = st.builds('{{"type":"image_url", "image_url": {{"url": {}}}}}'.format, strings())
    arguments = strings() | st.sampled_from(["{}", '{"a": 1.10}', "null", "7"])
    call = '{{"id": {}, "type": "function", "function": {{"name": {}, "arguments": {}}}}}'
    calls = st.builds(call.format, strings(), strings(), arguments)
    members = ['"role": "assistant"']
    if draw(st.booleans()):
        members.append(f'"content": {draw(strings() | arrays(parts | urls))}')
    if draw(st.booleans()):
        members.append(f'"tool_calls":{draw(arrays(calls))}')
    named = draw(st.sets(st.sampled_from(["name", "tool_call_id", "reasoning_content"])))
    members += [f'"{name}" :{draw(strings())}' for name in sorted(named)]
    return draw(joined(draw(st.permutations(members)), "{}"))


def valid(text: str) -> Any:
    """Parse a text strictly: NaN and Infinity are refused."""
    return json.loads(text, parse_constant=_no_constant)


def _no_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")
