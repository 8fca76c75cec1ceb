"""An MCP server as a program without dependencies, which misbehaves when it is told to: `python -SI rogue_program.py MARK [FAULT]`.

`count` adds to the counter of the process, and `do` commits the fault that its argument names. With FAULT it misbehaves at once.
MARK is not read: it marks the command lines of this process, and of those that it starts.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

COUNT = {"name": "count", "inputSchema": {"type": "object", "properties": {"number": {"type": "integer"}}}}
DO = {"name": "do", "inputSchema": {"type": "object", "properties": {"fault": {"type": "string"}}}}
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)"
DAEMON = """
import os, sys
if os.fork(): os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
os.execv(sys.executable, [sys.executable, "-SIc", sys.argv[2], sys.argv[1]])
"""
NOTIFICATION = '{"jsonrpc": "2.0", "method": "notifications/message", "params": {}}\n'
SAMPLING = '{"jsonrpc": "2.0", "id": "s", "method": "sampling/createMessage", "params": {}}\n'
FLOODS: dict[str, tuple[Any, str]] = {
    "endless line": (sys.stdout, "x" * 65536),
    "endless lines": (sys.stdout, "Listening...\n" * 5000),
    "endless errors": (sys.stderr, "Traceback\n" * 5000),
    "endless notifications": (sys.stdout, NOTIFICATION * 500),
    "endless requests": (sys.stdout, SAMPLING),
}


def write(message: Any) -> None:
    """Write a message as a line."""
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def respond(request: dict[str, Any], text: str) -> None:
    """Return a text."""
    result = {"content": [{"type": "text", "text": text}]}
    write({"jsonrpc": "2.0", "id": request["id"], "result": result})


def start_stubborn(mark: str) -> None:
    """Start a child that ignores SIGTERM, one in a session of its own, and a daemon whose parent has ended."""
    stubborn = [sys.executable, "-SIc", STUBBORN, mark]
    subprocess.Popen(stubborn)
    subprocess.Popen(stubborn, start_new_session=True)
    subprocess.run([sys.executable, "-SIc", DAEMON, mark, STUBBORN], check=True)


def flood(stream: Any, piece: str) -> None:
    """Write without end."""
    while True:
        stream.write(piece)


def end(fault: str) -> None:
    """End this process, or stop."""
    match fault:
        case "exit":
            sys.stderr.write("out of luck\n")
            sys.exit(3)
        case "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "close stdout":
            os.close(1)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(1000)


def commit(request: dict[str, Any], fault: str, mark: str) -> None:
    """Commit a fault in a call."""
    if fault in FLOODS:
        flood(*FLOODS[fault])
    if fault.startswith("children"):
        start_stubborn(mark)
    match fault:
        case "exit" | "crash" | "close stdout" | "stop" | "hang" | "children, then hang":
            end(fault)
        case "children, then exit":
            sys.exit(0)
        case "100 MB":
            respond(request, "x" * 100_000_000)
        case "many blocks":
            block = {"type": "text", "text": ""}
            write({"jsonrpc": "2.0", "id": request["id"], "result": {"content": [block] * 100_000}})
        case "surrogate":
            respond(request, "\ud800 and \udfff")
        case _:
            respond(request, "started")


def main(mark: str, fault: str = "") -> None:
    """Serve until the end of the standard input."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    total = 0
    if fault == "silent":
        time.sleep(1000)
    if fault:
        commit({"id": 0}, fault, mark)
    for line in sys.stdin:
        request = json.loads(line)
        match request.get("method"):
            case "initialize":
                about = {"serverInfo": {"name": "rogue", "version": "1"}, "capabilities": {"tools": {}}}
                write({"jsonrpc": "2.0", "id": request["id"], "result": {"protocolVersion": "2025-11-25", **about}})
            case "tools/list":
                write({"jsonrpc": "2.0", "id": request["id"], "result": {"tools": [COUNT, DO]}})
            case "tools/call":
                given = request["params"]["arguments"]
                if request["params"]["name"] == "do":
                    commit(request, given["fault"], mark)
                else:
                    total += given["number"]
                    respond(request, str(total))
            case _ if "id" in request:
                write({"jsonrpc": "2.0", "id": request["id"], "error": {"code": -32601, "message": "Method not found"}})


if __name__ == "__main__":
    main(*sys.argv[1:])
