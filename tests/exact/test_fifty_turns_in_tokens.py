"""The same fifty turns with gRPC trainers: in token mode every template completes every conversation.

The trainer judges each prompt independently. Its accumulated sample equals the server's record, element by element. The
same holds for the samples that the trainer library yields over a stream, both in token mode and if the trainer renders.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from osmosis.rollout.v1 import outcome_pb2
from rollout_client import AsyncClient, samples
from rollout_server.app import Server
from rollout_server.settings import Settings
from rollout_server.testing.checks.renderer import PlainRenderer
from rollout_server.testing.script import tool_call
from rollout_server.testing.trainer import StrictTrainer

from tests.exact.conversations import Conversation, Guided, written
from tests.exact.families import EVERYTHING, Family, families
from tests.exact.library import by_library, sayable
from tests.support.talking_agent import equal

KIND = "mixed"
# Without ROLLOUT_EXACT=all, each tokenizer runs with its own template only.
PLAYED = [each for each in families() if EVERYTHING or each.values[0] is None or each.values[0].template is None]
CALLED = {"role": "assistant", "content": "", "tool_calls": [tool_call("a1b2c3d4e", "look", '{"r": 0}')]}


def tool_of(tool: Any) -> Mapping[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": json.loads(tool.parameters_json_schema),
    }
    return {"type": "function", "function": function}


TOOLS = [tool_of(tool) for tool in Guided.tools]


@dataclass(frozen=True, slots=True)
class TokenModeServer:
    """A server, a client of it, and a trainer of one tokenizer. `rendered`: its template renders tool results."""

    address: str
    tokenizer: Any
    client: AsyncClient
    trainer: StrictTrainer
    conversation: Conversation
    rendered: bool


@asynccontextmanager
async def world(family: Family, at: Path) -> AsyncIterator[TokenModeServer]:
    directory = family.laid_out(at)
    ports: Any = {"host": "127.0.0.1", "http": False, "http_port": 0, "grpc_port": 0, "drain_seconds": 0}
    settings = Settings(_env_file=None, tokenizers={"model": directory}, tokenizers_offline=True, **ports)
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(Server([Guided()], settings))
        address = f"127.0.0.1:{server.grpc_port}"
        client = await stack.enter_async_context(AsyncClient(address))
        tokenizer = family.tokenizer()
        renderer = PlainRenderer(tokenizer)
        conversation = written(KIND, renderer, TOOLS, family.turns)
        trainer = await stack.enter_async_context(StrictTrainer(directory, tools=TOOLS))
        heard = [
            {"role": "user", "content": "?"},
            CALLED,
            {"role": "tool", "tool_call_id": "a1b2c3d4e", "content": "Zq9"},
        ]
        yield TokenModeServer(address, tokenizer, client, trainer, conversation, "Zq9" in renderer.text(heard, TOOLS))


async def play(at: TokenModeServer, rollout_id: str, **spec: Any) -> outcome_pb2.Outcome:
    await at.trainer.put_script(rollout_id, at.conversation.script)
    run = at.client.run(
        messages=at.conversation.asked,
        completions=f"grpc://{at.trainer.grpc_target}",
        rollout_id=rollout_id,
        limits={"turns": 100},
        metadata=at.conversation.metadata,
        **spec,
    )
    async for _ in run:
        pass
    return (await at.client.get(run.uid, view="full")).outcome


@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", PLAYED)
async def test_token_mode(family: Family, tmp_path: Path) -> None:
    async with world(family, tmp_path) as at:
        if not at.conversation.exchanges:
            pytest.skip("the template refuses every exchange")
        outcome = await play(at, "tokens", tokenizer="model")
        verdict = at.trainer.verdict("tokens")
        assert verdict is not None
        if not at.rendered:
            assert outcome.failure.category == outcome_pb2.FAILURE_CATEGORY_TOKENIZER
            assert "does not show where the last completion ends" in outcome.failure.message
            return
        assert (outcome.failure.message, verdict.refusals) == ("", ())
        assert len(verdict.turns) == len(at.conversation.exchanges)
        # Only for completions with a space behind their stop token: whether that token ends them is unknown.
        assert {warning.code for warning in outcome.warnings} <= {"rendering_inexact"}
        assert len(outcome.warnings) <= len(at.conversation.exchanges) / 10
        (sample,) = samples(outcome)
        assert equal(sample, verdict.sample)
        written_anew = sayable(PlainRenderer(at.tokenizer), at.conversation.asked, TOOLS, family.turns)
        for mode in ("tokens", "messages"):
            finished = await by_library(at.client, at.tokenizer, written_anew, mode)
            assert (finished.error, finished.mismatch, finished.checked) == ("", None, True), mode
            assert finished.rollout.outcome.metrics.turns == len(written_anew.exchanges)
            kept = samples(await at.client.get(finished.uid, view="full"))
            assert list(finished.samples) == kept
            assert len(kept) == 1 or mode == "messages"  # in message mode a template may rewrite the history
