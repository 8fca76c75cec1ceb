"""Trainer for the rows "whole server" of `bench.dialects`: `python -m bench.streaming SERVER DIRECTORY ROUNDS`.

Reads a JSON list of texts from standard input. In each round it runs one rollout per text and transport: HTTP with masks,
CompletionService, and the trainer stream. Prints a JSON object per rollout: the transport (`way`), the index of its text, and
the bytes of each turn's request.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import typer
from osmosis.rollout.v1 import message_pb2, spec_pb2
from osmosis.rollout.v1.outcome_pb2 import Outcome
from osmosis.rollout.v1.rollout_service_pb2 import StartRolloutRequest
from rollout_client import AsyncClient
from rollout_server.testing.grpc.train_stream import TrainStream
from rollout_server.testing.trainer import StrictTrainer

TOKENIZER = "measured"
HTTP, UNARY, STREAM = "http", "unary", "stream"
WAYS = (HTTP, UNARY, STREAM)


def main(server: str, directory: Path, rounds: int) -> None:
    """Run the rollouts and print the sizes of their requests."""
    asyncio.run(_play(server, directory, json.load(sys.stdin), rounds))


async def _play(server: str, directory: Path, texts: Sequence[str], rounds: int) -> None:
    async with (
        StrictTrainer(directory, api_key=None) as trainer,
        AsyncClient(server) as client,
        trainer.connected(server) as stream,
    ):
        for number in range(rounds):
            for way in WAYS:
                for place, text in enumerate(texts):
                    spec = _spec(trainer, way, f"{way}-{place}-{number}", text)
                    outcome = await (_streamed(stream, spec) if way == STREAM else _asked(client, spec))
                    if outcome.WhichOneof("end") != "stop":
                        raise SystemExit(f"bench.streaming: {outcome.failure.message}")
                    row = {"way": way, "place": place, "sent": _sent(trainer, way, spec.rollout_id)}
                    print(json.dumps(row), flush=True)


async def _streamed(stream: TrainStream, spec: spec_pb2.RolloutSpec) -> Outcome:
    (uid,) = await stream.start(StartRolloutRequest(spec=spec))
    return (await stream.outcome(uid)).outcome


async def _asked(client: AsyncClient, spec: spec_pb2.RolloutSpec) -> Outcome:
    async for _ in (run := client.run(spec, timeout=600)):
        pass
    return (await client.get(run.uid)).outcome


def _sent(trainer: StrictTrainer, way: str, rollout_id: str) -> list[int]:
    """Return the size of each request body in bytes."""
    if way == HTTP:
        requests = [seen for seen in trainer.requests if seen.body["rollout_id"] == rollout_id]
        return [int(seen.headers["content-length"]) for seen in requests]
    return [seen.request.ByteSize() for seen in trainer.completions if seen.request.rollout_id == rollout_id]


def _spec(trainer: StrictTrainer, way: str, rollout_id: str, text: str) -> spec_pb2.RolloutSpec:
    spec = spec_pb2.RolloutSpec(
        rollout_id=rollout_id,
        messages=[message_pb2.Message(json=json.dumps({"role": "user", "content": text}))],
        tokenizer=spec_pb2.Tokenizer(name=TOKENIZER),
    )
    if way == HTTP:
        spec.completions.url, spec.completions.dialect = trainer.url, spec_pb2.DIALECT_HTTP_MASKED
        return spec
    spec.token_mode = spec_pb2.TOKEN_MODE_TOKENS
    if way == UNARY:
        spec.completions.url = f"grpc://{trainer.grpc_target}"
    return spec


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
