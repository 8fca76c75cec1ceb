"""`python -m bench.memory DIRECTORY...`: what a server holds in memory, idle and with each tokenizer.

Each tokenizer is loaded by a server of its own, after the built-in one: that one brings the libraries, which are paid once, so
the difference is the tokenizer's own. A rollout loads it, whose trainer is not there: it is asked only after the rendering.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.child import ChildFailed

_START_SECONDS = 60.0
_STOP_SECONDS = 15.0
_POLL_SECONDS = 0.05
_TOY = "toy"
_MEASURED = "measured"
_NOBODY = "http://127.0.0.1:1"
"""No trainer listens on port 1."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of resident memory: now, and at most until now."""

    now: int
    peak: int


@dataclass(frozen=True, slots=True)
class Weights:
    """What a server held: idle, with the built-in tokenizer, and then with another one."""

    idle: Memory
    toy: Memory
    loaded: Memory


def main(
    directories: Annotated[
        list[Path], typer.Argument(help="Directories of tokenizers with chat templates.", exists=True, file_okay=False)
    ],
) -> None:
    """Print a table in Markdown. Fails where a tokenizer cannot be loaded."""
    if not sys.platform.startswith("linux"):
        raise typer.Exit(_complain("memory is read from /proc, which only Linux has"))
    try:
        found = {directory.resolve().name: weigh(directory.resolve()) for directory in directories}
    except (ChildFailed, OSError) as error:
        raise typer.Exit(_complain(str(error))) from None
    print("\n".join(table(found)))


def table(found: dict[str, Weights]) -> Iterator[str]:
    """Lines of Markdown, in MiB; what the server holds without a tokenizer of yours is the largest of all runs."""
    yield "| server | holds | at most, while loading |"
    yield "|---|---|---|"
    idle = max(weights.idle.now for weights in found.values())
    toy = max(weights.toy.now for weights in found.values())
    yield f"| idle | {_mib(idle)} MiB | |"
    yield f"| the tokenizer libraries and the built-in tokenizer | + {_mib(toy - idle)} MiB | |"
    for name, weights in found.items():
        own, most = weights.loaded.now - weights.toy.now, weights.loaded.peak - weights.toy.now
        yield f"| {name} | + {_mib(own)} MiB | + {_mib(most)} MiB |"


def weigh(directory: Path) -> Weights:
    """Starts a server and has it load the built-in tokenizer, then that of a directory. Raises ChildFailed."""
    with _server(f"{_TOY}={_TOY},{_MEASURED}={directory}") as (pid, url):
        idle = _memory(pid)
        _load(url, _TOY)
        toy = _memory(pid)
        _load(url, _MEASURED)
        return Weights(idle, toy, _memory(pid))


def _load(url: str, tokenizer: str) -> None:
    """Runs a rollout up to its first call of a trainer. Raises ChildFailed where it did not come that far."""
    body = {
        "rollout_id": tokenizer,
        "server_url": _NOBODY,
        "messages": [{"role": "user", "content": "Please calculate 5 plus 3."}],
        "sampling_params": {},
        "tokenizer_name": tokenizer,
    }
    request = urllib.request.Request(f"{url}/rollout", json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as reply:
        answer: dict[str, Any] = json.load(reply)
    if answer["extra_fields"].get("error_category") != "network_error":
        raise ChildFailed(f"{tokenizer}: {answer['error_message']}")


@contextmanager
def _server(tokenizers: str) -> Iterator[tuple[int, str]]:
    """A server with these tokenizers: its process id and its URL."""
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryFile() as log:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ROLLOUT_")}
        environment |= {"ROLLOUT_TOKENIZERS": tokenizers, "ROLLOUT_TOKENIZERS_OFFLINE": "true"}
        spawned = subprocess.Popen(_command(), cwd=directory, env=environment, stderr=log)
        try:
            yield spawned.pid, _ready(spawned, log.fileno())
        finally:
            spawned.terminate()
            try:
                spawned.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                spawned.kill()
                spawned.wait()


def _command() -> Sequence[str]:
    command = [sys.executable, "-m", "rollout_server.cli", "serve", "--host", "127.0.0.1"]
    return [*command, "--http-port", "0", "--grpc-port", "0"]


def _ready(spawned: subprocess.Popen[bytes], log: int) -> str:
    """The server's URL, read off its log. Raises ChildFailed."""
    until = time.monotonic() + _START_SECONDS
    while time.monotonic() < until and spawned.poll() is None:
        said = os.pread(log, 65536, 0).decode(errors="replace")
        if "HTTP on port " in said:
            return f"http://127.0.0.1:{int(said.rpartition('HTTP on port ')[2].split()[0])}"
        time.sleep(_POLL_SECONDS)
    raise ChildFailed(f"the server did not start: {os.pread(log, 4000, 0).decode(errors='replace')}")


def _memory(pid: int) -> Memory:
    """What Linux says: VmRSS and VmHWM, in units of 1024 bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return Memory(*(1024 * int(fields[name].split()[0]) for name in ("VmRSS", "VmHWM")))


def _mib(size: int) -> int:
    return round(size / 2**20)


def _complain(text: str) -> int:
    print(f"bench.memory: {text}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
