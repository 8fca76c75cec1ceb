"""A cheap trainer: it serves prepared completions at once, and counts wrong masks and histories.

`POST /judged/NAME/v1/chat/completions` serves the conversation NAME, and returns 422 for a wrong mask or history. Under
`/unjudged/` any mask is accepted, for the floor, which has no tokens. `GET /conversations/NAME` returns the beginning and end
of the conversation, `GET /counts` the counts so far.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any
from urllib.request import urlopen

import msgspec
import typer
from aiohttp import web
from rollout_server.testing.checks.judge import first_mask_fault, mask_fault
from rollout_server.testing.checks.renderer import PlainRenderer

from bench.conversation import Conversation, Turn, prepare
from bench.loop import serve

_FAULTS_KEPT = 5
_LARGEST_BODY = 64 * 1024 * 1024


class Counts(msgspec.Struct):
    """Counts of requests. `masks_refused` and `histories_refused` must stay 0; `faults` describes the first faults."""

    answered: int = 0
    masks_accepted: int = 0
    masks_refused: int = 0
    histories_refused: int = 0
    faults: list[str] = []


class _Request(msgspec.Struct):
    messages: list[msgspec.Raw]
    response_mask: object = None


class Trainer:
    """Serves all conversations. The number of messages identifies the turn, so the trainer keeps no state per rollout."""

    def __init__(self, conversations: Mapping[str, Conversation]) -> None:
        self._conversations = conversations
        self._counts = Counts()
        self._decoder = msgspec.json.Decoder(_Request)

    def app(self) -> web.Application:
        """Return the trainer as a web application."""
        app = web.Application(client_max_size=_LARGEST_BODY)
        app.router.add_post("/judged/{name}/v1/chat/completions", self._judged)
        app.router.add_post("/unjudged/{name}/v1/chat/completions", self._unjudged)
        app.router.add_get("/conversations/{name}", self._tell)
        app.router.add_get("/counts", self._count)
        app.router.add_get("/health", self._health)
        return app

    async def _judged(self, http: web.Request) -> web.Response:
        return await self._answer(http, judged=True)

    async def _unjudged(self, http: web.Request) -> web.Response:
        return await self._answer(http, judged=False)

    async def _answer(self, http: web.Request, *, judged: bool) -> web.Response:
        conversation = self._conversations[http.match_info["name"]]
        request = self._decoder.decode(await http.read())
        turn = conversation.turns.get(len(request.messages))
        if turn is None or not _continues(request.messages, turn.tail):
            self._counts.histories_refused += 1
            return self._refuse(f"a history of {len(request.messages)} messages does not end as scripted")
        if judged:
            fault = _mask_fault(request.response_mask, turn)
            if fault is not None:
                self._counts.masks_refused += 1
                return self._refuse(fault)
            self._counts.masks_accepted += 1
        self._counts.answered += 1
        return web.Response(body=turn.body, content_type="application/json")

    def _refuse(self, fault: str) -> web.Response:
        if len(self._counts.faults) < _FAULTS_KEPT:
            self._counts.faults.append(fault)
        return _json({"detail": fault}, 422)

    async def _tell(self, http: web.Request) -> web.Response:
        return _json(self._conversations[http.match_info["name"]].facts)

    async def _count(self, _: web.Request) -> web.Response:
        return _json(self._counts)

    async def _health(self, _: web.Request) -> web.Response:
        return _json({"status": "healthy"})


def _mask_fault(mask: object, turn: Turn) -> str | None:
    return mask_fault(mask, turn.new_tokens) if turn.new_tokens else first_mask_fault(mask)


def _continues(messages: Sequence[msgspec.Raw], tail: Sequence[Mapping[str, Any]]) -> bool:
    return all(msgspec.json.decode(raw) == message for raw, message in zip(messages[-len(tail) :], tail, strict=True))


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def _tools(gateway: str) -> list[dict[str, Any]]:
    with urlopen(f"{gateway}/tools", timeout=10) as response:
        tools: list[dict[str, Any]] = msgspec.json.decode(response.read())["tools"]
        return tools


def main(
    port: int,
    tokenizer: Annotated[Path, typer.Option(help="Directory of a tokenizer with a chat template.")],
    tools_from: Annotated[str, typer.Option(help="Base URL of the gateway whose tools are rendered into the prompts.")],
    conversation: Annotated[list[str], typer.Option(help="TURNSxCONTEXT, such as 10x1000; repeatable.")],
) -> None:
    """Prepare the conversations, then serve them until SIGTERM."""
    renderer, tools = PlainRenderer.load(tokenizer), _tools(tools_from)
    prepared = {}
    for name in conversation:
        turns, _, context = name.partition("x")
        prepared[name] = prepare(renderer, tools, int(turns), int(context))
    serve(Trainer(prepared).app(), port)


if __name__ == "__main__":
    typer.run(main)
