"""An agent that does everything that the page shows, and the scripts of its trainer."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollout_server import Agent, RewardResult, Run, ToolError, tool
from rollout_server.testing.script import Fault, Script, ScriptedReply, tool_call
from rollout_server.testing.tokenizer import TOY_TOKENIZER
from rollout_server.testing.trainer import StrictTrainer

from tests.support.bodies import TOKENIZER
from tests.system.conftest import Service

#: Text that would run, load or hide something in a page that does not treat it as text.
HOSTILE = '<img src=x onerror="document.title=1"></script><b>bold</b> \x1b[31mred\x1b[0m \u202elanosrep\u202c &amp;'
#: How the page writes the control characters of `HOSTILE`.
SHOWN = HOSTILE.replace("\x1b", "⟨U+001B⟩").replace("\u202e", "⟨U+202E⟩").replace("\u202c", "⟨U+202C⟩")


@tool
async def price(fruit: str) -> int:
    """Price of a fruit in cents.

    Args:
        fruit: its name, in the singular.
    """
    await asyncio.sleep(0.05)
    if fruit not in ("apple", "pear"):
        raise ToolError(f"there is no {fruit}; there are apple and pear")
    return len(fruit)


@tool(max_output_tokens=60)
async def read_page(url: str) -> str:
    """Text of a web page."""
    await asyncio.sleep(0.02)
    return "\n".join([HOSTILE, *(f"Line {number} of {url}" for number in range(200))])


class Tour(Agent):
    """Asks a critic, masks a completion, gives rewards and takes notes."""

    name = "tour"
    tools = (price, read_page)

    async def play(self, run: Run) -> None:
        """Sample until there is no tool call; then ask the critic, and sample once more."""
        run.note("plan", f"the agent begins {HOSTILE}")
        while (reply := await run.sample()).tool_calls:
            await run.call(reply.tool_calls)
            run.give_reward(0.25)
        run.mask(reply, "not the final answer")
        critic = await run.fork([{"role": "user", "content": "Criticise the answer."}], role="critic")
        await critic.sample()
        await run.append({"role": "user", "content": "Thanks. Now in one sentence."})
        await run.sample()

    async def reward(self, run: Run) -> RewardResult:
        """Reward, and a score."""
        return RewardResult(reward=0.75, scores={"brief": 1.0, "turns": run.turn})


class Long(Agent):
    """Append messages in bulk: `metadata.events` events."""

    name = "long"

    async def play(self, run: Run) -> None:
        """Sample twice; between both come the messages."""
        await run.sample()
        count = run.metadata["events"]
        assert isinstance(count, int)
        for number in range(count):
            await run.append({"role": "user", "content": f"Message {number}"})
        await run.sample()


#: Turns of `Tour`: two calls at once, a failing and a long one, an answer, the critic, and a last sentence.
TOUR = (
    ScriptedReply(
        content="Let me look up both prices.",
        reasoning="I need two prices.\nThey are independent.",
        tool_calls=(
            tool_call("call_1", "price", '{"fruit": "apple"}'),
            tool_call("call_2", "price", '{"fruit": "pear"}'),
        ),
    ),
    ScriptedReply(
        content=None,
        tool_calls=(
            tool_call("call_3", "price", '{"fruit": "plum", "note": "' + "<b>no</b>" + '"}'),
            tool_call("call_4", "read_page", '{"url": "https://fruit.example/plum"}'),
        ),
    ),
    ScriptedReply(content=f"An apple costs 5 cents. {HOSTILE}"),
    ScriptedReply(content="The answer does not name the pear."),
    ScriptedReply(content="An apple costs 5 and a pear 4 cents.", cut=True),
)


class Stepped:
    """A model with a list of replies, each of which waits for a step of the test. Only the trainer's thread waits."""

    def __init__(self, replies: Sequence[ScriptedReply]) -> None:
        self._replies = iter(replies)
        self._steps = threading.Semaphore(0)

    def reply(self, messages: Sequence[Mapping[str, object]]) -> ScriptedReply:
        """Return the next reply."""
        self._steps.acquire()
        return next(self._replies)

    def step(self, count: int = 1) -> None:
        """Permit so many replies."""
        self._steps.release(count)


@asynccontextmanager
async def forgetful(directory: Path, script: Script, world: Service) -> AsyncIterator[StrictTrainer]:
    """A trainer whose template drops the thinking of all completions but the last, so that its prompts drift."""
    shutil.copytree(TOY_TOKENIZER, directory / "model")
    template = directory / "model" / "chat_template.jinja"
    template.write_text(template.read_text().replace("{%- if thought -%}", "{%- if thought and loop.last -%}"))
    tools_from = f"http://127.0.0.1:{world.server.http_port}"
    async with StrictTrainer(directory / "model", script=script, tools_from=tools_from) as trainer:
        yield trainer


#: Turns of `Tour` that drift once with `forgetful`, and then fail.
DRIFTING = Script(
    lines=(replace(TOUR[1], reasoning="Think."), ScriptedReply(content="Done."), Fault.error(400, "enough"))
)


def slow(seconds: float, *replies: ScriptedReply) -> tuple[ScriptedReply, ...]:
    """The replies, each after this time."""
    return tuple(replace(reply, delay=seconds) for reply in replies)


async def begin(
    world: Service, rollout_id: str, agent: str, question: str = "What do fruits cost?", **changes: Any
) -> str:
    """Start a rollout over gRPC and return its uid."""
    body = {
        "rollout_id": rollout_id,
        "agent": agent,
        "messages": [{"role": "system", "content": "You are a shop."}, {"role": "user", "content": question}],
        "completions": {"url": f"grpc://{world.trainer.grpc_target}"},
        "sampling": {"temperature": 0.7, "max_tokens": 512, "logprobs": True},
        "tokenizer": {"name": TOKENIZER},
        **changes,
    }
    reply = await world.http.post("/v1/rollouts", json=body)
    assert reply.status_code == 201, reply.text
    return str(reply.json()["rollout"]["uid"])


async def play(world: Service, rollout_id: str, script: Script, **changes: Any) -> str:
    """Start a rollout of `Tour` with a script of the trainer, and return its uid."""
    await world.trainer.put_script(rollout_id, script)
    return await begin(world, rollout_id, "tour", **changes)


async def finished(world: Service, uid: str) -> dict[str, Any]:
    """Wait for the end of a rollout, and return it in full."""
    reply = await world.http.get(f"/v1/rollouts/{uid}", params={"view": "full", "wait": 60})
    rollout: dict[str, Any] = reply.json()
    assert rollout["state"] == "finished"
    return rollout


async def events(world: Service, uid: str) -> list[dict[str, Any]]:
    """All events of a finished rollout."""
    reply = await world.http.get(f"/v1/rollouts/{uid}/events", params={"detail": "full"})
    return [json.loads(line.removeprefix("data: ")) for line in reply.text.split("\n") if line.startswith("data: ")]


def link(world: Service, uid: str, query: str = "") -> str:
    """The URL of the page of a rollout."""
    return f"http://127.0.0.1:{world.server.http_port}/#/rollouts/{uid}{query}"
