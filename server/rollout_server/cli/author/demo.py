"""`rollout demo`: rollouts end to end with a strict trainer, without a GPU.

Starts the server in a subprocess and a strict trainer in this process. Runs the calculator agent over gRPC, over `POST /rollout`
and over `POST /v1/rollout/init`, and prints the author of every token. The exit code is 1 if the trainer rejects a turn or its
tokens differ from the server's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollout_server.cli.demo_output import event_line, show_ledger, show_messages, show_metrics, show_verdict
from rollout_server.cli.errors import quiet_transformers
from rollout_server.cli.json_output import AsJson, open_output
from rollout_server.edge.grpc_loop import run_loop
from rollout_server.inspection.escape import visible

if TYPE_CHECKING:
    import httpx
    from osmosis.rollout.v1.rollout_service_pb2 import Rollout
    from osmosis.rollout.v1.rollout_service_pb2_grpc import RolloutServiceAsyncStub
    from rich.console import Console

    from rollout_server.testing.trainer import StrictTrainer

START_SECONDS = 30
WAIT_SECONDS = 60
MODEL = "Qwen/Qwen3-8B"
QUESTION = "Please calculate 5 plus 3, and then multiply the result by 2."
SYSTEM = "You are a helpful calculator assistant with access to calculator tools."


SvgFile = Annotated[
    Path | None, typer.Option("--svg", metavar="FILE", help="Write a picture of the first rollout's tokens.")
]


def demo(as_json: AsJson = False, svg: SvgFile = None) -> None:
    """Run demo rollouts that a strict trainer verifies token by token.

    Each rollout starts through another API: gRPC, POST /rollout and
    POST /v1/rollout/init. The output shows the author of every token.

    With --json: {"agreed": bool, "rollouts": {API: whether all tokens match}}.
    """
    quiet_transformers()
    with open_output(as_json=as_json) as output:
        agreed = run_loop(_demo(svg))
        output.write({"agreed": all(agreed.values()), "rollouts": agreed})
    raise typer.Exit(0 if all(agreed.values()) else 1)


async def _demo(svg: Path | None) -> dict[str, bool]:
    import httpx
    from rich.console import Console

    from rollout_server.testing import TrainerDialect
    from rollout_server.testing.trainer import StrictTrainer

    console = Console(highlight=False)
    grpc_port, http_port = _free_port(), _free_port()
    gateway = f"http://127.0.0.1:{http_port}"
    async with (
        httpx.AsyncClient(base_url=gateway, timeout=WAIT_SECONDS, trust_env=False) as http,
        _server(console, grpc_port, http),
        StrictTrainer(tools_from=gateway, dialect=TrainerDialect.EITHER) as trainer,
        _stub(grpc_port) as stub,
    ):
        console.print(f"strict trainer on {trainer.url}: it verifies every token and rejects incorrect masks\n")
        agreed = {
            "RunRollout": await _over_grpc(console, stub, trainer, svg),
            "POST /rollout": await _over_http(console, http, trainer),
            "POST /v1/rollout/init": await _over_callbacks(console, http, stub, trainer),
        }
    console.print(
        "[green]all tokens match[/]" if all(agreed.values()) else "[red]a rollout failed or its tokens differ[/]"
    )
    return agreed


@contextlib.asynccontextmanager
async def _server(console: Console, grpc_port: int, http: httpx.AsyncClient) -> AsyncIterator[None]:
    """Run `rollout serve` in a subprocess within the block, once it is healthy."""
    http_port = http.base_url.port
    command = [sys.executable, "-m", "rollout_server.cli", "serve", "--host", "127.0.0.1"]
    command += ["--grpc-port", str(grpc_port), "--http-port", str(http_port), "--tokenizer", f"{MODEL}=toy"]
    with tempfile.TemporaryFile() as log:
        began = time.monotonic()
        spawned = await asyncio.create_subprocess_exec(*command, stderr=log)
        try:
            while not await _healthy(http):
                if spawned.returncode is not None or time.monotonic() - began > START_SECONDS:
                    log.seek(0)
                    console.print(log.read().decode(errors="replace"), style="red", markup=False)
                    raise typer.Exit(1)
                await asyncio.sleep(0.01)
            seconds = time.monotonic() - began
            console.print(f"server healthy after {seconds:.2f} s: gRPC on port {grpc_port}, HTTP on port {http_port}")
            yield
        finally:
            if spawned.returncode is None:
                spawned.terminate()
            await spawned.wait()


async def _healthy(http: httpx.AsyncClient) -> bool:
    import httpx

    try:
        return (await http.get("/health", timeout=2)).status_code == 200
    except httpx.TransportError:
        return False


@contextlib.asynccontextmanager
async def _stub(port: int) -> AsyncIterator[RolloutServiceAsyncStub]:
    import grpc
    from osmosis.rollout.v1 import rollout_service_pb2_grpc

    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", [("grpc.enable_http_proxy", 0)]) as channel:
        yield rollout_service_pb2_grpc.RolloutServiceStub(channel)


async def _over_grpc(console: Console, stub: RolloutServiceAsyncStub, trainer: StrictTrainer, svg: Path | None) -> bool:
    """Stream a rollout's events, then compare its ledger with the trainer's tokens. Return whether they match."""
    from osmosis.rollout.v1 import event_pb2, message_pb2, rollout_service_pb2, spec_pb2

    console.rule("over gRPC: RunRollout")
    spec = spec_pb2.RolloutSpec(
        rollout_id="demo-grpc",
        messages=[message_pb2.Message(json=json.dumps(message)) for message in _messages()],
        completions=spec_pb2.Target(url=trainer.url),
        tokenizer=spec_pb2.Tokenizer(name=MODEL),
        sampling=spec_pb2.Sampling(temperature=0.7, max_tokens=512, logprobs=True),
    )
    start = rollout_service_pb2.StartRolloutRequest(request_id="demo", spec=spec)
    uid = ""
    async for item in stub.RunRollout(
        rollout_service_pb2.RunRolloutRequest(start=start, detail=event_pb2.EVENT_DETAIL_MESSAGES)
    ):
        if item.HasField("started"):
            uid = item.started.rollout.uid
        else:
            console.print(visible(f"  {item.event.sequence:2} {event_line(item.event)}"), markup=False)
    view = rollout_service_pb2.ROLLOUT_VIEW_FULL
    reply = await stub.GetRollout(rollout_service_pb2.GetRolloutRequest(uid=uid, view=view))
    outcome = reply.rollout.outcome
    if not outcome.HasField("stop"):
        console.print(visible(f"  {outcome.failure.message}"), style="red", markup=False)
        return False
    show_ledger(console, outcome.segments[0], trainer.tokenizer_dir)
    if svg is not None:
        await asyncio.to_thread(_write_picture, svg, reply.rollout, trainer.tokenizer_dir)
    return show_verdict(console, trainer.verdict("demo-grpc"), outcome.samples)


def _write_picture(file: Path, rollout: Rollout, tokenizer_dir: Path) -> None:
    """Write the tokens of a finished rollout, coloured by author, as an SVG file."""
    from transformers import AutoTokenizer

    from rollout_server.inspection.svg import transcript_svg
    from rollout_server.inspection.transcript import transcript_of

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    picture = transcript_svg(transcript_of(rollout), lambda ids: str(tokenizer.decode(list(ids))))
    file.write_text(picture, encoding="utf-8")


async def _over_http(console: Console, http: httpx.AsyncClient, trainer: StrictTrainer) -> bool:
    """Run a rollout over the synchronous HTTP API, which returns the result in the response."""
    console.rule("over HTTP: POST /rollout")
    body = {
        "rollout_id": "demo-http",
        "server_url": trainer.url,
        "messages": _messages(),
        "sampling_params": {"temperature": 0.7, "top_p": 0.9, "max_tokens": 512, "logprobs": True},
        "tokenizer_name": MODEL,
        "max_turns": 10,
        "max_tokens_total": 8192,
    }
    response = (await http.post("/rollout", json=body)).json()
    show_messages(console, response["final_messages"])
    show_metrics(console, response)
    return response["status"] == "COMPLETED" and show_verdict(console, trainer.verdict("demo-http"))


async def _over_callbacks(
    console: Console, http: httpx.AsyncClient, stub: RolloutServiceAsyncStub, trainer: StrictTrainer
) -> bool:
    """Run a rollout over the asynchronous HTTP API, which reports the result in the last callback."""
    from osmosis.rollout.v1 import rollout_service_pb2 as pb

    console.rule("over HTTP: POST /v1/rollout/init")
    rollout_id = "demo-init"
    body = {
        "rollout_id": rollout_id,
        "server_url": trainer.url,
        "messages": _messages(),
        "completion_params": {"temperature": 0.7, "top_p": 0.9, "max_tokens": 512, "logprobs": True},
    }
    response = await http.post("/v1/rollout/init", json=body)
    tools = ", ".join(tool["function"]["name"] for tool in response.json().get("tools", ()))
    console.print(f"  HTTP {response.status_code}, tools: {tools}", markup=False)
    try:
        outcome = await asyncio.wait_for(trainer.completed(rollout_id), WAIT_SECONDS)
    except TimeoutError:
        console.print(f"  [red]the trainer received no outcome within {WAIT_SECONDS} s[/]")
        return False
    for request in trainer.requests:
        if request.body["rollout_id"] == rollout_id:
            count, key = len(request.body["messages"]), request.headers["idempotency-key"]
            console.print(f"  callback /v1/chat/completions: {count} messages, idempotency key {key}", markup=False)
    for delivery in trainer.deliveries(rollout_id):
        console.print(f"  callback /v1/rollout/completed: {delivery.met}, idempotency key {delivery.key}", markup=False)
    show_messages(console, outcome["final_messages"][-1:])
    show_metrics(console, outcome)
    chosen = pb.Selection(rollout_ids=[rollout_id])
    reply = await stub.ListRollouts(pb.ListRolloutsRequest(selection=chosen, view=pb.ROLLOUT_VIEW_FULL))
    samples = [sample for rollout in reply.rollouts for sample in rollout.outcome.samples]
    return outcome["status"] == "COMPLETED" and show_verdict(console, trainer.verdict(rollout_id), samples)


def _messages() -> Sequence[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
