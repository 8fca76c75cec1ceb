"""SDKs and frameworks on the endpoint: their samples equal those of the same conversation in a loop of the server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from rollout_client import TrainingSample
from rollout_server import Agent, Run, tool

from tests.clients.programs.calculator import QUESTION, SYSTEM, THANKS, add, multiply
from tests.clients.service import (
    ENVIRONMENT,
    PROGRAMS,
    Captured,
    External,
    Played,
    TurnModel,
    check_captured,
    offered,
    play,
    program,
    serving_world,
)

pytestmark = pytest.mark.skipif(
    not (ENVIRONMENT / ".ready").exists(), reason="no .venv-clients: `make .venv-clients/.ready` makes it"
)

# Arguments in a form that neither json.dumps nor JSON.stringify writes.
CALLS = (
    "<think>\nSix times seven, and five plus three.\n</think>\n\nI calculate.\n"
    '<tool_call>\n{"name": "multiply", "arguments": {"b": 7,"a":6}}\n</tool_call>\n'
    '<tool_call>{"name":"add", "arguments":{"a" : 5, "b" : 3}}</tool_call>'
)
SAYS = (CALLS, "<think>\nBoth are there.\n</think>\n\n 42 and 8.\n", "You are welcome.")
PROMPT = ({"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION})
RESULTS = {"multiply": "42", "add": "8"}
_PLAYED: dict[str, Sequence[TrainingSample]] = {}
"""The samples of the loop of the server, by the tools that clients offer."""
LINEAR = [
    ("openai_chat",),
    ("openai_responses",),
    ("openai_responses", "--previous"),
    ("anthropic_messages",),
    ("openai_agents", "--chat"),
    ("openai_agents",),
    ("langgraph_agent",),
    ("langgraph_agent", "--responses"),
    ("langgraph_agent", "--anthropic"),
    ("pydantic_ai_agent", "--chat"),
    ("pydantic_ai_agent", "--responses"),
    ("pydantic_ai_agent",),
]


def parameters() -> Iterator[Any]:
    for command in LINEAR:
        name = "".join(command)
        yield pytest.param([*command, "--stream"], id=f"{name}--stream")
        yield pytest.param([*command], id=name)


def facts(found: Sequence[TrainingSample]) -> list[Any]:
    return [(each.prompt_ids, each.response_ids, each.response_mask, each.logprobs) for each in found]


async def captured(command: Sequence[str], says: Sequence[str] = SAYS, *, mode: str = "tokens") -> Any:
    model = TurnModel(says, odd=mode == "tokens")
    async with serving_world(model, token_mode=mode) as world:
        return await world.capture(program(*command)), model.seen


async def expected(found: Captured, mode: str = "tokens") -> Sequence[TrainingSample]:
    tools = offered(found.recorder.calls[0].body, RESULTS)
    key = f"{mode} {tools}"
    if key not in _PLAYED:
        _PLAYED[key] = await play(SAYS, Played(tools, THANKS), PROMPT, odd=mode == "tokens", mode=mode)
    return _PLAYED[key]


@pytest.mark.parametrize("command", list(parameters()))
async def test_a_program_gets_the_samples_of_a_loop_of_the_server(command: Sequence[str]) -> None:
    found, seen = await captured(command)
    assert found.printed == ["You are welcome."]
    assert facts(found.samples) == facts(await expected(found))
    (sample,) = found.samples
    assert sample.verified
    assert sum(sample.response_mask) == sum(len(each.ids) for each in seen)
    assert (found.outcome.capture.continued, found.outcome.capture.parted) == (2, 0)


class Tooled(External):
    """The program is the agent, and calls tools of the server."""

    tools = (tool(multiply), tool(add))


async def test_a_program_calls_the_tools_of_its_rollout_over_mcp() -> None:
    model = TurnModel(SAYS, odd=True)
    async with serving_world(model, Tooled()) as world:
        found = await world.capture(program("openai_agents_mcp"))
    assert found.printed == ["You are welcome."]
    offers = offered(found.recorder.calls[0].body, RESULTS)
    assert [each.name for each in offers] == ["multiply", "add"]
    assert facts(found.samples) == facts(await play(SAYS, Played(offers, THANKS), PROMPT, odd=True, mode="tokens"))


@pytest.mark.parametrize("name", ["openai_chat", "anthropic_messages"])
async def test_an_engine_that_renders_gives_the_same_samples(name: str) -> None:
    found, _ = await captured([name, "--stream"], mode="messages")
    assert found.printed == ["You are welcome."]
    assert facts(found.samples) == facts(await expected(found, "messages"))


@pytest.mark.parametrize("options", [[], ["--stream"]])
async def test_smolagents_is_cut_honestly(options: list[str]) -> None:
    """It demands a tool call (`tool_choice`), which an engine in message mode can do."""
    final = '<tool_call>\n{"name": "final_answer", "arguments": {"answer": "42 and 8."}}\n</tool_call>'
    found, seen = await captured(["smolagents_agent", *options], [CALLS, final], mode="messages")
    assert found.printed[0].endswith("42 and 8.")
    assert len(found.samples) == len(seen) == 2
    assert check_captured(found.samples, seen) == []
    assert [each.origin.parting.field for each in found.outcome.segments][1:] == ["content"]


@pytest.mark.parametrize("name", ["openai_chat", "openai_responses", "anthropic_messages"])
async def test_two_processes_of_one_agent_share_a_rollout(name: str) -> None:
    model = TurnModel(SAYS, odd=True)
    async with serving_world(model) as world:
        world.engine.free.clear()
        world.engine.awaited = 2
        found = await world.capture(*[program(name, "--stream")] * 2)
    assert found.printed == ["You are welcome."] * 2
    assert check_captured(found.samples, model.seen) == []
    assert len(model.seen) == 6
    (once,) = await expected(found)
    for sample in found.samples:
        assert sample.prompt_ids + sample.response_ids == once.prompt_ids + once.response_ids


class Counting(Agent):
    """The conversation of the shell script."""

    name = "counting"

    async def play(self, run: Run) -> None:
        await run.sample()
        for _ in range(2):
            await run.append({"role": "user", "content": "Go on."})
            await run.sample()


async def test_a_shell_script_asks_again_and_trains_once() -> None:
    """Its first request is cut off while the model works, and sent again without a mark."""
    says = ["One.", "Two.", "Three."]
    model = TurnModel(says, odd=True)
    async with serving_world(model) as world:
        world.engine.free.clear()
        running = asyncio.create_task(world.capture(["sh", str(PROGRAMS / "shell.sh")]))
        while len(world.exchanges) < 2 and not running.done():  # noqa: ASYNC110  # the program is another process
            await asyncio.sleep(0.01)
        world.engine.free.set()
        found = await running
    assert found.printed == ["One.\nTwo.\nThree."]
    assert [each.path.split("/", 3)[3] for each in found.recorder.calls] == [
        "v1/chat/completions",
        "v1/chat/completions",
        "v1/messages",
        "chat/completions",
    ]
    played = await play(says, Counting(), [{"role": "user", "content": "Count."}], odd=True, mode="tokens")
    assert facts(found.samples) == facts(played)
    assert len(model.seen) == 3
