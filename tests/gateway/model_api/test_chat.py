"""Chat completions: requests as clients send them, responses and streams as they read them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from osmosis.rollout.v1 import agent_service_pb2 as pb

from tests.support.model_gateway import ModelGateway, frames_of, function_call, said

PATH = "v1/chat/completions"
ADD = {"type": "object", "properties": {"b": {"type": "number"}, "a": {"type": "number"}}}
BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi."}]}


async def test_a_request_becomes_a_call(endpoint: ModelGateway) -> None:
    function = {"name": "add", "description": "Adds.", "parameters": ADD, "strict": True}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Add."}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [function_call("add", '{"a": 1}')],
            "reasoning_content": "R",
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "3"},
    ]
    more = {
        "tools": [{"type": "function", "function": function}, {"type": "web_search"}],
        "tool_choice": {"type": "function", "function": {"name": "add"}},
        "parallel_tool_calls": False,
        "response_format": {"type": "json_object"},
        "temperature": 0.5,
        "top_p": 1,
        "max_completion_tokens": 9,
        "stop": "END",
        "n": 1,
        "user": "ignored",
    }
    response = await endpoint.post(PATH, BODY | more | {"messages": messages})
    assert response.status_code == 200, response.text
    call = endpoint.call
    assert endpoint.history == messages
    (tool,) = call.prompt.tools
    assert (tool.name, tool.description, tool.strict) == ("add", "Adds.", True)
    assert list(json.loads(tool.parameters_json_schema)["properties"]) == ["b", "a"]
    assert list(call.prompt.hosted_tools) == ["web_search"]
    sampling = call.sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens, list(sampling.stop)) == (0.5, 1.0, 9, ["END"])
    assert json.loads(sampling.extra_json) == {
        key: more[key] for key in ("tool_choice", "parallel_tool_calls", "response_format")
    }
    assert (call.api, call.model, call.auxiliary, call.repeated) == (pb.MODEL_API_CHAT, "m", False, False)


async def test_unset_sampling_stays_unset(endpoint: ModelGateway) -> None:
    await endpoint.post(PATH, BODY | {"tool_choice": None, "parallel_tool_calls": None, "stop": None, "n": None})
    assert endpoint.call.sampling == type(endpoint.call.sampling)()


async def test_a_completion_becomes_a_response(endpoint: ModelGateway) -> None:
    calls = [function_call("add", '{"a": 1}', "c1"), function_call("add", "{broken", "c2")]
    endpoint.server.reply = said("Text.", reasoning_content="Thought.", tool_calls=calls)
    response = (await endpoint.post(PATH, BODY)).json()
    assert response.pop("created") > 0
    assert response == {
        "id": "chatcmpl-cmp1",
        "object": "chat.completion",
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "Text.",
                    "refusal": None,
                    "reasoning_content": "Thought.",
                    "tool_calls": calls,
                },
                "logprobs": None,
                "finish_reason": "tool_calls",
            }
        ],
        "usage": {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18},
    }
    await endpoint.confirmed("cmp1")


@pytest.mark.parametrize(
    ("reply", "reason", "shown"),
    [
        (said("x"), "stop", ("x", "stop")),
        (said(""), "length", ("", "length")),
        (said(None), "eos", ("", "stop")),
        (said("x"), "content_filter", ("x", "content_filter")),
        (said("", tool_calls=[function_call("f", "{}")]), "stop", (None, "tool_calls")),
        (said(None, tool_calls=[function_call("f", "{")]), "length", (None, "length")),
        (said([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]), "stop", ("ab", "stop")),  # type: ignore[arg-type]
    ],
)
async def test_content_and_finish_reason(endpoint: ModelGateway, reply: Any, reason: str, shown: Any) -> None:
    endpoint.server.reply, endpoint.server.finish_reason = reply, reason
    (choice,) = (await endpoint.post(PATH, BODY)).json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == shown


@pytest.mark.parametrize("usage", [True, False])
async def test_a_stream_adds_up_to_the_response(endpoint: ModelGateway, usage: bool) -> None:
    calls = [function_call("add", '{"a": 1}', "c1"), function_call("sub", "{}", "c2")]
    endpoint.server.reply = said("Te\u2028xt.\nä", reasoning_content="Thought.", tool_calls=calls)
    options = {"stream": True, "stream_options": {"include_usage": usage}}
    response = await endpoint.post(PATH, BODY | options)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-accel-buffering"] == "no"
    assert "\nid:" not in response.text
    *frames, (name, end) = frames_of(response.text)
    assert (name, end) == ("", "[DONE]")
    chunks = [data for _, data in frames]
    assert {(chunk["object"], chunk["id"], chunk["model"]) for chunk in chunks} == {
        ("chat.completion.chunk", "chatcmpl-cmp1", "m")
    }
    if usage:
        assert chunks.pop()["usage"]["total_tokens"] == 18
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == "Te\u2028xt.\nä"
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Thought."
    parts = [part for delta in deltas for part in delta.get("tool_calls", ())]
    assert [part["index"] for part in parts] == [0, 0, 1, 1]
    assert [part["function"]["arguments"] for part in parts] == ["", '{"a": 1}', "", "{}"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["tool_calls"]
    await endpoint.confirmed("cmp1")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"max_tokens": 2**32}, "max_tokens: must be from 1 to 4294967295"),
        ({"stop": 5}, "stop: must be a string or a list of strings"),
        ({"stop": ["a", 5]}, "stop: must be a string or a list of strings"),
    ],
)
async def test_an_error_says_what_a_value_may_be(endpoint: ModelGateway, more: Any, message: str) -> None:
    response = await endpoint.post(PATH, BODY | more)
    assert response.json()["error"]["message"] == message


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"n": 2}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"functions": [{}]}, "functions"),
        ({"messages": []}, "messages"),
        ({"messages": "x"}, "messages"),
        ({"messages": [1]}, "messages[0]"),
        ({"messages": [*BODY["messages"], {"role": "assistant", "content": "The"}]}, "messages[1]"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": 1}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0]"),
        ({"max_tokens": "x"}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"top_p": 2**1024}, "top_p"),
        ({"stop": [1]}, "stop"),
        ({"stop": 1}, "stop"),
        ({"tool_choice": "some"}, "tool_choice"),
        ({"stream_options": 3}, "stream_options"),
        ({"model": "m" * 257}, "model"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]}
                ]
            },
            "messages[0].content[0].image_url",
        ),
    ],
)
async def test_what_is_not_possible_is_refused_by_name(endpoint: ModelGateway, more: Any, field: str) -> None:
    response = await endpoint.post(PATH, BODY | more)
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", field)
    assert field in error["message"]
    assert endpoint.server.calls == []
