"""`rollout demo`: the main job end to end, on embedded defaults.

Starts the server as a process of its own and a strict trainer beside it, runs the calculator's rollout over gRPC and over
`POST /rollout`, shows who wrote every token, and lets the trainer judge. Fails where the two records differ.
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
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from osmosis.rollout.v1 import token_pb2
    from rich.console import Console

    from rollout_server.testing.trainer import StrictTrainer

MODEL = "Qwen/Qwen3-8B"
QUESTION = "Please calculate 5 plus 3, and then multiply the result by 2."
SYSTEM = "You are a helpful calculator assistant with access to calculator tools."


def demo() -> None:
    """Run a rollout over gRPC and over HTTP against a strict trainer, and show who wrote every token."""
    raise typer.Exit(asyncio.run(_demo()))


async def _demo() -> int:
    from rich.console import Console

    from rollout_server.testing.trainer import StrictTrainer

    console = Console(highlight=False)
    grpc_port, http_port = _free_port(), _free_port()
    gateway = f"http://127.0.0.1:{http_port}"
    async with _server(console, grpc_port, http_port), StrictTrainer(tools_from=gateway) as trainer:
        console.print(f"strict trainer on {trainer.url}: it counts every token itself and refuses a wrong mask\n")
        over_grpc = await _over_grpc(console, f"127.0.0.1:{grpc_port}", trainer)
        over_http = await _over_http(console, gateway, trainer)
    agreed = over_grpc and over_http
    console.print("[green]every token agrees[/]" if agreed else "[red]the records differ[/]")
    return 0 if agreed else 1


@contextlib.asynccontextmanager
async def _server(console: Console, grpc_port: int, http_port: int) -> AsyncIterator[None]:
    """`rollout serve` as a process of its own, from start to a clean stop."""
    import httpx

    command = [sys.executable, "-m", "rollout_server.cli", "serve", "--host", "127.0.0.1"]
    command += ["--grpc-port", str(grpc_port), "--http-port", str(http_port), "--tokenizer", f"{MODEL}=toy"]
    with tempfile.TemporaryFile() as log:
        began = time.monotonic()
        process = await asyncio.create_subprocess_exec(*command, stderr=log)
        try:
            async with httpx.AsyncClient() as client:
                while not await _healthy(client, f"http://127.0.0.1:{http_port}/health"):
                    if process.returncode is not None or time.monotonic() - began > 30:
                        log.seek(0)
                        console.print(log.read().decode(errors="replace"), style="red")
                        raise typer.Exit(1)
                    await asyncio.sleep(0.01)
            took = time.monotonic() - began
            console.print(f"server healthy {took:.2f} s after its start: gRPC on {grpc_port}, HTTP on {http_port}")
            yield
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()


async def _healthy(client: Any, url: str) -> bool:
    import httpx

    try:
        return (await client.get(url, timeout=2)).status_code == 200  # type: ignore[no-any-return]
    except httpx.TransportError:
        return False


async def _over_grpc(console: Console, target: str, trainer: StrictTrainer) -> bool:
    """Streams the rollout's events, then reads its ledger and compares it with what the trainer accumulated."""
    import grpc
    from osmosis.rollout.v1 import event_pb2, message_pb2, rollout_service_pb2, rollout_service_pb2_grpc, spec_pb2

    console.rule("over gRPC: RunRollout")
    spec = spec_pb2.RolloutSpec(
        rollout_id="demo-grpc",
        messages=[message_pb2.Message(json=json.dumps(message)) for message in _messages()],
        completions=spec_pb2.Target(url=trainer.url),
        tokenizer=spec_pb2.Tokenizer(name=MODEL),
        sampling=spec_pb2.Sampling(temperature=0.7, max_tokens=512, logprobs=True),
    )
    async with grpc.aio.insecure_channel(target) as channel:
        stub = rollout_service_pb2_grpc.RolloutServiceStub(channel)
        start = rollout_service_pb2.StartRolloutRequest(request_id="demo", spec=spec)
        uid = ""
        async for item in stub.RunRollout(
            rollout_service_pb2.RunRolloutRequest(start=start, detail=event_pb2.EVENT_DETAIL_MESSAGES)
        ):
            if item.HasField("started"):
                uid = item.started.rollout.uid
            else:
                console.print(f"  {item.event.sequence:2} {_line(item.event)}", markup=False)
        view = rollout_service_pb2.ROLLOUT_VIEW_FULL
        reply = await stub.GetRollout(rollout_service_pb2.GetRolloutRequest(uid=uid, view=view))
    segment, sample = reply.rollout.outcome.segments[0], reply.rollout.outcome.samples[0]
    _show_tokens(console, segment, trainer)
    return _judge(console, trainer, "demo-grpc", sample)


async def _over_http(console: Console, gateway: str, trainer: StrictTrainer) -> bool:
    import httpx

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
    async with httpx.AsyncClient(timeout=60) as client:
        answer = (await client.post(f"{gateway}/rollout", json=body)).json()
    for message in answer["final_messages"]:
        console.print(f"  {message['role']:9} {_said(message)}", markup=False)
    metrics = answer["metrics"]
    console.print(
        f"  {answer['status']}, {answer['finish_reason']}: {metrics['num_llm_calls']} turns, {metrics['num_tool_calls']} "
        f"tool calls, {metrics['response_tokens']} tokens generated, {metrics['total_latency_ms']:.0f} ms"
    )
    return answer["status"] == "COMPLETED" and _judge(console, trainer, "demo-http", None)


def _judge(console: Console, trainer: StrictTrainer, rollout_id: str, sample: token_pb2.Sample | None) -> bool:
    verdict = trainer.verdict(rollout_id)
    if verdict is None or verdict.refusals or verdict.faults:
        console.print(f"  trainer: [red]refused[/] {verdict}")
        return False
    theirs = verdict.sample
    trained = sum(theirs.response_mask)
    text = f"  trainer: [green]accepted {len(verdict.turns)} masks[/], {trained} of {len(theirs.response_mask)} tokens train"
    same = sample is None or (
        tuple(sample.prompt_ids) == theirs.prompt_ids
        and tuple(sample.response_ids) == theirs.response_ids
        and tuple(sample.response_mask) == theirs.response_mask
        and tuple(sample.logprobs.values) == theirs.logprobs
    )
    if sample is not None:
        text += "; its record equals the server's, token for token" if same else "; [red]its record is another one[/]"
    console.print(text + "\n")
    return same


def _show_tokens(console: Console, segment: token_pb2.Segment, trainer: StrictTrainer) -> None:
    """The ledger's text: what the model wrote in green (mask 1), all else dim (mask 0)."""
    from osmosis.rollout.v1 import token_pb2
    from rich.text import Text
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(trainer.tokenizer_dir)
    text = Text()
    for span in segment.spans:
        decoded = tokenizer.decode(span.token_ids, skip_special_tokens=False)
        if span.mask_reason == token_pb2.MASK_REASON_PROMPT:
            decoded = f"… {decoded[-160:]}"
        model = span.author == token_pb2.AUTHOR_MODEL
        # Without colours the brackets tell.
        text.append(f"⟦{decoded}⟧" if model else decoded, style="bold green" if model else "dim")
    console.print("\n  the ledger: [bold green]the model wrote it, mask 1[/], [dim]others did, mask 0[/]")
    console.print(text)


def _line(event: Any) -> str:
    """One event in a few words."""
    kind = event.WhichOneof("event")
    match kind:
        case "asked":
            return f"turn {event.turn}: asked"
        case "answered":
            answered = event.answered
            mask = f", mask of {answered.mask_length}" if answered.HasField("mask_length") else ""
            message = json.loads(answered.message.json)
            return f"turn {event.turn}: {_said(message)}  ({answered.generated_tokens} tokens{mask})"
        case "tool_returned":
            returned = event.tool_returned
            return f"turn {event.turn}: {returned.name} returned {json.loads(returned.message.json)['content']}"
        case "finished":
            return f"finished: {event.finished.outcome.stop.reason or 'failed'}"
        case _:
            return str(kind).replace("_", " ")


def _said(message: dict[str, Any]) -> str:
    calls = [f"{c['function']['name']}{c['function']['arguments']}" for c in message.get("tool_calls") or ()]
    return " ".join([str(message.get("content") or ""), *calls]).strip()


def _messages() -> Sequence[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
