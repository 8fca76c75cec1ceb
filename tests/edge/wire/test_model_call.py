"""The calls of agents that own their loop, and the results of tools on the way to them."""

import json
from typing import Any

import pytest
from osmosis.rollout.v1 import agent_service_pb2 as pb
from osmosis.rollout.v1 import message_pb2
from rollout_server.core.message import ToolCall
from rollout_server.edge.wire.model_call import model_call, tool_result_to_proto
from rollout_server.runtime.tools.executor import ToolResult

PNG = message_pb2.Blob(media_type="image/png", inline=b"png")
LINK = message_pb2.Blob(media_type="image/png", uri="https://e.com/x.png")


def image(url: str, **more: str) -> dict[str, Any]:
    """An image in the form of OpenAI-style endpoints."""
    return {"type": "image_url", "image_url": {"url": url}, **more}


def test_messages_keep_the_text_by_which_they_are_recognized() -> None:
    """Equal values in other spellings are other texts."""
    texts = ['{"role": "user", "content": "é"}', '{"content":"\\u00e9","role":"user"}']
    sent = [pb.HistoryMessage(json=text) for text in (*texts, texts[0])]
    first, other, again = model_call(pb.CallModelRequest(prompt=pb.ModelPrompt(messages=sent))).messages
    assert first == other
    assert not first.repeats(other)
    assert first.repeats(again)


@pytest.mark.parametrize(
    ("part", "blob"),
    [
        (image("data:image/png;base64,cG5n"), PNG),
        (image("https://e.com/x.png", media_type="image/png"), LINK),
        (image("https://e.com/x.png"), None),
        (image("data:image/png,cG5n"), None),
        (image("data:image/png;base64,cG5n", detail="low"), None),
        (image("\ud800"), None),
    ],
)
def test_only_what_a_blob_can_say_becomes_one(part: dict[str, Any], blob: message_pb2.Blob | None) -> None:
    (sent,) = tool_result_to_proto(ToolResult(ToolCall("", "draw", "{}"), [part], failed=False)).parts
    if blob is None:
        assert json.loads(sent.json) == part
    else:
        assert sent.blob == blob
