"""Anthropic's messages."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

from osmosis.rollout.v1.agent_service_pb2 import MODEL_API_MESSAGES, CallModelRequest
from osmosis.rollout.v1.message_pb2 import Tool

from rollout_gateway.model_api import fields
from rollout_gateway.model_api.call import ApiCall, Frame, History, Reply, arguments_object, arguments_text, call_json
from rollout_gateway.model_api.fields import InvalidCall, Object, text_of_json

_STOPPED: Final = {"length": "max_tokens", "content_filter": "refusal"}
_CHOICES: Final = {None: None, "auto": "auto", "any": "required", "none": "none"}


def parse(body: Object) -> ApiCall:
    """Convert a body, also that of `count_tokens`. Raises InvalidCall."""
    fields.refuse(body, mcp_servers="not available here", container="not available here")
    history, loaded = History(), set[str]()
    for place, message in fields.items(body, "messages"):
        _add_message(history, place, message, loaded)
    history.demand_open("messages")
    tools, hosted = _tools(body, loaded)
    request = CallModelRequest(
        prompt=history.prompt(tools, hosted, _instructions(body)),
        sampling=fields.sampling(body, "max_tokens", "stop_sequences", _extra(body)),
        api=MODEL_API_MESSAGES,
        model=fields.model_name(body),
    )
    return ApiCall(request, bool(fields.read(body, "stream", bool)), history.places)


def _instructions(body: Object) -> list[str]:
    if isinstance(body.get("system"), str):
        return [body["system"]]
    return [fields.need(block, "text", str, place) for place, block in fields.items(body, "system")]


def _blocks(values: Object, place: str) -> Sequence[tuple[str, Any]]:
    """Return the blocks of a message or tool result; a string is one text block."""
    content = values.get("content")
    if isinstance(content, str):
        return [(f"{place}.content", {"type": "text", "text": content})]
    return fields.items(values, "content", place)


def _add_message(history: History, place: str, message: Object, loaded: set[str]) -> None:
    role = fields.need(message, "role", str, place)
    if role == "assistant":
        _add_reply(history, place, message)
        return
    parts: list[Object] = []
    for where, block in _blocks(message, place):
        if block.get("type") != "tool_result":
            parts.append(_part(where, block, loaded))
            continue
        if parts:
            history.add(place, {"role": role, "content": _short(parts)})
            parts = []
        found = [_part(inner, each, loaded) for inner, each in _blocks(block, where)]
        call_id = fields.need(block, "tool_use_id", str, where)
        history.add(where, {"role": "tool", "tool_call_id": call_id, "content": _short(found)})
    if parts or not _blocks(message, place):
        history.add(place, {"role": role, "content": _short(parts)})


def _short(parts: Sequence[Object]) -> Any:
    """Return a single text part as a string."""
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else list(parts)


def _part(place: str, block: Object, loaded: set[str]) -> Object:
    match block.get("type"):
        case "text":
            return {"type": "text", "text": fields.need(block, "text", str, place)}
        case "image":
            source = fields.need(block, "source", dict, place)
            if source.get("type") != "base64":
                raise InvalidCall(f"{place}.source", "images must be inline, with a source of type base64")
            kind, data = (fields.need(source, key, str, f"{place}.source") for key in ("media_type", "data"))
            return fields.image(place, f"data:{kind};base64,{data}")
        case "tool_reference":
            name = fields.need(block, "tool_name", str, place)
            loaded.add(name)
            return {"type": "text", "text": f"Tool {name} is available."}
    raise InvalidCall(f"{place}.type", f"blocks of type {str(block.get('type'))[:64]!r} are not supported")


def _add_reply(history: History, place: str, message: Object) -> None:
    """Add a message of the model: its texts, thoughts and tool calls, each in order."""
    texts: list[Object] = []
    thoughts: list[str] = []
    calls: list[Object] = []
    completion_id = ""
    for where, block in _blocks(message, place):
        match block.get("type"):
            case "thinking":
                thoughts.append(fields.read(block, "thinking", str, where) or "")
                completion_id = fields.read(block, "signature", str, where) or completion_id
            case "redacted_thinking":
                # It is of another model and has no text that could be shown to this one.
                pass
            case "tool_use":
                name, call_id = (fields.need(block, key, str, where) for key in ("name", "id"))
                arguments = arguments_text(fields.read(block, "input", dict, where) or {})
                calls.append(call_json(call_id, name, arguments))
            case _:
                texts.append(_part(where, block, set()))
    known: dict[str, Any] = {"role": "assistant", "content": _short(texts) if texts else None}
    if any(thoughts):
        known["reasoning_content"] = "".join(thoughts)
    if calls:
        known["tool_calls"] = calls
    history.add(place, known, completion_id)


def _tools(body: Object, loaded: set[str]) -> tuple[list[Tool], list[str]]:
    tools, hosted = [], []
    for place, each in fields.items(body, "tools"):
        if each.get("type", "custom") != "custom":
            kind = fields.hosted_tool(place, str(each["type"]))
            hosted.append(str(each.get("name") or kind))
        elif not each.get("defer_loading") or fields.need(each, "name", str, place) in loaded:
            tools.append(fields.tool(place, each, "input_schema"))
    return tools, hosted


def _extra(body: Object) -> Object:
    choice = fields.read(body, "tool_choice", dict) or {}
    kind = fields.read(choice, "type", str, "tool_choice")
    if kind != "tool" and kind not in _CHOICES:
        raise InvalidCall("tool_choice.type", "must be auto, any, tool or none")
    named = {"type": "function", "function": {"name": choice.get("name")}}
    config = fields.read(body, "output_config", dict) or {}
    schema = config.get("format") or fields.read(body, "output_format", dict)
    shape = {"name": "output", "strict": True, "schema": schema.get("schema")} if isinstance(schema, dict) else None
    return {
        "tool_choice": named if kind == "tool" else _CHOICES[kind],
        "parallel_tool_calls": False if choice.get("disable_parallel_tool_use") else None,
        "response_format": shape and {"type": "json_schema", "json_schema": shape},
    }


def _content(reply: Reply) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if reply.reasoning:
        found.append({"type": "thinking", "thinking": reply.reasoning, "signature": reply.id})
    if reply.content:
        found.append({"type": "text", "text": reply.content})
    for each in reply.calls:
        values = arguments_object(each.arguments)
        found.append({"type": "tool_use", "id": each.id, "name": each.name, "input": values})
    return found


def _usage(reply: Reply, generated: int) -> Object:
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"input_tokens": reply.prompt_tokens, **cached, "output_tokens": generated}


def response(call: ApiCall, reply: Reply) -> Object:
    """Return the body of a response."""
    reason = _STOPPED.get(reply.finish_reason, "tool_use" if reply.calls else "end_turn")
    head = {"id": f"msg_{reply.id}", "type": "message", "role": "assistant", "model": call.model}
    ends = {"stop_reason": reason, "stop_sequence": None, "usage": _usage(reply, reply.generated_tokens)}
    return head | {"content": _content(reply)} | ends


def frames(call: ApiCall, reply: Reply) -> Sequence[Frame]:
    """Return the frames of a stream."""
    return [(data["type"], data) for data in _events(call, reply)]


def _events(call: ApiCall, reply: Reply) -> Iterator[dict[str, Any]]:
    whole = response(call, reply)
    begun: Object = {"content": [], "stop_reason": None, "usage": _usage(reply, 0)}
    yield {"type": "message_start", "message": {**whole, **begun}}
    for index, block in enumerate(whole["content"]):
        start, deltas = _streamed(block)
        yield {"type": "content_block_start", "index": index, "content_block": {"type": block["type"], **start}}
        for delta in deltas:
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    ends = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    yield {"type": "message_delta", "delta": ends, "usage": whole["usage"]}
    yield {"type": "message_stop"}


def _streamed(block: Object) -> tuple[Object, Sequence[Object]]:
    """Return how a block starts, and its deltas."""
    match block["type"]:
        case "thinking":
            thought = {"type": "thinking_delta", "thinking": block["thinking"]}
            signature = {"type": "signature_delta", "signature": block["signature"]}
            return {"thinking": "", "signature": ""}, [thought, signature]
        case "text":
            return {"text": ""}, [{"type": "text_delta", "text": block["text"]}]
    delta = {"type": "input_json_delta", "partial_json": text_of_json(block["input"])}
    return {"id": block["id"], "name": block["name"], "input": {}}, [delta]
