"""Tools that processes import."""

from __future__ import annotations

import asyncio
import ctypes
import os
import subprocess
import sys
import threading
from pathlib import Path

from rollout_server import Run, ToolContext, ToolError, tool
from rollout_server.tool import Image

COUNT = [0]


@tool(process=True)
def add(a: int, b: int) -> int:
    """Add two numbers."""
    print("noise", flush=True)  # noqa: T201 - authors' tools print
    sys.stderr.write("more noise")
    return a + b


@tool(process=True)
async def add_later(a: int, b: int) -> int:
    """Add two numbers."""
    await asyncio.sleep(0)
    return a + b


@tool(process=True)
def where() -> list[int]:
    """The process, and how often it was called."""
    COUNT[0] += 1
    return [os.getpid(), COUNT[0]]


@tool(process=True)
def double() -> str:
    """Comes back twice."""
    return f"child of {os.getppid()}" if os.fork() == 0 else "parent"


@tool(process="fresh")
def fresh() -> list[int]:
    """The same, each time in another process."""
    COUNT[0] += 1
    return [os.getpid(), COUNT[0]]


@tool(process=True)
def go_wrong(how: str) -> object:
    """Ends in many ways."""
    match how:
        case "crash":
            ctypes.string_at(0)
        case "exit":
            os._exit(3)
        case "system exit":
            sys.exit(4)
        case "tool error":
            raise ToolError("closed today")
        case "group":
            raise ExceptionGroup("unhandled errors in a TaskGroup", [ToolError("closed today")])
        case "unwritable":
            return object()
        case "too large":
            return "é" * 10_000_000
        case "junk":
            for number in range(3, 64):
                try:
                    os.write(number, b"\0\0\0\2{]")
                except OSError:
                    continue
            threading.Event().wait()
    return {}[how]


@tool(process=True)
def show() -> object:
    """A text and an image."""
    return ["A dot", Image(b"abc")]


@tool(process=True, environment=("SOMETHING",))
def environment() -> list[str]:
    """The names of its variables."""
    return sorted(os.environ)


@tool(process=True, timeout=1)
def spawn_and_spin(marks: str) -> None:
    """Starts a child, leaves both numbers in a file, and never returns."""
    child = subprocess.Popen(["sleep", "1000"])
    Path(marks).write_text(f"{os.getpid()} {child.pid}", encoding="ascii")
    while True:
        pass


@tool(process=True)
def spin(marks: str) -> None:
    """The same without a time limit."""
    Path(marks).write_text(str(os.getpid()), encoding="ascii")
    while True:
        pass


@tool(process=True, memory_bytes=100_000_000)
def eat(size: int) -> int:
    """Takes memory."""
    return len(bytes(size))


@tool(process=True, cpu_seconds=1)
def burn() -> None:
    """Takes time of the processor."""
    while True:
        pass


@tool(process=True, idempotent=True, retries=1)
def crash_until(marks: str, times: int) -> int:
    """Crashes so many times."""
    path = Path(marks)
    tried = len(path.read_text(encoding="ascii")) if path.exists() else 0
    path.write_text("x" * (tried + 1), encoding="ascii")
    if tried < times:
        os._exit(1)
    return tried


def undecorated(a: int) -> int:
    """Made a tool under another name."""
    return a


renamed = tool(process=True)(undecorated)


def nowhere(a: int) -> int:
    """Made a tool in another place."""
    return a


@tool(process=True)
def report(context: ToolContext) -> object:
    """All that a process has of its rollout."""
    return [context.uid, context.rollout_id, context.metadata, context.state, context.cancelled]


@tool(process=True)
async def misuse(how: str, run: Run) -> object:
    """Does what a process cannot."""
    match how:
        case "sample":
            return await run.sample()
        case "state":
            run.state["seen"] = True
        case "inside":
            run.state["basket"].append("fig")
        case "metadata":
            run.metadata["wanted"].clear()  # type: ignore[union-attr]
    raise getattr(run, how)


@tool(process=True)
def without(a: int) -> int:
    """Takes no context, so any state will do."""
    return a


@tool(process=True)
def basket(context: ToolContext) -> str:
    """What the rollout's basket has."""
    return str(context.state["basket"])
