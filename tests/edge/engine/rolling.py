"""Rollouts with engines through the real server, and checks of their samples."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from osmosis.rollout.v1 import outcome_pb2
from rollout_client import AsyncClient, Target, TrainingSample, samples
from rollout_server import Agent, RewardResult, Run
from rollout_server.app import Server
from rollout_server.calculator import add, multiply
from rollout_server.core.ledger import Parting, SegmentKind
from rollout_server.core.message import Message
from rollout_server.runtime.errors import PromptTooLong
from rollout_server.runtime.run.opening import Opening
from rollout_server.settings import Settings
from rollout_server.testing.tokenizer import TOY_TOKENIZER

from tests.support.engine_model import Generated
from tests.support.engines import MODEL, Engine

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 5, "b": 3}}\n</tool_call>'
# No template writes JSON like this: the engine renders the parsed call, which differs from the sampled tokens.
SQUEEZED = '<tool_call>{"name":"add","arguments":{"a":5,"b":3}}</tool_call>'
TWO_CALLS = f'Both.\n{CALL}\n<tool_call>\n{{"name": "multiply", "arguments": {{"a": 2, "b": 4}}}}\n</tool_call>'
THOUGHT = f"<think>\nFive and three.\n</think>\n\n{CALL}"
DONE = "#### 8"
DIALECTS = {"OpenaiEngine": "openai", "VllmEngine": "vllm", "SglangEngine": "sglang"}


class Sums(Agent):
    """Add and multiply."""

    name = "sums"
    tools = (add, multiply)


class Parts(Agent):
    """Continue the conversation, branch from the same point, and start a subagent with another tool."""

    name = "parts"
    tools = (add,)

    async def play(self, run: Run) -> None:
        await run.sample()
        branch = await run.fork()
        aside = await run.fork([{"role": "user", "content": "Help."}], tools=[multiply])
        for conversation in (run, branch):
            await conversation.append({"role": "user", "content": "And now?"})
        for conversation in (run, branch, aside):
            await conversation.sample()


class Cooling(Agent):
    """Change the sampling parameters in the second of three turns."""

    name = "cooling"

    async def play(self, run: Run) -> None:
        await run.sample()
        await run.append({"role": "user", "content": "And now?"})
        await run.sample(temperature=0.25, max_tokens=64, logprobs=False, extra={"seed": 2})
        await run.append({"role": "user", "content": "And now?"})
        await run.sample()


class Tree(Agent):
    """Branches of branches, with and without turns between them, and a compaction of the main conversation."""

    name = "tree"
    tools = (add,)

    async def play(self, run: Run) -> None:
        await run.sample()
        branch = await run.fork()
        at_once = await branch.fork()
        await self._goes_on(branch)
        again = await branch.fork()
        shorter = await run.fork([{"role": "user", "content": "In short."}], kind="compaction")
        for conversation in (at_once, again, branch, shorter, shorter):
            await self._goes_on(conversation)
        await asyncio.gather(*(self._goes_on(each) for each in (at_once, again, await shorter.fork())))

    async def _goes_on(self, run: Run) -> None:
        await run.append({"role": "user", "content": f"Turn {run.turn}?"})
        await run.sample()


class Earlier(Agent):
    """Branches after the first of three completions: one at once, one of that branch, one while the conversation waits."""

    name = "earlier"
    tools = (add,)

    async def play(self, run: Run) -> None:
        first = await run.sample()
        await self._goes_on(run, "Two?")
        await self._goes_on(run, "Three?")
        branch = await run.fork(after=first)
        again = await branch.fork()
        await run.append({"role": "user", "content": "Four?"})
        async with asyncio.TaskGroup() as group:
            group.create_task(run.sample())
            await asyncio.sleep(0)
            late = await run.fork(after=first)
            for each, text in ((branch, "Or?"), (again, "Else?"), (late, "Late?")):
                group.create_task(self._goes_on(each, text))
        await asyncio.gather(*(self._goes_on(each, f"{n}?") for n, each in enumerate((run, branch, again, late))))

    async def _goes_on(self, run: Run, text: str) -> None:
        await run.append({"role": "user", "content": text})
        await run.sample()


class Shortening(Agent):
    """Continue in a shorter conversation when the prompt is too long, as agents with a loop of their own do."""

    name = "shortening"

    async def play(self, run: Run) -> None:
        main = await run.open(Opening(SegmentKind.MAIN, (said("5 plus 3?"),)))
        await main.attempt()
        await main.append({"role": "user", "content": "And now? " * 20})
        try:
            await main.attempt()
        except PromptTooLong as error:
            run.state["said"] = error.tokens, error.maximum
            shorter = Opening(SegmentKind.COMPACTION, (said("In short."),), parting=Parting(1, "content"))
            await (await main.open(shorter)).attempt()

    async def reward(self, run: Run) -> RewardResult:
        return RewardResult(extra_json=json.dumps({"said": run.state["said"]}))


def said(text: str) -> Message:
    return Message.write({"role": "user", "content": text})


@asynccontextmanager
async def connected() -> AsyncIterator[AsyncClient]:
    """A client of a real server that retries quickly."""
    ports: Any = {"host": "127.0.0.1", "http_port": 0, "grpc_port": 0, "http": False}
    retries: Any = {"retry_base_seconds": 0.01, "retry_max_seconds": 0.02, "retries": 2}
    settings = Settings(_env_file=None, tokenizers={"t": TOY_TOKENIZER}, tokenizers_offline=True, **ports, **retries)
    async with (
        Server([Sums(), Parts(), Tree(), Cooling(), Earlier(), Shortening()], settings) as server,
        AsyncClient(f"127.0.0.1:{server.grpc_port}") as client,
    ):
        yield client


def target(engine: Engine, **fields: Any) -> Target:
    return Target(engine.url, **{"dialect": DIALECTS[type(engine).__name__], "model": MODEL, **fields})


async def roll(client: AsyncClient, engine: Engine, **spec: Any) -> outcome_pb2.Outcome:
    """Run one rollout to its end. What the engine causes is never called the trainer's: there is none."""
    spec = {"completions": target(engine), "messages": [{"role": "user", "content": "5 plus 3?"}], **spec}
    run = client.run(**spec)
    async for _ in run:
        pass
    outcome = (await client.get(run.uid, view="full")).outcome
    assert outcome.failure.failure_class != outcome_pb2.FAILURE_CLASS_TRAINER
    assert [said for said in (outcome.failure.message, *map(str, outcome.warnings)) if "the trainer" in said] == []
    return outcome


def warned(outcome: outcome_pb2.Outcome) -> list[str]:
    return [warning.code for warning in outcome.warnings]


def check_whole(sample: TrainingSample, seen: Sequence[Generated]) -> None:
    """Assert that the sample consists of the engine's prompts and completions in these turns, id by id.

    Each prompt extends the previous one and its completion.
    """
    ids = sample.prompt_ids + sample.response_ids
    last = seen[-1]
    assert ids == last.prompt + last.ids
    mask, logprobs = [0] * len(ids), array("f", [0.0] * len(ids))
    for turn in seen:
        start = len(turn.prompt)
        assert ids[:start] == turn.prompt
        assert ids[start : start + len(turn.ids)] == turn.ids
        mask[start : start + len(turn.ids)] = [1] * len(turn.ids)
        logprobs[start : start + len(turn.ids)] = array("f", turn.logprobs)
    assert sample.prompt_ids == seen[0].prompt
    assert sample.response_mask == mask[len(sample.prompt_ids) :]
    assert sample.logprobs == logprobs[len(sample.prompt_ids) :].tolist()


def check_once(found: Sequence[TrainingSample], seen: Sequence[Generated]) -> None:
    """Assert that each completion is trained in exactly one sample, with its logprobs, after the prompt that the engine saw."""
    trained = 0
    for turn in seen:
        start, stop = len(turn.prompt), len(turn.prompt) + len(turn.ids)
        homes = 0
        for sample in found:
            opening = len(sample.prompt_ids)
            shown = [*sample.prompt_ids, *sample.response_ids][:stop] == [*turn.prompt, *turn.ids]
            if shown and start >= opening and any(sample.response_mask[start - opening : stop - opening]):
                homes += 1
                assert sample.response_mask[start - opening : stop - opening] == [1] * len(turn.ids)
                assert sample.logprobs is not None
                assert sample.logprobs[start - opening : stop - opening] == array("f", turn.logprobs).tolist()
        assert homes == 1, turn
        trained += len(turn.ids)
    assert sum(sum(sample.response_mask) for sample in found) == trained


def only(outcome: outcome_pb2.Outcome) -> TrainingSample:
    (sample,) = samples(outcome)
    return sample
