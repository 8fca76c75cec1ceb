"""RenderPrompt returns the ids that a rollout with the same spec sends in its first turn, or refuses with its reason."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from osmosis.rollout.v1.message_pb2 import ChatMessage, ContentPart, ToolCall
from rollout_client import (
    AsyncClient,
    InvalidRequest,
    NotPossible,
    RenderedPrompt,
    Target,
    Tokenizer,
    messages,
    samples,
)
from rollout_server import Agent, Request, tool
from rollout_server.app import Server
from rollout_server.calculator import Calculator, add, multiply
from rollout_server.runtime.ports import Tool
from rollout_server.testing.tokenizer import TOY_TOKENIZER

from tests.exact.families import Family, families
from tests.hostile.templates import conversations, grammar
from tests.support.datasets import read_rows
from tests.support.engine_model import EngineModel
from tests.support.engines import MODEL, Engine, SglangEngine, VllmEngine
from tests.support.engines import serving as serving_engine
from tests.support.grpc_trainer import GrpcTrainer, serving
from tests.support.start_requests import settings
from tests.support.trl_templates import trl_templates

RANDOM_TEMPLATES = 8
REFUSING = """{% for message in messages %}{% if message.role == "tool" %}{{ raise_exception("no tool results") }}{% endif %}
<|im_start|>{{ message.role }}: {{ message.content }}<|im_end|>{% endfor %}<|im_start|>assistant:"""
QUESTION = {"role": "user", "content": "What is 5 + 3?"}
CALLS = [{"id": "call00001", "type": "function", "function": {"name": "add", "arguments": '{"a": 5.0, "b":3}'}}]
HISTORY = [
    {"role": "system", "content": "Be brief. é 漢字 <|im_end|>"},
    {"role": "user", "content": [{"type": "text", "text": "What is"}, {"type": "text", "text": " 5 + 3?\n"}]},
    {"role": "assistant", "content": "", "tool_calls": CALLS},
    {"role": "tool", "content": "8", "tool_call_id": "call00001"},
    {"role": "user", "content": "And\u00a0twice that? 😀"},
]
TYPED = [
    ChatMessage(role="user", parts=[ContentPart(text="What is 5 + 3?")]),
    ChatMessage(role="assistant", tool_calls=[ToolCall(id="call00001", name="add", arguments_json='{"a":5,"b":3}')]),
    ChatMessage(role="tool", parts=[ContentPart(text="8")], tool_call_id="call00001"),
]


class Bare(Agent):
    """Has no tools."""

    name = "bare"


@tool
async def look(where: Literal["left", "<right>"], deep: Sequence[Mapping[str, float]] | None = None) -> str:
    """Looks "somewhere" & returns 'what' <b>is</b> there: é 漢字 😀.

    Args:
        where: One of two.
        deep: Numbers by name, such as {"a": 1.0}.
    """
    return where


class Choosing(Agent):
    """Offer the tools that the metadata names."""

    name = "choosing"
    tools = (look, add, multiply)

    def choose_tools(self, request: Request) -> Sequence[Tool]:
        """Return them in the order of `tools`."""
        return [each for each in self.tools if each.name in request.metadata.get("tools", ())]


AGENTS: Sequence[Mapping[str, Any]] = (
    {"agent": "bare"},
    {"agent": "calculator"},
    {"agent": "choosing", "metadata": {"tools": ["look", "multiply"]}},
    {"agent": "choosing", "metadata": {"tools": []}},
)


@dataclass(frozen=True)
class Stage:
    """A server with a client and a gRPC trainer."""

    client: AsyncClient
    trainer: GrpcTrainer

    async def same(self, **spec: Any) -> RenderedPrompt | None:
        """Render a prompt and run a rollout; both have the same ids, or the same reason for none. Return the prompt."""
        self.trainer.requests.clear()
        rendered, refused = None, ""
        try:
            rendered = await self.client.render_prompt(**spec)
        except (InvalidRequest, NotPossible) as error:
            refused = error.message
        started = await self.client.start(completions=self.trainer.url, **spec)
        outcome = (await self.client.wait(started.uid, view="samples")).outcome
        if rendered is None:
            assert outcome.HasField("failure"), (spec, refused)
            assert outcome.failure.message[:100] in refused  # statuses are cut
            assert self.trainer.requests == []
            return None
        assert not outcome.HasField("failure"), (spec, outcome.failure)
        (request,) = self.trainer.requests
        assert rendered.ids == [each for span in request.new_tokens.spans for each in span.token_ids], spec
        assert rendered.ids == samples(outcome)[0].prompt_ids
        assert rendered.messages == messages(request.new_messages)
        tools = [(each.name, each.description, json.loads(each.parameters_json_schema)) for each in started.tools]
        functions = [each["function"] for each in rendered.tools]
        assert [(each["name"], each["description"], each["parameters"]) for each in functions] == tools
        return rendered


@asynccontextmanager
async def stage(tokenizers: Mapping[str, Path], templates: Mapping[str, Path] | None = None) -> AsyncIterator[Stage]:
    """Start a server of all agents with these tokenizers and replaced templates."""
    changes = {"tokenizers": dict(tokenizers), "templates": dict(templates or {}), "tokenizers_offline": True}
    async with (
        Server([Bare(), Calculator(), Choosing()], settings(**changes)) as server,
        AsyncClient(f"127.0.0.1:{server.grpc_port}") as client,
        serving(GrpcTrainer([7, 8])) as trainer,
    ):
        yield Stage(client, trainer)


async def test_every_agent_and_conversation_has_the_prompt_of_its_first_turn() -> None:
    async with stage({"toy": TOY_TOKENIZER}) as at:
        for fields in AGENTS:
            for prompt in ([QUESTION], HISTORY, TYPED, ['{"role":"user" , "content":"\\u00e9","n":1e2}']):
                rendered = await at.same(messages=prompt, tokenizer="toy", **fields)
                assert rendered is not None
                names = [each["function"]["name"] for each in rendered.tools]
                assert names == (
                    fields["metadata"]["tools"]
                    if "metadata" in fields
                    else ["add", "subtract", "multiply", "divide"] * (fields["agent"] == "calculator")
                )
        plain = await at.same(messages=[QUESTION], tokenizer="toy", agent="bare")
        tooled = await at.same(messages=[QUESTION], tokenizer="toy", agent="calculator")
        assert plain is not None
        assert tooled is not None
        assert len(plain.ids) < len(tooled.ids)


async def check_templates(texts: Mapping[str, str], at: Path, chance: random.Random) -> Counter[bool]:
    """Compare prompts and rollouts with each template, by name. Return how many had a prompt, and how many had none."""
    paths = {name: at / f"{name}.jinja" for name in texts}
    for name, text in texts.items():
        paths[name].write_text(text, encoding="utf-8")
    counted = Counter[bool]()
    async with stage(dict.fromkeys(paths, TOY_TOKENIZER), paths) as started:
        for name in paths:
            talk = conversations.generate(chance)
            for prompt in ([QUESTION], HISTORY, [talk.spelled(each) for each in talk.prompt]):
                tokenizer = Tokenizer(name, "", chance.choice((None, {"enable_thinking": False})))
                rendered = await started.same(messages=prompt, tokenizer=tokenizer, **chance.choice(AGENTS))
                counted[rendered is not None] += 1
    return counted


async def test_random_templates_and_one_that_refuses(tmp_path: Path) -> None:
    chance = random.Random("first prompts")
    made = [grammar.generate(chance).text for _ in range(RANDOM_TEMPLATES)]
    # With "%M", prompt and rollout would differ in time.
    texts = {f"t{number}": text for number, text in enumerate(made) if "%M" not in text}
    counted = await check_templates({**texts, "refusing": REFUSING}, tmp_path, chance)
    assert counted[True] > RANDOM_TEMPLATES
    assert counted[False] > 0


async def test_templates_of_released_models(tmp_path: Path) -> None:
    found = [each.values[0] for each in trl_templates() if each.values[0] is not None]
    paths = [path for path in found if not path.stem.endswith("_training")]
    if not paths:
        pytest.skip("no .venv-templates: `make .venv-templates/.ready` makes it")
    texts = {path.stem: path.read_text(encoding="utf-8") for path in paths}
    counted = await check_templates(texts, tmp_path, random.Random("released"))
    assert counted[True] > len(paths)


@pytest.mark.parametrize("family", [each for each in families() if each.values[0] and not each.values[0].template])
async def test_tokenizers_of_released_models(family: Family) -> None:
    async with stage({"model": family.directory}) as at:
        found = [
            await at.same(messages=prompt, tokenizer="model", **fields)
            for fields in AGENTS
            for prompt in ([QUESTION], HISTORY)
        ]
    assert any(found)


@pytest.mark.parametrize("kind", [VllmEngine, SglangEngine])
async def test_an_engine_gets_the_same_ids(kind: type[Engine]) -> None:
    engine = kind(EngineModel(["It is 8."]))
    async with stage({"toy": TOY_TOKENIZER}) as at, serving_engine(engine):
        target = Target(engine.url, "vllm" if kind is VllmEngine else "sglang", model=MODEL)
        for mode, prompt in (("tokens", HISTORY), ("messages", [QUESTION])):  # this engine itself renders the same
            spec: Any = {"messages": prompt, "tokenizer": "toy", "agent": "calculator", "token_mode": mode}
            rendered = await at.client.render_prompt(completions=target, **spec)
            started = await at.client.start(completions=target, **spec)
            outcome = (await at.client.wait(started.uid, view="samples")).outcome
            assert engine.model.seen[-1].prompt == rendered.ids == samples(outcome)[0].prompt_ids


async def test_rows_of_a_dataset(tmp_path: Path) -> None:
    rows = [
        {"question": "Wohin?\n", "answer": "<right>", "tools": ["look", "multiply"], "system_prompt": "Sei knapp."},
        {"question": "What is 5 + 3?", "answer": "8", "tools": ["add"], "level": 1.5},
        {"question": [*HISTORY, QUESTION], "answer": None, "tools": []},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    async with stage({"toy": TOY_TOKENIZER}) as at:
        lengths = []
        for row in read_rows(path):
            rendered = await at.same(messages=row.messages, metadata=row.metadata, tokenizer="toy", agent="choosing")
            assert rendered is not None
            lengths.append((len(rendered.tools), len(rendered.messages)))
    assert lengths == [(2, 2), (1, 1), (0, 6)]


async def test_an_image_is_refused_by_name_as_in_a_rollout(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"question": "What is this?", "image": "https://images.example/a.png"}))
    (row,) = read_rows(path, {"images": "image"})
    async with stage({"toy": TOY_TOKENIZER}) as at:
        with pytest.raises(InvalidRequest) as caught:
            await at.client.render_prompt(messages=row.messages, tokenizer="toy", agent="bare")
        (wrong,) = caught.value.fields
        assert wrong.field == "spec.messages"
        assert "is not text (image_url)" in wrong.description
        assert await at.same(messages=row.messages, tokenizer="toy", agent="bare") is None
