"""OpenAI's responses: requests as clients send them, responses and streams as they read them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from osmosis.rollout.v1 import agent_service_pb2 as pb

from tests.support.model_gateway import ModelGateway, frames_of, function_call, said

PATH = "v1/responses"
ADD = {"type": "object", "properties": {"b": {"type": "number"}, "a": {"type": "number"}}}
BODY: dict[str, Any] = {"model": "m", "input": "Hi."}


def part(kind: str, value: str) -> dict[str, str]:
    return {"type": kind, "text": value}


async def test_a_request_becomes_a_call(endpoint: ModelGateway) -> None:
    function = {"type": "function", "name": "add", "description": "Adds.", "parameters": ADD, "strict": False}
    space = {"type": "namespace", "name": "files", "description": "F.", "tools": [function | {"name": "read"}]}
    body = {
        "instructions": "Be brief.",
        "input": [
            {"type": "message", "role": "developer", "content": [part("input_text", "Rules.")]},
            {
                "role": "user",
                "content": [
                    part("input_text", "Add."),
                    {"type": "input_image", "image_url": "data:image/png;base64,aGk="},
                ],
            },
            {"type": "reasoning", "id": "rs_x", "summary": [part("summary_text", "Hm.")], "encrypted_content": "cmp7"},
            {"type": "message", "role": "assistant", "id": "msg_cmp7", "content": [part("output_text", "Adding.")]},
            {"type": "function_call", "id": "fc_cmp7_0", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
            {"type": "function_call", "call_id": "c2", "namespace": "files", "name": "read", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "3"},
            {"type": "function_call_output", "call_id": "c2", "output": [part("input_text", "x")]},
        ],
        "tools": [function, space, {"type": "web_search"}],
        "tool_choice": {"type": "function", "name": "add"},
        "parallel_tool_calls": False,
        "text": {"format": {"type": "json_schema", "name": "n", "schema": ADD, "strict": True}, "verbosity": "low"},
        "max_output_tokens": 50,
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "low"},
        "prompt_cache_key": "k",
        "client_metadata": {"x": "y"},
    }
    response = await endpoint.post(PATH, BODY | body)
    assert response.status_code == 200, response.text
    assert list(endpoint.call.prompt.instructions) == ["Be brief."]
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
    assert endpoint.history == [
        {"role": "developer", "content": [part("text", "Rules.")]},
        {"role": "user", "content": [part("text", "Add."), image]},
        {"role": "assistant", "content": None, "reasoning_content": "Hm."},
        {"role": "assistant", "content": [part("text", "Adding.")]},
        {"role": "assistant", "content": None, "tool_calls": [function_call("add", '{"a": 1}', "c1")]},
        {"role": "assistant", "content": None, "tool_calls": [function_call("files__read", "{}", "c2")]},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
        {"role": "tool", "tool_call_id": "c2", "content": [part("text", "x")]},
    ]
    ids = [each.completion_id for each in endpoint.call.prompt.messages]
    assert ids == ["", "", "cmp7", "cmp7", "cmp7", "", "", ""]
    assert [tool.name for tool in endpoint.call.prompt.tools] == ["add", "files__read"]
    assert list(endpoint.call.prompt.hosted_tools) == ["web_search"]
    assert endpoint.call.sampling.max_tokens == 50
    assert json.loads(endpoint.call.sampling.extra_json) == {
        "tool_choice": {"type": "function", "function": {"name": "add"}},
        "parallel_tool_calls": False,
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": ADD, "strict": True}},
    }
    assert endpoint.call.api == pb.MODEL_API_RESPONSES
    shown = response.json()
    for key in ("instructions", "tools", "tool_choice", "parallel_tool_calls", "text", "store"):
        assert shown[key] == body[key]


async def test_a_response_is_named_by_its_id(endpoint: ModelGateway) -> None:
    first = (await endpoint.post(PATH, BODY)).json()
    await endpoint.post(PATH, BODY | {"previous_response_id": first["id"]})
    assert endpoint.call.prompt.previous_completion_id == "cmp1"
    assert endpoint.history == [{"role": "user", "content": "Hi."}]


async def test_items_are_named_by_their_ids(endpoint: ModelGateway) -> None:
    """The AI SDK sends them so, as OpenAI stores responses."""
    ids = ("rs_cmp1", "msg_cmp1", "fc_cmp1_0", "fc_cmp1_12", "other")
    items = [{"type": "item_reference", "id": each} for each in ids]
    await endpoint.post(PATH, BODY | {"input": [*items, {"role": "user", "content": "On."}]})
    fields = ["reasoning_content", "content", "tool_calls[0]", "tool_calls[12]", "other"]
    assert endpoint.history[:-1] == [{"role": "assistant", "repeated_field": field} for field in fields]
    assert [each.completion_id for each in endpoint.call.prompt.messages] == ["cmp1"] * 4 + ["", ""]


async def test_a_completion_becomes_items(endpoint: ModelGateway) -> None:
    calls = [function_call("add", '{"a": 1}', "c1"), function_call("files__read", "{broken", "c2")]
    endpoint.server.reply = said("Text.", reasoning_content="Thought.", tool_calls=calls)
    space = {"type": "namespace", "name": "files", "tools": [{"type": "function", "name": "read"}]}
    response = (await endpoint.post(PATH, BODY | {"tools": [space]})).json()
    assert response.pop("created_at") > 0
    usage = response.pop("usage")
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (11, 7, 18)
    # Clients that validate responses want both.
    assert usage["input_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": 0}
    assert (response["id"], response["object"], response["status"]) == ("resp_cmp1", "response", "completed")
    output = response["output"]
    assert output == [
        {
            "type": "reasoning",
            "id": "rs_cmp1",
            "summary": [part("summary_text", "Thought.")],
            "encrypted_content": "cmp1",
        },
        {
            "type": "message",
            "id": "msg_cmp1",
            "role": "assistant",
            "status": "completed",
            "content": [part("output_text", "Text.") | {"annotations": [], "logprobs": []}],
        },
        {
            "type": "function_call",
            "id": "fc_cmp1_0",
            "call_id": "c1",
            "name": "add",
            "arguments": '{"a": 1}',
            "status": "completed",
        },
        {
            "type": "function_call",
            "id": "fc_cmp1_1",
            "call_id": "c2",
            "name": "read",
            "namespace": "files",
            "arguments": "{broken",
            "status": "completed",
        },
    ]
    # Clients send the items back as they are.
    results = [{"type": "function_call_output", "call_id": name, "output": ""} for name in ("c1", "c2")]
    await endpoint.post(PATH, BODY | {"tools": [space], "input": [*output, *results]})
    assert [call for message in endpoint.history for call in message.get("tool_calls", ())] == calls
    assert [each.completion_id for each in endpoint.call.prompt.messages] == ["cmp1"] * 4 + ["", ""]


@pytest.mark.parametrize(
    ("reason", "status", "why"),
    [
        ("stop", "completed", None),
        ("length", "incomplete", {"reason": "max_output_tokens"}),
        ("content_filter", "incomplete", {"reason": "content_filter"}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_cut_completion_is_incomplete(
    endpoint: ModelGateway, reason: str, status: str, why: Any, stream: bool
) -> None:
    endpoint.server.finish_reason = reason
    got = await endpoint.post(PATH, BODY | {"stream": stream})
    name, response = f"response.{status}", got.json() if not stream else None
    if stream:
        name, data = frames_of(got.text)[-1]
        response = data["response"]
    assert response
    assert (name, response["status"], response["incomplete_details"]) == (f"response.{status}", status, why)
    assert response["output"][0]["status"] == status


async def test_a_stream_adds_up_to_the_response(endpoint: ModelGateway) -> None:
    endpoint.server.reply = said("Text.", reasoning_content="Thought.", tool_calls=[function_call("add", '{"a": 1}')])
    response = await endpoint.post(PATH, BODY | {"stream": True})
    frames = frames_of(response.text)
    assert [data["type"] for _, data in frames] == [name for name, _ in frames]
    assert [data["sequence_number"] for _, data in frames] == list(range(len(frames)))
    assert "\nid:" not in response.text
    summary = ("reasoning_summary_part.added", "reasoning_summary_text.delta", "reasoning_summary_text.done")
    text = ("content_part.added", "output_text.delta", "output_text.done", "content_part.done")
    arguments = ("function_call_arguments.delta", "function_call_arguments.done")
    items = ((*summary, "reasoning_summary_part.done"), text, arguments)
    names = [name for item in items for name in ("output_item.added", *item, "output_item.done")]
    assert [name for name, _ in frames] == [
        f"response.{name}" for name in ("created", "in_progress", *names, "completed")
    ]
    whole = frames[-1][1]["response"]
    assert [data["item"] for name, data in frames if name == "response.output_item.done"] == whole["output"]
    assert {data["response"]["id"] for _, data in frames if "response" in data} == {"resp_cmp1"}
    deltas = {name: data["delta"] for name, data in frames if name.endswith(".delta")}
    assert [*deltas.values()] == ["Thought.", "Text.", '{"a": 1}']
    added = [data["item"] for name, data in frames if name == "response.output_item.added"]
    assert [item.get("summary", item.get("content", item.get("arguments"))) for item in added] == [[], [], ""]
    await endpoint.confirmed("cmp1")


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}, "input[1]"),
        ({"input": [{"type": "computer_call", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
            "input[0].content[0].image_url",
        ),
        ({"input": [{"role": "user", "content": [{"type": ["input_text"]}]}]}, "input[0].content[0].type"),
        ({"temperature": -(10**400)}, "temperature"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"tools": [{"name": "x"}]}, "tools[0].type"),
        ({"tools": [{"type": "custom", "name": "x"}]}, "tools[0]"),
        ({"tools": [{"type": "local_shell"}]}, "tools[0].type"),
        ({"tools": [{"type": "web_search"}, {"type": "apply_patch"}]}, "tools[1].type"),
        ({"tools": [{"type": "computer_use_preview", "display_width": 9}]}, "tools[0].type"),
        ({"instructions": 3}, "instructions"),
        ({"text": {"format": 3}}, "text.format"),
        ({"max_output_tokens": 2**32}, "max_output_tokens"),
    ],
)
async def test_what_is_not_possible_is_refused_by_name(endpoint: ModelGateway, more: Any, field: str) -> None:
    response = await endpoint.post(PATH, BODY | more)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, field), error
    assert endpoint.server.calls == []
