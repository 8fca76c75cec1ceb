"""The floor: a rollout loop without tokens, limits, records and error handling.

`POST /rollout` as in the synchronous HTTP API: parse the request, post the growing list of messages with a meaningless mask,
parse the completion, append it and the tool result, repeat. It encodes the whole history in every turn, which a server can
avoid. So the floor is a reference value, not a lower bound.

`POST /proxy/NAME/v1/chat/completions` is the floor of the model endpoint: a bare proxy that sends the body to the trainer's
conversation NAME, and the response back, without reading either.

`bench.programs.grpc_floor` is the floor of the gRPC APIs. `GET /metrics` has the floor's loop lag, as that of the server.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
import typer
from aiohttp import web
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from rollout_server.edge.metrics.families import LAG_SECONDS
from rollout_server.runtime.aio.loop_watchdog import LoopLag
from yarl import URL

from bench.programs.grpc_floor import FloorHandler
from bench.programs.loop import grpc_beside, serve

_MASK = [0] * 32
_JSON = {"content-type": "application/json"}
_HTTP = web.AppKey("http", aiohttp.ClientSession)
_TRAINER = web.AppKey("trainer", URL)
_METRICS = web.AppKey("metrics", CollectorRegistry)
_LARGEST_BODY = 64 * 1024 * 1024


async def rollout(request: web.Request) -> web.Response:
    """Run one rollout. There is no error handling: if the trainer fails, this server returns 500."""
    start = msgspec.json.decode(await request.read())
    http, url = request.app[_HTTP], URL(f"{start['server_url']}/v1/chat/completions")
    messages: list[dict[str, Any]] = start["messages"]
    body = {"model": "default", "rollout_id": start["rollout_id"], "messages": messages, **start["sampling_params"]}
    body["response_mask"] = None
    turns, calls = 0, True
    while calls:
        async with http.post(url, data=msgspec.json.encode(body), headers=_JSON) as response:
            response.raise_for_status()
            completion = msgspec.json.decode(await response.read())
        message = completion["choices"][0]["message"]
        calls = message.get("tool_calls")
        messages.append(message)
        messages.extend(map(_result, calls or ()))
        body["response_mask"] = _MASK
        turns += 1
    return web.Response(body=_outcome(start["rollout_id"], messages, turns), content_type="application/json")


async def proxy(request: web.Request) -> web.Response:
    """Forward one request for a completion."""
    url = request.app[_TRAINER] / "unjudged" / request.match_info["name"] / "v1" / "chat" / "completions"
    async with request.app[_HTTP].post(url, data=await request.read(), headers=_JSON) as response:
        return web.Response(body=await response.read(), status=response.status, headers=_JSON)


def _result(call: dict[str, Any]) -> dict[str, Any]:
    arguments = msgspec.json.decode(call["function"]["arguments"])
    return {"role": "tool", "content": str(arguments["a"] + arguments["b"]), "tool_call_id": call["id"]}


def _outcome(rollout_id: str, messages: list[dict[str, Any]], turns: int) -> bytes:
    outcome = {
        "rollout_id": rollout_id,
        "status": "COMPLETED",
        "final_messages": messages,
        "finish_reason": "stop",
        "metrics": {"num_llm_calls": turns},
    }
    return msgspec.json.encode(outcome)


async def _health(_: web.Request) -> web.Response:
    return web.Response()


async def _client(app: web.Application) -> AsyncIterator[None]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        app[_HTTP] = http
        yield


async def _metrics(request: web.Request) -> web.Response:
    return web.Response(body=generate_latest(request.app[_METRICS]), content_type="text/plain")


async def _lag(app: web.Application) -> AsyncIterator[None]:
    name, help_text = "rollout_loop_lag_seconds", "Delay with which the event loop woke a sleeping task."
    lag = LoopLag(Histogram(name, help_text, registry=app[_METRICS], buckets=LAG_SECONDS).observe)
    lag.start()
    yield
    await lag.stop()


def main(port: int, grpc_port: int, trainer: str) -> None:
    """Serve until SIGTERM. `trainer` is the trainer's URL, for the proxy."""
    app = web.Application(client_max_size=_LARGEST_BODY)
    app[_TRAINER], app[_METRICS] = URL(trainer), CollectorRegistry()
    app.router.add_post("/rollout", rollout)
    app.router.add_post("/proxy/{name}/v1/chat/completions", proxy)
    app.router.add_get("/health", _health)
    app.router.add_get("/metrics", _metrics)
    app.cleanup_ctx.extend([_client, _lag, grpc_beside(FloorHandler(), grpc_port)])
    serve(app, port)


if __name__ == "__main__":
    typer.run(main)
