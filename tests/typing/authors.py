"""The type checker's view of authors' code: checked, never executed. An unused ignore is an error."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from datetime import datetime
from logging import Logger, LoggerAdapter
from random import Random
from typing import Any, assert_type

from rollout_server import (
    Agent,
    CaptureOptions,
    Environment,
    ExternalAgent,
    FunctionAgent,
    Judge,
    Limits,
    Program,
    ProgramResult,
    Reply,
    Request,
    RewardResult,
    Rubric,
    Run,
    Step,
    ToolContext,
    ToolError,
    number_from,
    own_loop,
    serve,
    tool,
)
from rollout_server.core.message import JSON
from rollout_server.runtime.ports import Tool


@tool
async def add(a: int | float, b: int | float = 1) -> int | float:
    """Adds."""
    if a == b:
        raise ToolError("the same")
    return a + b


@tool
def shout(text: str) -> str:
    """Shouts."""
    return text.upper()


@tool
async def remember(text: str, context: ToolContext) -> str:
    """Uses all of its context."""
    assert_type(context.uid + context.rollout_id, str)
    assert_type(context.metadata, Mapping[str, JSON])
    assert_type(context.state, dict[str, Any])
    assert_type(context.cancelled, bool)
    assert_type(context.logger, LoggerAdapter[Logger])
    assert_type(context.now(), datetime)
    assert_type(context.random(), Random)
    assert_type(await context.once(lambda: 7), int)
    assert_type((await context.model("judge").sample([])).content, str)
    context.sample()  # type: ignore[attr-defined]
    return text


@tool
async def delegate(task: str, run: Run) -> str:
    """Takes all of the rollout, and is a function of a narrower context as well."""
    await remember(task, run)
    return (await (await run.fork([{"role": "user", "content": task}])).sample()).content


class Asynchronous(Agent):
    """Everything that an author may write."""

    name = "asynchronous"
    tools = (add, shout, remember, delegate)
    limits = Limits(turns=8, seconds=1.5)

    def __init__(self, corpus: str = "") -> None:
        self.corpus = corpus

    async def start(self) -> None:
        await super().start()

    async def setup(self, run: Run) -> None:
        await super().setup(run)

    async def cleanup(self, run: Run) -> None:
        await super().cleanup(run)

    async def stop(self) -> None: ...

    async def dataset(self, split: str) -> AsyncIterator[Mapping[str, Any]]:
        yield {"prompt": split}

    def choose_tools(self, request: Request) -> Sequence[Tool]:
        assert_type(request.metadata, Mapping[str, Any])
        assert_type(request.labels, Mapping[str, str])
        return [add] if request.rollout_id else (add, shout)

    async def play(self, run: Run) -> None:
        reply = await run.sample()
        assert_type(reply, Reply)
        assert_type(reply.content, str)
        assert_type(reply.token_ids, Sequence[int] | None)
        assert_type(await run.sample(temperature=0.2, stop="END", extra={"min_p": 0.1}), Reply)
        assert_type(run.request, Request)
        assert_type(run.used.generated_tokens, int)
        for call in reply.tool_calls:
            assert_type(call.name, str)
        results = await run.call(reply.tool_calls)
        assert_type(results[0].failed, bool)
        await run.append({"role": "user", "content": "More?"}, {"role": "user", "content": ["text"]})
        assert_type(await run.fork(), Run)
        assert_type(await run.fork([{"role": "user", "content": "x"}], model="critic", trainable=True), Run)
        assert_type(await run.fork([{"role": "user", "content": "x"}], kind="compaction", tools=[add]), Run)
        assert_type(run.now(), datetime)
        assert_type(run.random(), Random)
        assert_type(await run.once(self.fetch), dict[str, int])
        assert_type(await run.once(lambda: 7), int)
        assert_type(run.state, dict[str, Any])
        assert_type(run.cancelled, bool)
        run.mask(reply, "dull")
        run.note("looked", "at it")
        await super().play(run)
        await run.finish("enough")

    async def fetch(self) -> dict[str, int]:
        return {}

    async def reward(self, run: Run) -> RewardResult:
        return RewardResult(1.0, {"short": 0.5}, '{"a": 1}')

    async def reward_group(self, runs: Sequence[Run]) -> list[RewardResult | None]:
        assert_type(runs[0].reward, RewardResult)
        return [RewardResult(reward=1.0), None]


class Plain(Agent):
    """The same with synchronous methods."""

    name = "plain"

    cleanup_seconds = 5

    def start(self) -> None: ...

    def setup(self, run: Run) -> None: ...

    def cleanup(self, run: Run) -> None: ...

    def dataset(self, split: str) -> Iterator[dict[str, str]]:
        yield {"prompt": split}

    def play(self, run: Run) -> None:
        reply = run.wait(run.sample())
        assert_type(reply, Reply)
        assert_type(run.wait(run.once(dict[str, int])), dict[str, int])

    def reward(self, run: Run) -> float | None:
        return None

    def reward_group(self, runs: Sequence[Run]) -> tuple[float, ...]:
        return tuple(run.reward.reward or 0.0 for run in runs)


class OfPlain(Plain):
    """A reward may have a narrower type than its parent's."""

    name = "of-plain"

    def dataset(self, split: str) -> Any:
        return f"{split}.jsonl"

    def reward(self, run: Run) -> float:
        return 1.0


def near(response: str, answer: str) -> float:
    """A reward function of a rubric."""
    return float(answer in response)


class Graded(Agent):
    """A rubric, a judge and a further model."""

    name = "graded"
    rubric = Rubric(funcs=[near, Judge("judge", parser=number_from(0, 10))], weights=[1.0, 0.1])

    async def play(self, run: Run) -> None:
        reply = await run.model("user").sample([{"role": "user", "content": "?"}], temperature=0.5)
        assert_type(reply.content, str)
        assert_type(reply.usage, tuple[int, int] | None)
        await run.append({"role": "user", "content": reply.content})


assert_type(Asynchronous("corpus"), Asynchronous)
serve(Asynchronous(), Plain(), http_port=0)


class Awaited(Agent):
    """A dataset may be awaited."""

    name = "awaited"

    async def dataset(self, split: str) -> list[dict[str, str]]:
        return [{"prompt": split}]


class Wrong(Agent):
    """Type errors are reported."""

    name = 7  # type: ignore[assignment]
    tools = (len,)  # type: ignore[assignment]
    limits = ("turns", 3)  # type: ignore[assignment]

    async def play(self, run: int) -> None:  # type: ignore[override]
        return None

    async def reward(self, run: Run) -> str:  # type: ignore[override]
        return "good"

    async def reward_group(self, runs: Sequence[Run]) -> float:  # type: ignore[override]
        return 1.0

    async def choose_tools(self, request: Request) -> Sequence[Tool]:  # type: ignore[override]
        return ()

    def dataset(self, split: str) -> int:  # type: ignore[override]
        return 5


class World(Environment):
    """An environment in coroutines."""

    name = "world"
    reward_rule = "own"

    async def reset(self, run: Run) -> str:
        player = await run.fork([{"role": "user", "content": "Go."}], role="player", trainable=False)
        player.give_reward(1)
        assert_type(run.turn_rewards, Mapping[int, float])
        return "Begin."

    async def step(self, run: Run, reply: Reply) -> Step:
        return Step({"role": "user", "content": reply.content}, reward=1.0, done=True)

    async def reward(self, run: Run) -> RewardResult:
        return RewardResult(sum(run.turn_rewards.values()), roles={"player": 1.0})


class PlainWorld(Environment):
    """An environment in plain functions, which returns tuples."""

    name = "plain-world"
    reward_rule = "each"  # type: ignore[assignment]

    def reset(self, run: Run) -> list[dict[str, JSON]]:
        return [{"role": "user", "content": "Begin."}]

    def step(self, run: Run, reply: Reply) -> tuple[str, float, bool]:
        return "Go on.", 0.5, False

    def reward(self, run: Run) -> float:
        return 1.0


@own_loop
async def solve(task: str, openai: Any) -> float:
    return 1.0


@own_loop(limits=Limits(turns=3), capture=CaptureOptions(model="m"))
def solve_in_thread(http: Any) -> None: ...


assert_type(solve, FunctionAgent)
assert_type(solve_in_thread, FunctionAgent)
serve(
    solve,
    Program(["my-agent", "{task}"], name="mine", prefix=("nice",), environment={"A": "b"}),
    ExternalAgent(name="far", tools=[add]),
)


class Coder(Program):
    name = "coder"
    command = ("my-agent",)
    environment = {"A": "b"}  # noqa: RUF012

    def task(self, run: Run) -> str:
        return "Do it."

    async def reward(self, run: Run) -> float:
        result: ProgramResult = run.state["program"]
        return float(result.exit_code == 0 and "done" in result.stdout)


async def misuse(run: Run, reply: Reply) -> None:
    """Calls with invalid arguments."""
    await run.fork(kind="twin")  # type: ignore[arg-type]
    await run.fork("text")  # type: ignore[arg-type]
    await run.append("text")  # type: ignore[arg-type]
    await run.call(["add"])  # type: ignore[list-item]
    await run.once(lambda: {1})  # type: ignore[type-var]
    await run.sample(temperature="hot")  # type: ignore[arg-type]
    await run.sample(min_p=0.1)  # type: ignore[call-arg]
    await run.model("judge").sample("text")  # type: ignore[arg-type]
    await run.model("judge").sample([], min_p=0.1)  # type: ignore[call-arg]
    Rubric(funcs=near)  # type: ignore[arg-type]
    run.mask(reply)  # type: ignore[call-arg]
    run.mask("reply", "dull")  # type: ignore[arg-type]
    run.give_reward("good")  # type: ignore[arg-type]
    run.wait(reply)  # type: ignore[arg-type]
    Program("ls", names="x")  # type: ignore[call-arg]
    ExternalAgent(idle_seconds="x")  # type: ignore[arg-type]
    own_loop(limits=3)  # type: ignore[call-overload]
    Limits(turn=3)  # type: ignore[call-arg]
    RewardResult("1.0")  # type: ignore[arg-type]
    reply.finish_reason = "stop"  # type: ignore[misc]
