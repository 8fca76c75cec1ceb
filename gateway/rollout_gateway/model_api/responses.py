"""OpenAI's responses."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from osmosis.rollout.v1.agent_service_pb2 import MODEL_API_RESPONSES, CallModelRequest
from osmosis.rollout.v1.message_pb2 import Tool

from rollout_gateway.model_api import fields
from rollout_gateway.model_api.call import ApiCall, Frame, History, Reply, call_json
from rollout_gateway.model_api.chat import tool_choice
from rollout_gateway.model_api.fields import InvalidCall, Object

_TEXTS: Final = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text"})
_INCOMPLETE: Final = {"length": "max_output_tokens", "content_filter": "content_filter"}
# Fields of the request that the response repeats, with their values where the request has none.
_ECHOED: Final[Object] = {
    **dict.fromkeys(("instructions", "max_output_tokens", "previous_response_id", "reasoning", "temperature", "top_p")),
    **{"metadata": {}, "parallel_tool_calls": True, "store": True, "text": {"format": {"type": "text"}}},
    **{"tool_choice": "auto", "tools": [], "truncation": "disabled"},
}
_EMPTY: Final[Mapping[str, Object]] = {
    "message": {"content": []},
    "reasoning": {"summary": []},
    "function_call": {"arguments": ""},
}
Tools = tuple[list[Tool], list[str], dict[str, tuple[str, str]]]


def parse(body: Object) -> ApiCall:
    """Convert a body. Raises InvalidCall."""
    fields.refuse(
        body,
        background="responses are not stored; read the stream instead",
        conversation="conversations are not stored; send the items, or previous_response_id",
        prompt="stored prompts are not available; send the items",
        top_logprobs="not available here; the rollout's samples have the logprobs of all its tokens",
    )
    if "message.output_text.logprobs" in (fields.read(body, "include", list) or []):
        raise InvalidCall("include", "logprobs are not available here; the rollout's samples have them")
    history = History()
    if isinstance(body.get("input"), str):
        history.add("input", {"role": "user", "content": body["input"]})
    else:
        for place, item in fields.items(body, "input"):
            _add_item(history, place, item)
    previous = fields.read(body, "previous_response_id", str) or ""
    if history.messages or not previous:
        history.demand_open("input")
    tools, hosted, namespaced = _tools(body)
    instructions = [body["instructions"]] if fields.read(body, "instructions", str) else []
    request = CallModelRequest(
        prompt=history.prompt(tools, hosted, instructions, previous.removeprefix("resp_")),
        sampling=fields.sampling(body, "max_output_tokens", "stop", _extra(body)),
        api=MODEL_API_RESPONSES,
        model=fields.model_name(body),
    )
    echo = {key: default if body.get(key) is None else body[key] for key, default in _ECHOED.items()}
    return ApiCall(request, bool(fields.read(body, "stream", bool)), history.places, echo, namespaced)


def _add_item(history: History, place: str, item: Object) -> None:
    match item.get("type", "message"):
        case "message":
            role = fields.need(item, "role", str, place)
            known = _completion_id(item) if role == "assistant" else ""
            history.add(place, {"role": role, "content": _content(item, "content", place)}, known)
        case "function_call":
            name = _joined(item.get("namespace"), fields.need(item, "name", str, place))
            call_id, arguments = (fields.need(item, key, str, place) for key in ("call_id", "arguments"))
            message = {"role": "assistant", "content": None, "tool_calls": [call_json(call_id, name, arguments)]}
            history.add(place, message, _completion_id(item).rpartition("_")[0])
        case "function_call_output":
            call_id = fields.need(item, "call_id", str, place)
            history.add(place, {"role": "tool", "tool_call_id": call_id, "content": _content(item, "output", place)})
        case "reasoning":
            thoughts = fields.items(item, "content", place) or fields.items(item, "summary", place)
            text = "".join(_part(*each)["text"] for each in thoughts)
            thought = {"role": "assistant", "content": None} | ({"reasoning_content": text} if text else {})
            history.add(place, thought, fields.read(item, "encrypted_content", str, place) or _completion_id(item))
        case "item_reference":
            prefix, _, known = fields.need(item, "id", str, place).partition("_")
            field = {"rs": "reasoning_content", "msg": "content"}.get(prefix, prefix)
            if prefix == "fc":
                known, _, index = known.rpartition("_")
                field = f"tool_calls[{index}]"
            history.add(place, {"role": "assistant", "repeated_field": field}, known)
        case other:
            raise InvalidCall(f"{place}.type", f"items of type {str(other)[:64]!r} are not supported")


def _content(item: Object, key: str, place: str) -> Any:
    given = item.get(key)
    return given if isinstance(given, str) else [_part(*each) for each in fields.items(item, key, place)]


def _part(place: str, part: Object) -> Object:
    kind = fields.read(part, "type", str, place)
    if kind in _TEXTS:
        return {"type": "text", "text": fields.need(part, "text", str, place)}
    if kind == "refusal":
        return {"type": "text", "text": fields.need(part, "refusal", str, place)}
    if kind == "input_image":
        return fields.image(f"{place}.image_url", part.get("image_url"))
    raise InvalidCall(f"{place}.type", f"parts of type {str(kind)[:64]!r} are not supported")


def _completion_id(item: Object) -> str:
    """Return what follows the prefix of an item's id."""
    found = item.get("id")
    return found.partition("_")[2] if isinstance(found, str) else ""


def _joined(namespace: Any, name: str) -> str:
    """Return the name in the prompt of a tool in a namespace."""
    return f"{namespace}__{name}" if namespace else name


def _tools(body: Object) -> Tools:
    """Return the function tools, the names of hosted ones, and the namespaces of the tools in some."""
    tools: list[Tool] = []
    hosted: list[str] = []
    namespaced: dict[str, tuple[str, str]] = {}
    for place, each in fields.items(body, "tools"):
        match fields.need(each, "type", str, place):
            case "function":
                tools.append(fields.tool(place, each))
            case "namespace":
                space = fields.need(each, "name", str, place)
                for where, inner in fields.items(each, "tools", place):
                    joined = _joined(space, fields.need(inner, "name", str, where))
                    namespaced[joined] = space, inner["name"]
                    tools.append(fields.tool(where, inner, name=joined))
            case "custom":
                raise InvalidCall(place, "custom tools are not supported; offer a function")
            case other:
                hosted.append(fields.hosted_tool(place, other))
    return tools, hosted, namespaced


def _extra(body: Object) -> Object:
    choice, text = tool_choice(body), fields.read(body, "text", dict) or {}
    if isinstance(choice, dict) and choice.get("type") == "function":
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    shape = fields.read(text, "format", dict, "text") or {}
    if shape.get("type") == "json_schema":
        schema = {key: shape[key] for key in ("name", "description", "schema", "strict") if shape.get(key) is not None}
        shape = {"type": "json_schema", "json_schema": schema}
    parallel = fields.read(body, "parallel_tool_calls", bool)
    return {"tool_choice": choice, "response_format": shape or None, "parallel_tool_calls": parallel}


def _output(call: ApiCall, reply: Reply, status: str) -> list[dict[str, Any]]:
    """Return the items of the response, whose ids carry the completion's."""
    found: list[dict[str, Any]] = []
    if reply.reasoning:
        summary = [{"type": "summary_text", "text": reply.reasoning}]
        found.append({"type": "reasoning", "id": f"rs_{reply.id}", "summary": summary, "encrypted_content": reply.id})
    if reply.content or not reply.calls:
        part = {"type": "output_text", "text": reply.content, "annotations": [], "logprobs": []}
        message = {"type": "message", "id": f"msg_{reply.id}", "role": "assistant", "status": status}
        found.append(message | {"content": [part]})
    for index, each in enumerate(reply.calls):
        space, name = call.namespaced.get(each.name, ("", each.name))
        item = {"type": "function_call", "id": f"fc_{reply.id}_{index}", "call_id": each.id, "name": name}
        found.append(item | ({"namespace": space} if space else {}) | {"arguments": each.arguments, "status": status})
    return found


def head(call: ApiCall, response_id: str, status: str = "in_progress") -> dict[str, Any]:
    """Return a response without its output."""
    return {
        "id": f"resp_{response_id}",
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "model": call.model,
        "output": [],
        "usage": None,
        **call.echo,
    }


def response(call: ApiCall, reply: Reply) -> dict[str, Any]:
    """Return the body of a response."""
    reason = _INCOMPLETE.get(reply.finish_reason)
    status = "incomplete" if reason else "completed"
    return head(call, reply.id, status) | {
        "incomplete_details": {"reason": reason} if reason else None,
        "output": _output(call, reply, status),
        "usage": {
            "input_tokens": reply.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": reply.generated_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": reply.prompt_tokens + reply.generated_tokens,
        },
    }


def frames(call: ApiCall, reply: Reply) -> Sequence[Frame]:
    """Return the frames of a stream, without `created` and `in_progress`."""
    whole = response(call, reply)
    found = [each for index, item in enumerate(whole["output"]) for each in _item_events(index, item)]
    return [*found, (f"response.{whole['status']}", {"response": whole})]


def _item_events(index: int, item: Object) -> Iterator[Frame]:
    common = {"item_id": item["id"], "output_index": index}
    empty = {**item, **({"status": "in_progress"} if "status" in item else {}), **_EMPTY[item["type"]]}
    yield "response.output_item.added", {"output_index": index, "item": empty}
    match item["type"]:
        case "message":
            at, part = common | {"content_index": 0}, item["content"][0]
            text = {"text": part["text"], "logprobs": []}
            yield "response.content_part.added", at | {"part": part | {"text": ""}}
            yield "response.output_text.delta", at | {"delta": part["text"], "logprobs": []}
            yield "response.output_text.done", at | text
            yield "response.content_part.done", at | {"part": part}
        case "reasoning":
            at, part = common | {"summary_index": 0}, item["summary"][0]
            yield "response.reasoning_summary_part.added", at | {"part": part | {"text": ""}}
            yield "response.reasoning_summary_text.delta", at | {"delta": part["text"]}
            yield "response.reasoning_summary_text.done", at | {"text": part["text"]}
            yield "response.reasoning_summary_part.done", at | {"part": part}
        case _:
            given = {"arguments": item["arguments"]}
            yield "response.function_call_arguments.delta", common | {"delta": item["arguments"]}
            yield "response.function_call_arguments.done", common | given | {"name": item["name"]}
    yield "response.output_item.done", {"output_index": index, "item": item}
