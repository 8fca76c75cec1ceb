"""For tests of agent loops: a mock trainer, and what it was told at the end.

The mock answers whatever it is asked. `rollout_server.testing.trainer.StrictTrainer` also counts tokens and refuses what is wrong.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import urlsplit

from rollout_server.sdk.core.schemas import CompletionsRequest, MessageDict
from rollout_server.sdk.utils import get_message_content, parse_tool_calls

if TYPE_CHECKING:
    import httpx
    import pytest
    from fastapi import FastAPI
    from fastapi.testclient import TestClient

    from rollout_server.edge.trainer.http_client import HttpClient, HttpRequest, HttpResponse

__all__ = [
    "RolloutCompletionTracker",
    "create_mock_trainer_app",
    "fake_prompt_token_ids",
    "fake_token_ids",
    "patch_httpx_for_mock_trainer",
]

ToolCallGenerator: TypeAlias = Callable[[MessageDict], list[dict[str, Any]] | None]

_COMPLETIONS, _COMPLETED = "/v1/chat/completions", "/v1/rollout/completed"
_ARITHMETIC = ("calculate", "add", "sum", "plus", "subtract", "multiply", "divide")


def fake_token_ids(text: str) -> list[int]:
    """Ids for a text: 0, 1, 2 and so on, one for each character."""
    return list(range(len(text)))


def fake_prompt_token_ids(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Ids for a prompt: 0, 1, 2 and so on, ten for each message, and ten where there is none."""
    return list(range(10 * max(1, len(messages))))


@dataclass
class RolloutCompletionTracker:
    """Keeps the outcomes that a mock trainer is told. `event` is set while there are some. Safe to use from several threads."""

    event: threading.Event = field(default_factory=threading.Event)
    responses: list[dict[str, Any]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def record(self, response: dict[str, Any]) -> None:
        """Takes an outcome, the body of `POST /v1/rollout/completed`."""
        with self._lock:
            self.responses.append(response)
            self.event.set()

    def clear(self) -> None:
        """Forgets all outcomes."""
        with self._lock:
            self.responses.clear()
            self.event.clear()

    def wait(self, timeout: float = 5.0) -> bool:
        """Waits at most `timeout` seconds for an outcome; whether there is one."""
        return self.event.wait(timeout)


def create_mock_trainer_app(
    tracker: RolloutCompletionTracker | None = None, tool_call_generator: ToolCallGenerator | None = None
) -> FastAPI:
    """A trainer of the asynchronous dialect that answers at once, the same each time.

    Where a user asks for arithmetic it calls the tool add, with 5 and 3; `tool_call_generator` decides instead, given the last
    message: the tool calls of the answer, or None for a text. It answers a tool's result with "The calculation is complete." and
    everything else with "OK.". Its token ids are one for each character, so that prompts extend each other. `tracker` is told of
    every outcome; `GET /v1/rollout/completed/ID` tells of the last one of a rollout, `{}` of none.
    """
    from fastapi import FastAPI, HTTPException

    outcomes = tracker or RolloutCompletionTracker()
    app = FastAPI(title="mock trainer")

    @app.get("/health")
    def health() -> dict[str, str]:
        return {"status": "healthy", "service": "mock-trainer"}

    @app.post(_COMPLETIONS)
    def complete(body: dict[str, Any]) -> dict[str, Any]:
        try:
            request = CompletionsRequest.model_validate(body)
        except ValueError as error:
            raise HTTPException(422, f"no request for a completion: {error}") from None
        return _completion(request, _reply(request.messages, tool_call_generator or _sum))

    @app.post(_COMPLETED)
    def completed(body: dict[str, Any]) -> dict[str, str]:
        outcomes.record(body)
        return {"status": "ok"}

    @app.get(_COMPLETED + "/{rollout_id:path}")
    def outcome(rollout_id: str) -> dict[str, Any]:
        return next((each for each in reversed(outcomes.responses) if each.get("rollout_id") == rollout_id), {})

    return app


def patch_httpx_for_mock_trainer(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sends what is meant for a trainer, at any URL, to this client's mock trainer, until `monkeypatch` is undone.

    That is what servers of this process post to `/v1/chat/completions` and `/v1/rollout/completed`, and what httpx's asynchronous
    client posts there.
    """
    import httpx

    from rollout_server.edge.trainer.http_client import HttpClient, HttpResponse

    post, httpx_post = HttpClient.post, httpx.AsyncClient.post

    async def to_mock(own: HttpClient, request: HttpRequest) -> HttpResponse:
        path = urlsplit(request.url).path
        if not _is_trainer_path(path):
            return await post(own, request)
        reply = await asyncio.to_thread(client.post, _mock_path(path), content=request.body, headers=request.headers)
        return HttpResponse(reply.status_code, reply.content)

    async def httpx_to_mock(own: httpx.AsyncClient, url: Any, **options: Any) -> httpx.Response:
        path = urlsplit(str(url)).path
        if not _is_trainer_path(path):
            return await httpx_post(own, url, **options)
        sent = {name: value for name, value in options.items() if name in ("json", "content", "headers")}
        reply = await asyncio.to_thread(partial(client.post, _mock_path(path), **sent))
        sent_request = httpx.Request("POST", str(url))
        return httpx.Response(
            reply.status_code, content=reply.content, headers=dict(reply.headers), request=sent_request
        )

    monkeypatch.setattr(HttpClient, "post", to_mock)
    monkeypatch.setattr(httpx.AsyncClient, "post", httpx_to_mock)


def _is_trainer_path(path: str) -> bool:
    return path.endswith((_COMPLETIONS, _COMPLETED))


def _mock_path(path: str) -> str:
    return _COMPLETIONS if path.endswith(_COMPLETIONS) else _COMPLETED


def _sum(last: MessageDict) -> list[dict[str, Any]] | None:
    """The tool call where a user's text has a word of arithmetic."""
    content = last.get("content")
    if last.get("role") != "user" or not isinstance(content, str):
        return None
    if not any(word in content.lower() for word in _ARITHMETIC):
        return None
    return [{"id": "call_mock_add", "type": "function", "function": {"name": "add", "arguments": '{"a": 5, "b": 3}'}}]


def _reply(messages: list[MessageDict], generate: ToolCallGenerator) -> MessageDict:
    last = messages[-1] if messages else {"role": "user", "content": ""}
    calls = generate(last)
    if calls:
        return {"role": "assistant", "content": "I'll help you with that calculation.", "tool_calls": calls}
    text = "The calculation is complete." if last.get("role") == "tool" else "OK."
    return {"role": "assistant", "content": text}


def _completion(request: CompletionsRequest, reply: MessageDict) -> dict[str, Any]:
    prompt = _characters([*map(_render, request.messages), "<assistant>"])
    generated = _characters([get_message_content(reply)])
    return {
        "id": request.rollout_id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": request.model,
        "choices": [{"index": 0, "message": reply, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(generated),
            "total_tokens": len(prompt) + len(generated),
        },
        "prompt_token_ids": prompt,
        "token_ids": generated,
        "logprobs": [0.0] * len(generated),
    }


def _render(message: Mapping[str, Any]) -> str:
    calls = "".join(json.dumps(call, sort_keys=True) for call in parse_tool_calls(message))
    return f"<{message.get('role')}>{get_message_content(message)}{calls}</>"


def _characters(texts: Sequence[str]) -> list[int]:
    return [ord(character) for text in texts for character in text]
