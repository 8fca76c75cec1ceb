"""`make up` and `make down`: run a server and a strict trainer in the background, to try things out on one machine.

A program inherits a locked descriptor of its pid file. The kernel releases the lock when the program ends, in whatever way.
So an unlocked pid file is stale, and a pid that another program has meanwhile is never signalled. Signals go to the process
group of the program, whose id is not reused while a member lives.
"""

# ruff: noqa: T201, S603 - a command-line program prints, and starts only `rollout`.

import argparse
import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

HOST = "127.0.0.1"
MODEL = "Qwen/Qwen3-8B"
TAIL_LINES = 30
POLL_SECONDS = 0.05


class Failed(Exception):
    """The command failed. The text says what was wrong and what to do."""


@dataclass(frozen=True, slots=True)
class Program:
    """A program to start: the arguments of `rollout`, its ports, and the URL that returns 200 once it is ready."""

    name: str
    arguments: Sequence[str]
    ports: Sequence[int]
    ready: str


class ProgramFiles:
    """Pid file and log file of a program."""

    def __init__(self, directory: Path, name: str) -> None:
        self.name = name
        self.pid_file = directory / f"{name}.pid"
        self.log = directory / f"{name}.log"

    @contextlib.contextmanager
    def claimed(self) -> Iterator[int | None]:
        """Yield a locked descriptor of the pid file, or None if a running program holds the lock."""
        descriptor = os.open(self.pid_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield None
            else:
                # Another process may have removed the file between open and flock, and a third may have created a new one.
                yield descriptor if self._is_named(descriptor) else None
        finally:
            os.close(descriptor)

    def _is_named(self, descriptor: int) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(descriptor), self.pid_file.stat())
        return False

    def alive(self) -> bool:
        """Return whether the program is running."""
        if not self.pid_file.exists():
            return False
        with self.claimed() as descriptor:
            return descriptor is None

    def start(self, program: Program) -> "subprocess.Popen[bytes]":
        """Start the program in a new process group. Raises Failed if it is running already."""
        with self.claimed() as descriptor, self.log.open("wb") as log:
            if descriptor is None:
                raise Failed(f"the {self.name} is already up")
            spawned = subprocess.Popen(
                [sys.executable, "-m", "rollout_server.cli", *program.arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=[descriptor],
            )
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{spawned.pid}\n".encode(), 0)
        return spawned

    def stop(self, patience: float) -> str:
        """Send SIGTERM, wait `patience` seconds, then send SIGKILL.

        Returns what happened, for the terminal. Raises Failed if the program still runs.
        """
        if not self.pid_file.exists():
            return "was not up"
        done = "was not up; its pid file was stale"
        for number, result in ((signal.SIGTERM, "stopped"), (signal.SIGKILL, f"killed after {patience:g} s")):
            if not self.alive():
                break
            done = result
            self._signal(number)
            until = time.monotonic() + patience
            while self.alive() and time.monotonic() < until:
                time.sleep(POLL_SECONDS)
        with self.claimed() as descriptor:
            if descriptor is None:
                raise Failed(f"the {self.name} does not end; {self.pid_file} contains its process id")
            self.pid_file.unlink()
        return done

    def _signal(self, number: signal.Signals) -> None:
        """Send a signal to the process group of the running program."""
        text = self.pid_file.read_text().strip()
        if not text.isdecimal() or int(text) < 2:
            raise Failed(f"{self.pid_file} contains no process id; stop `rollout` by hand and remove the file")
        with contextlib.suppress(ProcessLookupError):
            os.killpg(int(text), number)

    def tail(self) -> str:
        """Return the end of the log."""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join([f"--- {self.log} ends:", *lines[-TAIL_LINES:]])


def programs(options: argparse.Namespace) -> Sequence[Program]:
    """Return the server and the trainer, in their start order."""
    server, trainer = f"http://{HOST}:{options.http_port}", f"http://{HOST}:{options.trainer_port}"
    ports = ["--http-port", str(options.http_port), "--grpc-port", str(options.grpc_port)]
    return (
        Program(
            "server",
            ["serve", "--host", HOST, *ports, "--tokenizer", f"{MODEL}=toy"],
            [options.http_port, options.grpc_port],
            f"{server}/readyz",
        ),
        Program(
            "trainer",
            ["trainer", "--host", HOST, "--port", str(options.trainer_port), "--tools-from", server],
            [options.trainer_port],
            f"{trainer}/health",
        ),
    )


def up(options: argparse.Namespace) -> None:
    """Start both programs and wait until both are healthy. If that fails, stop both and raise Failed."""
    options.directory.mkdir(parents=True, exist_ok=True)
    (options.directory / ".gitignore").write_text("*\n")
    chosen = programs(options)
    all_files = [ProgramFiles(options.directory, program.name) for program in chosen]
    living = [files.name for files in all_files if files.alive()]
    if len(living) == len(all_files):
        raise Failed(f"{' and '.join(living)} are already up; `make down` stops them")
    if living:
        print(f"the {living[0]} runs alone; restarting both")
        down(options)
    check_ports(port for program in chosen for port in program.ports)
    try:
        started = [(files, program, files.start(program)) for files, program in zip(all_files, chosen, strict=True)]
        for files, program, spawned in started:
            wait(files, program, spawned, options.seconds)
    except BaseException:
        down(options)
        raise
    print(usage(options))


def check_ports(ports: Iterable[int]) -> None:
    """Raise Failed if another program uses one of the ports."""
    taken = []
    for port in ports:
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((HOST, port))
                listener.listen()
            except OSError:
                taken.append(port)
    if taken:
        names = ", ".join(map(str, taken))
        raise Failed(f"port {names} is taken; choose others: make up HTTP_PORT=... GRPC_PORT=... TRAINER_PORT=...")


def wait(files: ProgramFiles, program: Program, spawned: "subprocess.Popen[bytes]", seconds: float) -> None:
    """Wait until a program is ready. Raises Failed with the end of its log."""
    until = time.monotonic() + seconds
    while not is_ready(program.ready):
        if spawned.poll() is not None:
            raise Failed(f"the {files.name} ended with code {spawned.returncode}\n{files.tail()}")
        if time.monotonic() > until:
            raise Failed(f"the {files.name} was not healthy within {seconds:g} s\n{files.tail()}")
        time.sleep(POLL_SECONDS)


def is_ready(url: str) -> bool:
    """Return whether a URL of this machine returns 200."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=2) as reply:
            return bool(reply.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def down(options: argparse.Namespace) -> None:
    """Stop both programs; the server first, because its last calls go to the trainer. Raises Failed if one does not stop."""
    for name in ("server", "trainer"):
        print(f"{name} {ProgramFiles(options.directory, name).stop(options.patience)}")


def usage(options: argparse.Namespace) -> str:
    """Return the addresses and log files, and an example request."""
    server, trainer = f"http://{HOST}:{options.http_port}", f"http://{HOST}:{options.trainer_port}"
    question = "Please calculate 5 plus 3, and then multiply the result by 2."
    body = {
        "rollout_id": "first",
        "server_url": trainer,
        "messages": [{"role": "user", "content": question}],
        "sampling_params": {"temperature": 0.7, "max_tokens": 512},
        "tokenizer_name": MODEL,
    }
    return f"""server   {server} (/docs, /healthz, /readyz, /metrics), gRPC on {HOST}:{options.grpc_port}
trainer  {trainer} (/health, /verdicts)
logs     {options.directory}/server.log, {options.directory}/trainer.log

curl -s {server}/rollout -H 'Content-Type: application/json' -d '{json.dumps(body)}'

`make down` stops both."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("up", "down"))
    parser.add_argument("--http-port", type=int, default=9000)
    parser.add_argument("--grpc-port", type=int, default=50051)
    parser.add_argument("--trainer-port", type=int, default=9001)
    parser.add_argument("--directory", type=Path, default=Path(".run"), help="directory for logs and pid files")
    parser.add_argument("--seconds", type=float, default=60, help="seconds in which a program must become healthy")
    parser.add_argument(
        "--patience", type=float, default=60, help="seconds in which a program must stop before it is killed"
    )
    options = parser.parse_args(arguments)
    try:
        (up if options.command == "up" else down)(options)
    except (Failed, OSError) as error:
        print(f"make {options.command}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
