"""An agent that owns its loop has the samples of an `Agent` that plays the same conversation, with every trainer and engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from osmosis.rollout.v1 import outcome_pb2
from rollout_client import AsyncClient, Target, TrainingSample, samples
from rollout_server import Agent, Run
from rollout_server.app import Server
from rollout_server.calculator import add, multiply
from rollout_server.core.error import CallRefused
from rollout_server.runtime.capture.capture import Capture
from rollout_server.settings import Settings
from rollout_server.testing import TrainerDialect
from rollout_server.testing.script import Script, ScriptedReply, tool_call
from rollout_server.testing.tokenizer import TOY_TOKENIZER
from rollout_server.testing.trainer import StrictTrainer

from tests.edge.engine.rolling import DIALECTS
from tests.support.captured_agents import Fields, OwnLoop, SameLoop, message_of, model_call, user
from tests.support.engine_model import EngineModel
from tests.support.engines import MODEL, Engine, OpenaiEngine, SglangEngine, VllmEngine, serving

TOOLS = (add, multiply)
QUESTIONS = ("And twice that?", "Thanks.")
SCRIPT = Script(
    (
        ScriptedReply(
            content="Let me see.", reasoning="Add first.", tool_calls=(tool_call("c1", "add", {"a": 5, "b": 3}),)
        ),
        ScriptedReply(content=" It is 8.\n", reasoning="Done."),
        ScriptedReply(
            content=None,
            tool_calls=(
                tool_call("c2", "multiply", '{"b": 2,   "a":8.0}'),
                tool_call("c3", "add", {"a": 8, "b": 8}),
            ),
        ),
        ScriptedReply(content="It is 16."),
        ScriptedReply(content="You are welcome."),
    )
)
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 5, "b": 3}}\n</tool_call>'
TWICE = '<tool_call>\n{"name": "multiply", "arguments": {"a": 8, "b": 2}}\n</tool_call>'
SAYS = [f"<think>\nAdd first.\n</think>\n\n{CALL}", "It is 8.", f"Both.\n{TWICE}\n{CALL}", "It is 16.", "Welcome."]


def squeezed(message: Fields) -> Fields:
    """What clients do to an answer: reasoning dropped, arguments serialized again, ids renamed, text in parts, null for no text."""
    calls = [
        {
            "id": f"renamed_{call['id']}",
            "type": "function",
            "function": {
                "name": call["function"]["name"],
                "arguments": json.dumps(_parsed(call["function"]["arguments"]), separators=(",", ":"), sort_keys=True),
            },
        }
        for call in message.get("tool_calls") or []
    ]
    text = (message.get("content") or "").strip()
    content = [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}] if text else None
    return {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}


def _parsed(arguments: Any) -> Any:
    return json.loads(arguments) if isinstance(arguments, str) else arguments


EDITS: Mapping[str, Callable[[Fields], Fields]] = {"as it is": dict, "squeezed": squeezed}


class Calls(Agent):
    """Make the calls of a test."""

    name = "calls"

    def __init__(self, calls: Callable[[Capture], Any]) -> None:
        self._calls = calls

    async def play(self, run: Run) -> None:
        async with run.capture() as capture:
            await self._calls(capture)


@asynccontextmanager
async def connected(*agents: Agent) -> AsyncIterator[AsyncClient]:
    ports: Any = {"host": "127.0.0.1", "http_port": 0, "grpc_port": 0, "http": False, "retry_base_seconds": 0.01}
    settings = Settings(_env_file=None, tokenizers={"toy": TOY_TOKENIZER}, tokenizers_offline=True, **ports)
    async with Server(agents, settings) as server, AsyncClient(f"127.0.0.1:{server.grpc_port}") as client:
        yield client


async def roll(client: AsyncClient, agent: str, **spec: Any) -> outcome_pb2.Outcome:
    run = client.run(**{"messages": [user("5 plus 3?")], "rollout_id": agent, "agent": agent, **spec})
    async for _ in run:
        pass
    outcome = (await client.get(run.uid, view="full")).outcome
    assert outcome.failure.message == ""
    return outcome


def assert_equal(own: outcome_pb2.Outcome, same: outcome_pb2.Outcome) -> None:
    """Assert that both outcomes have one sample, with equal tokens, mask and logprobs."""
    (mine,), (other,) = samples(own), samples(same)
    for name in ("prompt_ids", "response_ids", "response_mask", "logprobs", "kind", "verified"):
        assert getattr(mine, name) == getattr(other, name), name
    assert sum(mine.response_mask) == own.metrics.generated_tokens > 0
    assert [warning.code for warning in own.warnings] == [warning.code for warning in same.warnings]
    assert [message.json for message in own.messages] == [message.json for message in same.messages]
    assert own.capture.longest_share == 1.0


MODES: dict[str, dict[str, Any]] = {
    "messages": {},
    "predicted": {"tokenizer": "toy"},
    "tokens": {"token_mode": "tokens", "tokenizer": "toy"},
}


def loops(edit: str) -> Sequence[Agent]:
    return OwnLoop("own", TOOLS, QUESTIONS, EDITS[edit]), SameLoop("same", TOOLS, QUESTIONS)


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("mode", ["messages", "tokens"])
async def test_with_a_grpc_trainer(mode: str, edit: str) -> None:
    async with connected(*loops(edit)) as client, StrictTrainer(script=SCRIPT) as trainer:
        spec = {"completions": f"grpc://{trainer.grpc_target}", **MODES[mode]}
        assert_equal(*[await roll(client, name, **spec) for name in ("own", "same")])
        assert [verdict.refusals for verdict in trainer.verdicts()] == [(), ()]


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("dialect", ["http_masked", "http_plain"])
async def test_with_an_http_trainer(dialect: Any, edit: str) -> None:
    """The agent's calls offer the tools that its class declares."""
    masked = dialect == "http_masked"
    judge = TrainerDialect.MASKED if masked else TrainerDialect.PLAIN
    async with connected(*loops(edit)) as client, StrictTrainer(script=SCRIPT, dialect=judge, render_tools=False) as trainer:
        spec = {"completions": Target(trainer.url, dialect), "tokenizer": "toy"}
        assert_equal(*[await roll(client, name, **spec) for name in ("own", "same")])
        assert [verdict.refusals for verdict in trainer.verdicts()] == [(), ()]


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize(
    ("kind", "mode"), [(VllmEngine, mode) for mode in MODES] + [(SglangEngine, mode) for mode in MODES]
)
async def test_with_an_engine(kind: Callable[[EngineModel], Engine], mode: str, edit: str) -> None:
    outcomes = []
    async with connected(*loops(edit)) as client:
        for name in ("own", "same"):
            engine = kind(EngineModel(SAYS))
            async with serving(engine):
                spec = {"completions": engine_target(engine), **MODES[mode]}
                outcomes.append(await roll(client, name, **spec))
    assert_equal(*outcomes)


def engine_target(engine: Engine) -> Target:
    dialect: Any = DIALECTS[type(engine).__name__]
    return Target(engine.url, dialect, model=MODEL)
