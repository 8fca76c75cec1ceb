"""Builders of model calls, and an owner of a `CallTree` that keeps what its conversations would show the model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rollout_server.core.capture.call import HistoryMessage, ModelCall, OfferedTool
from rollout_server.core.capture.decision import Branch, Continue, Open
from rollout_server.core.capture.history_tree import Pending
from rollout_server.core.capture.rendering import LaterSystem
from rollout_server.core.capture.rules import CaptureOptions
from rollout_server.core.capture.tree import DELIVERY_SECONDS, CallTree

Fields = Mapping[str, Any]

ADD = OfferedTool("add", "Adds.", '{"type": "object", "properties": {"a": {"type": "number"}}}')


def system(text: str) -> Fields:
    return {"role": "system", "content": text}


def user(text: str) -> Fields:
    return {"role": "user", "content": text}


def says(text: str, reasoning: str = "") -> Fields:
    thought = {"reasoning_content": reasoning} if reasoning else {}
    return {"role": "assistant", "content": text, **thought}


def called(*arguments: object, name: str = "add", reasoning: str = "", ids: Sequence[str] = ()) -> Fields:
    """An assistant message with one call for each of the arguments; text is sent as it is."""
    texts = [each if isinstance(each, str) else json.dumps(each) for each in arguments]
    calls = [
        {"id": ids[n] if ids else f"id{n}", "type": "function", "function": {"name": name, "arguments": text}}
        for n, text in enumerate(texts)
    ]
    return {**says("", reasoning), "tool_calls": calls}


def result(text: str, call_id: str | None = "id0") -> Fields:
    return {"role": "tool", "content": text, "tool_call_id": call_id}


def call_of(*messages: Fields, ids: Mapping[int, str] | None = None, **others: Any) -> ModelCall:
    """A call with these messages. `ids`: the completions that messages repeat, by index."""
    sent = tuple(
        HistoryMessage(fields, (ids or {}).get(index, ""), json.dumps(fields)) for index, fields in enumerate(messages)
    )
    return ModelCall(sent, **others)


class Captured:
    """A tree, and the messages that the model is shown in each conversation, with its completions as sampled.

    Attributes:
        conversations: the messages by conversation.
        lengths: for each turn, the number of messages in its conversation with its completion.
        homes: for each turn, its conversation.
        sampled: for each conversation, the indexes of the completions.
    """

    def __init__(self, options: CaptureOptions | None = None, later_system: LaterSystem = "system") -> None:
        self.tree = CallTree(options, later_system)
        self.now = 0.0
        self.conversations: dict[int, list[Fields]] = {}
        self.lengths: dict[int, int] = {}
        self.homes: dict[int, int] = {}
        self.sampled: dict[int, set[int]] = {}
        self.turn = 0

    def decide(self, call: ModelCall) -> Any:
        return self.tree.decide(call, self.now)

    def start(self, call: ModelCall) -> Pending:
        """Decide a call that must be sampled, and begin it."""
        decision = self.decide(call)
        assert isinstance(decision, Continue | Branch | Open), decision
        return self.begin(decision)

    def begin(self, decision: Continue | Branch | Open) -> Pending:
        pending = self.tree.begin(decision)
        match decision:
            case Continue():
                self.conversations[decision.conversation] += decision.messages
            case Branch():
                shown = self.conversations[decision.conversation][: self.lengths[decision.after_turn]]
                self.conversations[pending.conversation.id] = [*shown, *decision.messages]
                earlier = self.sampled[decision.conversation]
                self.sampled[pending.conversation.id] = {index for index in earlier if index < len(shown)}
            case Open():
                self.conversations[pending.conversation.id] = list(decision.messages)
                self.sampled[pending.conversation.id] = set()
        return pending

    def complete(self, pending: Pending, message: Fields, delivered: bool = True) -> str:
        """Note the completion of a call; return its id. One that is not delivered is not on its way any more."""
        self.turn += 1
        shown = self.conversations[pending.conversation.id]
        self.sampled[pending.conversation.id].add(len(shown))
        shown.append(message)
        self.lengths[self.turn], self.homes[self.turn] = len(shown), pending.conversation.id
        completion_id = f"completion-{self.turn}"
        self.tree.completed(pending, completion_id, message, self.turn, self.now)
        if delivered:
            assert self.tree.confirmed(completion_id)
        else:
            self.now += DELIVERY_SECONDS
        return completion_id

    def sample(self, call: ModelCall, message: Fields, delivered: bool = True) -> Any:
        """Decide a call that must be sampled and note its completion; return the decision."""
        decision = self.decide(call)
        assert isinstance(decision, Continue | Branch | Open), decision
        self.complete(self.begin(decision), message, delivered)
        return decision
