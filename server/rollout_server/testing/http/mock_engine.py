"""A mock inference engine: OpenAI's chat completions over HTTP, with scripted models. Agents use it for further models."""

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from rollout_server.testing.http.server import HttpServer
from rollout_server.testing.model.calculator import Model
from rollout_server.testing.script import ScriptedReply


class MockEngine:
    """Serves scripted models by name on a free port of 127.0.0.1. An async context manager.

    Each model has a method `reply(messages)` that returns a `ScriptedReply`, of which message, finish reason and delay are used.
    Token counts are numbers of words. With `key`, a request with another bearer token gets a 401.

    Attributes:
        requests: the request bodies so far, with the key `model`.
    """

    def __init__(self, models: Mapping[str, Model], key: str = "") -> None:
        self.requests: list[dict[str, Any]] = []
        self._models = dict(models)
        self._key = key
        self._server: HttpServer

    async def __aenter__(self) -> Self:
        app = Starlette(routes=[Route("/v1/chat/completions", self._complete, methods=["POST"])])
        self._server = await HttpServer.open(app, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._server.close()

    @property
    def url(self) -> str:
        """The base URL."""
        return f"http://127.0.0.1:{self._server.port}/v1"

    @property
    def entries(self) -> tuple[str, ...]:
        """The models as entries of the setting ROLLOUT_MODELS."""
        return tuple(f"{name}={self.url}|{name}" for name in self._models)

    async def _complete(self, request: Request) -> JSONResponse:
        if self._key and request.headers.get("authorization") != f"Bearer {self._key}":
            return _error(401, "the key is missing or wrong")
        body = json.loads(await request.body())
        model = self._models.get(body["model"])
        if model is None:
            return _error(404, f"there is no model {body['model']!r}; there are {', '.join(self._models)}")
        self.requests.append(body)
        reply = model.reply(body["messages"])
        with suppress(TimeoutError):  # a delay ends when the engine closes
            await asyncio.wait_for(request.scope["state"]["closing"].wait(), reply.delay)
        return JSONResponse(_completion(body, reply))


def _completion(body: Mapping[str, Any], reply: ScriptedReply) -> dict[str, Any]:
    prompt = sum(len(str(message.get("content")).split()) for message in body["messages"])
    generated = len(str(reply.content).split())
    return {
        "object": "chat.completion",
        "model": body["model"],
        "choices": [{"index": 0, "message": reply.message, "finish_reason": reply.finish}],
        "usage": {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated},
    }


def _error(status: int, text: str) -> JSONResponse:
    return JSONResponse({"error": {"message": text}}, status)
