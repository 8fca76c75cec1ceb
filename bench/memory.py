"""`python -m bench.memory DIRECTORY...`: resident memory of a server, idle and with each tokenizer.

Each tokenizer is measured in a separate server, after the built-in one. Loading the built-in tokenizer imports the libraries,
so the difference is the tokenizer's own memory. To load a tokenizer, the benchmark starts a rollout with an unreachable
trainer: the server renders the prompt before it calls the trainer.
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

from bench.programs.child import ChildFailed

_START_SECONDS = 60.0
_STOP_SECONDS = 15.0
_POLL_SECONDS = 0.05
_TOY = "toy"
_MEASURED = "measured"
_UNREACHABLE = "http://127.0.0.1:1"
"""No trainer listens on port 1."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Resident memory in bytes: current and peak."""

    now: int
    peak: int


@dataclass(frozen=True, slots=True)
class Weights:
    """Memory of a server: idle, with the built-in tokenizer, and with another tokenizer in addition."""

    idle: Memory
    toy: Memory
    loaded: Memory


def main(
    directories: Annotated[
        list[Path], typer.Argument(help="Directories of tokenizers with chat templates.", exists=True, file_okay=False)
    ],
) -> None:
    """Print a Markdown table of a server's memory. Fails if a tokenizer cannot be loaded."""
    if not sys.platform.startswith("linux"):
        raise typer.Exit(_complain("needs Linux: memory is read from /proc"))
    try:
        found = {directory.resolve().name: weigh(directory.resolve()) for directory in directories}
    except (ChildFailed, OSError) as error:
        raise typer.Exit(_complain(str(error))) from None
    print("\n".join(table(found)))


def table(found: dict[str, Weights]) -> Iterator[str]:
    """Yield the lines of the Markdown table, in MiB. The rows without a given tokenizer show the maximum of all runs."""
    yield "| server | memory | peak while loading |"
    yield "|---|---|---|"
    idle = max(weights.idle.now for weights in found.values())
    toy = max(weights.toy.now for weights in found.values())
    yield f"| idle | {_mib(idle)} MiB | |"
    yield f"| the tokenizer libraries and the built-in tokenizer | + {_mib(toy - idle)} MiB | |"
    for name, weights in found.items():
        own, most = weights.loaded.now - weights.toy.now, weights.loaded.peak - weights.toy.now
        yield f"| {name} | + {_mib(own)} MiB | + {_mib(most)} MiB |"


def weigh(directory: Path) -> Weights:
    """Start a server that loads the built-in tokenizer and then that of a directory. Raises ChildFailed."""
    with _server(f"{_TOY}={_TOY},{_MEASURED}={directory}") as (pid, url):
        idle = _memory(pid)
        _load(url, _TOY)
        toy = _memory(pid)
        _load(url, _MEASURED)
        return Weights(idle, toy, _memory(pid))


def _load(url: str, tokenizer: str) -> None:
    """Run a rollout until it calls the trainer, which fails. Raises ChildFailed for any other error."""
    body = {
        "rollout_id": tokenizer,
        "server_url": _UNREACHABLE,
        "messages": [{"role": "user", "content": "Please calculate 5 plus 3."}],
        "sampling_params": {},
        "tokenizer_name": tokenizer,
    }
    request = urllib.request.Request(f"{url}/rollout", json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        outcome: dict[str, Any] = json.load(response)
    if outcome["extra_fields"].get("error_category") != "network_error":
        raise ChildFailed(f"{tokenizer}: {outcome['error_message']}")


@contextmanager
def _server(tokenizers: str) -> Iterator[tuple[int, str]]:
    """Run a server with these tokenizers. Yields its process id and its URL."""
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
    """Wait until the server's log shows its HTTP port, and return its URL. Raises ChildFailed."""
    until = time.monotonic() + _START_SECONDS
    while time.monotonic() < until and spawned.poll() is None:
        text = os.pread(log, 65536, 0).decode(errors="replace")
        if "HTTP on port " in text:
            return f"http://127.0.0.1:{int(text.rpartition('HTTP on port ')[2].split()[0])}"
        time.sleep(_POLL_SECONDS)
    raise ChildFailed(f"the server did not start: {os.pread(log, 4000, 0).decode(errors='replace')}")


def _memory(pid: int) -> Memory:
    """Return resident and peak memory: VmRSS and VmHWM, which /proc shows in units of 1024 bytes."""
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
