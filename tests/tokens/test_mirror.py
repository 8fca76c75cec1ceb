"""The stand-in for a history: the same system message, calls and environment, and nothing of what was said."""

from typing import Any

from rollout_server.edge.tokens.mirror import mirror_length, mirrored

from tests.tokens.conftest import call

SYSTEM = {"role": "system", "content": "Be brief."}
ASKED = {"role": "user", "content": "Five and three?" * 100}
HEARD = {"role": "tool", "tool_call_id": "a1b2c3d4e", "content": "8"}
CALLS: list[Any] = [
    call('{"a": 5}'),
    call({"a": 5}),
    {"id": "x", "function": "no mapping"},
    {"id": "y"},
    "no call",
    {**call("", name="other"), "index": 0},
]
EMPTIED: list[Any] = [call("{}"), call({}), *CALLS[2:5], {**call("{}", name="other"), "index": 0}]


def test_calls_keep_their_names_and_lose_their_arguments() -> None:
    answer = {"role": "assistant", "content": "Adding.", "reasoning_content": "Let me see.", "tool_calls": CALLS}
    messages = [SYSTEM, {**SYSTEM, "role": "developer"}, ASKED, answer, HEARD, HEARD, ASKED]
    short = mirrored(messages, 3)
    said = {"role": "assistant", "content": "", "tool_calls": EMPTIED}
    assert short == [SYSTEM, {"role": "user", "content": "?"}, said, HEARD, HEARD, ASKED]
    assert mirror_length(messages, 3) == 3


def test_answers_without_calls() -> None:
    messages = [ASKED, {"role": "assistant", "content": "Eight.", "tool_calls": []}, ASKED, SYSTEM]
    short = mirrored(messages, 1)
    assert short == [{"role": "user", "content": "?"}, {"role": "assistant", "content": "Yes."}, ASKED, SYSTEM]
    assert mirror_length(messages, 1) == 2


def test_calls_of_another_shape_are_none() -> None:
    short = mirrored([ASKED, {"role": "assistant", "content": "", "tool_calls": {"a": 1}}], 1)
    assert short[1:] == [{"role": "assistant", "content": "", "tool_calls": []}]
