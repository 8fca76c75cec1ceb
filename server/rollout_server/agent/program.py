"""The `Program` base class: agents that are programs, which the server runs."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, Unpack, cast

from rollout_server.agent.own_loop import RESULT, AgentOptions, OwnLoopAgent, check_not_over, reachable, task_of
from rollout_server.core.message import MalformedMessage, parse_json
from rollout_server.core.outcome import RewardResult
from rollout_server.runtime.capture.endpoint import ModelAccess
from rollout_server.runtime.programs import ProgramStart, RunningProgram, program_failed
from rollout_server.runtime.run.reward import checked_reward
from rollout_server.runtime.run.run import Run

_WORKDIR: Final = "workdir"
_LOCK: Final = "workdir_lock"
_DIRECTORIES: Final = "rollout-program-"
_NEW_SECONDS: Final = 60.0
"""A directory this young may not have its lock yet."""
_PROGRAM: Final = "program"
_PLACEHOLDERS: Final = ("task", "task_file", "workdir", "directory", "uid", "base_url", "mcp_url", "model", "key")
_PLACEHOLDER: Final = re.compile(r"(?<!\$)\{([a-z_]+)\}")
_LONGEST_REWARD: Final = 1024 * 1024
_TAIL: Final = 2000
"""Characters of the output in a failure."""
_LAST_SECONDS: Final = 2.0
"""How long a program may go on once a limit has ended its rollout. It is less than the time that the driver gives `play`."""


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """How a program ended: `run.state["program"]`.

    Args:
        exit_code: its exit code; minus the number of the signal that killed it; None if it was ended because its rollout ended.
        stdout, stderr: what it has written: beginning and end, at most 64 KiB each. The rollout's key is replaced.
    """

    exit_code: int | None
    stdout: str
    stderr: str

    @property
    def tail(self) -> str:
        """The end of its standard error, or else of its standard output."""
        return (self.stderr.strip() or self.stdout.strip())[-_TAIL:]


class ProgramOptions(AgentOptions, total=False):
    """Options of `Program`."""

    prefix: Sequence[str]
    template: str | os.PathLike[str] | None
    environment: Mapping[str, str]
    stdin: str
    reward_file: str
    exit_codes: Collection[int]


class Program(OwnLoopAgent):
    """An agent that is a program, such as `Program(["my-agent", "{task}"], name="my_agent")`, which the server runs per rollout.

    The program gets the model endpoint of its rollout by its environment: `OPENAI_BASE_URL`, `OPENAI_API_KEY`,
    `ANTHROPIC_BASE_URL` and `ANTHROPIC_API_KEY`, as the clients of these APIs expect them. `ROLLOUT_MCP_URL` is an MCP server with
    `tools`, which the server runs; it has the same key. Of the server's own environment the program gets only basic variables,
    such as PATH. HOME and TMPDIR are its own empty directories.

    It ends with its rollout, together with all processes that it started: first SIGTERM, a second later SIGKILL. An exit code that
    is not in `exit_codes` ends the rollout as a failure of the class ENVIRONMENT. How it ended is `run.state["program"]`, a
    `ProgramResult`; its working directory is `run.state["workdir"]`, a Path, in `setup`, `reward` and `cleanup`, too.

    Command, prefix, environment and stdin may contain placeholders: `{task}`, the text of `task(run)`; `{task_file}`, a file with
    it; `{workdir}`; `{directory}`, which contains the working directory, HOME, TMPDIR and the task file; `{uid}`, the server's
    id of the rollout; `{base_url}`, the endpoint without "/v1"; `{mcp_url}`; `{model}`; and, except in arguments, `{key}`.

    Attributes:
        command: the program and its arguments. Required.
        prefix: what runs the command, such as ("docker", "run", ...).
        template: a directory; each rollout's working directory is a copy of it. None: an empty one.
        environment: further variables, or other values of those above.
        stdin: text of its standard input.
        reward_file: file in the working directory with the reward: a number, or an object with `reward`, and optionally `scores`
            and `extra`. Empty: none is read. Do not use it if the model can write the file.
        exit_codes: exit codes of a program that has done its work.
    """

    description = ""
    command: Sequence[str] = ()
    prefix: Sequence[str] = ()
    template: str | os.PathLike[str] | None = None
    environment: Mapping[str, str] = {}
    stdin: str = ""
    reward_file: str = ""
    exit_codes: Collection[int] = (0,)

    def __init__(self, command: Sequence[str] | None = None, **options: Unpack[ProgramOptions]) -> None:
        self._set(options if command is None else {**options, "command": command})

    def task(self, run: Run) -> str:
        """Return the task of a rollout; by default the text of the request's last user message."""
        return task_of(run)

    async def play(self, run: Run) -> None:
        """Run the program to its end. A limit of the rollout ends it, too."""
        workdir: Path = run.state[_WORKDIR]
        async with run.capture(self.capture) as capture:
            access = reachable(capture.access, self.name)
            start = await run.run_in_thread("task file", lambda: self._start(run, workdir, access))
            async with run.programs.start(start) as program:
                code = None
                try:
                    code = await _exit_code(program, run)
                finally:
                    run.state[_PROGRAM] = result = _result(program, code, access)
        check_not_over(run)
        run.note("program", f"exit code {result.exit_code}; {result.tail}")
        if result.exit_code not in self.exit_codes:
            text = f"the program ended with exit code {result.exit_code}: {result.tail or 'it wrote nothing'}"
            raise program_failed(text, run.turn)
        if self.reward_file:
            reward = await run.run_in_thread("reward file", lambda: self._read_reward(workdir))
            if reward is not None:
                run.state[RESULT] = reward

    def overrides(self, method: str) -> bool:
        """Return whether the agent has such a method of its own. It always has a `setup` and a `cleanup`: the directory's."""
        return method in ("setup", "cleanup") or super().overrides(method)

    async def run_setup(self, run: object) -> None:
        """Create the working directory and call `setup`; the runtime's entry point."""
        own_run = cast("Run", run)
        await own_run.run_in_thread("working directory", lambda: self._make_directory(own_run))
        await super().run_setup(run)

    async def run_cleanup(self, run: object) -> None:
        """Call `cleanup` and remove the working directory; the runtime's entry point."""
        own_run = cast("Run", run)
        try:
            await super().run_cleanup(run)
        finally:
            if _WORKDIR in own_run.state:
                directory = own_run.state[_WORKDIR].parent
                try:
                    await own_run.run_in_thread("working directory", lambda: _remove(directory))
                finally:
                    if _LOCK in own_run.state:
                        os.close(own_run.state.pop(_LOCK))

    def check_attributes(self) -> None:
        """Check what the metaclass does not know."""
        super().check_attributes()
        owner = f"agent {self.name!r}"
        for name in ("command", "prefix"):
            value = getattr(self, name)
            if (
                isinstance(value, str)
                or not isinstance(value, Sequence)
                or not all(isinstance(each, str) for each in value)
            ):
                raise TypeError(f"{owner}: {name} is {value!r:.100}; it must be a list of texts, one per argument")
        if not self.command:
            raise ValueError(
                f'{owner}: command is empty; give the program and its arguments, such as ["my-agent", "{{task}}"]'
            )
        if not isinstance(self.stdin, str) or not isinstance(self.reward_file, str):
            raise TypeError(f"{owner}: stdin and reward_file must be texts")
        if Path(self.reward_file).is_absolute() or ".." in Path(self.reward_file).parts:
            raise ValueError(f"{owner}: reward_file is {self.reward_file!r}; it must be in the working directory")
        if not isinstance(self.environment, Mapping) or not all(
            isinstance(text, str) for pair in self.environment.items() for text in pair
        ):
            raise TypeError(f"{owner}: environment must be a dictionary with texts as names and values")
        codes = self.exit_codes
        if not isinstance(codes, Collection) or not all(isinstance(code, int) for code in codes):
            raise TypeError(
                f"{owner}: exit_codes is {codes!r:.100}; it must be a collection of numbers, such as (0, 1)"
            )
        if self.template is not None and not Path(self.template).is_dir():
            raise ValueError(f"{owner}: template is {str(self.template)!r}, which is not a directory")
        self._check_placeholders(owner)

    def _check_placeholders(self, owner: str) -> None:
        arguments = (*self.prefix, *self.command)
        if any("key" in _PLACEHOLDER.findall(text) for text in arguments):
            raise ValueError(
                f"{owner}: {{key}} is not possible in arguments, which everybody can read; use environment"
            )
        texts = (*arguments, self.stdin, *self.environment.values())
        unknown = [name for text in texts for name in _PLACEHOLDER.findall(text) if name not in _PLACEHOLDERS]
        if unknown:
            known = ", ".join(f"{{{name}}}" for name in _PLACEHOLDERS)
            raise ValueError(f"{owner}: {{{unknown[0]}}} is not a placeholder; there are {known}")

    def _start(self, run: Run, workdir: Path, access: ModelAccess) -> ProgramStart:
        task, directory = self.task(run), workdir.parent
        task_file = directory / "task.txt"
        values = {"task": task, "task_file": task_file, "workdir": workdir, "directory": directory, "uid": run.uid}
        values |= {
            "base_url": access.base_url,
            "mcp_url": access.mcp_url,
            "model": self.capture.model,
            "key": access.key,
        }
        task_file.write_text(task, encoding="utf-8", errors="replace")

        def filled(text: str) -> str:
            return _PLACEHOLDER.sub(lambda found: str(values[found[1]]), text)

        environment = {
            "OPENAI_BASE_URL": f"{access.base_url}/v1",
            "OPENAI_API_KEY": access.key,
            "ANTHROPIC_BASE_URL": access.base_url,
            "ANTHROPIC_API_KEY": access.key,
            "HOME": str(directory / "home"),
            "TMPDIR": str(directory / "tmp"),
            "ROLLOUT_UID": run.uid,
            "ROLLOUT_ID": run.rollout_id,
            "ROLLOUT_MODEL": self.capture.model,
            "ROLLOUT_MCP_URL": access.mcp_url,
            "ROLLOUT_TASK_FILE": str(task_file),
        }
        if self.reward_file:
            environment["ROLLOUT_REWARD_FILE"] = str(workdir / self.reward_file)
        environment |= {name: filled(value) for name, value in self.environment.items()}
        command = tuple(filled(text) for text in (*self.prefix, *self.command))
        return ProgramStart(command, workdir, environment, filled(self.stdin))

    def _make_directory(self, run: Run) -> None:
        _remove_left()
        directory = Path(tempfile.mkdtemp(prefix=_DIRECTORIES))
        run.state[_WORKDIR] = workdir = directory / "work"
        with suppress(OSError):  # a file system without locks; there nobody removes what another server left
            run.state[_LOCK] = _locked(directory)
        for name in ("home", "tmp"):
            (directory / name).mkdir()
        if self.template is None:
            workdir.mkdir()
        else:
            shutil.copytree(self.template, workdir, symlinks=True)

    def _read_reward(self, workdir: Path) -> RewardResult | None:
        """Return the reward in the program's file; None if there is no such file. Raise `RolloutFailed` if it has no reward."""
        where = f"the program's reward file {self.reward_file}"
        try:
            # Without following links or waiting for a writer: the program may have left something else than a file.
            descriptor = os.open(workdir / self.reward_file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with open(descriptor, "rb") as file:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise OSError("it is not a regular file")
                text = file.read(_LONGEST_REWARD + 1).decode()
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise program_failed(f"{where} cannot be read: {error}") from None
        try:
            if len(text) > _LONGEST_REWARD:
                raise ValueError(f"it is longer than {_LONGEST_REWARD:,} characters")
            return parsed_reward(parse_json(text))
        except (TypeError, ValueError, MalformedMessage) as error:
            raise program_failed(f"{where} is invalid: {error}") from None


def parsed_reward(value: object) -> RewardResult:
    """Return the reward that a program wrote as JSON: a number, null, or an object. Raise TypeError or ValueError for others."""
    given: Mapping[str, Any] = value if isinstance(value, Mapping) else {"reward": value}
    unknown = given.keys() - {"reward", "scores", "extra"}
    if unknown:
        raise ValueError(f"{sorted(unknown)[0]!r} is none of reward, scores, extra")
    reward, extra = given.get("reward"), given.get("extra")
    if not isinstance(reward, int | float | None):
        raise TypeError(f"the reward is {reward!r:.100}; it must be a number")
    return checked_reward(RewardResult(reward, given.get("scores"), "" if extra is None else json.dumps(extra)), "it")


def _result(program: RunningProgram, code: int | None, access: ModelAccess) -> ProgramResult:
    stdout, stderr = (
        text.replace(access.key, "KEY") if access.key else text for text in (program.stdout, program.stderr)
    )
    return ProgramResult(code, stdout, stderr)


async def _exit_code(program: RunningProgram, run: Run) -> int | None:
    """Wait for the end of a program. Return None if it went on too long after the end of its rollout."""
    waiting = asyncio.ensure_future(program.wait())
    either: set[asyncio.Future[Any]] = {waiting, run.ending.reached}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait({waiting}, timeout=_LAST_SECONDS)
        return waiting.result() if waiting.done() else None
    finally:
        waiting.cancel()


def _locked(directory: Path) -> int:
    """Lock a directory until this process ends, or the returned descriptor is closed. Raise `BlockingIOError` if it is locked."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@cache
def _remove_left() -> None:
    """Remove, once per process, the directories of servers that were killed: nobody holds their locks."""
    for directory in Path(tempfile.gettempdir()).glob(f"{_DIRECTORIES}*"):
        with suppress(OSError):  # it is locked, gone, or not ours
            found = directory.lstat()
            if found.st_uid == os.geteuid() and found.st_mtime < time.time() - _NEW_SECONDS:
                descriptor = _locked(directory)
                try:
                    _remove(directory)
                finally:
                    os.close(descriptor)


def _remove(directory: Path) -> None:
    """Remove a directory, also what its owner has made read-only."""

    def allow(function: Callable[[str], object], path: str, _: object) -> None:
        os.chmod(Path(path).parent, stat.S_IRWXU)
        if not Path(path).is_symlink():
            os.chmod(path, stat.S_IRWXU)
        function(path)

    try:
        shutil.rmtree(directory, onerror=allow)
    except RecursionError:  # a program may nest directories deeper than this interpreter can follow
        subprocess.run(("rm", "-rf", "--", str(directory)), check=True)  # noqa: S603, S607 - our own command line
