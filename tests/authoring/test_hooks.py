"""Faulty hooks: an agent that fails to start is reported and stops the server; one that fails to stop affects no others."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack

import pytest
from rollout_server import Agent
from rollout_server.runtime.aio.threads import Threads
from rollout_server.runtime.run.lifecycle import AgentFailed, start_agents

from tests.authoring.theatre import place
from tests.support.jumping_loop import JumpingLoop

here = sys.modules[__name__]


class Hooked(Agent):
    """Fail in the given hook."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.stopped = False

    async def start(self) -> None:
        match self.name:
            case "start-raises":
                raise LookupError("no corpus")  # wrong: start-raises
            case "start-exits":
                sys.exit(3)  # wrong: start-exits
            case "start-is-slow":
                await asyncio.sleep(100)  # wrong: start-is-slow
            case "start-is-interrupted":
                raise KeyboardInterrupt  # wrong: start-is-interrupted

    async def stop(self) -> None:
        match self.name:
            case "stop-raises":
                raise LookupError("already gone")  # wrong: stop-raises
            case "stop-exits":
                sys.exit(3)  # wrong: stop-exits
            case "stop-never-returns":
                await asyncio.sleep(3600)  # wrong: stop-never-returns
            case "stop-swallows":
                for _ in range(3600):
                    with contextlib.suppress(BaseException):
                        await asyncio.sleep(1)  # wrong: stop-swallows
        self.stopped = True


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    """A loop with virtual time."""
    with asyncio.Runner(loop_factory=JumpingLoop) as jumping:
        yield jumping


@pytest.mark.parametrize("name", ["start-raises", "start-exits", "start-is-interrupted"])
def test_a_start_that_fails_stops_those_before_it(runner: asyncio.Runner, name: str) -> None:
    before = Hooked("honest")

    async def start() -> None:
        async with AsyncExitStack() as stack:
            await start_agents([before, Hooked(name)], stack)

    with pytest.raises(AgentFailed) as failed:
        runner.run(start())
    assert str(failed.value).startswith(f"agent {name!r} could not start: ")
    assert str(failed.value).endswith(f"({place(here, name)})")
    assert before.stopped


class Empty(Agent):
    """`start` is a synchronous function and raises an exception that asyncio cannot pass on from a thread."""

    name = "empty"

    def start(self) -> None:
        next(iter(()))


async def test_a_plain_start_fails_whatever_it_raises() -> None:
    asyncio.get_running_loop().set_default_executor(Threads())
    async with AsyncExitStack() as stack:
        with pytest.raises(AgentFailed, match=r"^agent 'empty' could not start: RuntimeError: StopIteration"):
            await start_agents([Empty()], stack)


def test_a_start_that_lasts_is_told_of(runner: asyncio.Runner, caplog: pytest.LogCaptureFixture) -> None:
    async def start() -> None:
        async with AsyncExitStack() as stack:
            await start_agents([Hooked("start-is-slow")], stack)

    runner.run(start())
    assert (
        f"is still starting after 10 s at {place(here, 'start-is-slow')}; the server accepts no requests" in caplog.text
    )


@pytest.mark.parametrize(
    ("name", "reads"),
    [
        ("stop-raises", "agent stop-raises: stop() failed at {at}"),
        ("stop-exits", "agent stop-exits: stop() failed at {at}"),
        ("stop-never-returns", "did not return within 10 s at {at}"),
        ("stop-swallows", "did not return within 10 s at {at}"),
    ],
)
def test_a_stop_that_fails_keeps_no_other_from_stopping(
    runner: asyncio.Runner, caplog: pytest.LogCaptureFixture, name: str, reads: str
) -> None:
    before = Hooked("honest")

    async def start() -> None:
        async with AsyncExitStack() as stack:
            await start_agents([before, Hooked(name)], stack)

    runner.run(start())
    assert before.stopped
    assert reads.format(at=place(here, name)) in caplog.text
