"""Start and stop hooks: an agent that fails to start is reported with its line; one that fails to stop affects no others."""

from __future__ import annotations

import re

import pytest
from rollout_server import Agent
from rollout_server.app import Server
from rollout_server.calculator import Calculator
from rollout_server.runtime.run.lifecycle import AgentFailed

from tests.support.start_requests import settings


class Telling(Agent):
    """Record the calls of its hooks."""

    def __init__(self, name: str, heard: list[str]) -> None:
        self.name = name
        self.heard = heard

    async def start(self) -> None:
        self.heard.append(f"{self.name} starts")

    def stop(self) -> None:
        self.heard.append(f"{self.name} stops")


class Broken(Agent):
    """Fail in the given hook."""

    def __init__(self, name: str) -> None:
        self.name = name

    def start(self) -> None:
        if self.name == "cannot-start":
            raise LookupError("no such\ncorpus")

    async def stop(self) -> None:
        raise LookupError("already gone")


async def test_agents_start_in_order_and_stop_the_other_way() -> None:
    heard: list[str] = []
    async with Server([Telling("one", heard), Telling("two", heard)], settings()):
        assert heard == ["one starts", "two starts"]
    assert heard[2:] == ["two stops", "one stops"]


async def test_a_server_does_not_start_without_an_agent(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[str] = []
    said = r"agent 'cannot-start' could not start: LookupError: no such corpus \(.*test_hooks\.py:(\d+)\)"
    with pytest.raises(AgentFailed, match=said) as failed:
        async with Server([Telling("one", heard), Broken("cannot-start")], settings()):
            pytest.fail("it started")
    assert heard == ["one starts", "one stops"]
    line = re.search(said, str(failed.value))
    assert line is not None
    assert "raise LookupError" in open(__file__).read().splitlines()[int(line[1]) - 1]  # noqa: SIM115, ASYNC230


async def test_a_stop_that_fails_is_logged_and_the_others_stop(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[str] = []
    async with Server([Telling("one", heard), Broken("two"), Calculator()], settings()):
        pass
    assert heard == ["one starts", "one stops"]
    assert re.search(r"agent two: stop\(\) failed at .*test_hooks\.py:\d+", caplog.text)
    assert "already gone" in caplog.text


async def test_an_agent_needs_no_hooks() -> None:
    """An agent without hooks starts and stops, too."""
    async with Server([Calculator()], settings()) as server:
        assert server.grpc_port
