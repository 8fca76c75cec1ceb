"""Lists of messages that extend the conversation so far are recognized, for any conversation."""

from __future__ import annotations

import contextlib
import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_server.sdk.history_diff import ConversationHistory

TEXTS = st.text(max_size=5)
VALUES = st.recursive(st.none() | st.booleans() | st.integers() | TEXTS, lambda inner: st.lists(inner, max_size=2))
ENVIRONMENT = st.fixed_dictionaries({"role": st.sampled_from(["user", "tool", "system"]), "content": TEXTS})
CALLS = st.fixed_dictionaries(
    {
        "id": TEXTS,
        "type": st.just("function"),
        "function": st.fixed_dictionaries(
            {"name": TEXTS, "arguments": st.dictionaries(TEXTS, VALUES, max_size=2).map(json.dumps) | TEXTS}
        ),
    }
)
ANSWERS = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": st.none() | TEXTS},
    optional={"tool_calls": st.none() | st.lists(CALLS, max_size=2), "reasoning_content": TEXTS, "refusal": st.none()},
)


def appended_to(following: ConversationHistory, messages: list[Any]) -> list[Any] | None:
    """The messages after the conversation so far; None if the list does not extend it."""
    return messages[following.known :] if following.follows(messages) else None


def written_anew(answer: dict[str, Any]) -> dict[str, Any]:
    """The same message from another JSON writer: empty fields removed, nulls added."""
    anew: dict[str, Any] = json.loads(json.dumps(answer, sort_keys=True))
    for call in anew.get("tool_calls") or []:
        with contextlib.suppress(ValueError):
            call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), indent=2)
    return {"audio": None, **{key: value for key, value in anew.items() if value not in (None, [])}}


@given(st.lists(ENVIRONMENT, max_size=3), st.lists(st.tuples(ANSWERS, st.lists(ENVIRONMENT, max_size=3)), max_size=4))
def test_what_is_appended_is_found(start: list[Any], turns: list[tuple[Any, list[Any]]]) -> None:
    following, shown = ConversationHistory(start), list(start)
    assert appended_to(following, shown) == []
    for answer, appended in turns:
        following.append_completion(copy.deepcopy(shown), answer)
        for form in (answer, written_anew(answer)):
            assert appended_to(following, [*shown, form, *appended]) == appended
        assert not following.follows(shown)
        shown = [*shown, written_anew(answer), *appended]


@given(st.lists(ENVIRONMENT, min_size=1, max_size=3), ANSWERS, st.data())
def test_a_change_anywhere_is_seen(start: list[Any], answer: dict[str, Any], drawn: Any) -> None:
    following = ConversationHistory(start)
    following.append_completion(start, answer)
    changed = copy.deepcopy([*start, answer])
    message = changed[drawn.draw(st.integers(0, len(changed) - 1))]
    message[drawn.draw(st.sampled_from(["content", "name", "role"]))] = "something else entirely"
    assert not following.follows(changed)
    assert not following.follows([*start, answer][1:])


def answered(**answer: Any) -> ConversationHistory:
    following = ConversationHistory([])
    following.append_completion([], {"role": "assistant", **answer})
    return following


CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 5, "b": 3}'}}


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"arguments": '{"b":3,"a":5}'}, True),
        ({"arguments": {"a": 5, "b": 3}}, True),
        ({"arguments": '{"a": 5, "b": 4}'}, False),
        ({"arguments": '{"a": 5}'}, False),
        ({"arguments": "{"}, False),
        ({"name": "sub"}, False),
    ],
)
def test_arguments_are_compared_by_what_they_say(change: dict[str, Any], same: bool) -> None:
    following = answered(content="Adding.", tool_calls=[CALL])
    call = CALL | {"function": {**CALL["function"], **change}}  # type: ignore[dict-item]
    assert following.follows([{"role": "assistant", "content": "Adding.", "tool_calls": [call]}]) is same


def test_a_key_that_was_dropped_is_taken_as_unchanged_until_it_has_been_seen() -> None:
    following = answered(content="Yes.", reasoning_content="Hm.")
    bare = {"role": "assistant", "content": "Yes."}
    full = {**bare, "reasoning_content": "Hm."}
    assert appended_to(following, [bare]) == []
    assert appended_to(following, [full]) == []
    following.append_completion([full], {"role": "assistant", "content": "Also."})
    assert not following.follows([bare, {"role": "assistant", "content": "Also."}])
    assert appended_to(following, [full, {"role": "assistant", "content": "Also."}]) == []


def test_calls_that_were_dropped_are_another_answer() -> None:
    following = answered(content="Adding.", tool_calls=[CALL])
    assert not following.follows([{"role": "assistant", "content": "Adding."}])
