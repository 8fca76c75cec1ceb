"""A trainer of the asynchronous HTTP API that accepts any list of messages, like the earlier SDK's trainers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from rollout_server.testing.http.server import HttpServer

from tests.sdk.conftest import SdkServer


class LenientTrainer:
    """Complete with `N answers TEXT`, where TEXT is the last message, without token ids.

    Attributes:
        asked: bodies of completion requests, in order of arrival.
        told: bodies of outcomes.
        holds: completions for these texts wait for the events.
        calls: tool calls in the completions for these texts.
    """

    def __init__(self) -> None:
        self.url = ""
        self.asked: list[dict[str, Any]] = []
        self.told: list[dict[str, Any]] = []
        self.holds: dict[str, asyncio.Event] = {}
        self.calls: dict[str, Sequence[Mapping[str, Any]]] = {}
        self._arrived = asyncio.Condition()
        self.app = FastAPI()
        self.app.post("/v1/chat/completions")(self._complete)
        self.app.post("/v1/rollout/completed")(self._completed)

    async def arrived(self, requests: int) -> None:
        """Wait for this number of completion requests."""
        async with self._arrived:
            await self._arrived.wait_for(lambda: len(self.asked) >= requests)

    async def play(self, place: SdkServer, rollout_id: str, **changes: Any) -> dict[str, Any]:
        """Run one rollout with this trainer and return the outcome that it receives."""
        body = {"server_url": self.url, "completion_params": {}, "messages": [{"role": "user", "content": "Hello"}]}
        answer = await place.start(rollout_id, **(body | changes))
        assert answer.status_code == 202, answer.text
        async with asyncio.timeout(60), self._arrived:
            await self._arrived.wait_for(lambda: any(each["rollout_id"] == place.id(rollout_id) for each in self.told))
        return next(each for each in self.told if each["rollout_id"] == place.id(rollout_id))

    def lists(self) -> list[list[str]]:
        """The message texts of each completion request."""
        return [[str(message.get("content")) for message in body["messages"]] for body in self.asked]

    async def _complete(self, request: Request) -> Response:
        body = await request.json()
        async with self._arrived:
            self.asked.append(body)
            number = len(self.asked)
            self._arrived.notify_all()
        text = str(body["messages"][-1]["content"]) if body["messages"] else ""
        if text in self.holds:
            await self.holds[text].wait()
        if text == "refuse":
            return Response('{"detail": "refused"}', 400)
        message: dict[str, Any] = {"role": "assistant", "content": f"{number} answers {text}"}
        if text in self.calls:
            message["tool_calls"] = self.calls[text]
        usage = {"prompt_tokens": 10 * len(body["messages"]), "completion_tokens": 7}
        return Response(json.dumps({"choices": [{"message": message}], "usage": usage}), media_type="application/json")

    async def _completed(self, request: Request) -> Response:
        body = await request.json()
        async with self._arrived:
            self.told.append(body)
            self._arrived.notify_all()
        return Response(status_code=204)


@asynccontextmanager
async def lenient_trainer() -> AsyncIterator[LenientTrainer]:
    """Serve a lenient trainer."""
    trainer = LenientTrainer()
    listener = await HttpServer.open(trainer.app, "127.0.0.1", 0)
    trainer.url = f"http://127.0.0.1:{listener.port}"
    try:
        yield trainer
    finally:
        for held in trainer.holds.values():
            held.set()
        await listener.close()
