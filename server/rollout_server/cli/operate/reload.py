"""`rollout serve --reload`: a server that is started anew when its agents' files change.

The server is a process of its own, so that what an author's modules leave behind ends with it, and a file that cannot be
imported costs a server and not the watching.
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
_QUIET_MS = 100
"""Changes within this time are one: editors write a file in several goes."""


def serve_anew(references: Sequence[str]) -> None:
    """Serves what the command line says, without `--reload`, until SIGTERM or Ctrl-C; again whenever a file changes.

    Raises `AuthorError` for references that are none, RuntimeError where nothing watches files.
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
                    typer.echo(f"{names} changed: serving anew", err=True)
                    _stop(child)
                    child = _start(command)
        finally:
            _stop(child)


def _start(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """In a process group of its own: Ctrl-C reaches this process alone, which ends the other in good order."""
    return subprocess.Popen(command, process_group=0)  # noqa: S603 - our own command line


def _stop(child: subprocess.Popen[bytes]) -> None:
    """Asks once, which lets rollouts finish; then again, which ends them; then kills."""
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
    """An event that SIGTERM and Ctrl-C set."""
    stopped = threading.Event()

    def came(_number: int, _frame: FrameType | None) -> None:
        stopped.set()

    before = {number: signal.signal(number, came) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _outermost(folders: set[Path]) -> list[Path]:
    """Those that are not within another one: each file is watched once."""
    return sorted(
        each for each in folders if not any(each != other and each.is_relative_to(other) for other in folders)
    )
