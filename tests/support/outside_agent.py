"""An agent outside the server: it reaches the model endpoint of its rollout with an HTTP client, in the shapes of three APIs."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx
from aiohttp import web
from rollout_server.agent import Agent
from rollout_server.agent.external import ExternalAgent
from rollout_server.app import Server
from rollout_server.core.capture.rules import CaptureOptions
from rollout_server.settings import Settings
from rollout_server.testing.tokenizer import TOY_TOKENIZER

from tests.support.api_shapes import api_answer, api_request
from tests.support.engine_model import EngineModel, Generated, toy
from tests.support.engines import MODEL, VllmEngine, serving
from tests.support.gateways import http_client

TOKENIZER = "toy"
ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    },
}


class Outside(ExternalAgent):
    """Runs elsewhere."""

    name = "outside"


class AsTemplate(ExternalAgent):
    """Runs elsewhere; its histories are rendered as they are sent."""

    name = "as-template"
    capture = CaptureOptions(history="as_template")


class Texts(Sequence[str]):
    """A different text for each generation, with its number, from 0: a thought, an answer and perhaps a call."""

    def __init__(self, *, thinks: bool = False, calls: bool = False) -> None:
        self._thought = "<think>\nThought {0}.\n</think>\n\n" if thinks else ""
        self._call = (
            '\n<tool_call>\n{{"name": "add", "arguments": {{"a": {0}, "b": 1}}}}\n</tool_call>' if calls else ""
        )

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, number: Any) -> Any:
        return f"{self._thought}Answer {{0}}.{self._call}".format(number)


class GatedEngine(VllmEngine):
    """A vLLM engine that answers while its gate is open; `waiting` counts the requests in front of it."""

    gate: asyncio.Event
    waiting: int = 0

    async def taken(self, request: web.Request) -> dict[str, Any]:
        """Wait for the gate."""
        if request.path != "/v1/chat/completions/derender":
            self.waiting += 1
            await self.gate.wait()
            self.waiting -= 1
        return await super().taken(request)


@dataclass
class Stand:
    """A server with outside agents, an engine, and an HTTP client of the gateway."""

    server: Server
    engine: GatedEngine
    http: httpx.AsyncClient
    started: int = 0

    @property
    def url(self) -> str:
        """The base URL of the gateway."""
        return f"http://127.0.0.1:{self.server.http_port}"

    @property
    def seen(self) -> list[Generated]:
        """What the engine generated, in order."""
        return self.engine.model.seen

    def calls(self, result: str) -> float:
        """How many model calls had this result, by the server's metrics."""
        lines = self.server.exposition().decode().splitlines()
        (found,) = (line for line in lines if re.match(rf'\S*model_calls\S*result="{result}"', line))
        return float(found.split()[-1])

    async def start(self, agent: str = "outside", **changes: Any) -> Endpoint:
        """Start a rollout and return its endpoint."""
        self.started += 1
        body = {
            "rollout_id": f"outside-{self.started}",
            "agent": agent,
            "messages": [{"role": "user", "content": "The task."}],
            "completions": {"url": self.engine.url, "dialect": "vllm", "model": MODEL},
            "tokenizer": {"name": TOKENIZER},
            "token_mode": "tokens",
        } | changes
        reply = await self.http.post("/v1/rollouts", json=body)
        assert reply.status_code == 201, reply.text
        access = reply.json()["access"]
        return Endpoint(self, reply.json()["rollout"]["uid"], urlsplit(access["base_url"]).path, access["key"])


@dataclass
class Endpoint:
    """The model endpoint of a rollout. `path` is that of its base URL."""

    stand: Stand
    uid: str
    path: str
    key: str = field(repr=False)

    def headers(self, key: str | None = None) -> dict[str, str]:
        """The headers of a request with this key; with the rollout's own by default."""
        return {"authorization": f"Bearer {self.key if key is None else key}"}

    async def post(
        self,
        route: str,
        body: Any,
        *,
        http: httpx.AsyncClient | None = None,
        key: str | None = None,
        repeated: bool = False,
    ) -> httpx.Response:
        """Send a request to a route of the endpoint, such as "chat/completions". `repeated`: it says that it repeats one."""
        headers = self.headers(key) | ({"x-stainless-retry-count": "1"} if repeated else {})
        return await (http or self.stand.http).post(f"{self.path}/v1/{route}", json=body, headers=headers)

    async def chat(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> dict[str, Any]:
        """Request a completion over chat completions and return its message."""
        reply = await self.post("chat/completions", api_request("chat", messages, **fields))
        assert reply.status_code == 200, reply.text
        return api_answer("chat", reply.json())

    async def finish(self, **result: Any) -> dict[str, Any]:
        """Finish the work and return the outcome."""
        reply = await self.stand.http.post(f"{self.path}/finish", json=result, headers=self.headers())
        assert reply.status_code == 200, reply.text
        return await self.outcome()

    async def outcome(self) -> dict[str, Any]:
        """Wait for the end of the rollout and return its outcome."""
        while True:
            reply = await self.stand.http.get(f"/v1/rollouts/{self.uid}", params={"wait": 30, "view": "full"})
            assert reply.status_code == 200, reply.text
            if reply.json()["state"] == "finished":
                outcome: dict[str, Any] = reply.json()["outcome"]
                return outcome


@asynccontextmanager
async def standing(
    texts: Sequence[str] = Texts(), *agents: Agent, odd: bool = False, **settings: Any
) -> AsyncIterator[Stand]:
    """Run a server, also with further agents, and an engine that generates these texts."""
    async with AsyncExitStack() as stack:
        engine = GatedEngine(EngineModel(texts, odd=odd))
        engine.gate = asyncio.Event()
        engine.gate.set()
        await stack.enter_async_context(serving(engine))
        chosen = Settings(
            _env_file=None,
            host="127.0.0.1",
            http_port=0,
            grpc_port=0,
            **{"tokenizers": {TOKENIZER: TOY_TOKENIZER}, "tokenizers_offline": True, "drain_seconds": 0, **settings},
        )
        server = await stack.enter_async_context(Server([Outside(), AsTemplate(), *agents], chosen))
        limits = httpx.Limits(max_connections=None)
        url = f"http://127.0.0.1:{server.http_port}"
        client = await stack.enter_async_context(http_client(url, timeout=60, limits=limits))
        yield Stand(server, engine, client)


def history(*texts: str) -> list[dict[str, Any]]:
    """Messages of a user and, in between, of an assistant."""
    return [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]


def request_body(api: str, *texts: str, system: str = "", **fields: Any) -> dict[str, Any]:
    """A request in the shape of an API, for texts of a user and, in between, of an assistant."""
    first = [{"role": "system", "content": system}] if system else []
    return api_request(api, [*first, *history(*texts)], **fields)


def answer_text(api: str, reply: httpx.Response) -> str:
    """The text of an answer in the shape of an API."""
    assert reply.status_code == 200, reply.text
    return str(api_answer(api, reply.json())["content"])


def check_each_token_once(
    outcome: Mapping[str, Any], seen: Sequence[Generated], masked: Iterable[int] = ()
) -> Mapping[int, str]:
    """Assert that each generated token is the model's in one sample and trains there, behind the prompt that the engine saw.

    No other token trains. The generations `masked`, counted from 0, are in a sample too, but do not train. Returns the segment of
    each generation.
    """
    samples = {sample["segment_id"]: sample["prompt_ids"] + sample["response_ids"] for sample in outcome["samples"]}
    masks = {
        sample["segment_id"]: [0] * len(sample["prompt_ids"]) + list(sample["response_mask"])
        for sample in outcome["samples"]
    }
    expected = {segment: [0] * len(ids) for segment, ids in samples.items()}
    placed: dict[int, str] = {}
    for number, generated in enumerate(seen):
        start, stop = len(generated.prompt), len(generated.prompt) + len(generated.ids)
        found = [
            segment["id"]
            for segment in outcome["segments"]
            if (start, stop) in model_spans(segment)
            and samples[segment["id"]][:stop] == generated.prompt + generated.ids
        ]
        assert len(found) == 1, f"generation {number} is in the segments {found}"
        placed[number] = found[0]
        expected[found[0]][start:stop] = [int(number not in masked)] * len(generated.ids)
    assert masks == expected
    assert sum(len(model_spans(segment)) for segment in outcome["segments"]) == len(seen)
    return placed


def model_spans(segment: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Where the tokens that the model sampled start and stop in a segment."""
    spans, start = [], 0
    for span in segment["spans"]:
        stop = start + len(span["token_ids"])
        if span["author"] == "model":
            spans.append((start, stop))
        start = stop
    return spans


def prompt_text(generated: Generated) -> str:
    """The prompt of a generation, as text."""
    return str(toy().decode(generated.prompt))
