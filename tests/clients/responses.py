"""Responses of the three APIs, streamed or not: the final object, its ids, and the text that the model wrote."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

_IDS = ("id", "call_id", "signature", "encrypted_content")


def parsed(response: bytes) -> dict[str, Any]:
    """The final object of a response."""
    text = response.decode()
    if text.lstrip().startswith("{"):
        return dict(json.loads(text))
    events = [json.loads(line[5:]) for line in text.splitlines() if line.startswith("data:") and "[DONE]" not in line]
    ends = [each["response"] for each in events if each.get("type", "").startswith("response.") and "response" in each]
    if ends:
        return dict(ends[-1])
    return _message(events) if "type" in events[0] else _chat(events)


def _chat(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []}
    for delta in (chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]):
        for name in ("content", "reasoning_content"):
            message[name] += delta.get(name) or ""
        for part in delta.get("tool_calls", ()):
            if part["index"] == len(message["tool_calls"]):
                message["tool_calls"].append({**part, "function": {**part["function"], "arguments": ""}})
            message["tool_calls"][part["index"]]["function"]["arguments"] += part["function"].get("arguments", "")
    return {"id": chunks[0]["id"], "choices": [{"message": message}]}


def _message(events: list[dict[str, Any]]) -> dict[str, Any]:
    blocks: list[dict[str, Any]] = []
    start = next(each["message"] for each in events if each["type"] == "message_start")
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(dict(event["content_block"]))
        elif event["type"] == "content_block_delta":
            for name, value in event["delta"].items():
                if name != "type":
                    blocks[event["index"]][name] = blocks[event["index"]].get(name, "") + value
    for block in blocks:
        if "partial_json" in block:
            block["input"] = json.loads(block.pop("partial_json"))
    return {**start, "content": blocks}


def ids(final: Any) -> dict[str, str]:
    """The ids in a final object, by kind and place: what a client may send back."""
    found: dict[str, str] = {}
    counts = dict.fromkeys(_IDS, 0)
    for name, value in _leaves(final):
        if name in _IDS and value and value not in found.values():
            found[f"{name}.{counts[name]}"] = value
            counts[name] += 1
    return found


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, key)
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner, name)
    elif isinstance(value, str):
        yield name, value


def wrote(final: Mapping[str, Any]) -> str:
    """The text of a model that gives this response."""
    reasoning, text, calls = "", "", []
    if "choices" in final:
        message = final["choices"][0]["message"]
        reasoning, text = message.get("reasoning_content") or "", message.get("content") or ""
        calls = [(each["function"]["name"], each["function"]["arguments"]) for each in message.get("tool_calls") or ()]
    for item in final.get("output", final.get("content", ())):
        match item["type"]:
            case "thinking":
                reasoning += item["thinking"]
            case "reasoning":
                reasoning += "".join(part["text"] for part in item["summary"])
            case "text":
                text += item["text"]
            case "message":
                text += "".join(part["text"] for part in item["content"])
            case "tool_use":
                calls.append((item["name"], json.dumps(item["input"])))
            case "function_call":
                calls.append((item["name"], item["arguments"]))
    thought = f"<think>\n{reasoning}\n</think>\n\n" if reasoning else ""
    written = [f'<tool_call>\n{{"name": "{name}", "arguments": {given}}}\n</tool_call>' for name, given in calls]
    return thought + "\n".join([text, *written] if text else written)
