"""`rollout serve --reload`: restart the server when the agents' files change.

The server runs in a subprocess. A restart therefore discards the state of the author's modules, and a file that cannot be imported
ends the server but not the watcher.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

import typer

_RELOAD = "--reload"
_HURRY_SECONDS, _STOP_SECONDS = 1.0, 5.0
"""Waiting times after the first and the second SIGTERM."""
_QUIET_MS = 100
"""Debounce: changes within this time cause one restart, because editors write a file in several steps."""


def serve_anew(references: Sequence[str]) -> None:
    """Run the current command line without `--reload`, and restart it at each file change, until SIGTERM or Ctrl-C.

    Raises `AuthorError` for a malformed reference, RuntimeError if the package `watchfiles` is missing.
    """
    from rollout_server.authoring.agent_loader import Reference

    try:
        from watchfiles import PythonFilter, watch
    except ModuleNotFoundError:
        raise RuntimeError("--reload needs the package watchfiles: pip install watchfiles") from None
    folders = _outermost({Reference.parse(text).folder for text in references} or {Path.cwd()})
    command = [sys.executable, "-m", "rollout_server.cli", *(word for word in sys.argv[1:] if word != _RELOAD)]
    typer.echo(f"watching {', '.join(map(str, folders))}", err=True)
    with _stop_event() as stopped:
        child = _start(command)
        try:
            for changes in watch(
                *folders, watch_filter=PythonFilter(), debounce=_QUIET_MS, stop_event=stopped, rust_timeout=200,
                raise_interrupt=False, yield_on_timeout=True,
            ):  # fmt: skip
                if changes:
                    names = ", ".join(sorted({Path(path).name for _, path in changes})[:5])
                    typer.echo(f"{names} changed, restarting the server", err=True)
                    _stop(child)
                    child = _start(command)
        finally:
            _stop(child)


def _start(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start the server in a new process group, so that Ctrl-C reaches only this process, which then stops the server."""
    return subprocess.Popen(command, process_group=0)  # noqa: S603 - our own command line


def _stop(child: subprocess.Popen[bytes]) -> None:
    """Stop the server with two SIGTERMs, then SIGKILL.

    The first SIGTERM starts the drain, in which rollouts may finish. The second ends the drain.
    """
    for seconds in (_HURRY_SECONDS, _STOP_SECONDS):
        if child.poll() is not None:
            return
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(seconds)
    if child.poll() is None:
        child.kill()
        child.wait()


@contextlib.contextmanager
def _stop_event() -> Iterator[threading.Event]:
    """Yield an event that SIGTERM and Ctrl-C set."""
    stopped = threading.Event()

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        stopped.set()

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _outermost(folders: set[Path]) -> list[Path]:
    """Return the folders that are not inside another one, so that each file is watched once."""
    return sorted(
        each for each in folders if not any(each != other and each.is_relative_to(other) for other in folders)
    )
