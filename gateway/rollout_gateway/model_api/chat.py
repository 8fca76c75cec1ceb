"""OpenAI's chat completions."""

import time
from collections.abc import Sequence
from typing import Any, Final

from osmosis.rollout.v1.agent_service_pb2 import MODEL_API_CHAT, CallModelRequest
from osmosis.rollout.v1.message_pb2 import Tool

from rollout_gateway.model_api import fields
from rollout_gateway.model_api.call import ApiCall, Frame, History, Reply, call_json
from rollout_gateway.model_api.fields import InvalidCall, Object

_FINISHED: Final = frozenset({"stop", "length", "tool_calls", "content_filter"})
_CHOICES: Final = frozenset({"none", "auto", "required"})


def parse(body: Object) -> ApiCall:
    """Convert a body. Raises InvalidCall."""
    if body.get("n") not in (None, 1):
        raise InvalidCall("n", "only 1 is supported; send the request several times for several answers")
    fields.refuse(
        body,
        logprobs="not available here; the rollout's samples have the logprobs of all its tokens",
        top_logprobs="not available",
        functions="no longer supported; use tools",
        function_call="no longer supported; use tool_choice",
        audio="only text is generated",
        web_search_options="not available here",
    )
    history = History()
    for place, message in fields.items(body, "messages"):
        _demand_inline(place, message)
        history.add(place, message)
    history.demand_open("messages")
    tools, hosted = _tools(body)
    most = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    extra = {
        "tool_choice": tool_choice(body),
        "response_format": fields.read(body, "response_format", dict),
        "parallel_tool_calls": fields.read(body, "parallel_tool_calls", bool),
    }
    request = CallModelRequest(
        prompt=history.prompt(tools, hosted),
        sampling=fields.sampling(body, most, "stop", extra),
        api=MODEL_API_CHAT,
        model=fields.model_name(body),
    )
    usage = fields.read(fields.read(body, "stream_options", dict) or {}, "include_usage", bool, "stream_options")
    return ApiCall(request, bool(fields.read(body, "stream", bool)), history.places, {"usage": bool(usage)})


def _demand_inline(place: str, message: Object) -> None:
    content = message.get("content")
    for index, part in enumerate(content if isinstance(content, list) else ()):
        if isinstance(part, dict) and part.get("type") == "image_url":
            shown = part.get("image_url")
            fields.image(f"{place}.content[{index}].image_url", shown.get("url") if isinstance(shown, dict) else shown)


def _tools(body: Object) -> tuple[list[Tool], list[str]]:
    tools, hosted = [], []
    for place, each in fields.items(body, "tools"):
        if each.get("type", "function") == "function":
            tools.append(fields.tool(f"{place}.function", fields.need(each, "function", dict, place)))
        elif each["type"] == "custom":
            raise InvalidCall(place, "custom tools are not supported; offer a function")
        else:
            hosted.append(str(each["type"]))
    return tools, hosted


def tool_choice(body: Object) -> Any:
    """Return the choice of tools, if there is one. Raises InvalidCall for an unknown word."""
    choice = body.get("tool_choice")
    if isinstance(choice, str) and choice not in _CHOICES:
        raise InvalidCall("tool_choice", "must be none, auto, required or an object that names a function")
    return choice


def finish_reason(reply: Reply) -> str:
    """Return the reason in the API's words: others that a trainer uses count as "stop"."""
    if reply.calls and reply.finish_reason != "length":
        return "tool_calls"
    return reply.finish_reason if reply.finish_reason in _FINISHED else "stop"


def usage(reply: Reply) -> Object:
    """Return the numbers of tokens; 0: unknown."""
    prompt, generated = reply.prompt_tokens, reply.generated_tokens
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


def response(call: ApiCall, reply: Reply) -> Object:
    """Return the body of a response."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.content or None, "refusal": None}
    if not reply.calls:
        message["content"] = reply.content
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.calls:
        message["tool_calls"] = [call_json(each.id, each.name, each.arguments) for each in reply.calls]
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason(reply)}
    return _head(call, reply, "chat.completion") | {"choices": [choice], "usage": usage(reply)}


def _head(call: ApiCall, reply: Reply, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{reply.id}", "object": kind, "created": int(time.time()), "model": call.model}


def frames(call: ApiCall, reply: Reply) -> Sequence[Frame]:
    """Return the frames of a stream."""
    head = _head(call, reply, "chat.completion.chunk")

    def chunk(delta: Object, reason: str | None = None) -> Frame:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        return "", head | {"choices": [choice]} | ({"usage": None} if call.echo["usage"] else {})

    found = [chunk({"role": "assistant", "content": ""})]
    if reply.reasoning:
        found.append(chunk({"reasoning_content": reply.reasoning}))
    if reply.content:
        found.append(chunk({"content": reply.content}))
    for index, each in enumerate(reply.calls):
        function = {"name": each.name, "arguments": ""}
        found.append(chunk({"tool_calls": [{"index": index, "id": each.id, "type": "function", "function": function}]}))
        found.append(chunk({"tool_calls": [{"index": index, "function": {"arguments": each.arguments}}]}))
    found.append(chunk({}, finish_reason(reply)))
    if call.echo["usage"]:
        found.append(("", head | {"choices": [], "usage": usage(reply)}))
    return [*found, ("", "[DONE]")]
