"""A real server, an engine with a scripted model behind a real tokenizer, and programs that run on the endpoint of a rollout."""

from __future__ import annotations

import asyncio
import json
import os
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from aiohttp import web
from osmosis.rollout.v1.outcome_pb2 import Outcome
from rollout_client import AsyncClient, Target, TrainingSample, samples
from rollout_server import Agent, Run
from rollout_server.agent import ExternalAgent
from rollout_server.app import Server
from rollout_server.settings import Settings
from rollout_server.testing.tokenizer import TOY_TOKENIZER

from tests.clients.recording import Exchange, Recorder, recording
from tests.support.engine_model import END, EngineModel, Generated
from tests.support.engines import MODEL, VllmEngine, serving

ENVIRONMENT = Path(__file__).resolve().parents[2] / ".venv-clients"
PROGRAMS = Path(__file__).parent / "programs"
_TURN = "<|im_start|>assistant\n"


@dataclass
class TurnModel(EngineModel):
    """Say the text whose place in `says` is the number of completions in the prompt: equal prompts get equal texts."""

    def next_text(self, prompt: Sequence[int]) -> str:
        turns = self.tokenizer.decode(list(prompt)).count(_TURN) - 1
        return self.says[min(turns, len(self.says) - 1)]


@dataclass
class GatedEngine(VllmEngine):
    """vLLM that generates nothing until it is set free, or until `awaited` requests have come."""

    free: asyncio.Event = field(default_factory=asyncio.Event)
    awaited: int = 0

    async def generate(self, request: web.Request) -> web.Response:
        self.awaited -= 1
        if not self.awaited:
            self.free.set()
        await self.free.wait()
        return await super().generate(request)


@dataclass(frozen=True)
class OwnTool:
    """A tool with a given schema, and the function behind it."""

    name: str
    description: str
    parameters_json_schema: str
    results: Mapping[str, str]

    async def run(self, arguments: Mapping[str, Any]) -> str:
        return self.results[self.name]


class Played(Agent):
    """The same conversation in a loop of the server: call tools, and thank for the first answer."""

    name = "played"

    def __init__(self, tools: Sequence[OwnTool], thanks: str) -> None:
        super().__init__()
        self.tools = tuple(tools)
        self.thanks = thanks

    async def play(self, run: Run) -> None:
        while (reply := await run.sample()).tool_calls:
            await run.call(reply.tool_calls)
        await run.append({"role": "user", "content": self.thanks})
        await run.sample()


@dataclass(frozen=True)
class Captured:
    """A rollout whose agent was a program: its outcome and samples, what passed the wire, and what each program printed."""

    outcome: Outcome
    samples: Sequence[TrainingSample]
    recorder: Recorder
    printed: Sequence[str]


@dataclass(frozen=True)
class World:
    """A server with an engine."""

    engine: GatedEngine
    server: Server
    client: AsyncClient
    http: httpx.AsyncClient
    spec: Mapping[str, Any]
    endpoint: str
    exchanges: list[Exchange] = field(default_factory=list)

    async def start(self) -> tuple[str, str, dict[str, str]]:
        """Start a rollout; return its uid, the path of its endpoint, and the header with its key."""
        target = {"url": self.engine.url, "dialect": "vllm", "model": MODEL}
        body = {"agent": "external", "messages": [{"role": "user", "content": "?"}], "completions": target, **self.spec}
        response = await self.http.post("/v1/rollouts", json=body)
        assert response.is_success, response.text
        started = response.json()
        access = started["access"]
        path = httpx.URL(access["base_url"]).path
        return started["rollout"]["uid"], path, {"authorization": f"Bearer {access['key']}"}

    async def finish(self, uid: str, path: str, bearer: Mapping[str, str]) -> Outcome:
        """Finish the rollout with the reward 1 and return its outcome."""
        (await self.http.post(f"{path}/finish", json={"reward": 1.0}, headers=bearer)).raise_for_status()
        await self.client.wait(uid, timeout=60)
        outcome = (await self.client.get(uid, view="full")).outcome
        assert outcome.failure.message == ""
        assert outcome.reward == 1.0
        return outcome

    async def capture(self, *commands: Sequence[str], folder: Path | None = None, **environment: str) -> Captured:
        """Run the programs at the same time as the agent of one rollout, and finish it."""
        uid, path, bearer = await self.start()
        async with recording(self.endpoint) as recorder:
            recorder.exchanges = self.exchanges
            given = access_environment(recorder.url + path, bearer["authorization"].split()[1]) | environment
            printed = await asyncio.gather(*(run_program(command, given, folder) for command in commands))
        outcome = await self.finish(uid, path, bearer)
        return Captured(outcome, samples(outcome), recorder, printed)


def access_environment(base: str, key: str) -> dict[str, str]:
    """The variables by which clients find the endpoint, and none of the server's own."""
    own = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
    openai = {"OPENAI_BASE_URL": f"{base}/v1", "OPENAI_API_KEY": key, "OPENAI_AGENTS_DISABLE_TRACING": "1"}
    return own | openai | {"ANTHROPIC_BASE_URL": base, "ANTHROPIC_API_KEY": key, "BASE": base, "NO_PROXY": "*"}


async def run_program(command: Sequence[str], environment: Mapping[str, str], folder: Path | None) -> str:
    """Run a program to its end and return what it printed, stripped."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command, env=dict(environment), cwd=folder, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), 90)
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, f"{command}: {out.decode()[-2000:]}\n{err.decode()[-4000:]}"
    return out.decode().strip()


def program(name: str, *options: str) -> list[str]:
    """The command of a program that runs in the clients' environment."""
    return [str(ENVIRONMENT / "bin" / "python"), str(PROGRAMS / f"{name}.py"), *options]


@asynccontextmanager
async def serving_world(model: EngineModel, *agents: Agent, token_mode: str = "tokens") -> AsyncIterator[World]:
    """Start an engine with the model and a server with the agents, or with one external agent."""
    ports: Any = {"host": "127.0.0.1", "http_port": 0, "grpc_port": 0, "drain_seconds": 0}
    settings = Settings(_env_file=None, tokenizers={"t": TOY_TOKENIZER}, tokenizers_offline=True, **ports)
    engine = GatedEngine(model)
    engine.free.set()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(serving(engine))
        server = await stack.enter_async_context(Server(agents or [External()], settings))
        client = await stack.enter_async_context(AsyncClient(f"127.0.0.1:{server.grpc_port}"))
        url = f"http://127.0.0.1:{server.http_port}"
        http = await stack.enter_async_context(
            httpx.AsyncClient(base_url=url, timeout=60, trust_env=False, verify=False)
        )
        yield World(engine, server, client, http, {"tokenizer": {"name": "t"}, "token_mode": token_mode}, url)


class External(ExternalAgent):
    """The program is the agent."""

    name = "external"


async def play(
    says: Sequence[str], agent: Agent, messages: Sequence[Mapping[str, Any]], *, odd: bool, mode: str
) -> Any:
    """The samples of the agent's conversation about the messages with a model that says the same."""
    model = TurnModel(says, odd=odd)
    async with serving_world(model, agent, token_mode=mode) as world:
        target = Target(world.engine.url, "vllm", model=MODEL)
        async with world.client.run(
            agent=agent.name, messages=messages, completions=target, tokenizer="t", token_mode=mode
        ) as run:
            async for _ in run:
                pass
        return samples((await world.client.get(run.uid, view="full")).outcome)


def offered(body: Mapping[str, Any], results: Mapping[str, str]) -> list[OwnTool]:
    """The tools of a request of any of the APIs."""
    found = []
    for tool in body.get("tools", ()):
        given = tool.get("function", tool)
        schema = json.dumps(given.get("parameters", given.get("input_schema")))
        found.append(OwnTool(given["name"], given.get("description", ""), schema, results))
    return found


def check_captured(found: Sequence[TrainingSample], seen: Sequence[Generated]) -> list[Generated]:
    """Assert that each completion is in one sample, after the prompt that the engine saw, and that nothing else trains.

    Returns the completions that are masked out.
    """
    trained, masked = 0, []
    for (prompt, ids), times in Counter((tuple(each.prompt), tuple(each.ids)) for each in seen).items():
        start, stop = len(prompt), len(prompt) + len(ids)
        homes = [each for each in found if _written(each, start, stop) and _tokens(each)[:stop] == [*prompt, *ids]]
        assert len(homes) == times, (len(homes), times)
        generated = next(each for each in seen if (tuple(each.prompt), tuple(each.ids)) == (prompt, ids))
        for home in homes:
            inside = slice(start - len(home.prompt_ids), stop - len(home.prompt_ids))
            mask = home.response_mask[inside]
            assert mask in ([1] * len(ids), [0] * len(ids))
            trained += sum(mask)
            if mask[0]:
                assert home.logprobs is not None
                assert home.logprobs[inside] == array("f", generated.logprobs).tolist()
            else:
                masked.append(generated)
    assert sum(sum(each.response_mask) for each in found) == trained
    return masked


def text(model: EngineModel, generated: Generated) -> str:
    """What the model wrote, without the end token."""
    return str(model.tokenizer.decode(generated.ids)).removesuffix(END)


def _tokens(sample: TrainingSample) -> list[int]:
    return sample.prompt_ids + sample.response_ids


def _written(sample: TrainingSample, start: int, stop: int) -> bool:
    """Whether the tokens are one completion that was sampled in this segment."""
    return any(
        (span.author, span.start, span.stop) == ("model", start, stop) and span.reason != "prompt"
        for span in sample.spans or ()
    )
