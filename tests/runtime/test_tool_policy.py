"""Tool policies in rollouts: timeouts, retries, slots, caching, truncation, and tools that ignore cancellation."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterable
from typing import NoReturn

import pytest
from rollout_server import Agent, Limits, ToolError, tool
from rollout_server.core.message import ToolCall
from rollout_server.core.outcome import Category, Failure, Outcome
from rollout_server.runtime.ports import Tool
from rollout_server.runtime.registry.dependencies import RegistryDependencies
from rollout_server.runtime.tools.executor import ToolExecutor, ToolResult
from rollout_server.runtime.tools.resources import ToolLimits, ToolResources
from rollout_server.runtime.tools.task import GRACE_SECONDS
from rollout_server.tool import Image

from tests.support.runtime_harness import FOREVER, RuntimeHarness, Say, call, contents, outcome_of, wait


def with_tools(*tools: Tool, seconds: float | None = None) -> Agent:
    class Tooled(Agent):
        name = "tooled"
        limits = Limits(seconds=seconds)

    Tooled.tools = tools
    return Tooled()


async def played(new_world: Callable[..., RuntimeHarness], *tools: Tool, calls: Iterable[ToolCall]) -> Outcome:
    """A rollout that calls its tools in one turn."""
    return await outcome_of(new_world(with_tools(*tools)).start(Say("", tuple(calls)), Say("done")))


def now() -> float:
    return asyncio.get_running_loop().time()


async def run(box: ToolExecutor, name: str, **arguments: object) -> ToolResult:
    return await box.run(ToolCall("c", name, json.dumps(arguments)))


@tool(timeout=5)
async def slow(seconds: float) -> float:
    """Takes its time."""
    await wait(seconds)
    return seconds


async def test_a_call_that_takes_too_long_is_given_up_and_the_model_told(new_world: type[RuntimeHarness]) -> None:
    began = now()
    outcome = await played(new_world, slow, calls=[call("slow", "a", seconds=4), call("slow", "b", seconds=6)])
    assert contents(outcome, "tool") == ["4.0", "Error: slow took longer than 5 s"]
    assert now() - began == pytest.approx(5)
    assert contents(outcome, "assistant") == ["", "done"]


async def test_a_tool_that_never_returns_ends_with_its_rollout(new_world: type[RuntimeHarness]) -> None:
    ended = asyncio.Event()

    @tool
    async def never() -> None:
        try:
            await wait(FOREVER)
        finally:
            ended.set()

    outcome = await outcome_of(new_world(with_tools(never, seconds=30)).start(Say("", (call("never"),))))
    assert isinstance(outcome.end, Failure)
    assert outcome.end.category is Category.TIMEOUT
    await ended.wait()


@tool(timeout=1)
async def stubborn(seconds: float) -> str:
    """Does not give way."""
    until = now() + seconds
    while now() < until:
        try:
            await asyncio.sleep(until - now())
        except asyncio.CancelledError:
            continue
    return "late"


async def test_a_tool_that_swallows_its_cancellation_holds_nobody_up(
    new_world: type[RuntimeHarness], caplog: pytest.LogCaptureFixture
) -> None:
    began = now()
    outcome = await played(new_world, stubborn, calls=[call("stubborn", seconds=100)])
    assert contents(outcome, "tool") == ["Error: stubborn took longer than 1 s"]
    assert now() - began == pytest.approx(1)
    place = f"{__file__}:{stubborn.definition.line}"
    (late,) = caplog.messages
    assert late.startswith(f"tool stubborn ({place}) took longer than 1 s at {__file__}:")
    await asyncio.sleep(GRACE_SECONDS)
    message = caplog.messages[-1]
    assert message == f"tool stubborn ({place}) ignores its cancellation and is abandoned with the slots it holds"
    await asyncio.sleep(100)


async def test_a_cancelled_caller_does_not_wait_for_a_stubborn_tool() -> None:
    began = now()
    running = asyncio.create_task(run(ToolExecutor((stubborn,)), "stubborn", seconds=50))
    await asyncio.sleep(0.5)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert now() - began == pytest.approx(0.5)
    await asyncio.sleep(100)


async def test_retries_with_back_off_until_it_works() -> None:
    tried: list[float] = []

    @tool(retries=3, idempotent=True)
    async def flaky(failures: int) -> int:
        tried.append(now())
        if len(tried) <= failures:
            raise ConnectionError("gone")
        return len(tried)

    began = now()
    result = await run(ToolExecutor((flaky,)), "flaky", failures=3)
    assert (result.content, result.failed) == ("4", False)
    assert [at - began for at in tried] == pytest.approx([0, 0.1, 0.3, 0.7])


async def test_retries_come_to_an_end_and_tool_errors_are_final() -> None:
    tried: list[str] = []

    @tool(retries=2, idempotent=True)
    async def refuse(kind: str) -> NoReturn:
        tried.append(kind)
        if kind == "tool":
            raise ToolError("closed")
        raise SystemExit(3) if kind == "exit" else ConnectionError("gone")

    box = ToolExecutor((refuse,))
    assert (await run(box, "refuse", kind="tool")).content == "Error: closed"
    assert (await run(box, "refuse", kind="other")).content == "Error: gone"
    assert (await run(box, "refuse", kind=3)).failed
    assert tried == ["tool", "other", "other", "other"]


async def test_the_time_limit_is_for_all_attempts_together() -> None:
    @tool(retries=100, idempotent=True, timeout=2)
    async def flaky() -> NoReturn:
        raise ConnectionError("gone")

    assert (await run(ToolExecutor((flaky,)), "flaky")).content == "Error: flaky took longer than 2 s"


class Counter:
    """Count concurrent calls."""

    def __init__(self) -> None:
        self.inside, self.most, self.calls = 0, 0, 0

    async def work(self) -> None:
        self.inside, self.calls = self.inside + 1, self.calls + 1
        self.most = max(self.most, self.inside)
        try:
            await asyncio.sleep(1)
        finally:
            self.inside -= 1


async def test_places_of_a_rollout_and_of_the_server() -> None:
    within, across = Counter(), Counter()

    @tool(concurrency=2)
    async def narrow() -> None:
        await within.work()

    @tool(server_concurrency=3)
    async def scarce() -> None:
        await across.work()

    bench = ToolResources()
    first, second = ToolExecutor((narrow, scarce), bench), ToolExecutor((narrow, scarce), bench)
    await asyncio.gather(*(run(box, "narrow") for box in (first, second) for _ in range(5)))
    assert (within.most, within.calls) == (4, 10)
    await asyncio.gather(*(run(box, "scarce") for box in (first, second) for _ in range(5)))
    assert (across.most, across.calls) == (3, 10)
    within.most = 0
    await asyncio.gather(*(run(box, "narrow") for box in (first, first.with_tools((narrow,))) for _ in range(5)))
    assert within.most == 2  # a fork's tool calls count for the rollout


async def test_waiting_for_a_place_is_not_part_of_a_calls_time() -> None:
    @tool(timeout=2, server_concurrency=1)
    async def one() -> str:
        await asyncio.sleep(1.5)
        return "done"

    box = ToolExecutor((one,))
    assert [result.content for result in await asyncio.gather(*(run(box, "one") for _ in range(4)))] == ["done"] * 4


async def test_a_caller_who_leaves_while_it_waits_takes_no_place() -> None:
    counter = Counter()

    @tool(server_concurrency=1)
    async def one() -> None:
        await counter.work()

    box = ToolExecutor((one,))
    running = [asyncio.create_task(run(box, "one")) for _ in range(4)]
    await asyncio.sleep(0.5)
    running[1].cancel()
    running[0].cancel()
    await asyncio.gather(*running, return_exceptions=True)
    assert (counter.calls, counter.most) == (3, 1)
    assert not (await run(box, "one")).failed


async def test_places_that_are_lost_are_told_of_and_come_back() -> None:
    @tool(timeout=1, server_concurrency=1)
    async def stuck(seconds: float) -> str:
        return await stubborn(seconds)

    box = ToolExecutor((stuck,))
    waiting = asyncio.create_task(run(box, "stuck", seconds=50))
    await asyncio.sleep(0.5)
    behind = asyncio.create_task(run(box, "stuck", seconds=0))
    said = "Error: stuck cannot run: all its slots on this server are in use, 1 of them by abandoned calls that never returned"
    assert (await waiting).content == "Error: stuck took longer than 1 s"
    assert (await behind).content == said
    assert (await run(box, "stuck", seconds=0)).content == said
    await asyncio.sleep(50)
    assert (await run(box, "stuck", seconds=0)).content == "late"


async def test_results_are_kept_by_arguments_for_the_whole_server() -> None:
    calls: list[str] = []

    @tool(idempotent=True, cache=True, cache_seconds=60)
    async def look(key: str, more: int = 0) -> str:
        calls.append(key)
        await asyncio.sleep(1)
        if key == "bad":
            raise ToolError("unknown")
        return key.upper()

    bench = ToolResources()
    first, second = ToolExecutor((look,), bench), ToolExecutor((look,), bench)
    results = await asyncio.gather(*(run(box, "look", key="a", more=1) for box in (first, second) for _ in range(3)))
    assert [result.content for result in results] == ["A"] * 6
    assert (await second.run(ToolCall("c", "look", '{"more": 1, "key": "a"}'))).content == "A"
    assert calls == ["a"]
    await asyncio.sleep(61)
    await run(first, "look", key="a", more=1)
    await run(first, "look", key="a", more=2)
    assert calls == ["a"] * 3
    assert [(await run(first, "look", key="bad")).content for _ in range(2)] == ["Error: unknown"] * 2
    assert calls[3:] == ["bad", "bad"]
    assert (await run(first, "look", key=3)).failed


async def test_a_shared_call_goes_on_while_somebody_waits_for_it() -> None:
    given_up = 0

    @tool(idempotent=True, cache=True)
    async def look() -> str:
        nonlocal given_up
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            given_up += 1
            raise
        return "found"

    bench = ToolResources()
    running = [asyncio.create_task(run(ToolExecutor((look,), bench), "look")) for _ in range(3)]
    await asyncio.sleep(1)
    running[0].cancel()
    running[1].cancel()
    assert (await running[2]).content == "found"
    bench = ToolResources()
    running = [asyncio.create_task(run(ToolExecutor((look,), bench), "look")) for _ in range(2)]
    await asyncio.sleep(1)
    assert given_up == 0
    for each in running:
        each.cancel()
    await asyncio.wait(running)
    await asyncio.sleep(0)
    assert given_up == 1
    assert (await run(ToolExecutor((look,), bench), "look")).content == "found"


async def test_the_oldest_results_make_room() -> None:
    calls: list[int] = []

    @tool(idempotent=True, cache=True)
    async def look(key: int) -> str:
        calls.append(key)
        return "x" * 100

    for limits in (ToolLimits(cache_entries=2), ToolLimits(cache_bytes=1500)):
        calls.clear()
        box = ToolExecutor((look,), ToolResources(limits))
        for key in (1, 2, 1, 3, 1, 2):
            await run(box, "look", key=key)
        assert calls == [1, 2, 3, 2]


@pytest.mark.parametrize(
    ("result", "content"),
    [
        ("x" * 40, "x" * 40),
        ("x" * 41, "x" * 40 + "\n[Cut: the last 1 of 41 characters are missing]"),
        ("é" * 5000, "é" * 40 + "\n[Cut: the last 4,960 of 5,000 characters are missing]"),
        (
            ["x" * 30, "y" * 30],
            '["' + "x" * 30 + '", "' + "y" * 4 + "\n[Cut: the last 28 of 68 characters are missing]",
        ),
    ],
)
async def test_a_long_result_is_cut_by_characters_where_there_is_no_tokenizer(result: object, content: str) -> None:
    @tool(max_output_tokens=10)
    async def tell() -> object:
        return result

    told = await run(ToolExecutor((tell,)), "tell")
    assert (told.content, told.failed) == (content, False)


async def test_an_error_is_cut_like_a_result() -> None:
    @tool(max_output_tokens=3)
    async def tell() -> str:
        raise ToolError("x" * 100)

    assert (
        await run(ToolExecutor((tell,)), "tell")
    ).text == "Error: xxxxx\n[Cut: the last 95 of 107 characters are missing]"


@pytest.mark.parametrize(("character", "kept"), [("x", 1000), ("é", 500), ("€", 333), ("😀", 250), ("\ud800", 1000)])
async def test_a_tool_that_floods_is_cut_between_characters(character: str, kept: int) -> None:
    @tool
    async def flood() -> str:
        return character * 100_000

    told = await run(ToolExecutor((flood,), ToolResources(ToolLimits(output_bytes=1000))), "flood")
    assert told.text == f"{character * kept}\n[Cut: the last {100_000 - kept:,} of 100,000 characters are missing]"
    told.message()


async def test_parts_are_cut_together_and_images_are_not() -> None:
    @tool
    async def show(size: int) -> list[object]:
        return ["x" * 600, Image(b"i" * size), "y" * 600, "z"]

    box = ToolExecutor((show,), ToolResources(ToolLimits(output_bytes=1000, image_bytes=1000)))
    told = await run(box, "show", size=10)
    assert [part.get("text", "image") for part in told.content if not isinstance(part, str)] == [
        "x" * 600,
        "image",
        "y" * 400,
        "\n[Cut: the last 201 of 1,201 characters are missing]",
    ]
    told = await run(box, "show", size=1000)
    assert told.failed
    assert told.text.startswith("Error: The result's images have 1,4")


async def test_images_reach_the_conversation_as_parts(new_world: type[RuntimeHarness]) -> None:
    @tool
    async def show() -> Image:
        return Image(b"abc")

    outcome = await played(new_world, show, calls=[call("show")])
    assert contents(outcome, "tool") == [[Image(b"abc").part()]]


async def test_an_authors_mistakes_are_logged_once_with_file_and_line(caplog: pytest.LogCaptureFixture) -> None:
    @tool
    async def broken(kind: str) -> object:
        if kind == "exit":
            raise SystemExit("bye")
        return {}[kind] if kind else object()

    box, line = ToolExecutor((broken,)), broken.definition.line
    assert (await run(box, "broken", kind="secret")).content == "Error: KeyError: 'secret'"
    assert (await run(box, "broken", kind="")).text.startswith("Error: The result of broken cannot be written: Unable")
    assert (await run(box, "broken", kind="exit")).content == "Error: SystemExit: bye"
    await run(box, "broken", kind="secret")
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == [
        f"tool broken ({__file__}:{line}) raised KeyError at {__file__}:{line + 4}",
        f"tool broken ({__file__}:{line}) returned a value that cannot be written as text",
        f"tool broken ({__file__}:{line}) ended with SystemExit at {__file__}:{line + 3}",
    ]
    assert "secret" not in caplog.text


class Strange(Exception):
    """An exception whose text cannot be formatted."""

    def __str__(self) -> str:
        raise LookupError


async def test_whatever_a_tool_raises_is_a_text() -> None:
    @tool
    async def strange() -> None:
        raise Strange

    @tool
    async def cancelled() -> None:
        raise asyncio.CancelledError

    box = ToolExecutor((strange, cancelled))
    assert (await run(box, "strange")).content == "Error: Strange"
    assert (await run(box, "cancelled")).content == "Error: The tool was cancelled"


@pytest.mark.parametrize("content", [None, 3, b"x", ["x"], [{"type": "text", "text": float("nan")}], object()])
async def test_a_foreign_tool_whose_result_is_no_content_fails_alone(content: object) -> None:
    class Foreign:
        name, description, parameters_json_schema = "foreign", "", "{}"

        async def run(self, arguments: object) -> object:
            return content

    told = await run(ToolExecutor((Foreign(),)), "foreign")  # type: ignore[arg-type]
    assert told.failed
    told.message()


def test_a_roster_without_a_workbench_has_one_of_its_own() -> None:
    assert RegistryDependencies().tool_resources is None
