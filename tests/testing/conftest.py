"""A caller for the strict trainer: a minimal server side of the synchronous HTTP API."""

import asyncio
import json
import operator
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from rollout_server.testing.tokenizer import TOY_TOKENIZER
from rollout_server.testing.trainer import StrictTrainer
from transformers import AutoTokenizer

QUESTION = [
    {"role": "system", "content": "You are a helpful calculator assistant with access to calculator tools."},
    {"role": "user", "content": "Please calculate 5 plus 3, and then multiply the result by 2."},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name} two numbers",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
                "required": ["a", "b"],
            },
        },
    }
    for name in ("add", "subtract", "multiply", "divide")
]
_RUN = {"add": operator.add, "subtract": operator.sub, "multiply": operator.mul, "divide": operator.truediv}


def run_tool(call: dict[str, Any]) -> dict[str, Any]:
    """The tool message for one call."""
    try:
        arguments = call["function"]["arguments"]
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        text = str(_RUN[call["function"]["name"]](arguments["a"], arguments["b"]))
    except (ValueError, LookupError, TypeError, ArithmeticError) as error:
        text = f"Error: {type(error).__name__}"
    return {"role": "tool", "content": text, "tool_call_id": call["id"]}


async def until(condition: Callable[[], bool]) -> None:
    """Poll for a state that the trainer does not report."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - no event reports it
            await asyncio.sleep(0.01)


@dataclass
class Caller:
    """Call a trainer turn by turn. The mask's length is the growth of the caller's own renderings, as the protocol requires."""

    client: httpx.AsyncClient
    tokenizer: Any
    rollout_id: str = "r"
    tools: Sequence[Any] | None = None
    messages: list[Any] = field(default_factory=lambda: list(QUESTION))
    answers: list[dict[str, Any]] = field(default_factory=list)
    _last: int = 0

    def rendered(self) -> int:
        ids = self.tokenizer.apply_chat_template(
            self.messages, tools=self.tools, add_generation_prompt=True, return_dict=False
        )
        return len(ids)

    def mask(self) -> list[int] | None:
        if not self.answers:
            return None
        return [0] * (self.rendered() - self._last - len(self.answers[-1]["token_ids"])) or None

    async def post(self, **changes: Any) -> httpx.Response:
        """Send the correct request, or an incorrect one with `changes`. The response is not added to the history."""
        body = {"model": "default", "rollout_id": self.rollout_id, "messages": self.messages, "logprobs": True}
        return await self.client.post("/v1/chat/completions", json=body | {"response_mask": self.mask()} | changes)

    async def turn(self, **changes: Any) -> dict[str, Any]:
        """Run one accepted turn and its tools."""
        response = await self.post(**changes)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        self._last = self.rendered()
        self.answers.append(answer)
        message = answer["choices"][0]["message"]
        self.messages.append(message)
        self.messages.extend(run_tool(call) for call in message.get("tool_calls") or [])
        return answer

    async def play(self, turns: int = 20) -> None:
        """Run turns until a completion calls no tools, or `turns` are done."""
        for _ in range(turns):
            answer = await self.turn()
            if not answer["choices"][0]["message"].get("tool_calls"):
                return


@pytest.fixture(scope="session")
def toy() -> Any:
    return AutoTokenizer.from_pretrained(TOY_TOKENIZER)


@pytest.fixture
async def client() -> AsyncIterator[Callable[[StrictTrainer], httpx.AsyncClient]]:
    """`client(trainer)`: one client per trainer."""
    opened: dict[str, httpx.AsyncClient] = {}

    def connect(trainer: StrictTrainer) -> httpx.AsyncClient:
        if trainer.url not in opened:
            limits = httpx.Limits(max_connections=None)
            opened[trainer.url] = httpx.AsyncClient(base_url=trainer.url, timeout=60, limits=limits, verify=False)
        return opened[trainer.url]

    yield connect
    for each in opened.values():
        await each.aclose()


@pytest.fixture
def caller(client: Callable[[StrictTrainer], httpx.AsyncClient], toy: Any) -> Callable[..., Caller]:
    """A factory: `caller(trainer, rollout_id=..., messages=..., tools=...)`."""

    def make(trainer: StrictTrainer, **options: Any) -> Caller:
        return Caller(client(trainer), options.pop("tokenizer", toy), **options)

    return make


@dataclass
class KeyedCaller:
    """The server side of the asynchronous HTTP API: no masks, a key per turn, and an outcome at the end."""

    client: httpx.AsyncClient
    rollout_id: str = "r"
    messages: list[Any] = field(default_factory=lambda: list(QUESTION))
    answers: list[dict[str, Any]] = field(default_factory=list)
    tool_calls: int = 0

    @property
    def key(self) -> str:
        return f"{quote(self.rollout_id)}/0/{len(self.answers) + 1}"

    async def post(self, key: str | None = None, headers: Any = None, **changes: Any) -> httpx.Response:
        """Send the correct request, or an incorrect one with `changes`. The response is not added to the history."""
        body = {"model": "default", "rollout_id": self.rollout_id, "messages": self.messages, "max_tokens": 512}
        sent = {"idempotency-key": self.key if key is None else key, **(headers or {})}
        return await self.client.post("/v1/chat/completions", json=body | changes, headers=sent)

    def take(self, response: httpx.Response) -> dict[str, Any]:
        """Add a response to the history and run its tools."""
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        self.answers.append(answer)
        message = answer["choices"][0]["message"]
        calls = message.get("tool_calls") or []
        self.messages.append(message)
        self.messages.extend(run_tool(call) for call in calls)
        self.tool_calls += len(calls)
        return answer

    async def turn(self) -> dict[str, Any]:
        return self.take(await self.post())

    async def play(self) -> None:
        """Run turns until a completion calls no tools."""
        while (await self.turn())["choices"][0]["message"].get("tool_calls"):
            pass

    def outcome(self, **changes: Any) -> dict[str, Any]:
        """The correct outcome, or an incorrect one with `changes`."""
        prompts = [self._count(answer, "prompt_token_ids", "prompt_tokens") for answer in self.answers]
        generated = [self._count(answer, "token_ids", "completion_tokens") for answer in self.answers]
        metrics = {
            **dict.fromkeys(("total_latency_ms", "llm_latency_ms", "tool_latency_ms"), 1.5),
            "num_llm_calls": len(self.answers),
            "num_tool_calls": self.tool_calls,
            "prompt_tokens": sum(prompts),
            "response_tokens": sum(generated),
            "max_context_tokens": max(map(operator.add, prompts, generated), default=0),
        }
        return {
            "rollout_id": self.rollout_id,
            "status": "COMPLETED",
            "final_messages": self.messages,
            "finish_reason": "stop",
            "metrics": metrics,
            "extra_fields": {},
        } | changes

    def failure(self, **changes: Any) -> dict[str, Any]:
        """The outcome of a failed rollout."""
        failed = {"status": "ERROR", "finish_reason": "error", "error_message": "turn 1: no", "final_messages": []}
        return self.outcome(**failed | changes)

    async def deliver(self, body: Any = None, key: str = "outcome", **headers: str) -> httpx.Response:
        """Deliver an outcome once."""
        content = json.dumps(self.outcome() if body is None else body)
        sent = {"idempotency-key": key} if key else {}
        return await self.client.post("/v1/rollout/completed", content=content, headers=sent | headers)

    @staticmethod
    def _count(answer: dict[str, Any], ids: str, usage: str) -> int:
        return len(answer[ids]) if ids in answer else (answer.get("usage") or {}).get(usage, 0)


@pytest.fixture
def keyed(client: Callable[[StrictTrainer], httpx.AsyncClient]) -> Callable[..., KeyedCaller]:
    """A factory: `keyed(trainer, rollout_id=..., messages=...)`."""

    def make(trainer: StrictTrainer, **options: Any) -> KeyedCaller:
        return KeyedCaller(client(trainer), **options)

    return make
