"""Main program of a tool process: imports a module, then runs one call after another until the server disconnects."""

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
from rollout_server.runtime.aio.source_location import raised_at
from rollout_server.runtime.errors import AgentMistake, ArgumentError, ToolError, cause_of
from rollout_server.runtime.tools.process_context import ProcessContext
from rollout_server.runtime.tools.protocols import ServerRunTool, ToolContext, Unwritable

_ALIAS = "rollout_tool_file"


def main(descriptor: int) -> None:
    """Serve the connection with this file descriptor, in a child of this process."""
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
            response = _respond(module, call)
            if os.getpid() != own:  # the tool forked, and this is the copy: only the original may respond
                os._exit(0)
            connection.sendall(response)


def _respond(module: ModuleType, call: Mapping[str, JSON]) -> bytes:
    own = {"call": call["call"]}
    try:
        tool = _tool(module, str(call["name"]))
        text = str(call["context_json"])
        context = cast("ToolContext", ProcessContext.parse(text)) if text else None
        content = tool.run_here(cast("Mapping[str, JSON]", call["arguments"]), context)
    except AgentMistake as error:  # such as modifying the copy of the state
        return framed({**own, **_failure(error), "text": f"tool {tool.name}: {error}"})
    except BaseException as error:  # the boundary to a tool author's code
        return framed({**own, **_failure(cause_of(error))})
    try:
        return framed({**own, "content": content})
    except ValueError as error:
        return framed({**own, "error": "unwritable", "text": f"The result of {tool.name} cannot be sent: {error}"})


def _failure(error: BaseException) -> Mapping[str, str]:
    kinds = {Unwritable: "unwritable", ArgumentError: "argument", ToolError: "tool"}
    kind = next((word for each, word in kinds.items() if isinstance(error, each)), "other")
    name = type(error).__name__
    try:
        text = str(error)[: 1024 * 1024]
    except Exception:  # `__str__` is the author's code, too
        text = ""
    if not isinstance(error, Exception):
        text = f"{name}: {text}" if text else name
    frames = traceback.extract_tb(error.__traceback__)
    innermost = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    place = raised_at(error).removeprefix(" at ") or innermost
    return {"error": kind, "text": text or name, "kind": name, "place": place}


def _tool(module: ModuleType, name: str) -> ServerRunTool:
    found: object = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if isinstance(found, ServerRunTool):
        return found
    for value in vars(module).values():  # the tool may have another name in the module than its function
        if isinstance(value, ServerRunTool) and value.definition.name == name:
            return value
    raise LookupError(f"its module has no tool {name} at the top level, where a tool process looks for it")


def _imported(name: str, file: str) -> ModuleType:
    """Import a module by its name, or by its file: a script's module name `__main__` means another module in this process."""
    if name != "__main__":
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            # Use the file only if the module itself was not found. A missing import inside it is the author's error.
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
        with suppress(OSError):  # /proc exists only on Linux
            taken = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + most, taken + most))


def _limit_cpu(seconds: JSON, *, last: bool) -> None:
    """Set the CPU limit of a call.

    The limit counts from the start of the process, so every call raises the soft limit. The hard limit cannot be raised again,
    so it is set only for the last call of the process.
    """
    if isinstance(seconds, int | float):
        used = resource.getrusage(resource.RUSAGE_SELF)
        most = math.ceil(used.ru_utime + used.ru_stime + seconds)
        hard = most + 1 if last else resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (most, hard))
