"""Random trees of histories, in random spellings, against what they must show the model."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from rollout_server.core.capture.call import ModelCall
from rollout_server.core.capture.decision import Branch, Continue, Join, Open, Replay
from rollout_server.core.capture.history_tree import Pending
from rollout_server.core.capture.rules import CaptureOptions

from tests.core.capture.agent_calls import Captured, Fields, system, user
from tests.core.capture.spellings import Entry, next_messages, sampled_messages, spelled

START = (Entry(system("Be brief.")), Entry(user("Add 3 and 5.")))


def gist(message: Fields) -> tuple[Any, ...]:
    """What must survive every spelling of a message: its role, the text apart from reasoning, and calls."""
    text = message["content"]
    if message["role"] == "assistant":
        if text.lstrip().startswith("<think>"):
            text = text.partition("</think>")[2]
        text = text.strip()
    calls = [(call["function"]["name"], arguments(call)) for call in message.get("tool_calls", [])]
    return message["role"], text, calls


def arguments(call: Any) -> Any:
    text = call["function"]["arguments"]
    try:
        return json.loads(text or "{}") if isinstance(text, str) else text
    except ValueError:
        return text


@given(st.data())
def test_a_linear_history_in_any_spelling_is_one_conversation(data: st.DataObject) -> None:
    captured, history = Captured(), list(START)
    for number in range(1, data.draw(st.integers(2, 6)) + 1):
        decision = captured.decide(spelled(data.draw, history, drops_texts=True))
        assert isinstance(decision, Open if number == 1 else Continue)
        message = sampled_messages(data.draw)
        captured.complete(captured.begin(decision), message)
        history.append(Entry(message, number))
        assert captured.conversations == {0: [entry.fields for entry in history]}, "the completions are as sampled"
        history += next_messages(data.draw, message)
    settlement = captured.tree.settle()
    assert (settlement.main, settlement.masked, settlement.report.parted) == (0, (), 0)


class Agents:
    """Agents that send random histories, several at a time, to one rollout."""

    def __init__(self, data: st.DataObject, options: CaptureOptions) -> None:
        self.draw = data.draw
        self.captured = Captured(options)
        self.histories: list[tuple[Entry, ...]] = [START]
        self.sent: list[tuple[tuple[Entry, ...], ModelCall]] = []
        self.running: list[tuple[Pending, tuple[Entry, ...]]] = []
        self.prompts: dict[int, tuple[Entry, ...]] = {}
        self.sampled = 0

    def step(self) -> None:
        action = self.draw(st.sampled_from(["call", "call", "complete", "complete", "again", "disconnect"]))
        if action == "call":
            history = self.edited(self.draw(st.sampled_from(self.histories)))
            self.call(history, spelled(self.draw, history))
        elif action == "again" and self.sent:
            self.call(*self.draw(st.sampled_from(self.sent)))
        elif action == "disconnect" and self.running:
            self.captured.tree.disconnected(self.draw(st.sampled_from(self.running))[0])
        elif self.running:
            self.complete(*self.running.pop(self.draw(st.integers(0, len(self.running) - 1))))

    def edited(self, history: tuple[Entry, ...]) -> tuple[Entry, ...]:
        edit = self.draw(st.sampled_from(["none", "none", "none", "truncate", "system", "compact", "rewrite"]))
        completions = [index for index, entry in enumerate(history) if entry.completion]
        if edit == "truncate" and completions:
            stop = self.draw(st.sampled_from(completions)) + 1
            return (*history[:stop], *next_messages(self.draw, history[stop - 1].fields))
        if edit == "system":
            return (Entry(system(self.draw(st.sampled_from(["Be kind.", "Be brief."])))), *history[1:])
        if edit == "compact":
            return history[0], Entry(user("So far: nothing."))
        if edit == "rewrite" and completions:
            index = self.draw(st.sampled_from(completions))
            other = {**history[index].fields, "content": "Not what the model said."}
            return (*history[:index], Entry(other), *history[index + 1 :])
        return history

    def call(self, history: tuple[Entry, ...], call: ModelCall) -> None:
        self.sent.append((history, call))
        decision = self.captured.decide(call)
        if isinstance(decision, Replay):
            number = int(decision.completion_id.removeprefix("completion-"))
            assert [gist(each.fields) for each in self.prompts[number]] == [gist(each.fields) for each in history]
        elif isinstance(decision, Join):
            assert decision.pending in [pending for pending, _ in self.running]
        else:
            self.check(history, decision)
            self.running.append((self.captured.begin(decision), history))
            shown = self.captured.conversations[self.running[-1][0].conversation.id]
            assert [gist(message) for message in shown] == [gist(entry.fields) for entry in history]
            self.check_template(self.running[-1][0].conversation.id)

    def check(self, history: tuple[Entry, ...], decision: Continue | Branch | Open) -> None:
        captured = self.captured
        if isinstance(decision, Continue):
            assert captured.conversations[decision.conversation][-1]["role"] == "assistant"
            assert decision.conversation not in [pending.conversation.id for pending, _ in self.running]
        elif isinstance(decision, Branch):
            assert captured.homes[decision.after_turn] == decision.conversation
        elif captured.tree._options.history == "restored":
            assert not self.first_is_whole(history), "a history with a completion as it was sampled continues something"

    def check_template(self, conversation: int) -> None:
        """With `as_template`, no user message follows a completion with reasoning within its conversation."""
        shown = self.captured.conversations[conversation]
        last_user = max(index for index, message in enumerate(shown) if message["role"] == "user")
        earlier = [shown[index] for index in self.captured.sampled[conversation] if index < last_user]
        if self.captured.tree._options.history == "as_template":
            assert not any(message.get("reasoning_content") or "</think>" in message["content"] for message in earlier)

    def first_is_whole(self, history: tuple[Entry, ...]) -> bool:
        """Whether the first completion in a history follows the messages that it was sampled for."""
        first = next((index for index, entry in enumerate(history) if entry.completion), None)
        return first is not None and self.prompts[history[first].completion] == history[:first]

    def complete(self, pending: Pending, history: tuple[Entry, ...]) -> None:
        message = sampled_messages(self.draw)
        self.sampled += 1
        self.prompts[self.sampled] = history
        self.captured.complete(pending, message, delivered=self.draw(st.booleans()))
        answered = (*history, Entry(message, self.sampled))
        self.histories.append((*answered, *next_messages(self.draw, message)))


@given(st.data(), st.sampled_from(["restored", "as_template"]))
def test_random_trees(data: st.DataObject, history: Any) -> None:
    agents = Agents(data, CaptureOptions(history=history))
    for _ in range(data.draw(st.integers(1, 25))):
        agents.step()
    captured = agents.captured
    assert captured.turn == agents.sampled == len(captured.homes), "each completion is in one conversation"
    masked = [turn for turn, _ in captured.tree.settle().masked]
    assert len(masked) == len(set(masked))
    assert set(masked) <= set(captured.homes)
    settlement = captured.tree.settle()
    assert settlement == captured.tree.settle()
    assert (settlement.main is None) is (agents.sampled == 0)
