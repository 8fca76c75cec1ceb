"""A counter that speaks JSON-RPC by itself, as a program: its state is that of its process. Starts within milliseconds."""

from __future__ import annotations

import json
import sys


def main() -> None:
    """Serve until the end of the standard input."""
    total = 0
    for line in sys.stdin:
        request = json.loads(line)
        if "id" not in request:
            continue
        outcome: object = {"error": {"code": -32601, "message": "Method not found"}}
        if request["method"] == "initialize":
            about = {"serverInfo": {"name": "tally", "version": "1"}, "capabilities": {"tools": {}}}
            outcome = {"result": {"protocolVersion": "2025-11-25", **about}}
        elif request["method"] == "tools/call":
            total += request["params"]["arguments"]["number"]
            outcome = {"result": {"content": [{"type": "text", "text": str(total)}]}}
        sys.stdout.write(json.dumps({"jsonrpc": "2.0", "id": request["id"], **outcome}) + "\n")  # type: ignore[dict-item]
        sys.stdout.flush()


if __name__ == "__main__":
    main()
