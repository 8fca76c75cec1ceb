"""Random conversations, and random spellings of them as clients send them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from rollout_server.core.capture.call import HistoryMessage, ModelCall

from tests.core.capture.agent_calls import Fields, called, says, system, user

TEXTS = ("", "8", "It is 8.", "\n\n8\n", "a <b> c", "é\u2028")
ARGUMENTS = ("", "{}", '{"a": 1}', '{"a": 1.0, "b": [true, "x"]}', '{"b": {"c": null}, "a": -2.5e3}', "not JSON")


@dataclass(frozen=True)
class Entry:
    """A message of a conversation: one of the agent's own, or the completion with this number, unless it is 0."""

    fields: Any
    completion: int = 0


def sampled_messages(draw: Any) -> Fields:
    """A completion as a trainer sends it."""
    thought = draw(st.sampled_from(["", "", "Easy.", "Hard."]))
    text = draw(st.sampled_from(TEXTS))
    if thought and draw(st.booleans()):
        text, thought = f"<think>\n{thought}\n</think>\n\n{text}", ""
    arguments = draw(st.lists(st.sampled_from(ARGUMENTS), max_size=3))
    if not arguments:
        return says(text, thought)
    ids = draw(st.lists(st.sampled_from("xyz"), min_size=len(arguments), max_size=len(arguments)))
    return {**called(*arguments, ids=ids, reasoning=thought), "content": text}


def next_messages(draw: Any, message: Fields) -> list[Entry]:
    """What an agent sends after a completion: the results of its calls, in order, or a message of a user."""
    calls = message.get("tool_calls", [])
    entries = [
        Entry({"role": "tool", "content": draw(st.sampled_from(("8", ""))), "tool_call_id": call["id"]})
        for call in calls
    ]
    others = draw(st.lists(st.sampled_from([user("On."), user("Stop?"), system("Later.")]), max_size=2))
    if not calls and not others:
        others = [user("On.")]
    return [*entries, *map(Entry, others)]


def spelled(draw: Any, history: Sequence[Entry], *, drops_texts: bool = False, **others: Any) -> ModelCall:
    """A call with a random spelling of a history. With `drops_texts`, answers may come back without the text beside their calls."""
    ids = draw(st.sampled_from(["same", "renamed", "none"]))
    sent: list[HistoryMessage] = []
    renamed: list[str] = []
    for entry in history:
        fields = dict(entry.fields)
        if fields["role"] == "tool":
            new = renamed.pop(0)
            fields["tool_call_id"] = {"same": fields["tool_call_id"], "renamed": new, "none": None}[ids]
        elif calls := fields.get("tool_calls"):
            renamed = [f"r{len(sent)}-{n}" for n in range(len(calls))]
            fields["tool_calls"] = [
                _spelled_call(draw, call, new if ids == "renamed" else call["id"])
                for call, new in zip(calls, renamed, strict=True)
            ]
        messages = (
            _spelled_answer(draw, fields, drops_texts and ids != "renamed")
            if entry.completion
            else [_noise(draw, fields)]
        )
        repeated = f"completion-{entry.completion}" if entry.completion and draw(st.booleans()) else ""
        sent += [HistoryMessage(each, repeated, json.dumps(each)) for each in messages]
    return ModelCall(tuple(sent), **others)


def _spelled_call(draw: Any, call: Any, call_id: str) -> dict[str, Any]:
    text = call["function"]["arguments"]
    try:
        value = json.loads(text or "{}")
    except ValueError:
        value = None
    if value is not None:
        reordered = dict(reversed(value.items()))
        text = draw(st.sampled_from([text, json.dumps(reordered), json.dumps(value, separators=(",", ":")), value]))
    return {
        "id": call_id,
        "index": 0,
        "type": "function",
        "function": {"name": call["function"]["name"], "arguments": text},
    }


def _spelled_answer(draw: Any, fields: dict[str, Any], drops_text: bool) -> list[dict[str, Any]]:
    """An answer with its reasoning, without it, or with it elsewhere, as one message or several."""
    text, thought = fields["content"], fields.get("reasoning_content", "")
    if text.startswith("<think>"):
        thought, _, text = text.removeprefix("<think>").partition("</think>")
        thought = thought.strip()
    calls = fields.get("tool_calls", [])
    text = draw(st.sampled_from([text, text.strip(), f" {text}\n", *([""] if calls and drops_text else [])]))
    pieces: list[dict[str, Any]] = []
    if thought:
        pieces.append(
            draw(
                st.sampled_from(
                    [{"content": ""}, {"reasoning_content": thought}, {"content": f"<think>{thought}</think>"}],
                )
            )
        )
    pieces += [{"content": text}, *({"tool_calls": [call]} for call in calls)]
    if draw(st.booleans()):
        return [_noise(draw, {"role": "assistant", **piece}) for piece in pieces]
    joined: dict[str, Any] = {"role": "assistant", "content": "".join(piece.get("content", "") for piece in pieces)}
    if reasoning := "".join(piece.get("reasoning_content", "") for piece in pieces):
        joined["reasoning_content"] = reasoning
    if calls:
        joined["tool_calls"] = calls
    return [_noise(draw, joined)]


def _noise(draw: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """A message with its text in parts, or null for no text, and with fields that do not count."""
    text = fields.get("content", "")
    half = len(text) // 2
    spellings: list[Any] = [text, [_part(text)], [_part(text[:half]), _part(text[half:])]]
    if not text:
        spellings += [None, []]
    role = draw(st.sampled_from(["system", "developer"])) if fields["role"] == "system" else fields["role"]
    return {
        **fields,
        "role": role,
        "content": draw(st.sampled_from(spellings)),
        "status": "completed",
        "is_error": False,
    }


def _part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}
