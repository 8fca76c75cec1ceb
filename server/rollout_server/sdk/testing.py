"""A mock trainer for tests of agent loops, and a tracker of the outcomes it receives.

The mock verifies nothing. `rollout_server.testing.trainer.StrictTrainer` verifies every token and mask.
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
    """Return the token ids 0, 1, 2, ..., one per character."""
    return list(range(len(text)))


def fake_prompt_token_ids(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the token ids 0, 1, 2, ..., ten per message; ten if there are no messages."""
    return list(range(10 * max(1, len(messages))))


@dataclass
class RolloutCompletionTracker:
    """Collects the outcomes that a mock trainer receives. `event` is set while `responses` is not empty. Thread-safe."""

    event: threading.Event = field(default_factory=threading.Event)
    responses: list[dict[str, Any]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def record(self, response: dict[str, Any]) -> None:
        """Add an outcome, the body of `POST /v1/rollout/completed`."""
        with self._lock:
            self.responses.append(response)
            self.event.set()

    def clear(self) -> None:
        """Remove all outcomes."""
        with self._lock:
            self.responses.clear()
            self.event.clear()

    def wait(self, timeout: float = 5.0) -> bool:
        """Wait at most `timeout` seconds for an outcome. Return whether there is one."""
        return self.event.wait(timeout)


def create_mock_trainer_app(
    tracker: RolloutCompletionTracker | None = None, tool_call_generator: ToolCallGenerator | None = None
) -> FastAPI:
    """Return a mock trainer of the asynchronous HTTP API with deterministic completions.

    If the user asks for arithmetic, the completion calls the tool `add` with 5 and 3. After a tool result it is "The calculation is
    complete.", otherwise "OK.". Each character is one token, so that prompts extend each other.
    `GET /v1/rollout/completed/ID` returns the last outcome of a rollout, or `{}`.

    Args:
        tracker: receives every outcome.
        tool_call_generator: given the last message, returns the tool calls of the completion, or None for a text.
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
            raise HTTPException(422, f"not a completion request: {error}") from None
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
    """Redirect trainer requests for any URL to the mock trainer of this test client, until `monkeypatch` is undone.

    This covers POST requests to `/v1/chat/completions` and `/v1/rollout/completed` from servers in this process and from
    `httpx.AsyncClient`.
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
    """Return a tool call if the last message is a user's and mentions arithmetic, else None."""
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
