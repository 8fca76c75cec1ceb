"""The message that an agent's client gets: the trainer's text, or the same in the shape that clients read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from rollout_server.core.capture.client_message import client_message
from rollout_server.core.message import Message


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}


@pytest.mark.parametrize(
    "text",
    [
        '{"role":"assistant",  "content": null, "big": 12345678901234567890123, "x": 1.0}',
        json.dumps({"role": "assistant", "content": "é", "reasoning_content": "r", "reasoning": "r"}),
        json.dumps({"role": "assistant", "tool_calls": [call('{ "a":1}')]}),
        json.dumps({"role": "assistant", "tool_calls": None}),
        '{"role":"assistant","tool_calls":[{"function":{"arguments":{"a":' + "9" * 5000 + "}}}]}",
    ],
)
def test_what_clients_can_read_is_verbatim(text: str) -> None:
    assert client_message(Message.parse(text)) == text


@pytest.mark.parametrize(
    ("sent", "shaped"),
    [
        ({"tool_calls": [call({"a": "ä"})]}, {"tool_calls": [call('{"a": "ä"}')]}),
        ({"tool_calls": [call(None), call("{}")]}, {"tool_calls": [call(""), call("{}")]}),
        ({"reasoning": "Hm."}, {"reasoning": "Hm.", "reasoning_content": "Hm."}),
        ({"thinking": "Hm.", "reasoning_content": None}, {"thinking": "Hm.", "reasoning_content": "Hm."}),
    ],
)
def test_the_rest_is_written_as_clients_read_it(sent: dict[str, Any], shaped: dict[str, Any]) -> None:
    message = Message.write({"role": "assistant", "content": "x", **sent})
    assert json.loads(client_message(message)) == {"role": "assistant", "content": "x", **shaped}
