"""`make up` and `make down`, with real programs on free ports."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.deploy.files import DEPLOY, ROOT
from tests.support.processes import environment


@dataclass(frozen=True)
class Local:
    """The script with its own ports and directory."""

    directory: Path
    http: int
    grpc: int
    trainer: int

    def run(self, command: str, *more: str, **env: str) -> subprocess.CompletedProcess[str]:
        ports = ("--http-port", self.http, "--grpc-port", self.grpc, "--trainer-port", self.trainer)
        return subprocess.run(
            [sys.executable, DEPLOY / "local.py", command, *map(str, ports), "--directory", self.directory, *more],
            cwd=self.directory.parent,
            env=environment(ROLLOUT_TOKENIZERS_OFFLINE="true", **env),
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )

    def pid(self, name: str) -> int:
        return int((self.directory / f"{name}.pid").read_text())

    def files(self) -> set[str]:
        return {path.name for path in self.directory.iterdir()} - {".gitignore"}


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listener in listeners:
            listener.bind(("127.0.0.1", 0))
        return [listener.getsockname()[1] for listener in listeners]


def is_free(port: int) -> bool:
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", port)) != 0


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Local]:
    found = Local(tmp_path / ".run", *free_ports(3))
    yield found
    found.run("down", "--patience", "10")


def test_up_a_rollout_up_again_a_kill_up_down_down_again(local: Local) -> None:
    up = local.run("up")
    assert up.returncode == 0, up.stderr
    assert f"http://127.0.0.1:{local.http}" in up.stdout
    assert f"gRPC on 127.0.0.1:{local.grpc}" in up.stdout
    answer = example(up.stdout)
    assert (answer["status"], answer["final_messages"][-1]["content"][-3:]) == ("COMPLETED", "16.")
    verdicts = httpx.get(f"http://127.0.0.1:{local.trainer}/verdicts", trust_env=False).json()
    assert "first" in str(verdicts)

    again = local.run("up")
    assert again.returncode == 1
    assert "server and trainer are already up" in again.stderr
    assert httpx.get(f"http://127.0.0.1:{local.http}/readyz", trust_env=False).status_code == 200

    os.kill(local.pid("server"), signal.SIGKILL)
    while not is_free(local.http):
        pass
    after_a_kill = local.run("up")
    assert after_a_kill.returncode == 0, after_a_kill.stderr
    assert "the trainer runs alone" in after_a_kill.stdout
    assert example(after_a_kill.stdout)["status"] == "COMPLETED"

    down = local.run("down")
    assert (down.returncode, down.stdout) == (0, "server stopped\ntrainer stopped\n")
    assert all(is_free(port) for port in (local.http, local.grpc, local.trainer))
    assert local.files() == {"server.log", "trainer.log"}
    once_more = local.run("down")
    assert (once_more.returncode, once_more.stdout) == (0, "server was not up\ntrainer was not up\n")


def example(printed: str) -> dict[str, object]:
    """Run the printed example command."""
    (line,) = [line for line in printed.splitlines() if line.startswith("curl ")]
    _, silent, url, _, header, _, body = shlex.split(line)
    assert silent == "-s"
    name, _, value = header.partition(": ")
    answer = httpx.post(url, content=body, headers={name: value}, timeout=60, trust_env=False)
    found: dict[str, object] = answer.json()
    return found


def test_a_pid_file_that_is_stale_kills_nobody(local: Local) -> None:
    local.directory.mkdir()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True) as other:
        (local.directory / "server.pid").write_text(f"{other.pid}\n")
        down = local.run("down")
        assert down.stdout == "server was not up; its pid file was stale\ntrainer was not up\n"
        assert other.poll() is None
        assert local.files() == set()
        other.kill()


def test_a_port_that_is_taken_is_named_and_nothing_is_left(local: Local) -> None:
    with socket.create_server(("127.0.0.1", local.trainer)):
        up = local.run("up")
    assert up.returncode == 1
    assert f"port {local.trainer} is taken" in up.stderr
    assert local.files() == set()
    assert is_free(local.http)


def test_a_server_that_does_not_start_shows_its_log_and_nothing_is_left(local: Local) -> None:
    up = local.run("up", ROLLOUT_TARGETS="http://not-a-rule")
    assert up.returncode == 1
    assert "the server ended with code 1" in up.stderr
    assert "ROLLOUT_TARGETS" in up.stderr.partition("server.log ends:")[2]
    assert local.files() == {"server.log", "trainer.log"}
    assert is_free(local.trainer)


def test_a_server_that_is_not_healthy_in_time_is_stopped(local: Local) -> None:
    up = local.run("up", "--seconds", "0")
    assert up.returncode == 1
    assert "was not healthy within 0 s" in up.stderr
    assert (local.directory / ".gitignore").read_text() == "*\n"
    assert local.run("down").stdout == "server was not up\ntrainer was not up\n"
    assert is_free(local.http)


@pytest.mark.parametrize(
    ("target", "wanted"), [("up", "up --http-port 9100 --grpc-port 50051 --trainer-port 9001"), ("down", "down")]
)
def test_make_passes_the_ports_on(target: str, wanted: str) -> None:
    done = subprocess.run(
        ["make", "--no-print-directory", "-n", "-o", "setup", target, "HTTP_PORT=9100"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert re.search(rf"deploy/local\.py {re.escape(wanted)}$", done.stdout.strip()), done.stdout + done.stderr
