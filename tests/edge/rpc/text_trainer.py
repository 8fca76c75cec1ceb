"""A trainer whose responses are raw texts that no JSON library would write."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Self

from aiohttp import web


@dataclass
class TextTrainer:
    """Respond to the k-th request with the k-th message, as raw text; the last one repeats."""

    messages: list[str]
    url: str = ""
    seen: list[str] = field(default_factory=list)

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/v1/chat/completions", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        self.seen.append(await request.text())
        message = self.messages[min(len(self.seen), len(self.messages)) - 1]
        rest = json.dumps({"token_ids": [len(self.seen)], "logprobs": [-0.5]})[1:]
        body = f'{{"choices": [{{"message": {message}, "finish_reason": "stop"}}], {rest}'
        return web.Response(text=body, content_type="application/json")
