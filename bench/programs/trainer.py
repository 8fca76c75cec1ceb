"""A cheap trainer: it serves prepared completions at once, over HTTP and gRPC, and counts wrong masks and histories.

`POST /judged/NAME/v1/chat/completions` serves the conversation NAME, and returns 422 for a wrong mask or history. Under
`/unjudged/` any mask is accepted, for the floor, which has no tokens, and under `/plain/` none, as in the asynchronous HTTP API,
whose outcomes arrive there, too. `bench.programs.completions` serves gRPC.

`POST /rollouts` starts a `Batch` of rollouts and responds when they have ended. `POST /pace` sets the seconds that each completion
takes. `POST /hold` keeps the last completion of each
rollout back until `POST /release`; `GET /waiting` returns how many are held. `GET /conversations/NAME` returns beginning and end of
a conversation, `GET /counts` the counts so far, and `POST /traffic` the `Traffic` since the last call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any
from urllib.request import urlopen

import aiohttp
import grpc
import msgspec
import typer
from aiohttp import web
from rollout_server.testing.checks.judge import first_mask_fault, mask_fault
from rollout_server.testing.checks.renderer import PlainRenderer

from bench.programs.clients import Batch, Callbacks, Stream, init_player, run_batch
from bench.programs.completions import CompletionHandler, Completions
from bench.programs.conversation import Conversation, Turn, prepare
from bench.programs.drive import Order, grpc_player, http_player
from bench.programs.hold import Hold
from bench.programs.loop import grpc_beside, serve
from bench.programs.tally import Tally

_LARGEST_BODY = 64 * 1024 * 1024
_KEEPALIVE_SECONDS = 2.0
"""Shorter than the server's idle timeout, because a request on a connection that is being closed is lost."""
_TIMEOUT = aiohttp.ClientTimeout(total=1800)
_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.enable_http_proxy", 0)]
JUDGED, UNJUDGED, PLAIN = "judged", "unjudged", "plain"


class _Request(msgspec.Struct):
    messages: list[msgspec.Raw]
    rollout_id: str = ""
    response_mask: object = None


class Trainer:
    """Serves all conversations. The number of messages identifies the turn, so there is no state per rollout.

    Args:
        conversations: by name.
        port: its HTTP port, for the rollouts that it starts.
        grpc_port: port of its CompletionService; None: without one.
    """

    def __init__(self, conversations: Mapping[str, Conversation], port: int = 0, grpc_port: int | None = None) -> None:
        self._conversations = conversations
        self._port = port
        self._grpc_port = grpc_port
        self._tally = Tally()
        self._hold = Hold()
        self._completions = Completions(conversations, self._tally, self._hold)
        self._callbacks = Callbacks()
        self._decoder = msgspec.json.Decoder(_Request)

    def app(self) -> web.Application:
        """Return the trainer as a web application."""
        app = web.Application(client_max_size=_LARGEST_BODY)
        app.router.add_post("/{rule}/{name}/v1/chat/completions", self._answer)
        app.router.add_post("/{rule}/{name}/v1/rollout/completed", self._receive)
        app.router.add_post("/rollouts", self._play)
        app.router.add_post("/pace", self._pace)
        app.router.add_post("/hold", self._close)
        app.router.add_post("/release", self._release)
        app.router.add_get("/waiting", self._waiting)
        app.router.add_get("/conversations/{name}", self._tell)
        app.router.add_get("/counts", self._count)
        app.router.add_post("/traffic", self._traffic)
        app.router.add_get("/health", self._health)
        if self._grpc_port is not None:
            app.cleanup_ctx.append(grpc_beside(CompletionHandler(self._completions), self._grpc_port))
        return app

    async def _answer(self, http: web.Request) -> web.Response:
        rule, conversation = http.match_info["rule"], self._conversations[http.match_info["name"]]
        content = await http.read()
        request = self._decoder.decode(content)
        self._tally.receive(request.rollout_id, len(content))
        turn = conversation.turns.get(len(request.messages))
        if turn is None or not _continues(request.messages, turn.tail):
            return self._refuse(f"a history of {len(request.messages)} messages does not end as scripted", mask=False)
        if rule == JUDGED:
            fault = _mask_fault(request.response_mask, turn)
            if fault is not None:
                return self._refuse(fault, mask=True)
            self._tally.counts.masks_accepted += 1
        last = len(request.messages) + 1 == conversation.facts.messages
        await self._hold.passed(last=last)
        self._tally.answer(request.rollout_id, last=last)
        return web.Response(body=turn.body, content_type="application/json")

    def _refuse(self, fault: str, *, mask: bool) -> web.Response:
        self._tally.refuse(fault, mask=mask)
        return _json({"detail": fault}, 422)

    async def _receive(self, http: web.Request) -> web.Response:
        self._callbacks.deliver(await http.read())
        return _json({})

    async def _play(self, http: web.Request) -> web.Response:
        batch = msgspec.json.decode(await http.read(), type=Batch)
        if batch.api == "stream":
            stream = Stream(self._order(batch, ""), self._completions, 2 * batch.concurrency)
            return _json(await stream.run(batch))
        if batch.api == "tokens":
            order = self._order(batch, f"grpc://127.0.0.1:{self._grpc_port}")
            async with grpc.aio.insecure_channel(batch.server, _OPTIONS) as channel:
                return _json(await run_batch(grpc_player(channel, order), batch))
        rule = JUDGED if batch.api == "sync" else PLAIN
        order = self._order(batch, f"http://127.0.0.1:{self._port}/{rule}/{batch.conversation}")
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_SECONDS)
        async with aiohttp.ClientSession(connector=connector, timeout=_TIMEOUT) as session:
            if batch.api == "sync":
                play = http_player(session, batch.server, order)
            else:
                play = init_player(session, batch.server, order, self._callbacks)
            return _json(await run_batch(play, batch))

    def _order(self, batch: Batch, url: str) -> Order:
        facts = self._conversations[batch.conversation].facts
        return Order(batch.conversation, url, facts, batch.agent, self._tally.start if batch.timed else None)

    async def _pace(self, http: web.Request) -> web.Response:
        self._hold.seconds = msgspec.json.decode(await http.read(), type=float)
        return _json({})

    async def _close(self, _: web.Request) -> web.Response:
        self._hold.close()
        return _json({})

    async def _release(self, _: web.Request) -> web.Response:
        self._hold.open()
        return _json({})

    async def _waiting(self, _: web.Request) -> web.Response:
        return _json(self._hold.waiting)

    async def _tell(self, http: web.Request) -> web.Response:
        return _json(self._conversations[http.match_info["name"]].facts)

    async def _count(self, _: web.Request) -> web.Response:
        return _json(self._tally.counts)

    async def _traffic(self, _: web.Request) -> web.Response:
        return _json(self._tally.take())

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
    conversation: Annotated[
        list[str],
        typer.Option(help="TURNSxCONTEXT, such as 10x1000, or with bytes of results: 3x1000+500; repeatable."),
    ],
    grpc_port: Annotated[int | None, typer.Option(help="Port of CompletionService.")] = None,
) -> None:
    """Prepare the conversations, then serve them until SIGTERM."""
    renderer, tools = PlainRenderer.load(tokenizer), _tools(tools_from)
    prepared = {}
    for name in conversation:
        turns, _, rest = name.partition("x")
        context, _, result_bytes = rest.partition("+")
        prepared[name] = prepare(renderer, tools, int(turns), int(context), int(result_bytes or 0))
    serve(Trainer(prepared, port, grpc_port).app(), port)


if __name__ == "__main__":
    typer.run(main)
