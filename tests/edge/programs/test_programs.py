"""Programs in processes: output, exit codes, environment, and that nothing of them remains."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from rollout_server.core.outcome import FailureClass
from rollout_server.edge.programs.runner import ProgramOutput, ProgramRunner
from rollout_server.runtime.errors import RolloutFailed
from rollout_server.runtime.programs import NoPrograms, ProgramStart

from tests.support.examples import processes_in

SHELL = ("/bin/sh", "-c")
DAEMON = """
import os, signal, sys, time
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.closerange(0, 1000)
        open("started", "w").close()
        time.sleep(1000)
    os._exit(0)
while not os.path.exists("started"):
    time.sleep(0.01)
"""
"""Leaves a process in a session of its own, without its output, that ignores SIGTERM."""


SWARM = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.closerange(3, 1000)
ends = time.time() + 120
for _ in range(20):
    if os.fork() == 0:
        os.setsid()
        while time.time() < ends:
            if os.fork():
                os._exit(0)
        os._exit(0)
open("started", "w").close()
time.sleep(120)
"""
"""Sessions in each of which a process forks and exits all the time, so that its number changes faster than it can be read."""


@pytest.fixture
async def runner(tmp_path: Path) -> AsyncIterator[ProgramRunner]:
    """A runner of which nothing is left at the end of each test."""
    runner = ProgramRunner()
    yield runner
    await runner.close()
    assert (runner.running, list(processes_in(tmp_path))) == (0, [])


async def output_of(runner: ProgramRunner, start: ProgramStart) -> tuple[int, str, str]:
    async with runner.start(start) as program:
        code = await program.wait()
    return code, program.stdout, program.stderr


async def until_there(path: Path) -> None:
    while not path.exists():  # noqa: ASYNC110, ASYNC240 - another process creates it
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("echo out; echo err >&2", (0, "out\n", "err\n")),
        ("exit 3", (3, "", "")),
        ("kill -KILL $$", (-signal.SIGKILL, "", "")),
        ("kill -TERM $$", (-signal.SIGTERM, "", "")),
        ("yes | head -n 1", (0, "y\n", "")),  # SIGPIPE ends `yes` without an error
        ("ulimit -c", (0, "0\n", "")),
        ("kill -STOP $PPID; echo on", (0, "on\n", "")),  # its supervisor
    ],
)
async def test_ends(runner: ProgramRunner, tmp_path: Path, script: str, expected: tuple[int, str, str]) -> None:
    start = ProgramStart((*SHELL, script), tmp_path)
    if "STOP" not in script:
        assert await output_of(runner, start) == expected
        return
    async with runner.start(start) as program:
        while program.stdout != "on\n":  # noqa: ASYNC110 - no event reports it
            await asyncio.sleep(0.01)


async def test_stdin_and_directory(runner: ProgramRunner, tmp_path: Path) -> None:
    text = "é" * 300_000
    code, out, _ = await output_of(runner, ProgramStart((*SHELL, "pwd; wc -c"), tmp_path, stdin=text))
    assert (code, out.split()) == (0, [str(tmp_path), "600000"])
    # A program that does not read its input.
    assert (await output_of(runner, ProgramStart(("true",), tmp_path, stdin=text)))[0] == 0
    assert await output_of(runner, ProgramStart(("cat",), tmp_path)) == (0, "", "")


async def test_it_inherits_no_secrets(runner: ProgramRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ROLLOUT_API_KEY", "AWS_SECRET_ACCESS_KEY", "PYTHONPATH", "OPENAI_API_KEY"):
        monkeypatch.setenv(name, "hunter2")
    start = ProgramStart(("env",), tmp_path, {"GIVEN": "yes", "HOME": "/nowhere"})
    _, out, _ = await output_of(runner, start)
    variables = dict(line.split("=", 1) for line in out.splitlines())
    assert "hunter2" not in out
    assert (variables["GIVEN"], variables["HOME"], variables["PATH"]) == ("yes", "/nowhere", os.environ["PATH"])
    assert "yes" not in repr(start)


async def test_it_cannot_read_the_memory_of_the_server(runner: ProgramRunner, tmp_path: Path) -> None:
    """A process that is not dumpable belongs to root in /proc, so that others of its user cannot read its environment."""
    await output_of(runner, ProgramStart(("true",), tmp_path))
    assert ctypes.CDLL(None).prctl(3, 0, 0, 0, 0) == 0  # PR_GET_DUMPABLE


async def test_a_flood_is_bounded(runner: ProgramRunner, tmp_path: Path) -> None:
    script = "echo first; head -c 20000000 /dev/zero | tr '\\0' x; echo; echo last"
    code, out, _ = await output_of(runner, ProgramStart((*SHELL, script), tmp_path))
    assert (code, out[:6], out[-5:]) == (0, "first\n", "last\n")
    assert len(out) < 140_000
    assert "bytes left out" in out


async def test_an_endless_flood_ends_with_the_context(runner: ProgramRunner, tmp_path: Path) -> None:
    async with runner.start(ProgramStart((*SHELL, "trap '' TERM; yes; yes >&2"), tmp_path)) as program:
        while "left out" not in program.stdout:  # noqa: ASYNC110 - no event reports it
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (
            ("no-such-program",),
            "the program 'no-such-program' could not be executed: [Errno 2] No such file or directory",
        ),
        (("/etc/passwd",), "could not be executed: [Errno 13] Permission denied"),
        (("echo", "x" * 200_000), "could not be started: Argument list too long"),
        (("echo", "a\0b"), "could not be started: embedded null byte"),
    ],
)
async def test_it_cannot_start(runner: ProgramRunner, tmp_path: Path, command: tuple[str, ...], reason: str) -> None:
    with pytest.raises(RolloutFailed) as raised:
        await output_of(runner, ProgramStart(command, tmp_path))
    assert reason in raised.value.failure.message
    assert raised.value.failure.failure_class is FailureClass.ENVIRONMENT


async def test_no_directory(runner: ProgramRunner, tmp_path: Path) -> None:
    with pytest.raises(RolloutFailed, match="could not be started: No such file"):
        await output_of(runner, ProgramStart(("true",), tmp_path / "missing"))
    with pytest.raises(RolloutFailed, match="runs no programs"):
        NoPrograms().start(ProgramStart(("true",), tmp_path))


async def test_what_it_leaves_behind_dies_with_it(runner: ProgramRunner, tmp_path: Path) -> None:
    code, _, _ = await output_of(runner, ProgramStart((sys.executable, "-ISc", DAEMON), tmp_path))
    assert (code, (tmp_path / "started").exists()) == (0, True)
    assert list(processes_in(tmp_path)) == []


async def test_processes_that_fork_all_the_time_end_with_the_context(runner: ProgramRunner, tmp_path: Path) -> None:
    async with runner.start(ProgramStart((sys.executable, "-ISc", SWARM), tmp_path)):
        await until_there(tmp_path / "started")


@pytest.mark.parametrize(
    "script",
    [
        "touch started; sleep 1000",
        "trap '' TERM; touch started; while :; do sleep 1000; done",
        "(trap '' TERM; touch started; sleep 1000) & wait",
        f"setsid {sys.executable} -ISc '{DAEMON}' & sleep 1000",
    ],
)
async def test_a_cancelled_program_leaves_nothing(runner: ProgramRunner, tmp_path: Path, script: str) -> None:
    task = asyncio.create_task(output_of(runner, ProgramStart((*SHELL, script), tmp_path)))
    await until_there(tmp_path / "started")
    assert list(processes_in(tmp_path)) != []
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert list(processes_in(tmp_path)) == []


async def test_it_may_end_by_itself_on_sigterm(runner: ProgramRunner, tmp_path: Path) -> None:
    script = "trap 'echo bye; exit 0' TERM; touch started; while :; do sleep 0.01; done"
    async with runner.start(ProgramStart((*SHELL, script), tmp_path)) as program:
        await until_there(tmp_path / "started")
    assert program.stdout == "bye\n"


async def test_a_start_that_is_cancelled_leaves_nothing(runner: ProgramRunner, tmp_path: Path) -> None:
    for yields in range(6):
        task = asyncio.create_task(output_of(runner, ProgramStart(("sleep", "1000"), tmp_path)))
        for _ in range(yields):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert (runner.running, list(processes_in(tmp_path))) == (0, [])


async def test_it_dies_with_a_server_that_is_killed(tmp_path: Path) -> None:
    program = f"""
import asyncio
from pathlib import Path
from rollout_server.edge.programs.runner import ProgramRunner
from rollout_server.runtime.programs import ProgramStart

async def main():
    async with ProgramRunner().start(ProgramStart(("/bin/sh", "-c", "touch started; sleep 1000"), Path({str(tmp_path)!r}))) as p:
        await p.wait()

asyncio.run(main())
"""
    server = subprocess.Popen([sys.executable, "-c", program])  # noqa: ASYNC220 - it starts in a moment
    await until_there(tmp_path / "started")
    server.kill()
    server.wait()
    while list(processes_in(tmp_path)):  # noqa: ASYNC110 - no event reports it
        await asyncio.sleep(0.01)


async def test_fifty_at_once(runner: ProgramRunner, tmp_path: Path) -> None:
    starts = [ProgramStart((*SHELL, f"sleep 0.1; echo {number}"), tmp_path) for number in range(50)]
    done = await asyncio.gather(*(output_of(runner, start) for start in starts))
    assert [out for _, out, _ in done] == [f"{number}\n" for number in range(50)]


def test_output_in_pieces() -> None:
    text = b"".join(b"%07d\n" % number for number in range(40_000))
    whole, pieces = ProgramOutput(), ProgramOutput()
    whole.add(text)
    for at in range(0, len(text), 999):
        pieces.add(text[at : at + 999])
    assert whole.text == pieces.text
    assert whole.text.startswith("0000000\n0000001\n")
    assert whole.text.endswith("0039999\n")
    assert f"... {len(text) - 131_072:,} bytes left out ..." in whole.text
