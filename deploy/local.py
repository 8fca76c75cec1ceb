"""`make up` and `make down`: a server and a strict trainer in the background, for trying things out on one machine.

A program holds a lock on its pid file for as long as it lives, because it inherits the locked file; the kernel lets go of it
however the program ends. So the lock says whether a pid file is stale, and a number that another program got meanwhile is never
killed: what is signalled is the process group that the program leads, whose number is not given away while a member lives.
"""

# ruff: noqa: T201, S603 - it talks to a terminal, and starts nothing but `rollout`.

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
    """The text says what went wrong and what to do."""


@dataclass(frozen=True, slots=True)
class Program:
    """One that is started and stopped: its arguments to `rollout`, its ports, and the URL that answers 200 once it is ready."""

    name: str
    arguments: Sequence[str]
    ports: Sequence[int]
    ready: str


class Place:
    """The pid file and the log of a program in a directory."""

    def __init__(self, directory: Path, name: str) -> None:
        self.name = name
        self.pid_file = directory / f"{name}.pid"
        self.log = directory / f"{name}.log"

    @contextlib.contextmanager
    def claimed(self) -> Iterator[int | None]:
        """A locked descriptor of the pid file, or None where a program that lives has it."""
        descriptor = os.open(self.pid_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield None
            else:
                # Whoever removed the file since it was opened has let go of its name: somebody else may have a new one.
                yield descriptor if self._is_named(descriptor) else None
        finally:
            os.close(descriptor)

    def _is_named(self, descriptor: int) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(descriptor), self.pid_file.stat())
        return False

    def alive(self) -> bool:
        """Whether a program that was started here lives."""
        if not self.pid_file.exists():
            return False
        with self.claimed() as descriptor:
            return descriptor is None

    def start(self, program: Program) -> "subprocess.Popen[bytes]":
        """Starts it in a process group of its own. Raises Failed where one lives already."""
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
        """Asks it to stop, waits `patience` seconds, then kills it.

        Returns what became of it. Raises Failed for one that lives on.
        """
        if not self.pid_file.exists():
            return "was not up"
        done = "was not up; its pid file was stale"
        for number, words in ((signal.SIGTERM, "stopped"), (signal.SIGKILL, f"killed after {patience:g} s")):
            if not self.alive():
                break
            done = words
            self._signal(number)
            until = time.monotonic() + patience
            while self.alive() and time.monotonic() < until:
                time.sleep(POLL_SECONDS)
        with self.claimed() as descriptor:
            if descriptor is None:
                raise Failed(f"the {self.name} does not end; {self.pid_file} has its process")
            self.pid_file.unlink()
        return done

    def _signal(self, number: signal.Signals) -> None:
        """To the group of the program that lives."""
        text = self.pid_file.read_text().strip()
        if not text.isdecimal() or int(text) < 2:
            raise Failed(f"{self.pid_file} holds no process; end `rollout` by hand and remove the file")
        with contextlib.suppress(ProcessLookupError):
            os.killpg(int(text), number)

    def tail(self) -> str:
        """The end of its log."""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join([f"--- {self.log} ends:", *lines[-TAIL_LINES:]])


def programs(options: argparse.Namespace) -> Sequence[Program]:
    """The server and the trainer, in the order in which they start."""
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
    """Starts both and waits until both are healthy, else leaves neither behind. Raises Failed."""
    options.directory.mkdir(parents=True, exist_ok=True)
    (options.directory / ".gitignore").write_text("*\n")
    chosen = programs(options)
    places = [Place(options.directory, program.name) for program in chosen]
    living = [place.name for place in places if place.alive()]
    if len(living) == len(places):
        raise Failed(f"{' and '.join(living)} are already up; `make down` stops them")
    if living:
        print(f"the {living[0]} runs alone; it is started again with the other one")
        down(options)
    check_ports(port for program in chosen for port in program.ports)
    try:
        started = [(place, program, place.start(program)) for place, program in zip(places, chosen, strict=True)]
        for place, program, spawned in started:
            wait(place, program, spawned, options.seconds)
    except BaseException:
        down(options)
        raise
    print(told(options))


def check_ports(ports: Iterable[int]) -> None:
    """Raises Failed for a port that somebody else has."""
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


def wait(place: Place, program: Program, spawned: "subprocess.Popen[bytes]", seconds: float) -> None:
    """Waits until a program is ready. Raises Failed with the end of its log."""
    until = time.monotonic() + seconds
    while not is_ready(program.ready):
        if spawned.poll() is not None:
            raise Failed(f"the {place.name} ended with code {spawned.returncode}\n{place.tail()}")
        if time.monotonic() > until:
            raise Failed(f"the {place.name} was not healthy within {seconds:g} s\n{place.tail()}")
        time.sleep(POLL_SECONDS)


def is_ready(url: str) -> bool:
    """Whether a URL of this machine answers 200."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=2) as reply:
            return bool(reply.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def down(options: argparse.Namespace) -> None:
    """Stops both, the server first: its last calls go to the trainer. Raises Failed for one that cannot be stopped."""
    for name in ("server", "trainer"):
        print(f"{name} {Place(options.directory, name).stop(options.patience)}")


def told(options: argparse.Namespace) -> str:
    """What is where, and how to use it."""
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
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("up", "down"))
    parser.add_argument("--http-port", type=int, default=9000)
    parser.add_argument("--grpc-port", type=int, default=50051)
    parser.add_argument("--trainer-port", type=int, default=9001)
    parser.add_argument("--directory", type=Path, default=Path(".run"), help="for logs and pid files")
    parser.add_argument("--seconds", type=float, default=60, help="until a program has to be healthy")
    parser.add_argument("--patience", type=float, default=60, help="seconds to stop in, before a program is killed")
    options = parser.parse_args(arguments)
    try:
        (up if options.command == "up" else down)(options)
    except (Failed, OSError) as error:
        print(f"make {options.command}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
