"""What runs in a process of tools: imports a module, then answers one call after the other until the server hangs up."""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import resource
import socket
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import cast

from rollout_server.core.message import JSON
from rollout_server.edge.tools.ipc_protocol import framed, read_blocking
from rollout_server.edge.tools.supervisor import supervise
from rollout_server.runtime.errors import ArgumentError, ToolError
from rollout_server.runtime.tools.protocols import ServerRunTool, Unwritable

_ALIAS = "rollout_tool_file"


def main(descriptor: int) -> None:
    """Serves the connection with this file descriptor, in a child of this process."""
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    supervise(connection)
    with suppress(EOFError, ConnectionError):
        opening = read_blocking(connection)
        try:
            module = _imported(str(opening["module"]), str(opening["file"]))
            _limit_memory(opening.get("memory_bytes"))
        except BaseException as error:  # the module of a tool is its author's code
            connection.sendall(framed(_failure(error)))
            return
        connection.sendall(framed({"ready": True}))
        own = os.getpid()
        while True:
            call = read_blocking(connection)
            _limit_cpu(opening.get("cpu_seconds"), last=bool(opening.get("fresh")))
            answer = _respond(module, call)
            if os.getpid() != own:  # the tool has forked, and its copy came back, too
                os._exit(0)
            connection.sendall(answer)


def _respond(module: ModuleType, call: Mapping[str, JSON]) -> bytes:
    own = {"call": call["call"]}
    try:
        tool = _tool(module, str(call["name"]))
        content = tool.run_here(cast("Mapping[str, JSON]", call["arguments"]))
    except BaseException as error:  # the boundary to a tool author's code
        return framed({**own, **_failure(error)})
    try:
        return framed({**own, "content": content})
    except ValueError as error:
        return framed({**own, "error": "unwritable", "text": f"The result of {tool.name} cannot be written: {error}"})


def _failure(error: BaseException) -> Mapping[str, str]:
    kinds = {Unwritable: "unwritable", ArgumentError: "argument", ToolError: "tool"}
    kind = next((word for each, word in kinds.items() if isinstance(error, each)), "other")
    name = type(error).__name__
    try:
        text = str(error)[: 1024 * 1024]
    except Exception:  # its __str__ is the author's, too
        text = ""
    if not isinstance(error, Exception):
        text = f"{name}: {text}" if text else name
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return {"error": kind, "text": text or name, "kind": name, "place": place}


def _tool(module: ModuleType, name: str) -> ServerRunTool:
    found: object = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if isinstance(found, ServerRunTool):
        return found
    for value in vars(module).values():  # the function may be one thing, and the tool made of it another
        if isinstance(value, ServerRunTool) and value.definition.name == name:
            return value
    raise LookupError(f"its module has no tool {name} at its top, where a process looks for the tool that it runs")


def _imported(name: str, file: str) -> ModuleType:
    """By its name, or else by its file: a program that was started as a script has no name that another process could use."""
    if name != "__main__":
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
    spec = importlib.util.spec_from_file_location(_ALIAS, Path(file))
    if spec is None or spec.loader is None:
        raise ImportError(f"module {name} can be imported neither by its name nor from {file}")
    module = sys.modules[_ALIAS] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _limit_memory(most: JSON) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if isinstance(most, int):
        taken = 0
        with suppress(OSError):  # only Linux tells
            taken = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + most, taken + most))


def _limit_cpu(seconds: JSON, *, last: bool) -> None:
    """The limit counts from the process's start, so it moves with each call; before the last one it becomes a hard one."""
    if isinstance(seconds, int | float):
        used = resource.getrusage(resource.RUSAGE_SELF)
        most = math.ceil(used.ru_utime + used.ru_stime + seconds)
        hard = most + 1 if last else resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (most, hard))
