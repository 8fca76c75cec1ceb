"""Anthropic's messages: requests as clients send them, responses and streams as they read them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from osmosis.rollout.v1 import agent_service_pb2 as pb

from tests.support.model_gateway import KEY, ModelGateway, frames_of, function_call, said

PATH = "v1/messages"
ADD = {"type": "object", "properties": {"b": {"type": "number"}, "a": {"type": "number"}}}
BODY: dict[str, Any] = {"model": "m", "max_tokens": 100, "messages": [{"role": "user", "content": "Hi."}]}
PNG = {"type": "base64", "media_type": "image/png", "data": "aGk="}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **more}


async def test_a_request_becomes_a_call(endpoint: ModelGateway) -> None:
    body = {
        "system": [text("x-billing: 1"), text("Be brief.", cache_control={"type": "ephemeral"})],
        "messages": [
            {"role": "user", "content": [text("Add."), {"type": "image", "source": PNG}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "cmp7"},
                    {"type": "redacted_thinking", "data": "xyz"},
                    text("Adding."),
                    {"type": "tool_use", "id": "t1", "name": "add", "input": {"b": 1, "a": 2}},
                    {"type": "tool_use", "id": "t2", "name": "add", "input": {"__raw_arguments": "{broken"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": "3", "is_error": False},
                    {
                        "type": "tool_result",
                        "tool_use_id": "t2",
                        "content": [text("a"), {"type": "image", "source": PNG}],
                    },
                    text("Go on."),
                ],
            },
            {"role": "system", "content": "Mind the time."},
        ],
        "tools": [
            {"name": "add", "description": "Adds.", "input_schema": ADD, "cache_control": {"type": "ephemeral"}},
            {"type": "web_search_20250305", "name": "web_search"},
        ],
        "tool_choice": {"type": "tool", "name": "add", "disable_parallel_tool_use": True},
        "output_config": {"format": {"type": "json_schema", "schema": ADD}, "effort": "high"},
        "stop_sequences": ["END"],
        "temperature": 1,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "metadata": {"user_id": "u"},
    }
    response = await endpoint.post(f"{PATH}?beta=true", BODY | body, **{"x-api-key": KEY, "anthropic-beta": "a"})
    assert response.status_code == 200, response.text
    assert list(endpoint.call.prompt.instructions) == ["x-billing: 1", "Be brief."]
    assert endpoint.history == [
        {"role": "user", "content": [text("Add."), IMAGE]},
        {
            "role": "assistant",
            "content": "Adding.",
            "reasoning_content": "Hm.",
            "tool_calls": [function_call("add", '{"b":1,"a":2}', "t1"), function_call("add", "{broken", "t2")],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "3"},
        {"role": "tool", "tool_call_id": "t2", "content": [text("a"), IMAGE]},
        {"role": "user", "content": "Go on."},
        {"role": "system", "content": "Mind the time."},
    ]
    assert [each.completion_id for each in endpoint.call.prompt.messages] == ["", "cmp7", "", "", "", ""]
    (tool,) = endpoint.call.prompt.tools
    assert (tool.name, list(json.loads(tool.parameters_json_schema)["properties"])) == ("add", ["b", "a"])
    assert list(endpoint.call.prompt.hosted_tools) == ["web_search"]
    sampling = endpoint.call.sampling
    assert (sampling.max_tokens, list(sampling.stop), sampling.temperature) == (100, ["END"], 1.0)
    assert json.loads(sampling.extra_json) == {
        "tool_choice": {"type": "function", "function": {"name": "add"}},
        "parallel_tool_calls": False,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "output", "strict": True, "schema": ADD},
        },
    }
    assert endpoint.call.api == pb.MODEL_API_MESSAGES


async def test_a_tool_is_offered_once_it_is_loaded(endpoint: ModelGateway) -> None:
    tools = [{"name": name, "input_schema": ADD, "defer_loading": True} for name in ("add", "sub")]
    await endpoint.post(PATH, BODY | {"tools": tools})
    assert list(endpoint.call.prompt.tools) == []
    loaded = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "tool_reference", "tool_name": "sub"}]}
    messages = [*BODY["messages"], {"role": "user", "content": [loaded]}]
    await endpoint.post(PATH, BODY | {"tools": tools, "messages": messages})
    assert [tool.name for tool in endpoint.call.prompt.tools] == ["sub"]


async def test_a_completion_becomes_a_response(endpoint: ModelGateway) -> None:
    calls = [function_call("add", '{"b": 1, "a": 2}', "c1"), function_call("add", "{broken", "c2")]
    endpoint.server.reply = said("Text.", reasoning_content="Thought.", tool_calls=calls)
    response = (await endpoint.post(PATH, BODY)).json()
    assert response == {
        "id": "msg_cmp1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [
            {"type": "thinking", "thinking": "Thought.", "signature": "cmp1"},
            text("Text."),
            {"type": "tool_use", "id": "c1", "name": "add", "input": {"b": 1, "a": 2}},
            {"type": "tool_use", "id": "c2", "name": "add", "input": {"__raw_arguments": "{broken"}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 11,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 7,
        },
    }
    await endpoint.confirmed("cmp1")
    again = [*BODY["messages"], {"role": response["role"], "content": response["content"]}, *BODY["messages"]]
    await endpoint.post(PATH, BODY | {"messages": again})
    sent = endpoint.history[1]
    assert [(call["id"], json.loads(call["function"]["arguments"])) for call in sent["tool_calls"][:1]] == [
        ("c1", {"b": 1, "a": 2})
    ]
    assert sent["tool_calls"][1] == calls[1]
    assert (sent["content"], sent["reasoning_content"]) == ("Text.", "Thought.")
    assert endpoint.call.prompt.messages[1].completion_id == "cmp1"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("depth", "kept"), [(200, False), (300, True), (3000, True)])
async def test_arguments_that_are_nested_deeply_stay_a_text(
    endpoint: ModelGateway, depth: int, kept: bool, stream: bool
) -> None:
    arguments = f'{{"a":{"[" * depth}1{"]" * depth}}}'
    endpoint.server.reply = said(None, tool_calls=[function_call("add", arguments, "c1")])
    response = await endpoint.post(PATH, BODY | {"stream": stream})
    if stream:
        (given,) = [data["delta"] for name, data in frames_of(response.text) if name == "content_block_delta"]
        values = json.loads(given["partial_json"])
    else:
        values = response.json()["content"][0]["input"]
    assert [*values] == ["__raw_arguments" if kept else "a"]
    block = {"type": "tool_use", "id": "c1", "name": "add", "input": values}
    again = [*BODY["messages"], {"role": "assistant", "content": [block]}, *BODY["messages"]]
    assert (await endpoint.post(PATH, BODY | {"messages": again})).status_code == 200
    assert endpoint.history[1]["tool_calls"][0]["function"]["arguments"] == arguments


@pytest.mark.parametrize(
    ("reply", "reason", "shown"),
    [
        (said("x"), "stop", ([text("x")], "end_turn")),
        (said(""), "eos", ([], "end_turn")),
        (said("x"), "length", ([text("x")], "max_tokens")),
        (said("x"), "content_filter", ([text("x")], "refusal")),
    ],
)
async def test_content_and_stop_reason(endpoint: ModelGateway, reply: Any, reason: str, shown: Any) -> None:
    endpoint.server.reply, endpoint.server.finish_reason = reply, reason
    response = (await endpoint.post(PATH, BODY)).json()
    assert (response["content"], response["stop_reason"]) == shown


async def test_a_stream_adds_up_to_the_response(endpoint: ModelGateway) -> None:
    calls = [function_call("add", '{"b": 1}', "c1")]
    endpoint.server.reply = said("Text.", reasoning_content="Thought.", tool_calls=calls)
    response = await endpoint.post(PATH, BODY | {"stream": True})
    frames = frames_of(response.text)
    assert [name for name, _ in frames] == [data["type"] for _, data in frames]
    assert "\nid:" not in response.text
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    thinking = [block[0], block[1], block[1], block[2]]
    assert [name for name, _ in frames] == ["message_start", *thinking, *block, *block, "message_delta", "message_stop"]
    message = frames[0][1]["message"]
    assert (message["id"], message["content"], message["stop_reason"]) == ("msg_cmp1", [], None)
    deltas = [data["delta"] for name, data in frames if name == "content_block_delta"]
    assert deltas == [
        {"type": "thinking_delta", "thinking": "Thought."},
        {"type": "signature_delta", "signature": "cmp1"},
        {"type": "text_delta", "text": "Text."},
        {"type": "input_json_delta", "partial_json": '{"b":1}'},
    ]
    assert frames[-2][1]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert frames[-2][1]["usage"]["output_tokens"] == 7
    await endpoint.confirmed("cmp1")


async def test_tokens_are_counted(endpoint: ModelGateway) -> None:
    body = {"model": "m", "system": "Be brief.", "messages": BODY["messages"]}
    response = await endpoint.post(f"{PATH}/count_tokens", body)
    assert response.json() == {"input_tokens": 42}
    (counted,) = endpoint.server.counted
    assert list(counted.prompt.instructions) == ["Be brief."]
    assert endpoint.server.calls == []


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"messages": [*BODY["messages"], {"role": "assistant", "content": "{"}]}, "messages[1]"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0].type"),
        (
            {"messages": [{"role": "user", "content": [text("")], "x": 1}, {"role": "user", "content": 3}]},
            "messages[1].content",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "u"}}]}]},
            "messages[0].content[0].source",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
        ({"system": [{"type": "text"}]}, "system[0].text"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"tools": [{"name": "x", "input_schema": []}]}, "tools[0].input_schema"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"tools": [{"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"}]}, "tools[0].type"),
        ({"tools": [{"type": "web_fetch_20250910", "name": "f"}, {"type": "memory_20250818"}]}, "tools[1].type"),
        ({"tools": [{"name": ["x"], "defer_loading": True, "input_schema": {}}]}, "tools[0].name"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tool_choice": {"type": ["auto"]}}, "tool_choice.type"),
        ({"top_p": 10**400}, "top_p"),
        ({"max_tokens": -1}, "max_tokens"),
    ],
)
async def test_what_is_not_possible_is_refused_by_name(endpoint: ModelGateway, more: Any, field: str) -> None:
    response = await endpoint.post(PATH, BODY | more)
    body = response.json()
    assert (response.status_code, body["type"], body["error"]["type"]) == (400, "error", "invalid_request_error")
    assert body["error"]["message"].startswith(f"{field}: ")
    assert endpoint.server.calls == []
