"""A call begins with the messages of the call before it. They are not read again, and every decision stays the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_server.core.capture.call import HistoryMessage, ModelCall
from rollout_server.core.capture.decision import Continue, Open
from rollout_server.core.capture.history import HistoryReader
from rollout_server.core.capture.rules import AuxiliaryRule, CaptureOptions
from rollout_server.core.capture.tree import CallTree

from tests.core.capture.agent_calls import ADD, Fields, call_of, called, result, says, system, user

ALIKE: tuple[Any, ...] = (1, 1.0, True, "1", 0, False)
NEXT = (
    *(user(text) for text in ("Add 3 and 5.", "And now?")),
    *(system(text) for text in ("Be brief.", "drop this")),
    *(called({"a": value}, ids=[call_id]) for value in ALIKE for call_id in ("id0", "id1")),
    *(
        {**called(), "tool_calls": [{"id": "id0", "function": {"name": "add", "arguments": {"a": value}}}]}
        for value in ALIKE
    ),
    *(result(text, call_id) for text in ("8", "9") for call_id in ("id0", "id1", None)),
    says("Eight."),
    {"role": "nobody", "content": "?"},
)
OPTIONS = CaptureOptions(dropped_instructions=("drop",))


def without_texts(call: ModelCall) -> ModelCall:
    """The call of a client whose texts are unknown: a tree reads all of it."""
    return replace(call, messages=tuple(replace(message, json="") for message in call.messages))


def answers(tree: CallTree, calls: list[ModelCall]) -> list[str]:
    """What a tree decides for calls that follow each other, with the messages and the plan of each decision."""
    told = []
    for number, call in enumerate(calls):
        decision = tree.decide(call, float(number))
        told.append(repr(decision) + repr(getattr(getattr(decision, "plan", None), "digest", "")))
        if isinstance(decision, Continue | Open):
            pending = tree.begin(decision)
            told.append(
                repr((pending.plan.calls, pending.plan.dropped, pending.plan.lineage_keys, pending.plan.messages))
            )
            tree.completed(
                pending, f"c{number}", called({"a": number % 2}, ids=[f"id{number % 2}"]), number, float(number)
            )
    return [*told, repr(tree.settle())]


@st.composite
def histories(draw: Any) -> list[ModelCall]:
    """Calls of clients that repeat their history, cut it, or rewrite messages of it."""
    history: list[Fields] = [user("Add 3 and 5.")]
    ids: dict[int, str] = {}
    calls = []
    for _ in range(draw(st.integers(2, 7))):
        change = draw(st.sampled_from(("append", "append", "append", "cut", "rewrite")))
        if change == "cut":
            history = history[: draw(st.integers(1, len(history)))]
        elif change == "rewrite":
            history = [*history]
            history[draw(st.integers(0, len(history) - 1))] = draw(st.sampled_from(NEXT))
        history = [*history, *draw(st.lists(st.sampled_from(NEXT), max_size=3))]
        if draw(st.booleans()):
            ids = {**ids, draw(st.integers(0, len(history) - 1)): draw(st.sampled_from(("", "c0", "c1")))}
        instructions = draw(st.sampled_from(((), ("Be brief.",), ("drop this",))))
        previous = draw(st.sampled_from(("", "", "", "c0")))
        calls.append(
            call_of(
                *history, ids=ids, instructions=instructions, previous=previous, tools=(ADD,) * draw(st.integers(0, 1))
            )
        )
    return calls


@given(histories())
def test_decisions_are_those_of_a_tree_that_reads_every_message(calls: list[ModelCall]) -> None:
    assert answers(CallTree(OPTIONS), calls) == answers(CallTree(OPTIONS), list(map(without_texts, calls)))


def test_what_system_messages_say_counts_in_each_call() -> None:
    """An author's rule finds calls beside the task by a system text; texts that are left out are counted."""
    mixed = {"role": "system", "content": [{"type": "text", "text": text} for text in ("drop this", "Make a title.")]}
    beside = CaptureOptions(dropped_instructions=("drop",), auxiliary=(AuxiliaryRule(system="title"),))
    tree = CallTree(beside)
    for number in range(3):
        decision = tree.decide(call_of(mixed, *[user("Add.")] * (number + 1)), float(number))
        assert isinstance(decision, Open)
        assert decision.auxiliary
        assert decision.plan.dropped == 1


def test_messages_behind_a_completion_are_numbered_anew() -> None:
    """The same texts as in a whole history: their calls follow those of the completion."""
    history = user("Add."), called({"a": 1}), result("8")
    tree = CallTree()
    decision = tree.decide(call_of(*history), 0.0)
    assert isinstance(decision, Open)
    tree.completed(tree.begin(decision), "c0", called({"a": 2}), 0, 0.0)
    following = tree.decide(call_of(*history, previous="c0"), 1.0)
    assert isinstance(following, Continue)
    assert [message.result_of for message in following.plan.messages] == [-1, -1, 2]


def test_equal_values_are_not_the_same_text() -> None:
    first, *others = (
        HistoryMessage({"a": value}, "", text) for value, text in ((1, "1"), (1.0, "1.0"), (True, "true"))
    )
    assert all(first.fields == other.fields and not first.repeats(other) for other in others)
    assert first.repeats(replace(first))
    assert not first.repeats(replace(first, completion_id="c0"))
    assert not replace(first, json="").repeats(replace(first, json=""))


def test_only_new_messages_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read, paths = HistoryReader.read, list[str]()

    def noted(self: HistoryReader, message: HistoryMessage, path: str) -> Any:
        paths.append(path)
        return read(self, message, path)

    monkeypatch.setattr(HistoryReader, "read", noted)
    tree, history = CallTree(), [user("Add."), called({"a": 1}), result("8")]
    tree.decide(call_of(*history), 0.0)
    paths.clear()
    tree.decide(call_of(*history, says("Eight."), user("And now?")), 1.0)
    assert paths == ["messages[3]", "messages[4]"]
    paths.clear()
    tree.decide(call_of(history[0], called({"a": 2}), result("8")), 2.0)
    assert paths == ["messages[1]", "messages[2]"], "a rewritten message, and what follows it"
