"""Play a transcript's trainer, and compare the server's requests with the recorded ones.

The rules of comparison are in `tests/golden/README.md`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from aiohttp import web

Json = Any
REPEAT = "REPEAT x "
ERROR_PREFIXES = (
    "Error: Invalid JSON arguments: ",
    "Error: Unknown function 'x'. Available: ",
    "Error: Invalid arguments for ",
)


@dataclass(frozen=True)
class Transcript:
    name: str
    settings: Mapping[str, str]
    volatile: frozenset[str]
    exchanges: Sequence[Mapping[str, Json]]

    @classmethod
    def load(cls, path: Path) -> Transcript:
        raw = json.loads(path.read_text())
        return cls(path.stem, raw.get("server_settings") or {}, frozenset(raw["volatile"]), raw["exchanges"])

    @property
    def calls(self) -> list[Mapping[str, Json]]:
        return [exchange for exchange in self.exchanges if exchange["to"] == "server"]

    @property
    def callbacks(self) -> list[Mapping[str, Json]]:
        return [exchange for exchange in self.exchanges if exchange["to"] == "trainer"]


@dataclass
class Seen:
    path: str
    authorization: str | None
    key: str | None
    body: Json
    raw: bytes


@dataclass
class ReplayTrainer:
    """Respond to the k-th request with the k-th recorded exchange, `hold` seconds after it arrives."""

    transcript: Transcript
    hold: float = 0.0
    seen: list[Seen] = field(default_factory=list)
    url: str = ""
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{tail:.*}", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def until(self, requests: int) -> None:
        """Wait for this number of requests."""
        while len(self.seen) < requests:
            self._arrived.clear()
            await self._arrived.wait()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        headers = request.headers
        raw = await request.read()
        authorization, key = headers.get("authorization"), headers.get("idempotency-key")
        self.seen.append(Seen(request.path, authorization, key, json.loads(raw), raw))
        self._arrived.set()
        await asyncio.sleep(self.hold)
        recorded = self.transcript.callbacks
        if len(self.seen) > len(recorded):
            return web.json_response({"detail": "no more answers were recorded"}, status=500)
        exchange = recorded[len(self.seen) - 1]
        if exchange["status"] is None:
            return await self._break(request, exchange["outcome"])
        answer = exchange["response"]
        text = answer if isinstance(answer, str) else "" if answer is None else json.dumps(answer)
        headers = {"content-type": "application/json", **(exchange.get("response_headers") or {})}
        headers.pop("content-length", None)
        return web.Response(text=text, status=exchange["status"], headers=headers)

    async def _break(self, request: web.Request, outcome: str) -> web.StreamResponse:
        assert request.transport is not None
        if outcome.startswith("no answer"):
            await asyncio.sleep(60)
        elif "middle" in outcome:
            response = web.StreamResponse(headers={"content-length": "1000"})
            await response.prepare(request)
            await response.write(b'{"choices": [')
        request.transport.abort()
        return web.Response()


def fill(value: Json, places: Mapping[str, str]) -> Json:
    """Replace placeholders of the transcript by real addresses and names."""
    if isinstance(value, str):
        if value.startswith(REPEAT):
            return "x" * int(value.removeprefix(REPEAT))
        for place, real in places.items():
            if value == place or (place.startswith("http://") and value.startswith(place)):
                return real + value[len(place) :]
        return value
    if isinstance(value, list):
        return [fill(item, places) for item in value]
    if isinstance(value, dict):
        return {key: fill(item, places) for key, item in value.items()}
    return value


def plain(value: Json, volatile: frozenset[str] = frozenset()) -> Json:
    """Drop volatile keys and nulls, shorten error texts of tools to their prefix, and treat an empty mask as absent."""
    if isinstance(value, list):
        return [plain(item, volatile) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {key: plain(item, volatile) for key, item in value.items() if item is not None and key not in volatile}
    if kept.get("response_mask") == []:
        del kept["response_mask"]
    content = kept.get("content")
    if kept.get("role") == "tool" and isinstance(content, str):
        for prefix in ERROR_PREFIXES:
            if content.startswith(prefix):
                kept["content"] = prefix
    return kept


def longest_context(exchanges: Sequence[Mapping[str, Json]]) -> int:
    """The longest prompt plus completion that the trainer reported, by ids or by usage."""
    answers = [each["response"] for each in exchanges if each["to"] == "trainer" and each["status"] == 200]
    return max((_context(answer) for answer in answers if _has_message(answer)), default=0)


def _has_message(answer: Json) -> bool:
    choices = answer.get("choices") if isinstance(answer, dict) else None
    return bool(choices and choices[0]["message"])


def _context(answer: Json) -> int:
    if answer.get("prompt_token_ids") and answer.get("token_ids"):
        return len(answer["prompt_token_ids"]) + len(answer["token_ids"])
    total: int = (answer.get("usage") or {}).get("total_tokens", 0)
    return total
