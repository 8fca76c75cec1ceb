"""Socket directories of killed servers: the next start removes them, and nothing else."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from rollout_server.edge.rpc.sockets import SOCKET_NAME, SOCKET_PREFIX, remove_stale_sockets, socket_directory

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
    made.bind(str(at / SOCKET_NAME))
    if listens:
        made.listen(1)
    if old:
        os.utime(at / SOCKET_NAME, LONG_AGO)
    return made


def test_only_what_a_dead_server_left_is_removed(temporary: Path) -> None:
    with (
        left(temporary / f"{SOCKET_PREFIX}dead"),
        left(temporary / f"{SOCKET_PREFIX}new", old=False),
        left(temporary / "other"),
    ):
        pass
    with left(temporary / f"{SOCKET_PREFIX}more"):
        (temporary / f"{SOCKET_PREFIX}more" / "notes").write_text("mine", encoding="ascii")
    (temporary / f"{SOCKET_PREFIX}empty").mkdir()
    (temporary / f"{SOCKET_PREFIX}file").write_text("", encoding="ascii")
    (temporary / f"{SOCKET_PREFIX}link").symlink_to(temporary / "other")
    no_socket = temporary / f"{SOCKET_PREFIX}plain"
    no_socket.mkdir()
    (no_socket / SOCKET_NAME).write_text("", encoding="ascii")
    before = {path.name for path in temporary.iterdir()}
    with left(temporary / f"{SOCKET_PREFIX}alive", listens=True) as alive:
        remove_stale_sockets()
        assert {path.name for path in temporary.iterdir()} == before - {f"{SOCKET_PREFIX}dead"} | {
            f"{SOCKET_PREFIX}alive"
        }
        assert alive.fileno() > 0
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect(str(temporary / f"{SOCKET_PREFIX}alive" / SOCKET_NAME))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's directory")
def test_another_users_is_left_alone(temporary: Path) -> None:
    with left(temporary / f"{SOCKET_PREFIX}theirs"), left(temporary / f"{SOCKET_PREFIX}mixed"):
        pass
    os.chown(temporary / f"{SOCKET_PREFIX}theirs", 12345, 12345)
    os.chown(temporary / f"{SOCKET_PREFIX}mixed" / SOCKET_NAME, 12345, 12345)
    remove_stale_sockets()
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
        assert [each.name for each in tmp_path.glob(f"{SOCKET_PREFIX}*")] == [other.parent.name]
    finally:
        second.kill()
        second.communicate()


def test_a_directory_without_room_for_the_names_of_sockets_is_refused(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = 107 - len("/rollout-12345678/worker-999.questions")
    monkeypatch.setattr(tempfile, "tempdir", f"{temporary}/x".ljust(longest + 1, "x"))
    os.mkdir(tempfile.gettempdir())
    with pytest.raises(OSError, match="let TMPDIR name another directory"), socket_directory():
        pass
