"""An MCP server that speaks JSON-RPC by itself and breaks its rules, as a program: `python mcp_faulty.py FAULT`.

It answers the handshake of 2025-11-25 and lists one tool, `call`, unless FAULT says otherwise. It has no dependencies, so that
it starts quickly.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

TOOL = {"name": "call", "inputSchema": {"type": "object"}}
TEXT = {"content": [{"type": "text", "text": "fine"}]}
BAD_RESULTS: dict[str, Any] = {
    "wrong type": {"content": "text"},
    "wrong block": {"content": [{"type": "text", "text": 5}]},
    "no content": {},
    "bad image": {"content": [{"type": "image", "data": "%%%", "mimeType": "image/png"}]},
    "not an image": {"content": [{"type": "image", "data": "AAAA", "mimeType": "text/html"}]},
    "structured": {"content": [], "structuredContent": {"n": 1}},
    "error": {"content": [{"type": "text", "text": "no such file"}], "isError": True},
}


def write(message: Any) -> None:
    """Write a message as a line."""
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def result(request: dict[str, Any], value: Any) -> None:
    """Respond to a request."""
    write({"jsonrpc": "2.0", "id": request["id"], "result": value})


def flood(line: str) -> None:
    """Write without end."""
    while True:
        sys.stdout.write(line)


def on_call(request: dict[str, Any], fault: str) -> None:
    """Respond to a call, or do what the fault says."""
    match fault:
        case "hang":
            return
        case "exit":
            sys.stderr.write("out of luck\n")
            sys.exit(3)
        case "endless line":
            flood("x" * 65536)
        case "endless lines":
            flood("log line that is no message\n" * 1000)
        case "notifications":
            flood(json.dumps({"jsonrpc": "2.0", "method": "notifications/message", "params": {}}) + "\n")
        case "requests":
            for number in range(10**9):
                request_of_server = {"jsonrpc": "2.0", "id": f"s{number}", "method": "sampling/createMessage"}
                sys.stdout.write(json.dumps(request_of_server) + "\n")
        case "json-rpc error":
            write({"jsonrpc": "2.0", "id": request["id"], "error": {"code": -32603, "message": "broken inside"}})
        case "asks":
            ask = {"jsonrpc": "2.0", "id": "ask", "method": "elicitation/create"}
            write({**ask, "params": {"message": "Password?", "requestedSchema": {"type": "object", "properties": {}}}})
            refusal = json.loads(sys.stdin.readline())
            result(request, {"content": [{"type": "text", "text": json.dumps(refusal.get("error"))}]})
        case "noise":
            sys.stdout.write("Listening...\n{\n")
            result(request, TEXT)
        case _:
            result(request, BAD_RESULTS.get(fault, TEXT))


def on_list(request: dict[str, Any], fault: str) -> None:
    """Respond to tools/list, or do what the fault says."""
    match fault:
        case "many tools":
            result(request, {"tools": [{**TOOL, "name": f"t{number}"} for number in range(10_000)]})
        case "endless pages":
            cursor = int((request.get("params") or {}).get("cursor", 0)) + 1
            result(request, {"tools": [], "nextCursor": str(cursor)})
        case "same page":
            result(request, {"tools": [TOOL], "nextCursor": "again"})
        case "empty page":
            last = (request.get("params") or {}).get("cursor") == "last"
            described = {**TOOL, "description": "x" * 600}
            result(request, {"tools": []} if last else {"tools": [described], "nextCursor": "last"})
        case "large schemas":
            schema = {"type": "object", "description": "x" * 1_000_000}
            result(request, {"tools": [{"name": f"t{number}", "inputSchema": schema} for number in range(5)]})
        case "tools of wrong type":
            result(request, {"tools": [{"name": 5}]})
        case "tools are a text":
            result(request, {"tools": "all"})
        case "output schema":
            result(request, {"tools": [{**TOOL, "outputSchema": {"type": "object", "$ref": "http://127.0.0.1:9/x"}}]})
        case _:
            result(request, {"tools": [TOOL]})


def main(fault: str) -> None:
    """Serve until the end of the standard input."""
    if fault == "silent":
        time.sleep(1000)
    if fault == "garbage":
        flood("Usage: server [OPTIONS]\n")
    for line in sys.stdin:
        request = json.loads(line)
        match request.get("method"):
            case "initialize":
                about = {"serverInfo": {"name": "faulty", "version": "1"}, "capabilities": {"tools": {}}}
                version = "1999-01-01" if fault == "version" else "2025-11-25"
                result(request, {"protocolVersion": version, **about})
            case "tools/list":
                on_list(request, fault)
            case "tools/call":
                on_call(request, fault)
            case _ if "id" in request:
                write({"jsonrpc": "2.0", "id": request["id"], "error": {"code": -32601, "message": "Method not found"}})


if __name__ == "__main__":
    main(sys.argv[1])
