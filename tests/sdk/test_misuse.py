"""Faulty loops: each error is reported with a clear message, and nothing else is affected."""

from __future__ import annotations

import asyncio
import logging
from fractions import Fraction
from typing import Any

import pytest
from rollout_server.runtime.errors import RolloutEnded
from rollout_server.sdk import (
    OsmosisRolloutError,
    OsmosisServerError,
    OsmosisTransportError,
    RolloutContext,
    RolloutRequest,
    RolloutResult,
    ToolExecutionError,
)
from rollout_server.testing.script import Fault, FaultKind, ScriptedReply

from tests.sdk.calculator_agent import SCHEMAS, CalculatorAgentLoop
from tests.sdk.conftest import OpenPlace, opened
from tests.sdk.loops import Loop, say, user

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def at_once(ctx: RolloutContext) -> RolloutResult:
    messages, _ = await say(ctx)
    return ctx.complete(messages)


async def test_completing_twice_and_chatting_after_it_is_harmless(open_place: OpenPlace) -> None:
    async def play(ctx: RolloutContext) -> RolloutResult:
        messages, _ = await say(ctx)
        ctx.complete(messages, finish_reason="too early")
        messages, _ = await say(ctx, *messages, user("More"))
        ctx.error("not returned")
        return ctx.complete(messages, finish_reason="returned")

    place = await open_place(Loop(play))
    told = await place.plain("twice")
    assert (told["finish_reason"], told["metrics"]["num_llm_calls"]) == ("returned", 2)


async def test_chatting_after_the_return_reaches_no_trainer(open_place: OpenPlace) -> None:
    late: list[asyncio.Task[Any]] = []

    async def play(ctx: RolloutContext) -> RolloutResult:
        messages, _ = await say(ctx)
        go = asyncio.Event()

        async def later() -> None:
            await go.wait()
            with pytest.raises(RolloutEnded):
                await ctx.chat([*messages, user("More")])

        late.append(asyncio.create_task(later()))
        late.append(asyncio.create_task(_set_soon(go)))
        return ctx.complete(messages)

    place = await open_place(Loop(play))
    assert (await place.plain("late"))["status"] == "COMPLETED"
    await asyncio.gather(*late)
    assert len(place.requests("late")) == 1


async def _set_soon(event: asyncio.Event) -> None:
    await asyncio.sleep(0.2)
    event.set()


@pytest.mark.parametrize("dialect", ["masked", "plain"])
async def test_an_error_is_told_in_the_loops_own_words(open_place: OpenPlace, dialect: str) -> None:
    async def play(ctx: RolloutContext) -> RolloutResult:
        messages, _ = await say(ctx)
        return ctx.error("the search index is gone", final_messages=messages)

    place = await open_place(Loop(play))
    told = await place.of(dialect, "words")
    assert (told["status"], told["finish_reason"]) == ("ERROR", "error")
    assert told["error_message"] == "the search index is gone"
    assert told["metrics"]["num_llm_calls"] == 1


@pytest.mark.parametrize(
    ("error", "text", "category"),
    [
        (ToolExecutionError("the tool broke", tool_name="add"), "the tool broke", "tool_error"),
        (OsmosisRolloutError("no more ideas"), "no more ideas", "internal_error"),
        (OsmosisRolloutError(), "OsmosisRolloutError", "internal_error"),
    ],
)
async def test_an_error_of_the_sdk_may_be_raised(
    open_place: OpenPlace, error: Exception, text: str, category: str
) -> None:
    async def play(ctx: RolloutContext) -> RolloutResult:
        await say(ctx)
        raise error

    place = await open_place(Loop(play))
    told = await place.plain("raised")
    assert (told["status"], told["error_message"]) == ("ERROR", text)
    assert told["extra_fields"]["error_category"] == category


async def test_an_error_has_no_reward(open_place: OpenPlace) -> None:
    async def play(ctx: RolloutContext) -> RolloutResult:
        messages, _ = await say(ctx)
        return RolloutResult("ERROR", messages, "error", "gone", reward=0.5)

    place = await open_place(Loop(play))
    told = await place.plain("unjudged")
    assert (told["error_message"], told.get("reward")) == ("gone", None)


async def test_any_other_exception_is_in_the_log_and_not_in_the_outcome(
    open_place: OpenPlace, caplog: pytest.LogCaptureFixture
) -> None:
    async def play(ctx: RolloutContext) -> RolloutResult:
        if ctx.request.rollout_id.startswith("fine"):
            return await at_once(ctx)
        raise RuntimeError("with an inside that is nobody's business")

    place = await open_place(Loop(play))
    told, fine = await asyncio.gather(place.plain("broken"), place.plain("fine"))
    assert told["status"] == "ERROR"
    assert "inside" not in told["error_message"]
    assert "nobody's business" in caplog.text
    assert "test_misuse.py" in caplog.text
    assert fine["status"] == "COMPLETED"


def wrong_result(result: Any) -> Loop:
    async def play(ctx: RolloutContext) -> Any:
        messages, _ = await say(ctx)
        return result(ctx, messages) if callable(result) else result

    return Loop(play)


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (None, "returned None; return ctx.complete(...) or ctx.error(...)"),
        ({"status": "COMPLETED"}, "returned {'status': 'COMPLETED'}; return"),
        (lambda _, messages: RolloutResult("DONE", messages, "stop"), "status is 'DONE'"),
        (lambda ctx, messages: ctx.complete(messages, finish_reason=""), "it must be a string of 1 to 256 characters"),
        (lambda ctx, messages: ctx.complete(messages, finish_reason=7), "it must be a string of 1 to 256 characters"),
        (
            lambda ctx, messages: ctx.complete(messages, finish_reason="x" * 300),
            "it must be a string of 1 to 256 characters",
        ),
        (lambda ctx, messages: ctx.complete(messages, reward=float("nan")), "reward is nan"),
        (lambda ctx, messages: ctx.complete(messages, reward="high"), "'high'"),
        (lambda ctx, messages: ctx.complete([*messages, 5]), "messages[2] is int"),
    ],
)
async def test_a_result_that_is_none_is_an_error(
    open_place: OpenPlace, result: Any, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    place = await open_place(wrong_result(result))
    told = await place.plain("none")
    assert told["status"] == "ERROR"
    assert said in caplog.text + told["error_message"]


@pytest.mark.parametrize("reward", [True, 1, Fraction(1)])
async def test_any_number_is_a_reward(open_place: OpenPlace, reward: Any) -> None:
    place = await open_place(wrong_result(lambda ctx, messages: ctx.complete(messages, reward=reward)))
    told = await place.plain("number")
    assert (told["status"], told["reward"]) == ("COMPLETED", 1.0)


async def test_a_wrong_result_is_told_with_file_and_line(caplog: pytest.LogCaptureFixture) -> None:
    async with opened(wrong_result(None)) as place:
        await place.plain("where")
    assert "Loop.run (" in caplog.text
    assert "loops.py:" in caplog.text


async def test_a_trainer_that_fails_raises_what_the_sdk_raised(open_place: OpenPlace) -> None:
    statuses: list[int] = []

    async def play(ctx: RolloutContext) -> RolloutResult:
        try:
            return await at_once(ctx)
        except OsmosisServerError as error:
            statuses.append(error.status_code)
            return ctx.complete(list(ctx.request.messages), finish_reason="gave up", reward=1.0)

    loop = Loop(play)
    place = await open_place(loop)
    down = Fault(kind=FaultKind.STATUS, status=500)
    await place.script("down", down, down, ScriptedReply(content="late"))
    told = await place.plain("down")
    assert (told["status"], told["extra_fields"]["error_category"]) == ("ERROR", "trainer_server_error")
    assert "reward" not in told
    assert statuses == [500]


async def test_a_trainer_that_is_gone_ends_the_rollout_though_the_loop_swallows_it(open_place: OpenPlace) -> None:
    seen: list[str] = []

    async def play(ctx: RolloutContext) -> RolloutResult:
        while True:
            try:
                return await at_once(ctx)
            except OsmosisTransportError as error:
                seen.append(str(error))

    loop = Loop(play)
    place = await open_place(loop)
    told = await place.masked("gone", server_url="http://127.0.0.1:1")
    assert (told["status"], told["extra_fields"]["error_category"]) == ("ERROR", "network_error")
    assert len(seen) == 1
    assert len(loop.caught) == 1


async def test_a_cancel_reaches_a_loop_that_waits(open_place: OpenPlace) -> None:
    started = asyncio.Event()

    async def play(ctx: RolloutContext) -> RolloutResult:
        started.set()
        await asyncio.Event().wait()
        raise AssertionError

    loop = Loop(play)
    place = await open_place(loop)
    asked = asyncio.create_task(place.masked("stuck", metadata={"timeout_seconds": 0.3}))
    await started.wait()
    told = await asked
    assert told["extra_fields"]["error_category"] == "timeout"
    assert isinstance(loop.caught[0], asyncio.CancelledError)


async def test_a_loop_whose_tools_break_has_its_request_refused(
    open_place: OpenPlace, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(CalculatorAgentLoop):
        def get_tools(self, request: RolloutRequest) -> Any:
            return None if request.metadata.get("break") else SCHEMAS

    place = await open_place(Broken())
    answer = await place.start("broken", metadata={"break": True})
    assert (answer.status_code, answer.json()) == (500, {"detail": "Internal server error"})
    assert "Current.get_tools (" in caplog.text
    assert "returned None; return a list of OpenAIFunctionToolSchema" in caplog.text
    masked = await place.masked("broken", metadata={"break": True})
    assert masked["status"] == "ERROR"
    assert (await place.plain("fine"))["status"] == "COMPLETED"
