"""Requests and answers of a model endpoint in the shapes of its three APIs, from and to messages of chat completions.

A message of the model may have `signature`: the opaque text that came with its reasoning, and goes back with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

ROUTES = {"chat": "chat/completions", "responses": "responses", "messages": "messages"}


def api_request(
    api: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), **fields: Any
) -> dict[str, Any]:
    """The body of a request for a completion."""
    functions = [tool["function"] for tool in tools]
    if api == "chat":
        sent = [{name: value for name, value in each.items() if name != "signature"} for each in messages]
        body: dict[str, Any] = {"messages": sent}
        offered: list[dict[str, Any]] = list(map(dict, tools))
    elif api == "responses":
        body = {"input": [item for message in messages for item in _items(message)]}
        offered = [{"type": "function", **function} for function in functions]
    else:
        first = messages[0] if messages and messages[0]["role"] in ("system", "developer") else None
        body = {"messages": [_anthropic(message) for message in messages[first is not None :]], "max_tokens": 1000}
        if first is not None:
            body["system"] = first["content"]
        offered = [
            {"name": each["name"], "description": each["description"], "input_schema": each["parameters"]}
            for each in functions
        ]
    return {"model": "m", **body, **({"tools": offered} if offered else {}), **fields}


def api_answer(api: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """The message of the model in the body of a response."""
    if api == "chat":
        return dict(body["choices"][0]["message"])
    texts, thoughts, calls, signature = [], [], [], ""
    for item in body["output"] if api == "responses" else body["content"]:
        match item["type"]:
            case "message":
                texts += [part["text"] for part in item["content"]]
            case "text":
                texts.append(item["text"])
            case "reasoning":
                thoughts += [part["text"] for part in item["summary"]]
                signature = item.get("encrypted_content") or ""
            case "thinking":
                thoughts.append(item["thinking"])
                signature = item["signature"]
            case "function_call":
                calls.append(_call(item["call_id"], item["name"], item["arguments"]))
            case "tool_use":
                calls.append(_call(item["id"], item["name"], json.dumps(item["input"])))
            case other:
                raise AssertionError(other)
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts) or None}
    if thoughts:
        message |= {"reasoning_content": "".join(thoughts), "signature": signature}
    return message | ({"tool_calls": calls} if calls else {})


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _items(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The items of the responses API for one message."""
    if message["role"] == "tool":
        yield {"type": "function_call_output", "call_id": message["tool_call_id"], "output": _text(message)}
        return
    if thought := message.get("reasoning_content"):
        summary = [{"type": "summary_text", "text": thought}]
        yield {"type": "reasoning", "id": "rs_1", "summary": summary, "encrypted_content": message.get("signature")}
    if message["content"]:
        kind = "output_text" if message["role"] == "assistant" else "input_text"
        content = message["content"]
        if not isinstance(content, str):
            content = [{"type": kind, "text": part["text"]} for part in content]
        yield {"type": "message", "role": message["role"], "content": content}
    for call in message.get("tool_calls") or ():
        yield {"type": "function_call", "call_id": call["id"], **call["function"]}


def _anthropic(message: Mapping[str, Any]) -> dict[str, Any]:
    """One message of the messages API."""
    if message["role"] == "tool":
        result = {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": message["content"]}
        return {"role": "user", "content": [result]}
    calls, thought = message.get("tool_calls") or (), message.get("reasoning_content")
    if not calls and not thought:
        return {"role": message["role"], "content": message["content"] or ""}
    blocks: list[dict[str, Any]] = []
    if thought:
        blocks.append({"type": "thinking", "thinking": thought, "signature": message.get("signature") or ""})
    content = message["content"] or []
    blocks += [{"type": "text", "text": content}] if isinstance(content, str) else content
    blocks += [
        {
            "type": "tool_use",
            "id": call["id"],
            "name": call["function"]["name"],
            "input": json.loads(call["function"]["arguments"]),
        }
        for call in calls
    ]
    return {"role": message["role"], "content": blocks}


def _text(message: Mapping[str, Any]) -> Any:
    content = message["content"]
    return content if isinstance(content, str) else [{"type": "input_text", "text": part["text"]} for part in content]
