"""Agents with one mistake each. The faulty line ends with `# wrong: ` and the agent's name."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rollout_server import Agent, Request, RewardResult, Run, tool
from rollout_server.core.message import ToolCall

LET_GO = threading.Event()
"""Set after the tests, so that threads that never return can end."""


async def for_ever() -> None:
    """Block until the tests are over."""
    await asyncio.get_running_loop().create_future()


class PlayRaises(Agent):
    name = "play-raises"

    async def play(self, run: Run) -> None:
        await run.sample()
        raise LookupError("no such corpus")  # wrong: play-raises


class Unshowable(Exception):
    """An exception whose text cannot be formatted."""

    def __str__(self) -> str:
        raise LookupError


class PlayRaisesOddly(Agent):
    name = "play-raises-oddly"

    def play(self, run: Run) -> None:
        raise Unshowable  # wrong: play-raises-oddly


class PlayExits(Agent):
    name = "play-exits"

    async def play(self, run: Run) -> None:
        sys.exit(1)  # wrong: play-exits


class PlayIsInterrupted(Agent):
    name = "play-is-interrupted"

    async def play(self, run: Run) -> None:
        raise KeyboardInterrupt  # wrong: play-is-interrupted


class WaitsForNothing(Agent):
    name = "waits-for-nothing"

    def play(self, run: Run) -> None:
        run.wait(run.sample)  # type: ignore[arg-type]  # wrong: waits-for-nothing


class FinishesWithoutAWord(Agent):
    name = "finishes-without-a-word"

    async def play(self, run: Run) -> None:
        await run.sample()
        await run.finish(None)  # type: ignore[arg-type]  # wrong: finishes-without-a-word


class RemarksNoText(Agent):
    name = "remarks-no-text"

    async def play(self, run: Run) -> None:
        run.note("turn", run.turn)  # type: ignore[arg-type]  # wrong: remarks-no-text


class AppendsForEver(Agent):
    name = "appends-for-ever"

    async def play(self, run: Run) -> None:
        while run.turn < 1:
            await run.append({"role": "user", "content": "x" * 10_000_000})  # wrong: appends-for-ever


class RewardHasOddScores(Agent):
    name = "reward-has-odd-scores"

    async def reward(self, run: Run) -> RewardResult:  # wrong: reward-has-odd-scores
        return RewardResult(1.0, scores={1: 1.0})  # type: ignore[dict-item]


class TaskExits(Agent):
    """The task belongs to no rollout, so its exit ends none."""

    name = "task-exits"

    async def play(self, run: Run) -> None:
        task = asyncio.create_task(self.leave())
        await asyncio.wait({task})
        await run.sample()

    async def leave(self) -> None:
        sys.exit(1)  # wrong: task-exits


class GroupRaises(Agent):
    name = "group-raises"

    async def play(self, run: Run) -> None:
        await run.sample()
        async with asyncio.TaskGroup() as group:
            group.create_task(for_ever())
            group.create_task(self.fail())

    async def fail(self) -> None:
        raise LookupError("one of several")  # wrong: group-raises


class SetupRaises(Agent):
    name = "setup-raises"

    def setup(self, run: Run) -> None:
        raise LookupError("no sandbox")  # wrong: setup-raises


class CleanupRaises(Agent):
    name = "cleanup-raises"

    def cleanup(self, run: Run) -> None:
        run.state["sandbox"].close()  # wrong: cleanup-raises


class CleanupNeverReturns(Agent):
    name = "cleanup-never-returns"
    cleanup_seconds = 0.1

    async def cleanup(self, run: Run) -> None:
        await asyncio.sleep(3600)  # wrong: cleanup-never-returns


class CleanupSwallows(Agent):
    name = "cleanup-swallows"
    cleanup_seconds = 0.1

    async def cleanup(self, run: Run) -> None:
        while not LET_GO.is_set():
            with contextlib.suppress(BaseException):
                await asyncio.sleep(0.1)  # wrong: cleanup-swallows


class PlainCleanupNeverReturns(Agent):
    name = "plain-cleanup-never-returns"
    cleanup_seconds = 0.1

    def cleanup(self, run: Run) -> None:  # wrong: plain-cleanup-never-returns
        LET_GO.wait()


class RewardRaises(Agent):
    name = "reward-raises"

    async def reward(self, run: Run) -> float:
        return float(run.messages[-1]["content"])  # type: ignore[arg-type]  # wrong: reward-raises


class RewardIsNotANumber(Agent):
    name = "reward-is-nan"

    async def reward(self, run: Run) -> float:  # wrong: reward-is-nan
        return float("nan")


class RewardIsAText(Agent):
    name = "reward-is-a-text"

    def reward(self, run: Run) -> Any:  # wrong: reward-is-a-text
        return "good"


class RewardNeverReturns(Agent):
    name = "reward-never-returns"

    async def reward(self, run: Run) -> float:
        await for_ever_here()
        return 1.0


async def for_ever_here() -> None:
    await asyncio.get_running_loop().create_future()  # wrong: reward-never-returns


class PlayNeverReturns(Agent):
    name = "play-never-returns"

    async def play(self, run: Run) -> None:
        await run.sample()
        async with asyncio.timeout(None):
            await asyncio.sleep(3600)  # wrong: play-never-returns


class PlainPlayNeverReturns(Agent):
    name = "plain-play-never-returns"

    def play(self, run: Run) -> None:  # wrong: plain-play-never-returns
        LET_GO.wait()


class PlaySwallows(Agent):
    name = "play-swallows"

    async def play(self, run: Run) -> None:
        while not LET_GO.is_set():
            with contextlib.suppress(BaseException):
                await asyncio.sleep(0.1)  # wrong: play-swallows


class PlaySwallowsItsEnd(Agent):
    name = "play-swallows-its-end"

    async def play(self, run: Run) -> None:
        while not LET_GO.is_set():
            with contextlib.suppress(BaseException):
                await run.sample()  # wrong: play-swallows-its-end


class RewardSwallows(Agent):
    name = "reward-swallows"

    async def reward(self, run: Run) -> float:
        while not LET_GO.is_set():
            with contextlib.suppress(BaseException):
                await asyncio.sleep(0.1)  # wrong: reward-swallows
        return 1.0


@tool  # wrong: tool-outlasts-its-rollout
async def endless() -> None:
    """Never returns."""
    await for_ever()


class ReturnsEarly(Agent):
    name = "returns-early"
    tools = (endless,)

    async def play(self, run: Run) -> None:
        calls = (await run.sample()).tool_calls
        self.task = asyncio.create_task(self.go_on(run, calls))
        await asyncio.sleep(0)

    async def go_on(self, run: Run, calls: Sequence[ToolCall]) -> None:
        await run.call(calls)  # wrong: returns-early


class SamplesTwice(Agent):
    name = "samples-twice"

    async def play(self, run: Run) -> None:
        await asyncio.gather(run.sample(), self.once_more(run))

    async def once_more(self, run: Run) -> None:
        await run.sample()  # wrong: samples-twice


class AppendsNoMessage(Agent):
    name = "appends-no-message"

    async def play(self, run: Run) -> None:
        await run.append("hello")  # type: ignore[arg-type]  # wrong: appends-no-message


class AppendsAList(Agent):
    name = "appends-a-list"

    async def play(self, run: Run) -> None:
        await run.append([{"role": "user", "content": "Go on."}])  # type: ignore[arg-type]  # wrong: appends-a-list


class CallsAReply(Agent):
    name = "calls-a-reply"

    async def play(self, run: Run) -> None:
        await run.call(await run.sample())  # type: ignore[arg-type]  # wrong: calls-a-reply


class RewardIsNotAwaited(Agent):
    name = "reward-is-not-awaited"

    async def score(self, run: Run) -> float:
        return 1.0

    async def reward(self, run: Run) -> Any:  # wrong: reward-is-not-awaited
        return self.score(run)


class AppendsWithoutRole(Agent):
    name = "appends-without-role"

    async def play(self, run: Run) -> None:
        await run.append({"content": "hello"})  # wrong: appends-without-role


class InventsCalls(Agent):
    name = "invents-calls"

    async def play(self, run: Run) -> None:
        await run.sample()
        await run.call([ToolCall("mine", "add", "{}")])  # wrong: invents-calls


class CallsTwice(Agent):
    name = "calls-twice"

    async def play(self, run: Run) -> None:
        calls = (await run.sample()).tool_calls
        await run.call(calls)
        await run.call(calls)  # wrong: calls-twice


class CallsNoCalls(Agent):
    name = "calls-no-calls"

    async def play(self, run: Run) -> None:
        await run.call([{"name": "add"}])  # type: ignore[list-item]  # wrong: calls-no-calls


class ForksWrongly(Agent):
    name = "forks-wrongly"

    async def play(self, run: Run) -> None:
        await run.sample()
        await run.fork([{"role": "user", "content": "Go on."}], kind="branch")  # wrong: forks-wrongly


class RewritesHistory(Agent):
    name = "rewrites-history"

    async def play(self, run: Run) -> None:
        reply = await run.sample()
        run.messages[-1]["content"] = reply.content.upper()  # type: ignore[index]  # wrong: rewrites-history


class DropsHistory(Agent):
    name = "drops-history"

    async def play(self, run: Run) -> None:
        await run.sample()
        del run.messages[0]  # type: ignore[attr-defined]  # wrong: drops-history


class KeepsWhatIsNoJson(Agent):
    name = "keeps-what-is-no-json"

    async def play(self, run: Run) -> None:
        await run.once(self.look)  # type: ignore[type-var]

    async def look(self) -> object:  # wrong: keeps-what-is-no-json
        return object()


class ChooseToolsRaises(Agent):
    name = "choose-tools-raises"

    def choose_tools(self, request: Request) -> Sequence[Any]:
        return request.metadata["tools"]  # type: ignore[no-any-return]  # wrong: choose-tools-raises


class ChoosesNoTools(Agent):
    name = "chooses-no-tools"

    def choose_tools(self, request: Request) -> Sequence[Any]:  # wrong: chooses-no-tools
        return [7]


@tool
async def raises() -> str:
    """Fails."""
    return dict[str, str]()["key"]  # wrong: tool-raises


@tool  # wrong: tool-returns-no-json
async def odd() -> object:
    """Returns what no model can read."""
    return object()


@tool(timeout=0.1)
async def never() -> None:
    """Never returns."""
    await asyncio.sleep(3600)  # wrong: tool-never-returns


@tool(timeout=0.1)  # wrong: plain-tool-never-returns
def never_plain() -> None:
    """Never returns."""
    LET_GO.wait()


@tool(timeout=0.1)  # wrong: tool-swallows
async def stubborn() -> None:
    """Never gives way."""
    while not LET_GO.is_set():
        with contextlib.suppress(BaseException):
            await asyncio.sleep(0.1)


@tool  # wrong: tool-floods
async def flood() -> str:
    """Says 100 MB."""
    return "x" * 100_000_000


@tool  # wrong: tool-floods-json
async def flood_json() -> list[str]:
    """Says 100 MB, in a list."""
    return ["x" * 1_000_000] * 100


@tool
async def prints() -> str:
    """Talks to whoever started the server."""
    print("hello")  # noqa: T201
    return "printed"


@tool
async def blocks() -> str:
    """Holds everybody up."""
    time.sleep(0.4)  # noqa: ASYNC251  # wrong: tool-blocks
    return "slept"


@tool
async def leaves() -> str:
    """Thinks that it is a script."""
    sys.exit(1)  # wrong: tool-exits


class Fatal(BaseException):
    """An exception that does not derive from Exception."""


@tool
def dies() -> str:
    """Raises what no `except Exception` catches."""
    raise Fatal("too bad")  # wrong: tool-dies


@tool
async def cancels() -> None:
    """Says that it was cancelled, and was not."""
    raise asyncio.CancelledError


class ToolAgent(Agent):
    """The default loop with one tool. Concurrent rollouts change the same object, without effect."""

    def __init__(self, name: str, offered: Any) -> None:
        self.name = name
        self.tools = (offered,)
        self.played = 0

    async def play(self, run: Run) -> None:
        self.played += 1
        await super().play(run)


TOOLS: Mapping[str, Any] = {
    "tool-raises": raises,
    "tool-returns-no-json": odd,
    "tool-never-returns": never,
    "plain-tool-never-returns": never_plain,
    "tool-outlasts-its-rollout": endless,
    "tool-swallows": stubborn,
    "tool-floods": flood,
    "tool-floods-json": flood_json,
    "tool-prints": prints,
    "tool-blocks": blocks,
    "tool-exits": leaves,
    "tool-dies": dies,
    "tool-cancels": cancels,
}
CALLED = {**{name: offered.name for name, offered in TOOLS.items()}, "returns-early": "endless", "calls-twice": "add"}
"""The tool that the model calls, by the agent's name."""


def wrong_agents() -> Sequence[Agent]:
    """New objects of all faulty agents."""
    here = [kind for kind in vars(sys.modules[__name__]).values() if isinstance(kind, type)]
    kinds = [kind for kind in here if issubclass(kind, Agent) and "name" in vars(kind)]
    return [kind() for kind in kinds] + [ToolAgent(name, offered) for name, offered in TOOLS.items()]
