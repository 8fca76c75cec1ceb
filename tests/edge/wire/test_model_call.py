"""Results of tools on the way to an agent that owns its loop."""

import json
from typing import Any

import pytest
from osmosis.rollout.v1 import message_pb2
from rollout_server.core.message import ToolCall
from rollout_server.edge.wire.model_call import tool_result_to_proto
from rollout_server.runtime.tools.executor import ToolResult

PNG = message_pb2.Blob(media_type="image/png", inline=b"png")
LINK = message_pb2.Blob(media_type="image/png", uri="https://e.com/x.png")


def image(url: str, **more: str) -> dict[str, Any]:
    """An image in the form of OpenAI-style endpoints."""
    return {"type": "image_url", "image_url": {"url": url}, **more}


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
