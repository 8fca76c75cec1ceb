"""The tools of a rollout as an MCP server: what a modern request says of itself in its headers."""

from __future__ import annotations

import base64

import pytest

from tests.support.model_gateway import KEY, ModelGateway
from tests.support.scripted_server import UID

VERSION = "2026-07-28"
META = {
    f"io.modelcontextprotocol/{key}": value for key, value in (("protocolVersion", VERSION), ("clientCapabilities", {}))
}


@pytest.mark.parametrize(
    ("header", "equal"),
    [
        (b"=?base64?" + base64.b64encode("é".encode()) + b"?=", True),
        ("=?base64?é?=".encode(), False),
        (b"=?base64?w6?=", False),
        (b"=?base64?w===?=", False),
        (b"=?base64?/w==?=", False),
        ("é".encode(), False),
    ],
)
async def test_a_name_in_a_header_that_differs_from_the_body_is_refused(
    endpoint: ModelGateway, header: bytes, equal: bool
) -> None:
    names = {"authorization": f"Bearer {KEY}", "mcp-protocol-version": VERSION, "mcp-method": "tools/call"}
    headers = [*((name.encode(), value.encode()) for name, value in names.items()), (b"mcp-name", header)]
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "é", "_meta": META}}
    response = await endpoint.http.post(f"/r/{UID}/mcp", json=body, headers=headers)
    error = response.json()["error"]
    assert (error["code"] == -32020, "header mcp-name" in error["message"]) == (not equal, not equal)
    assert equal or response.status_code == 400
