"""Directories that killed servers left behind: the next start removes them, and nothing else."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from rollout_server.edge.rpc.local_sockets import NAME, PREFIX, sweep

LONG_AGO = (1_000_000_000, 1_000_000_000)
SERVER = """
import asyncio, sys
from rollout_server.app import Server
from rollout_server.calculator import Calculator
from rollout_server.settings import load
async def main():
    async with Server([Calculator()], load(http_port=0, grpc_port=0, http=False, host="127.0.0.1")) as server:
        print(server.address, flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def left(at: Path, *, listens: bool = False, old: bool = True) -> socket.socket:
    """A directory with a socket in it."""
    at.mkdir()
    made = socket.socket(socket.AF_UNIX)
    made.bind(str(at / NAME))
    if listens:
        made.listen(1)
    if old:
        os.utime(at / NAME, LONG_AGO)
    return made


def test_only_what_a_dead_server_left_is_removed(temporary: Path) -> None:
    with left(temporary / f"{PREFIX}dead"), left(temporary / f"{PREFIX}new", old=False), left(temporary / "other"):
        pass
    with left(temporary / f"{PREFIX}more"):
        (temporary / f"{PREFIX}more" / "notes").write_text("mine", encoding="ascii")
    (temporary / f"{PREFIX}empty").mkdir()
    (temporary / f"{PREFIX}file").write_text("", encoding="ascii")
    (temporary / f"{PREFIX}link").symlink_to(temporary / "other")
    no_socket = temporary / f"{PREFIX}plain"
    no_socket.mkdir()
    (no_socket / NAME).write_text("", encoding="ascii")
    before = {path.name for path in temporary.iterdir()}
    with left(temporary / f"{PREFIX}alive", listens=True) as alive:
        sweep()
        assert {path.name for path in temporary.iterdir()} == before - {f"{PREFIX}dead"} | {f"{PREFIX}alive"}
        assert alive.fileno() > 0
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect(str(temporary / f"{PREFIX}alive" / NAME))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's directory")
def test_another_users_is_left_alone(temporary: Path) -> None:
    with left(temporary / f"{PREFIX}theirs"), left(temporary / f"{PREFIX}mixed"):
        pass
    os.chown(temporary / f"{PREFIX}theirs", 12345, 12345)
    os.chown(temporary / f"{PREFIX}mixed" / NAME, 12345, 12345)
    sweep()
    assert len(list(temporary.iterdir())) == 2


def test_the_start_of_a_server_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    def started() -> tuple[subprocess.Popen[str], Path]:
        process = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            env=os.environ | {"TMPDIR": str(tmp_path)},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        return process, Path(process.stdout.readline().strip().removeprefix("unix:"))

    first, path = started()
    first.send_signal(signal.SIGKILL)
    first.communicate()
    assert path.is_socket()
    os.utime(path, LONG_AGO)
    second, other = started()
    try:
        assert other.is_socket()
        assert [each.name for each in tmp_path.glob(f"{PREFIX}*")] == [other.parent.name]
    finally:
        second.kill()
        second.communicate()
